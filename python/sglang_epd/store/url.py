"""`SGLANG_EPD_STORE`: which store, and within which bounds, in one URL.

    file:///folder
    mooncake://master:port

Bounds are query parameters. One that has no effect is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

from sglang_epd.errors import ConfigError

_NAME = "SGLANG_EPD_STORE"
_NAMESPACE = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$"
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=10**12)]


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of every store.

    Attributes:
        ttl_s: older entries are misses.
        max_item_mb: larger embeddings are not stored, and not read.
        queue_mb: embeddings that wait to be written; more are dropped.
        namespace: begins all names, so that several may share a store.
    """

    ttl_s: _Positive = 604_800
    max_item_mb: _Positive = 256
    queue_mb: _Positive = 512
    namespace: Annotated[str, msgspec.Meta(pattern=_NAMESPACE)] = "sglang-epd"


class FolderBounds(Bounds, frozen=True):
    """`max_mb`: MiB of all files."""

    max_mb: _Positive = 16_384


class MooncakeOptions(Bounds, frozen=True):
    """Parameters of Mooncake's own set-up."""

    protocol: str = "tcp"
    device: str = ""
    host: str = ""
    metadata: str = "P2PHANDSHAKE"
    tenant: str = ""
    segment_mb: Annotated[int, msgspec.Meta(ge=0, lt=10**12)] = 0


_KINDS: dict[str, type[Bounds]] = {"file": FolderBounds, "mooncake": MooncakeOptions}


@dataclass(frozen=True)
class StoreUrl:
    """A store, as the user typed it.

    Attributes:
        kind: "file" or "mooncake".
        shown: the URL for logs and status, without parameters.
        bounds: its parameters.
        folder: of a file:// URL.
        host, port: of Mooncake's master.
    """

    kind: str
    shown: str
    bounds: Bounds
    folder: Path
    host: str
    port: int

    @property
    def max_item_bytes(self) -> int:
        return self.bounds.max_item_mb << 20

    @classmethod
    def parse(cls, typed: str) -> StoreUrl:
        """Read and check the setting.

        Raises:
            ConfigError: the parameter cannot be honoured; never shows what was typed.
        """
        try:
            url = urlsplit(typed)
            port = url.port or 0
        except ValueError:
            raise ConfigError(f"{_NAME} is no URL") from None
        form = _KINDS.get(url.scheme)
        if form is None:
            raise ConfigError(f"{_NAME} must begin with file:// or mooncake://")
        bounds = _parameters(url, form)
        for problem in _problems(url, port, bounds):
            raise ConfigError(f"{_NAME}: {problem}")
        return cls(
            kind=url.scheme,
            shown=f"{url.scheme}://{url.netloc}{url.path}",
            bounds=bounds,
            folder=Path(unquote(url.path)),
            host=url.hostname or "",
            port=port,
        )


def _problems(url: SplitResult, port: int, bounds: Bounds) -> Iterator[str]:
    """The parameters that cannot be honoured."""
    if url.fragment:
        yield "a fragment (#...) has no meaning"
    if bounds.queue_mb < bounds.max_item_mb:
        yield "queue_mb is less than max_item_mb, one embedding"
    if isinstance(bounds, FolderBounds):
        if url.netloc or not url.path.startswith("/") or url.path == "/":
            yield "file:// wants an absolute folder (file:///folder)"
        if bounds.max_mb < bounds.max_item_mb:
            yield "max_mb is less than max_item_mb, one embedding"
    elif not url.hostname or not port or url.path not in ("", "/") or "@" in url.netloc:
        yield "mooncake:// wants its master's host:port, no more"


def _parameters(url: SplitResult, form: type[Bounds]) -> Bounds:
    try:
        given = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
    except ValueError:
        raise ConfigError(f"{_NAME}: its parameters cannot be read") from None
    if len(dict(given)) < len(given):
        raise ConfigError(f"{_NAME}: a parameter is there twice")
    try:
        return msgspec.convert(dict(given), form, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(form.__struct_fields__)
        raise ConfigError(f"{_NAME}: {error}; {url.scheme}:// has {known}") from None
