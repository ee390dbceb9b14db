"""Pure functions that spread items over encoders."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sglang_epd.errors import ConfigError
from sglang_epd.wire import EncodeItem

# (items, encoder URLs, random source) -> encoder URL of each item, in order.
Policy = Callable[[Sequence[EncodeItem], Sequence[str], random.Random], list[str]]


def shuffle(items: Sequence[EncodeItem], urls: Sequence[str], rng: random.Random) -> list[str]:
    """Data-parallel split over the encoders in random order.

    The reference behaviour: each encoder gets `len(items) / len(urls)` items, and
    chance decides who gets the remainder.
    """
    order = rng.sample(urls, len(urls))
    return [order[index % len(order)] for index in range(len(items))]


_POLICIES: dict[str, Policy] = {"shuffle": shuffle}


def policy(name: str) -> Policy:
    """Look a policy up by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _POLICIES:
        known = ", ".join(sorted(_POLICIES))
        raise ConfigError(f"SGLANG_EPD_DISPATCH_POLICY={name!r} is not a policy; known: {known}")
    return _POLICIES[name]
