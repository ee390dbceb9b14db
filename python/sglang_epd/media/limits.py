"""Limits of media: kinds, places and sizes that may be read."""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from sglang_epd.config import Settings
from sglang_epd.errors import ConfigError

# More bytes than a process can hold.
NO_LIMIT = 1 << 62
# Of JPEG 2000, however many pixels other formats may have. A file of 287 bytes bought 2.4 GiB
# and 21 s with 100 megapixels. A megapixel takes 0.08 to 0.3 s of a processor; the slowest of
# the others, AVIF with an alpha channel, takes 0.06.
MAX_JPEG_2000_PIXELS = 25_000_000
_USUAL = Settings()


def _nbytes(mebibytes: float) -> int:
    return math.ceil(mebibytes * (1 << 20))


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Bounds on one media item; those of `Settings` unless given, where it has them.

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
    """

    max_bytes: int = _nbytes(_USUAL.media_max_mb)
    max_url_bytes: int | None = None
    max_pixels: int = _USUAL.media_max_pixels
    max_video_frames: int = _USUAL.media_max_video_frames
    max_video_pixels: int = _USUAL.media_max_video_pixels
    max_video_total_pixels: int = _USUAL.media_max_video_total_pixels
    max_audio_s: float = _USUAL.media_max_audio_s
    max_redirects: int = 5
    connect_timeout_s: float = 3.0
    total_timeout_s: float = _USUAL.media_timeout_s
    allowed_domains: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    allowed_local_root: Path | None = None

    def plain(self) -> Any:
        """The limits as they travel to another process."""
        return msgspec.to_builtins(self, enc_hook=str)

    @classmethod
    def read(cls, plain: Any) -> Self:
        """The limits that `plain` wrote."""
        return msgspec.convert(plain, cls, dec_hook=lambda kind, value: kind(value))

    @classmethod
    def of(cls, flags: Any) -> MediaLimits:
        """The limits of `Settings` and of SGLang's flags.

        Args:
            flags: `allowed_media_domains` and `media_url_max_file_size_mb`.

        Raises:
            ConfigError: as of `from_env`.
        """
        hosts, url_mb = flags.allowed_media_domains, flags.media_url_max_file_size_mb
        return cls.from_env(hosts=hosts, url_mb=url_mb)

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str] | None = None,
        *,
        hosts: Sequence[str] = (),
        url_mb: int | None = None,
    ) -> MediaLimits:
        """The limits of `Settings`.

        Args:
            env: instead of the process's environment.
            hosts: of `--allowed-media-domains`, unless `ALLOWED_DOMAINS` is set.
            url_mb: of `--media-url-max-file-size-mb`, 0 for no limit, unless `MAX_MB` is set.

        Raises:
            ConfigError: a setting cannot be honoured; the message names it.
        """
        told = Settings.from_env(env)
        domains, root = told.media_allowed_domains, told.media_local_root.strip()
        for name in domains:
            _check_host("SGLANG_EPD_MEDIA_ALLOWED_DOMAINS", name)
        for name in hosts:
            _check_host("--allowed-media-domains", name)
        if root and not (Path(root).is_absolute() and Path(root).is_dir()):
            raise ConfigError(f"SGLANG_EPD_MEDIA_LOCAL_ROOT={root!r} is not an absolute folder")
        max_bytes, max_url_bytes = _nbytes(told.media_max_mb), None
        named = (os.environ if env is None else env).get("SGLANG_EPD_MEDIA_MAX_MB", "").strip()
        if url_mb is not None and not named:
            max_url_bytes = url_mb << 20 or NO_LIMIT
            # Media that may be fetched may be decoded; a lower flag does not bound inline media.
            max_bytes = max(max_bytes, max_url_bytes)
        return cls(
            max_bytes=max_bytes,
            max_url_bytes=max_url_bytes,
            max_pixels=told.media_max_pixels,
            max_video_frames=told.media_max_video_frames,
            max_video_pixels=told.media_max_video_pixels,
            max_video_total_pixels=told.media_max_video_total_pixels,
            max_audio_s=told.media_max_audio_s,
            connect_timeout_s=min(told.media_timeout_s, cls.connect_timeout_s),
            total_timeout_s=told.media_timeout_s,
            allowed_domains=domains,
            allowed_hosts=() if domains else tuple(hosts),
            allowed_networks=told.media_allowed_networks,
            allowed_local_root=Path(root) if root else None,
        )


def _check_host(setting: str, host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not host.strip(".") or any(c in "/:@*? " for c in host):
            raise ConfigError(f"{setting}: {host!r} is not a host name") from None
