"""How profiles, workloads and topologies are read: typed, unknown keys refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from sglang_epd.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Cost = Annotated[float, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]

_T = TypeVar("_T", bound="Data")
_DECODERS = {
    ".yaml": msgspec.yaml.decode,
    ".yml": msgspec.yaml.decode,
    ".toml": msgspec.toml.decode,
}


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all that is read from files."""


def convert(value: object, kind: type[_T], what: str) -> _T:
    """Plain data as `kind`.

    Args:
        what: names it in the error.

    Raises:
        ConfigError: a key is missing, unknown, of another type or out of its range.
    """
    _refuse_infinities(value, what)
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error


def load(path: Path, kind: type[_T]) -> _T:
    """A file: JSON, or YAML or TOML where its name ends in .yaml, .yml or .toml.

    Raises:
        ConfigError: it cannot be read, or is not what `convert` takes.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        value: Any = _DECODERS.get(path.suffix, msgspec.json.decode)(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return convert(value, kind, str(path))


def _refuse_infinities(value: object, what: str) -> None:
    """YAML and TOML can say inf and nan, which no bound in a type refuses."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{what}: {value} is not a finite number")
    if isinstance(value, dict):
        for key, one in value.items():
            _refuse_infinities(one, f"{what}: {key}")
    elif isinstance(value, list):
        for one in value:
            _refuse_infinities(one, what)
