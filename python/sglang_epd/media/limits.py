"""What media may be read, from where, and how much of it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_epd.config import Declared, environment
from sglang_epd.errors import ConfigError

_PREFIX = "SGLANG_EPD_MEDIA_"
_SERVERS = "encoders; language with `--enable-adaptive-dispatch-to-encoder`"
# More bytes than a process can hold.
NO_LIMIT = 1 << 62
# Of JPEG 2000, however many pixels other formats may have. A file of 287 bytes bought 2.4 GiB
# and 21 s with 100 megapixels. A megapixel takes 0.08 to 0.3 s of a processor; the slowest of
# the others, AVIF with an alpha channel, takes 0.06.
MAX_JPEG_2000_PIXELS = 25_000_000
_POSITIVE = (
    "max_bytes",
    "max_pixels",
    "max_video_frames",
    "max_video_pixels",
    "max_video_total_pixels",
    "max_audio_s",
    "connect_timeout_s",
    "total_timeout_s",
)


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Bounds on one media item.

    Attributes:
        max_bytes: of the encoded media, also after a Content-Encoding is undone.
        max_url_bytes: the same of media behind http and https URLs; `max_bytes` where None.
        max_pixels: width times height that an image's header may claim. 100
            megapixels take 2.6 GB to decode and prepare (`decoding/child.py`), and are
            eight times what the largest vision processors keep; the photographs of nearly
            all cameras fit. JPEG 2000 may have 25 (`MAX_JPEG_2000_PIXELS`).
        max_video_frames: frames in a video file, read or not: ten minutes at 30 a second.
        max_video_pixels: of one frame of a video; 4096 x 2304 fit.
        max_video_total_pixels: of those frames of a video that the model is shown (two a
            second, mostly), before they are made smaller. Four minutes of 1080p fit; each
            pixel takes 24 bytes of the memory for decoding (`SGLANG_EPD_DECODE_MB`), which
            may allow less.
        max_audio_s: how long an audio clip may last.
        max_redirects: followed for one URL.
        connect_timeout_s: for one TCP connection; slower hosts count as down.
        total_timeout_s: for everything that a fetch does: name resolution, TLS,
            redirects and the body, so that a URL that drips ends here too.
        allowed_domains: hosts that may be asked, each with its subdomains.
        allowed_hosts: hosts that may be asked, without their subdomains. Where both lists
            are empty, all may be. Neither opens a private address: those need
            `allowed_networks`.
        allowed_networks: CIDRs that are open although private (10.1.0.0/16, say).
        allowed_local_root: folder beneath which local files may be read; None for none.

    Raises:
        ConfigError: a bound is not positive, a CIDR, domain or folder is not one.
    """

    max_bytes: int = 64 << 20
    max_url_bytes: int | None = None
    max_pixels: int = 100_000_000
    max_video_frames: int = 18_000
    max_video_pixels: int = 4096 * 2304
    max_video_total_pixels: int = 1_000_000_000
    max_audio_s: float = 600.0
    max_redirects: int = 5
    connect_timeout_s: float = 3.0
    total_timeout_s: float = 10.0
    allowed_domains: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    allowed_local_root: Path | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            # Written so that NaN fails as well.
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be positive and finite")
        if self.max_redirects < 0:
            raise ConfigError("max_redirects must not be negative")
        for network in self.allowed_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ConfigError(f"allowed_networks: {error}") from None
        for domain in (*self.allowed_domains, *self.allowed_hosts):
            if _is_address(domain):
                continue
            if not domain.strip(".") or any(c in "/:@*? " for c in domain):
                raise ConfigError(f"allowed_domains: {domain!r} is not a host name")
        root = self.allowed_local_root
        if root is not None and not (root.is_absolute() and root.is_dir()):
            raise ConfigError(f"allowed_local_root: {str(root)!r} is not an absolute folder")

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        hosts: Sequence[str] = (),
        url_mb: int | None = None,
    ) -> MediaLimits:
        """Read `SGLANG_EPD_MEDIA_*`; what is unset or empty keeps its default.

        Args:
            environ: instead of the process's environment.
            hosts: of `--allowed-media-domains`, unless `ALLOWED_DOMAINS` is set.
            url_mb: of `--media-url-max-file-size-mb`, 0 for no limit, unless `MAX_MB` is set.

        Raises:
            ConfigError: a value cannot be read or is out of range, or the variable is
                none that is declared; the message names it.
        """
        fields: dict[str, Any] = {}
        for name, value in environment(environ).items():
            if not name.startswith(_PREFIX):
                continue
            variable = _VARIABLES.get(name.removeprefix(_PREFIX))
            if variable is None:
                known = ", ".join(_PREFIX + known for known in _VARIABLES)
                raise ConfigError(f"{name} is not a setting; there are {known}")
            if not value.strip():
                continue
            try:
                update = variable.read(value.strip())
                cls(**update)
            except ConfigError as error:
                raise ConfigError(f"{name}={value!r}: {error}") from None
            except (ValueError, OverflowError):
                raise ConfigError(f"{name}={value!r}: expected {variable.values}") from None
            fields |= update
        if hosts and "allowed_domains" not in fields:
            fields["allowed_hosts"] = tuple(hosts)
        if url_mb is not None and "max_bytes" not in fields:
            most = url_mb << 20 or NO_LIMIT
            # What may be fetched may be decoded; inline media are not the flag's.
            fields |= {"max_url_bytes": most, "max_bytes": max(most, cls.max_bytes)}
        return cls(**fields)


