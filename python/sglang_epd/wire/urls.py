"""The URL of a server, as strangers may write it."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from sglang_epd.errors import ProtocolError

_MAX_CHARACTERS = 512
# Visible ASCII that a URL does not quote: nothing that a log or a header would mistake.
_PLAIN = re.compile(r"[!-~]+")
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?")


# The schemes of servers' URLs, and those of encoders.
HTTP = ("http", "https")
ENCODERS = (*HTTP, "grpc")


def server_url(raw: str, schemes: tuple[str, ...] = HTTP) -> str:
    """`raw` in its one form: `http://host:port` or the like, in small letters.

    The port is left out where it was; gRPC has none to leave out.

    Args:
        schemes: that it may have.

    Raises:
        ProtocolError: it is no such URL, or has credentials, a path, a query, or an address
            that no client can connect to.
    """
    if not raw or len(raw) > _MAX_CHARACTERS or not _PLAIN.fullmatch(raw):
        raise ProtocolError("a server's URL is some visible ASCII characters")
    try:
        parts = urlsplit(raw)
        port = parts.port
    except ValueError:
        raise ProtocolError("a server's URL has a bad host or port") from None
    if parts.scheme not in schemes:
        begins = " or ".join(f"{scheme}://" for scheme in schemes)
        raise ProtocolError(f"a server's URL begins with {begins}")
    if "@" in parts.netloc:
        raise ProtocolError("a server's URL has no credentials")
    if parts.path not in ("", "/") or "?" in raw or "#" in raw or "\\" in raw:
        raise ProtocolError("a server's URL is a scheme, a host and a port, nothing more")
    host = _host(parts.hostname or "", in_brackets="[" in parts.netloc)
    if port == 0 or (port is None and parts.scheme == "grpc"):
        raise ProtocolError("a server's URL has a bad host or port")
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")


def bracketed(host: str) -> str:
    """A host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_port(host: str, port: int) -> str:
    return f"{bracketed(host)}:{port}"


def _host(host: str, *, in_brackets: bool) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # Some read a number as an address, others as a name.
        numeric = host.rpartition(".")[2].isdecimal() or host.startswith("0x")
        if in_brackets or numeric or len(host) > 253 or not _NAME.fullmatch(host):
            raise ProtocolError("a server's URL has a bad host or port") from None
        return host
    if address.is_unspecified or address.is_multicast:
        raise ProtocolError(f"{address} is not an address that others can connect to")
    return f"[{address}]" if address.version == 6 else str(address)
