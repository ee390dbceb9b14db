"""Sounds that need no recording: made up, and the same each time."""

from __future__ import annotations

import numpy as np

RATE_HZ = 16_000
_TONES_HZ = {"low": 130.0, "middle": 440.0, "high": 1200.0, "shrill": 3100.0}
NAMES = tuple(_TONES_HZ)


def load(name: str, *, seconds: float = 2.0, rate_hz: int = RATE_HZ) -> np.ndarray:
    """The sound `name`: a tone that rises by a third, beating, with some noise; float32
    [samples].

    Raises:
        KeyError: no sound has that name.
    """
    tone_hz = _TONES_HZ[name]
    time = np.arange(int(seconds * rate_hz)) / rate_hz
    sweep = np.sin(2 * np.pi * tone_hz * (time + time**2 / (6 * seconds)))
    beat = 0.5 + 0.5 * np.sin(2 * np.pi * (1 + tone_hz / 200) * time)
    noise = np.random.default_rng(int(tone_hz)).normal(0, 0.02, len(time))
    return (0.5 * sweep * beat + noise).astype(np.float32)