def declared() -> list[Declared]:
    """The settings of this module, as people are told of them."""
    return [
        Declared(_PREFIX + name, one.values, one.default, _SERVERS, one.text)
        for name, one in _VARIABLES.items()
    ]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _read_timeout(text: str) -> dict[str, Any]:
    total_s = float(text)
    return {
        "total_timeout_s": total_s,
        "connect_timeout_s": min(total_s, MediaLimits.connect_timeout_s),
    }


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(part for part in map(str.strip, text.split(",")) if part)


@dataclass(frozen=True)
class _Variable:
    """One variable: how it is read, and what people are told of it."""

    read: Callable[[str], dict[str, Any]]
    values: str
    default: str
    text: str


def _whole(field: str, text: str) -> _Variable:
    default = str(getattr(MediaLimits, field))
    return _Variable(lambda raw: {field: int(raw)}, "a whole number", default, text)


_VARIABLES: dict[str, _Variable] = {
    "MAX_MB": _Variable(
        lambda raw: {"max_bytes": int(float(raw) * (1 << 20))},
        "a number of MiB",
        str(MediaLimits.max_bytes >> 20),
        "Of one item's encoded media, also after a Content-Encoding is undone. Where it is not "
        "set, `--media-url-max-file-size-mb` counts for media behind URLs (0: no limit).",
    ),
    "MAX_PIXELS": _whole(
        "max_pixels",
        "Width times height that an image's header may claim; JPEG 2000 may claim "
        f"{MAX_JPEG_2000_PIXELS} at most.",
    ),
    "MAX_VIDEO_FRAMES": _whole("max_video_frames", "Frames in a video file, read or not."),
    "MAX_VIDEO_PIXELS": _whole("max_video_pixels", "Pixels of one frame of a video."),
    "MAX_VIDEO_TOTAL_PIXELS": _whole(
        "max_video_total_pixels",
        "Pixels of all frames that the model is shown, before they are made smaller.",
    ),
    "MAX_AUDIO_S": _Variable(
        lambda raw: {"max_audio_s": float(raw)},
        "a number of seconds",
        f"{MediaLimits.max_audio_s:.0f}",
        "How long a sound may last.",
    ),
    "MAX_REDIRECTS": _whole("max_redirects", "Followed for one URL."),
    "TIMEOUT_S": _Variable(
        _read_timeout,
        "a number of seconds",
        f"{MediaLimits.total_timeout_s:.0f}",
        "For all that a fetch does: names, TLS, redirects and the body.",
    ),
    "ALLOWED_DOMAINS": _Variable(
        lambda raw: {"allowed_domains": _read_list(raw)},
        "host names, with commas between",
        "",
        "Hosts that may be asked, each with its subdomains; all unless given. Where it is not "
        "set, `--allowed-media-domains` counts, whose hosts are exact. Opens no private address.",
    ),
    "ALLOWED_NETWORKS": _Variable(
        lambda raw: {"allowed_networks": _read_list(raw)},
        "CIDRs, with commas between",
        "",
        "Private networks that media may come from.",
    ),
    "LOCAL_ROOT": _Variable(
        lambda raw: {"allowed_local_root": Path(raw)},
        "a folder",
        "",
        "Folder below which `file://` media may be read.",
    ),
}
