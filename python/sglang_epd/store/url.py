"""`SGLANG_EPD_STORE`: which store, and within which bounds, in one URL.

    file:///folder                      redis://[user:password@]host[:port][/database]
    mooncake://master:port              rediss://, valkey://, valkeys:// likewise

Bounds are query parameters. One that has no effect is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

from sglang_epd.errors import ConfigError

_NAME = "SGLANG_EPD_STORE"
_KINDS = {"file": "file", "redis": "redis", "rediss": "redis", "valkey": "redis"}
_KINDS |= {"valkeys": "redis", "mooncake": "mooncake"}
_TLS = {"rediss", "valkeys"}
_NAMESPACE = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$"
_DATABASE = re.compile(r"[0-9]{1,5}")
# The most that one string of Redis may hold, less our own overhead.
_REDIS_MAX_ITEM_MB = 511
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
    segment_mb: Annotated[int, msgspec.Meta(ge=0, lt=10**12)] = 0


_PARAMETERS: dict[str, type[Bounds]] = {
    "file": FolderBounds,
    "redis": Bounds,
    "mooncake": MooncakeOptions,
}


@dataclass(frozen=True)
class StoreUrl:
    """A store, as the user typed it.

    Attributes:
        kind: "file", "redis" or "mooncake".
        shown: the URL for logs and status, without credentials and parameters.
        bounds: its parameters.
        folder: of a file:// URL.
        host, port, database, username, password, tls: of Redis; the first two of
            Mooncake's master, too.
    """

    kind: str
    shown: str
    bounds: Bounds
    folder: Path
    host: str
    port: int
    database: int
    username: str
    password: str = field(repr=False)
    tls: bool

    @property
    def max_item_bytes(self) -> int:
        return self.bounds.max_item_mb << 20

    @classmethod
    def parse(cls, typed: str) -> StoreUrl:
        """Read and check the setting.

        Raises:
            ConfigError: the parameter cannot be honoured; never shows a password.
        """
        try:
            url = urlsplit(typed)
            port = url.port or 0
        except ValueError:
            raise ConfigError(f"{_NAME} is no URL") from None
        kind = _KINDS.get(url.scheme)
        if kind is None:
            raise ConfigError(f"{_NAME} must begin with one of {', '.join(_KINDS)}, then ://")
        bounds = _parameters(url, _PARAMETERS[kind])
        for problem in _problems(url, kind, port, bounds):
            raise ConfigError(f"{_NAME}: {problem}")
        return cls(
            kind=kind,
            shown=f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}",
            bounds=bounds,
            folder=Path(unquote(url.path)),
            host=url.hostname or "",
            port=port or 6379,
            database=int(url.path.strip("/") or "0") if kind == "redis" else 0,
            username=unquote(url.username or ""),
            password=unquote(url.password or ""),
            tls=url.scheme in _TLS,
        )


def _problems(url: SplitResult, kind: str, port: int, bounds: Bounds) -> Iterator[str]:
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
    elif kind == "redis":
        if not url.hostname:
            yield "the URL names no host"
        if bounds.max_item_mb > _REDIS_MAX_ITEM_MB:
            yield f"max_item_mb is over the {_REDIS_MAX_ITEM_MB} of Redis"
        if not _DATABASE.fullmatch(url.path.strip("/") or "0"):
            yield "the path of a Redis URL is the database's number"
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
