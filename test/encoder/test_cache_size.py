"""How much an encoder keeps, by SGLang's flag and variable."""

import pytest

from sglang_epd.encoder.server import cache_bytes
from sglang_epd.errors import ConfigError


@pytest.mark.parametrize(
    ("typed", "enabled", "mib"),
    [
        ("", True, 4096),
        # SGLang sets it so for Qwen3-VL on Hopper GPUs.
        ("0", True, 4096),
        ("100", True, 100),
        ("100", False, 0),
    ],
)
def test_the_flag_asks_for_a_cache_and_the_variable_says_how_large(
    typed: str, enabled: bool, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", typed)
    assert cache_bytes(enabled=enabled) == mib << 20


def test_what_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "-1")
    with pytest.raises(ConfigError, match="SGLANG_VLM_CACHE_SIZE_MB='-1'"):
        cache_bytes(enabled=True)
