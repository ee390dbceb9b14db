"""A small machine and a kind of request for the simulator's tests."""

from __future__ import annotations

from typing import Any

# A picture of 448 x 448: 1024 patches, 256 tokens; 100 ms of an encoder.
PROFILE: dict[str, Any] = {
    "name": "small",
    "source": ["made up for tests"],
    "hardware": "none",
    "model": "none",
    "pixels": {"patch_px": 14, "merge": 4},
    "encoder": {"tower": {"patch_s": 0.1 / 1024}},
    "language": {
        "prefill_token_s": 1e-4,
        "decode_launch_s": 0.02,
        "tower": {"patch_s": 0.1 / 1024},
    },
    "links": {"bytes_per_token": 8192, "latency_s": 1e-3, "kv_bytes_per_token": 1000},
}
KIND: dict[str, Any] = {
    "text_tokens": 100,
    "output_tokens": 20,
    "items": 1,
    "pictures": [{"width": 448, "height": 448}],
}
