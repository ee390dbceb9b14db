"""Which encoder gets which item.

Nothing here waits, reads a clock or knows a socket. `shuffle`, `round_robin` and
`least_loaded` are pure functions; `Affinity` remembers where it sent what, and nothing
else.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from blake3 import blake3

from sglang_epd.dispatch.pool import Snapshot
from sglang_epd.errors import ConfigError


class Work(NamedTuple):
    """One item, as far as a policy has to know it.

    Attributes:
        key: equal for items whose embeddings are equal, as far as can be known before
            they are encoded.
        patches: what encoding it is expected to cost; positive.
    """

    key: bytes
    patches: float


# Encoders by URL, with what they are compared by.
Ranks = dict[str, tuple[bytes, str]]
# (items, encoders that may be asked, random source) -> encoder URL of each item, in order.
# There is at least one encoder.
Policy = Callable[[Sequence[Work], Snapshot, random.Random], list[str]]


def shuffle(items: Sequence[Work], snapshot: Snapshot, rng: random.Random) -> list[str]:
    """Data-parallel split over the encoders in random order.

    The reference behaviour: each encoder gets `len(items) / len(encoders)` items, and
    chance decides who gets the remainder.
    """
    order = rng.sample(_urls(snapshot), len(snapshot.encoders))
    return [order[index % len(order)] for index in range(len(items))]


def round_robin(items: Sequence[Work], snapshot: Snapshot, _rng: random.Random) -> list[str]:
    """One encoder after the other, from where the request before left off."""
    urls = _urls(snapshot)
    return [urls[(snapshot.turn + index) % len(urls)] for index in range(len(items))]


def least_loaded(items: Sequence[Work], snapshot: Snapshot, rng: random.Random) -> list[str]:
    """Each item to whoever will have it done first, the large ones before the small.

    In seconds where the rates of all encoders are known, else in patches. (Graham's
    longest processing time first, 1969, on machines that have work already.)
    """
    views = list(snapshot.encoders)
    # So that the first of equals is chance's choice.
    rng.shuffle(views)
    rated = all(view.rate > 0 for view in views)
    rates = {view.url: view.rate if rated else 1.0 for view in views}
    loads = {view.url: view.load for view in views}
    chosen = [""] * len(items)
    for index in sorted(range(len(items)), key=lambda index: -items[index].patches):
        cost = items[index].patches
        url = min(loads, key=lambda url: (loads[url] + cost) / rates[url])
        loads[url] += cost
        chosen[index] = url
    return chosen


# A new key goes past encoders with more than so many times the mean load; but not unless
# they have so many times the item's own cost more than the mean: of a few items in
# flight one encoder always has twice as many as another, and that says nothing.
_BOUND = 1.25
_SLACK = 3.0
# The same for a key that was sent there before. Moving it costs its encoding anew, and if
# its embedding is kept there, the queue does not delay it.
_KNOWN_BOUND = 2.0
_KNOWN_SLACK = 8.0
# A key has one encoder for each such part of an encoder's fair share of items that it
# makes up, if it was seen so often for each of them.
_HOT_SHARE = 0.25
_HOT_COUNT = 8
# After so many items a key's count is halved.
_HALF_LIFE_ITEMS = 2000
# Keys that are remembered, some 500 bytes each.
_KEYS = 32_768


@dataclass(slots=True)
class _Home:
    """Where a key is at home.

    Attributes:
        urls: the encoders it was sent to; the first by its order, others because it is hot.
        passed: those before the first one in its order that had too much to do.
        count: how often it was seen, as of `at`, older times counting less.
        at: the item count when it was seen last.
    """

    urls: list[str] = field(default_factory=list)
    passed: frozenset[str] = frozenset()
    count: float = 0.0
    at: int = 0


class Affinity:
    """What was encoded somewhere goes there again, as long as that leaves no one idle.

    Each key has an order of the encoders of its own (rendezvous hashing: Thaler and
    Ravishankar, 1998), which every language server finds for itself, and in which an
    encoder that comes or goes moves none but its own keys. A new key goes to the first
    in its order that has not much more than the mean load (consistent hashing with
    bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018), and stays where it went: at
    each of its requests anew, the bound would spread it over all encoders and push other
    embeddings out of their caches. It returns when an encoder comes back that was not
    there at the time. What is asked for so often that one encoder would have more to
    answer than others gets several, in its order, and goes to the least loaded of them.

    Args:
        keys: how many are remembered; the least recently seen are forgotten first.
    """

    def __init__(self, keys: int = _KEYS) -> None:
        self._keys = keys
        self._homes: OrderedDict[bytes, _Home] = OrderedDict()
        self._items = 0

    def __len__(self) -> int:
        return len(self._homes)

    def __call__(self, items: Sequence[Work], snapshot: Snapshot, rng: random.Random) -> list[str]:
        loads = {view.url: view.load for view in snapshot.encoders}
        chosen: dict[bytes, str] = {}
        for item in items:
            # Equal items of one request share one computation, wherever it is.
            if item.key not in chosen:
                url = chosen[item.key] = self._choose(item, loads, rng)
                loads[url] += item.patches
        return [chosen[item.key] for item in items]

    def _choose(self, item: Work, loads: dict[str, float], rng: random.Random) -> str:
        ranks = rendezvous(item.key, loads)
        cost = item.patches
        mean = (sum(loads.values()) + cost) / len(loads)
        most = max(_BOUND * mean, mean + _SLACK * cost)

        def first(urls: Iterable[str]) -> str | None:
            """Of these, with room for a new key."""
            roomy = [url for url in urls if loads[url] + cost <= most]
            return max(roomy, key=ranks.__getitem__, default=None)

        home = self._seen(item.key)
        _leave(home, ranks)
        wanted = self._wanted(home, len(ranks))
        del home.urls[wanted:]
        if 0 < len(home.urls) < wanted:
            # One more at a time: each has to encode it first.
            another = first(loads.keys() - home.urls)
            home.urls += [another] if another else []
        bound = max(_KNOWN_BOUND * mean, mean + _KNOWN_SLACK * cost)
        known = [url for url in home.urls if loads[url] + cost <= bound]
        if known:
            least = min(loads[url] for url in known)
            return rng.choice([url for url in known if loads[url] == least])
        best = max(ranks, key=ranks.__getitem__)
        if loads[best] + cost <= most:
            home.urls, home.passed = [best], frozenset()
            return best
        # The least loaded always has room for a new key: it has the mean at most.
        found = first(loads)
        assert found is not None
        home.urls, home.passed = [found], _before(found, ranks)
        return found

    def _seen(self, key: bytes) -> _Home:
        self._items += 1
        home = self._homes.setdefault(key, _Home(at=self._items))
        self._homes.move_to_end(key)
        if len(self._homes) > self._keys:
            self._homes.popitem(last=False)
        home.count = home.count * _fading(self._items - home.at) + 1.0
        home.at = self._items
        return home

    def _wanted(self, home: _Home, encoders: int) -> int:
        """How many encoders the key should have."""
        # What all keys' counts add up to.
        total = (1.0 - _fading(self._items)) / (1.0 - _fading(1))
        shares = home.count / total * encoders / _HOT_SHARE
        return max(1, min(encoders, round(shares), int(home.count / _HOT_COUNT)))


def _leave(home: _Home, ranks: Ranks) -> None:
    """Drop encoders that cannot be asked, and all if there is one now that the key would
    have gone to, had it been there."""
    home.urls = [url for url in home.urls if url in ranks]
    if home.urls and not _before(home.urls[0], ranks) <= home.passed:
        home.urls = []


def _before(url: str, ranks: Ranks) -> frozenset[str]:
    """Those that come before it in a key's order."""
    own = ranks[url]
    return frozenset([other for other, rank in ranks.items() if rank > own])


def _fading(items: int) -> float:
    return float(0.5 ** (items / _HALF_LIFE_ITEMS))


def rendezvous(key: bytes, urls: Iterable[str]) -> Ranks:
    """The key's order of encoders, as a rank of each: the highest is the first. No rank
    depends on who else is there."""
    return {url: (_hashing(url).copy().update(key).digest(8), url) for url in urls}


@lru_cache(maxsize=4096)
def _hashing(url: str) -> blake3:
    """What a key is added to, for its rank; 2 KB."""
    return blake3(url.encode(errors="surrogatepass") + b"\0")


def _urls(snapshot: Snapshot) -> list[str]:
    return [view.url for view in snapshot.encoders]


_POLICIES: dict[str, Callable[[], Policy]] = {
    "shuffle": lambda: shuffle,
    "round_robin": lambda: round_robin,
    "least_loaded": lambda: least_loaded,
    "affinity": Affinity,
}


def policy(name: str) -> Policy:
    """A policy by its name, with a memory of its own if it has one.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _POLICIES:
        known = ", ".join(sorted(_POLICIES))
        raise ConfigError(f"SGLANG_EPD_DISPATCH_POLICY={name!r} is not a policy; known: {known}")
    return _POLICIES[name]()
