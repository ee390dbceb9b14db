from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_epd.config import Settings
from sglang_epd.errors import ConfigError
from sglang_epd.media import MediaLimits
from sglang_epd.media.limits import MAX_JPEG_2000_PIXELS, NO_LIMIT


def test_defaults_stand_where_nothing_is_set() -> None:
    assert MediaLimits.from_env({"PATH": "/bin", "SGLANG_EPD_MEDIA_MAX_MB": " "}) == MediaLimits()
    assert MediaLimits().allowed_local_root is None


def test_every_variable_is_read(tmp_path: Path) -> None:
    environ = {
        "SGLANG_EPD_MEDIA_MAX_MB": "1.5",
        "SGLANG_EPD_MEDIA_MAX_PIXELS": "1000",
        "SGLANG_EPD_MEDIA_MAX_VIDEO_FRAMES": "100",
        "SGLANG_EPD_MEDIA_MAX_VIDEO_PIXELS": "2000",
        "SGLANG_EPD_MEDIA_MAX_VIDEO_TOTAL_PIXELS": "30000",
        "SGLANG_EPD_MEDIA_MAX_AUDIO_S": "1.5",
        "SGLANG_EPD_MEDIA_TIMEOUT_S": "2",
        "SGLANG_EPD_MEDIA_ALLOWED_DOMAINS": "example.com, cdn.example.org",
        "SGLANG_EPD_MEDIA_ALLOWED_NETWORKS": "127.0.0.0/8, ::1/128,",
        "SGLANG_EPD_MEDIA_LOCAL_ROOT": str(tmp_path),
    }
    assert MediaLimits.from_env(environ) == MediaLimits(
        max_bytes=3 << 19,
        max_pixels=1000,
        max_video_frames=100,
        max_video_pixels=2000,
        max_video_total_pixels=30000,
        max_audio_s=1.5,
        connect_timeout_s=2.0,
        total_timeout_s=2.0,
        allowed_domains=("example.com", "cdn.example.org"),
        allowed_networks=("127.0.0.0/8", "::1/128"),
        allowed_local_root=tmp_path,
    )


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EPD_MEDIA_MAX_PIXELS", "77")
    assert MediaLimits.from_env().max_pixels == 77


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NO_SUCH_LIMIT", "1"),
        ("MAX_MB", "many"),
        ("MAX_MB", "0"),
        ("MAX_MB", "-1"),
        ("MAX_MB", "inf"),
        ("MAX_MB", "nan"),
        ("MAX_PIXELS", "a few"),
        ("MAX_PIXELS", "0"),
        ("MAX_VIDEO_FRAMES", "0"),
        ("MAX_VIDEO_PIXELS", "1.5"),
        ("MAX_VIDEO_TOTAL_PIXELS", "-1"),
        ("MAX_AUDIO_S", "nan"),
        ("TIMEOUT_S", "soon"),
        ("TIMEOUT_S", "nan"),
        ("TIMEOUT_S", "inf"),
        ("ALLOWED_NETWORKS", "127.0.0.1/8"),
        ("ALLOWED_NETWORKS", "localhost"),
        ("ALLOWED_DOMAINS", "https://example.com"),
        ("ALLOWED_DOMAINS", "*.example.com"),
        ("ALLOWED_DOMAINS", "."),
        ("LOCAL_ROOT", "relative"),
        ("LOCAL_ROOT", "/no/such/folder"),
        ("ALLOWED_NETWORK", "10.0.0.0/8"),  # misspelt
    ],
)
def test_bad_values_name_their_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"SGLANG_EPD_MEDIA_{name}\\b"):
        MediaLimits.from_env({f"SGLANG_EPD_MEDIA_{name}": value})


@pytest.mark.parametrize(
    ("url_mb", "urls", "others"),
    [
        (None, None, 64 << 20),
        (64, 64 << 20, 64 << 20),
        (8, 8 << 20, 64 << 20),  # what comes inline is not the flag's
        (256, 256 << 20, 256 << 20),
        (0, NO_LIMIT, NO_LIMIT),
    ],
)
def test_the_flag_bounds_what_is_behind_urls(url_mb, urls, others) -> None:
    limits = MediaLimits.from_env({}, url_mb=url_mb)
    assert (limits.max_url_bytes, limits.max_bytes) == (urls, others)


def test_our_settings_count_before_the_flags() -> None:
    env = {"SGLANG_EPD_MEDIA_MAX_MB": "3", "SGLANG_EPD_MEDIA_ALLOWED_DOMAINS": "a.example"}
    assert MediaLimits.from_env(env, hosts=["b.example"], url_mb=8) == MediaLimits(
        max_bytes=3 << 20, allowed_domains=("a.example",)
    )


def test_the_flags_hosts_are_exact() -> None:
    limits = MediaLimits.from_env({}, hosts=["a.example", "::1"])
    assert (limits.allowed_hosts, limits.allowed_domains) == (("a.example", "::1"), ())
    with pytest.raises(ConfigError, match=r"https://a\.example"):
        MediaLimits.from_env({}, hosts=["https://a.example"])


def test_what_people_are_told_of_jpeg_2000_is_so() -> None:
    assert f"JPEG 2000 may claim {MAX_JPEG_2000_PIXELS} at most" in " ".join(
        (Settings.__doc__ or "").split()
    )


def test_limits_cross_to_another_process(tmp_path):
    for limits in (
        MediaLimits(),
        MediaLimits(max_pixels=5, allowed_domains=("a.example",), allowed_local_root=tmp_path),
    ):
        packed = msgspec.msgpack.encode(limits.plain())
        assert MediaLimits.read(msgspec.msgpack.decode(packed)) == limits
