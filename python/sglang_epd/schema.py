"""Reads profiles, workloads and topologies: typed, with unknown keys refused."""

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
    """Base of all that files and options describe."""


def convert(value: object, kind: type[_T], what: str) -> _T:
    """Plain data as `kind`.

    Args:
        what: its name in error messages.

    Raises:
        ConfigError: a key is missing, unknown, of another type or out of its range.
    """
    _refuse_infinities(value, what)
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error


def load(path: Path, kind: type[_T]) -> _T:
    """A file as `kind`: YAML or TOML if its name ends in .yaml, .yml or .toml, JSON otherwise.

    Raises:
        ConfigError: the file cannot be read, or `convert` refuses its content.
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
    """Refuse inf and nan, which YAML and TOML can say and no bound of a type refuses."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{what}: {value} is not a finite number")
    if isinstance(value, dict):
        for key, one in value.items():
            _refuse_infinities(one, f"{what}: {key}")
    elif isinstance(value, list):
        for one in value:
            _refuse_infinities(one, what)
