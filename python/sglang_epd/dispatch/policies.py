"""Which encoder gets which item, and how often work may be sent again.

Nothing here waits or knows a socket. `shuffle`, `round_robin` and
`least_loaded` are pure functions; `Affinity` remembers where each key went, and whether
encoders know keys that are new here.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from blake3 import blake3

from sglang_epd.dispatch.pool import Snapshot
from sglang_epd.errors import ConfigError

# Retries per item that was sent for the first time, and a fixed rate besides: enough
# for all that one encoder may have had when it died.
_SHARE = 0.2
_BURST = 128.0
_PER_S = 10.0
_PAUSE_S = (0.05, 2.0)


class ItemCost(NamedTuple):
    """One item, as far as a policy has to know it.

    Attributes:
        key: equal for items whose embeddings are equal, as far as can be known before
            they are encoded.
        patches: the expected cost of its encoding; positive.
    """

    key: bytes
    patches: float


# Encoders by URL, with the figure by which they are compared.
Ranks = dict[str, tuple[bytes, str]]
# (items, encoders that may be asked, random source) -> encoder URL of each item, in order.
# There is at least one encoder.
Choose = Callable[[Sequence[ItemCost], Snapshot, random.Random], list[str]]


class Policy:
    """Spreads a request's items over the encoders; this one by a function, and learns nothing."""

    def __init__(self, choose: Choose) -> None:
        self._by = choose

    def __call__(
        self, items: Sequence[ItemCost], snapshot: Snapshot, rng: random.Random
    ) -> list[str]:
        return self._by(items, snapshot, rng)

    def heard(self, key: bytes, source: str) -> None:
        """An item of that key was delivered, by the encoder that was chosen last.

        Args:
            source: how its embedding came about (`wire.http.ItemOutcome`).
        """


def shuffle(items: Sequence[ItemCost], snapshot: Snapshot, rng: random.Random) -> list[str]:
    """Data-parallel split over the encoders in random order.

    The reference behaviour: each encoder gets `len(items) / len(encoders)` items, and
    chance decides which ones get the remainder.
    """
    order = rng.sample(_urls(snapshot), len(snapshot.encoders))
    return [order[index % len(order)] for index in range(len(items))]


def round_robin(items: Sequence[ItemCost], snapshot: Snapshot, _rng: random.Random) -> list[str]:
    """One encoder after the other, from where the request before left off."""
    urls = _urls(snapshot)
    return [urls[(snapshot.turn + index) % len(urls)] for index in range(len(items))]


