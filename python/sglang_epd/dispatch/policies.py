"""Pure functions that spread items over encoders."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_epd.dispatch.pool import Snapshot
from sglang_epd.errors import ConfigError


@dataclass(frozen=True)
class Work:
    key: bytes
    patches: float


Policy = Callable[[Sequence[Work], Snapshot, random.Random], list[str]]


def shuffle(items: Sequence[Work], snapshot: Snapshot, rng: random.Random) -> list[str]:
    """Data-parallel split over the encoders in random order.

    The reference behaviour: each encoder gets `len(items) / len(urls)` items, and
    chance decides who gets the remainder.
    """
    urls = [view.url for view in snapshot.encoders]
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
