"""`SGLANG_EPD_STORE`: which store, and within which bounds, in one URL.

    file:///folder                      redis://[user:password@]host[:port][/database]
    mooncake://master:port              rediss://, valkey://, valkeys:// likewise

Bounds are query parameters: `ttl_s`, `max_item_mb`, `queue_mb`, `namespace` for all;
`max_mb` for a folder; `protocol`, `device`, `host`, `metadata` and `segment_mb` for
Mooncake. One that has no effect is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from sglang_epd.errors import ConfigError

_NAME = "SGLANG_EPD_STORE"
_KINDS = {
    "file": "file",
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
    "mooncake": "mooncake",
}
_TLS = {"rediss", "valkeys"}
_COMMON = {"ttl_s": "604800", "max_item_mb": "256", "queue_mb": "512", "namespace": "sglang-epd"}
_OWN = {
    "file": {"max_mb": "16384"},
    "redis": {},
    "mooncake": {
        "protocol": "tcp",
        "device": "",
        "host": "",
        "metadata": "P2PHANDSHAKE",
        "segment_mb": "0",
    },
}
_MAY_BE_ZERO = {"segment_mb"}
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
# What one string of Redis may hold, less than our own overhead.
_REDIS_MAX_ITEM_MB = 511


@dataclass(frozen=True)
class StoreUrl:
    """A store, as the user typed it.

    Attributes:
        kind: "file", "redis" or "mooncake".
        shown: the URL for logs and status, without credentials and parameters.
        namespace: begins all names, so that several may share a store.
        ttl_s: older entries are misses.
        max_item_bytes: larger embeddings are not stored, and not read.
        queue_bytes: embeddings that wait to be written; more are dropped.
        folder, max_bytes: of a folder, and what all in it may take.
        host, port, database, username, password, tls: of Redis; the first two of
            Mooncake's master, too.
        options: Mooncake's own.
    """

    kind: str
    shown: str
    namespace: str
    ttl_s: float
    max_item_bytes: int
    queue_bytes: int
    folder: Path = Path()
    max_bytes: int = 0
    host: str = ""
    port: int = 0
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, typed: str) -> StoreUrl:
        """Read and check the setting.

        Raises:
            ConfigError: what cannot be honoured, by name; never shows a password.
        """
        try:
            url = urlsplit(typed)
            port = url.port
        except ValueError:
            raise ConfigError(f"{_NAME} is no URL") from None
        kind = _KINDS.get(url.scheme)
        if kind is None:
            raise ConfigError(f"{_NAME} must begin with one of {', '.join(_KINDS)}, then ://")
        if url.fragment:
            raise ConfigError(f"{_NAME} has a fragment (#...), which has no meaning")
        given = _parameters(url, kind)
        options = {**_COMMON, **_OWN[kind], **given}
        if not _NAMESPACE.fullmatch(options["namespace"]) or options["namespace"] in (".", ".."):
            raise ConfigError(f"{_NAME}: namespace is letters, digits, '.', '_', '-', 64 at most")
        numbers = {
            name: _number(name, value)
            for name, value in options.items()
            if name.endswith(("_mb", "_s"))
        }
        item_mb = numbers["max_item_mb"]
        if numbers["queue_mb"] < item_mb:
            raise ConfigError(f"{_NAME}: queue_mb is less than max_item_mb, one embedding")
        common = cls(
            kind=kind,
            shown=f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}",
            namespace=options["namespace"],
            ttl_s=float(numbers["ttl_s"]),
            max_item_bytes=item_mb << 20,
            queue_bytes=numbers["queue_mb"] << 20,
            max_bytes=numbers.get("max_mb", 0) << 20,
            host=url.hostname or "",
            port=port or 0,
            options={name: options[name] for name in _OWN[kind] if kind == "mooncake"},
        )
        return _SPECIFIC[kind](common, url)


def _file(common: StoreUrl, url: SplitResult) -> StoreUrl:
    if url.netloc or not url.path.startswith("/") or url.path == "/":
        raise ConfigError(f"{_NAME}: file:// wants an absolute folder (file:///folder)")
    if common.max_bytes < common.max_item_bytes:
        raise ConfigError(f"{_NAME}: max_mb is less than max_item_mb, one embedding")
    return replace(common, folder=Path(unquote(url.path)))


def _redis(common: StoreUrl, url: SplitResult) -> StoreUrl:
    if not common.host:
        raise ConfigError(f"{_NAME} names no host")
    if common.max_item_bytes > _REDIS_MAX_ITEM_MB << 20:
        raise ConfigError(f"{_NAME}: max_item_mb is over the {_REDIS_MAX_ITEM_MB} of Redis")
    database = url.path.strip("/") or "0"
    if not (database.isascii() and database.isdecimal() and len(database) < 6):
        raise ConfigError(f"{_NAME}: the path of a Redis URL is the database's number")
    return replace(
        common,
        port=common.port or 6379,
        database=int(database),
        username=unquote(url.username or ""),
        password=unquote(url.password or ""),
        tls=url.scheme in _TLS,
    )


def _mooncake(common: StoreUrl, url: SplitResult) -> StoreUrl:
    if not common.host or not common.port or url.path not in ("", "/") or "@" in url.netloc:
        raise ConfigError(f"{_NAME}: mooncake:// wants its master's host:port, no more")
    return common


_SPECIFIC = {"file": _file, "redis": _redis, "mooncake": _mooncake}


def _parameters(url: SplitResult, kind: str) -> dict[str, str]:
    known = {**_COMMON, **_OWN[kind]}
    try:
        given = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
    except ValueError:
        raise ConfigError(f"{_NAME}: its parameters cannot be read") from None
    names = [name for name, _ in given]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{_NAME}: {name!r} is no parameter of {url.scheme}://; "
                f"known: {', '.join(sorted(known))}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"{_NAME}: {name} is there twice")
    return dict(given)


def _number(name: str, raw: str) -> int:
    least = 0 if name in _MAY_BE_ZERO else 1
    if not (raw.isascii() and raw.isdecimal() and len(raw) <= 12 and int(raw) >= least):
        raise ConfigError(f"{_NAME}: {name}={raw!r} is not a whole number of {least} or more")
    return int(raw)