def least_loaded(items: Sequence[ItemCost], snapshot: Snapshot, rng: random.Random) -> list[str]:
    """Each item to the encoder that will have it done first, the large ones before the small.

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
# Keys that are remembered, some 200 bytes each.
_KEYS = 32_768
# Where at least this share of new keys is known to their first encoder, other servers send it
# the same items. The share before anything is known, and the weight of each key that is heard of:
# a server takes itself for alone after 29 new keys in a row that no encoder had.
_SHARED = 0.1
_SHARED_AT_FIRST = 0.25
_WEIGHT = 1 / 32


class _Home(NamedTuple):
    """Where a key is at home.

    Attributes:
        url: the encoder that it was sent to.
        known: the encoders that it was chosen from by the key's order; None where it was chosen
            by load.
        tells: whether the encoder's answer will tell if another server sends it there too.
    """

    url: str
    known: frozenset[str] | None
    tells: bool


class Affinity(Policy):
    """Sends an item to the encoder that had it before, within a bound of the load.

    Each key has an order of the encoders of its own (rendezvous hashing: Thaler and
    Ravishankar, 1998), which every language server finds for itself, and in which an
    encoder that comes or goes moves none but its own keys. A new key goes to the first
    in its order that has not much more than the mean load (consistent hashing with
    bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018), and stays where it went: at
    each of its requests anew, the bound would spread it over all encoders and push other
    embeddings out of their caches. It returns when an encoder comes back that was not
    there at the time.

    That order is for servers that are asked for the same images. While encoders answer that
    they had next to none of the new keys, a new key goes to the least loaded instead, and the
    order decides between equals.

    Args:
        keys: how many are remembered, the last seen ones.
    """

    def __init__(self, keys: int = _KEYS) -> None:
        self._keys = keys
        self._homes: OrderedDict[bytes, _Home] = OrderedDict()
        # Of new keys that went to the first in their order: those that it had.
        self._shared = _SHARED_AT_FIRST

    def __len__(self) -> int:
        return len(self._homes)

    def __call__(
        self, items: Sequence[ItemCost], snapshot: Snapshot, rng: random.Random
    ) -> list[str]:
        loads = {view.url: view.load for view in snapshot.encoders}
        known = _one_for_all(frozenset(loads))
        chosen: dict[bytes, str] = {}
        for item in items:
            # Equal items of one request share one computation, wherever it is.
            if item.key not in chosen:
                url = chosen[item.key] = self._choose(item, loads, known)
                loads[url] += item.patches
        return [chosen[item.key] for item in items]

    def _choose(self, item: ItemCost, loads: dict[str, float], known: frozenset[str]) -> str:
        ranks = rendezvous(item.key, loads)
        cost = item.patches
        mean = (sum(loads.values()) + cost) / len(loads)

        def fits(url: str, bound: float, slack: float) -> bool:
            return loads[url] + cost <= max(bound * mean, mean + slack * cost)

        home = self._homes.get(item.key)
        if (
            home is None
            or not _stands(home, ranks)
            or not fits(home.url, _KNOWN_BOUND, _KNOWN_SLACK)
        ):
            if self._shared < _SHARED:
                least = min(loads.values())
                roomy, among = [url for url, load in loads.items() if load == least], None
            else:
                # The least loaded always has room: it has the mean at most.
                roomy, among = [url for url in loads if fits(url, _BOUND, _SLACK)], known
            url = max(roomy, key=ranks.__getitem__)
            tells = home is None and url == max(ranks, key=ranks.__getitem__)
            home = self._homes[item.key] = _Home(url, among, tells)
        self._homes.move_to_end(item.key)
        if len(self._homes) > self._keys:
            self._homes.popitem(last=False)
        return home.url

    def heard(self, key: bytes, source: str) -> None:
        home = self._homes.get(key)
        # An embedding from a shared store says nothing of other servers' choices. One that
        # several requests share may have been begun for one of this server's.
        if home is not None and home.tells and source in ("computed", "cached"):
            self._homes[key] = home._replace(tells=False)
            self._shared += _WEIGHT * ((source == "cached") - self._shared)


def _stands(home: _Home, ranks: Ranks) -> bool:
    """Whether the encoder is there, and where the key's order chose it, none that was missing
    then comes before it."""
    own, known = ranks.get(home.url), home.known
    if own is None or known is None:
        return own is not None
    return all(url in known for url, rank in ranks.items() if rank > own)


@lru_cache(maxsize=256)
def _one_for_all(urls: frozenset[str]) -> frozenset[str]:
    """The same set for equal ones: each key keeps one."""
    return urls


def rendezvous(key: bytes, urls: Iterable[str]) -> Ranks:
    """The key's order of encoders, as a rank of each: the highest is the first. No rank
    depends on the other encoders."""
    return {url: (_hashing(url).copy().update(key).digest(8), url) for url in urls}


@lru_cache(maxsize=4096)
def _hashing(url: str) -> blake3:
    """The hash state that a key is added to, for its rank; 2 KB."""
    return blake3(url.encode(errors="surrogatepass") + b"\0")


def _urls(snapshot: Snapshot) -> list[str]:
    return [view.url for view in snapshot.encoders]


_POLICIES: dict[str, Callable[[], Policy]] = {
    "shuffle": lambda: Policy(shuffle),
    "round_robin": lambda: Policy(round_robin),
    "least_loaded": lambda: Policy(least_loaded),
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


class RetryBudget:
    """Tokens that first tries and time bring in, and retries use up: retries never add more
    than a share to the load.

    An empty budget delays retries, it refuses none: a request's deadline does. A retry that
    would come too late takes no tokens: a long fault would delay others long after its end.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = _BURST
        self._at = clock()

    def sent(self, items: int) -> None:
        """So many items were sent for the first time."""
        self._refill(items * _SHARE)

    def take(self, items: int, within_s: float) -> float:
        """Use the tokens of so many retries; returns the seconds to wait before, 0 while there
        are tokens.

        Args:
            items: that are to be sent again.
            within_s: after so long they are of no use, and are not sent.
        """
        self._refill(0.0)
        wait_s = max(0.0, (items - self._tokens) / _PER_S)
        if wait_s <= within_s:
            self._tokens -= items
        return wait_s

    def _refill(self, tokens: float) -> None:
        now = self._clock()
        self._tokens = min(_BURST, self._tokens + tokens + (now - self._at) * _PER_S)
        self._at = now


def pause(number: int, rng: random.Random) -> float:
    """Seconds before the `number`-th return to encoders that have failed: exponential, and
    drawn between nothing and all of it, so that requests that failed together do not return
    together.

    Args:
        number: of returns before this one.
    """
    least, most = _PAUSE_S
    return least + rng.random() * (min(most, least * 2.0 ** min(number, 30)) - least)
