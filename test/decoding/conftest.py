from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sglang_epd.decoding import Decoders
from sglang_epd.media import MediaLimits

Make = Callable[..., Decoders]


@pytest.fixture(scope="package")
def decoders() -> Iterator[Decoders]:
    """For tests that leave it as it was."""
    decoders = Decoders(MediaLimits(), 2 << 30, 4)
    yield decoders
    decoders.close()


@pytest.fixture(scope="package")
def strict() -> Iterator[Decoders]:
    """The same, with little memory and small limits."""
    limits = MediaLimits(max_audio_s=3, max_video_total_pixels=17 * 1280 * 720)
    decoders = Decoders(limits, 700 << 20, 2)
    yield decoders
    decoders.close()


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Decoders] = []

    def make(budget_mb: int = 1024, places: int = 2, **limits: int) -> Decoders:
        made.append(Decoders(MediaLimits(**limits), budget_mb << 20, places))
        return made[-1]

    yield make
    for decoders in made:
        decoders.close()
