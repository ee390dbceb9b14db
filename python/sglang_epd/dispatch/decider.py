"""Whether a request's media are encoded by encoders or by this server's own tower.

Pure: measurements go in, a decision with both predicted costs comes out. The costs are
seconds until the embeddings are there. Elsewhere they are those of the encoder that is
done last, of moving the embeddings, and of one round trip; here those of the tower, behind
what it has to do already, times what it costs that prefill and decode stand still
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_epd.dispatch.policies import ItemCost
from sglang_epd.dispatch.pool import Health, Snapshot, View

# Patches a second of a tower of which nothing is known, where there is no other to go by.
START_PATCHES_PER_S = 20_000.0

Where = Literal["remote", "local"]
Why = Literal[
    "cost",  # the predicted seconds
    "small",  # no item is as large as SGLANG_EPD_MIN_PATCHES
    "few",  # fewer items than SGLANG_ENCODER_DISPATCH_MIN_ITEMS
    "off",  # SGLANG_EPD_ENCODE=off
    "no_encoder",  # none is ready
    "busy",  # all that are ready are full
    "no_tower",  # this server cannot encode it
    "failed",  # it was sent, and no encoder took it
]


@dataclass(frozen=True)
class LocalRate:
    """This server's own tower.

    Attributes:
        patches_per_s: as measured; 0 where it has not been.
        queued: patches that wait or run there.
    """

    patches_per_s: float = 0.0
    queued: float = 0.0


@dataclass(frozen=True)
class LinkCost:
    """The cost of sending items to encoders, besides encoding.

    Attributes:
        round_trip_s: for nothing at all.
        bytes_per_s: at which embeddings arrive.
    """

    round_trip_s: float = 0.005
    bytes_per_s: float = 1e9


@dataclass(frozen=True)
class Knobs:
    """Settings of users, and facts about the model.

    Attributes:
        encode: whether encoders are asked at all.
        min_patches: requests whose items are all smaller stay here.
        min_items: requests of fewer items stay here.
        bytes_per_patch: of the embedding.
        interference: cost of a second of the tower here, while prefill and decode wait.
    """

    encode: bool = True
    min_patches: float = 0.0
    min_items: int = 0
    bytes_per_patch: float = 2048.0
    interference: float = 2.0


@dataclass(frozen=True)
class Decision:
    """Where a request's media are encoded.

    Attributes:
        where: "remote" or "local".
        why: see `Why`.
        remote_s, local_s: predicted seconds; infinite where it is impossible.
        compute_s: the encoders' part of `remote_s`.
    """

    where: Where
    why: Why
    remote_s: float = float("inf")
    local_s: float = float("inf")
    compute_s: float = 0.0


def decide(
    work: Sequence[ItemCost],
    snapshot: Snapshot,
    local: LocalRate | None,
    knobs: Knobs,
    link: LinkCost = LinkCost(),
) -> Decision:
    """Compare the costs; users' settings come before them.

    Args:
        work: the request's items.
        snapshot: the encoders. Only ready ones count: with a tower here, no request has to
            wait for a silent encoder to come back.
        local: None where this server cannot encode these items.
        link: as learnt so far.
    """
    ready = [view for view in snapshot.encoders if view.state is Health.READY]
    free = [view for view in ready if not view.busy]
    rates = [view.rate for view in ready if view.rate > 0]
    compute_s = _finish_s(work, free, rates, local) if free else float("inf")
    patches = sum(one.patches for one in work)
    transfer_s = patches * knobs.bytes_per_patch / link.bytes_per_s
    remote_s = compute_s + transfer_s + link.round_trip_s
    if local is None:
        return Decision("remote", "no_tower", remote_s, compute_s=compute_s)
    rate = local.patches_per_s or _mean(rates) or START_PATCHES_PER_S
    local_s = (local.queued + patches) / rate * knobs.interference
    why: Why | None = None
    if not knobs.encode:
        why = "off"
    elif not ready:
        why = "no_encoder"
    elif not free:
        why = "busy"
    elif len(work) < knobs.min_items:
        why = "few"
    elif work and all(one.patches < knobs.min_patches for one in work):
        why = "small"
    if why is not None:
        return Decision("local", why, remote_s, local_s, compute_s)
    where: Where = "local" if local_s < remote_s else "remote"
    return Decision(where, "cost", remote_s, local_s, compute_s)


def _finish_s(
    work: Sequence[ItemCost],
    encoders: Sequence[View],
    rates: Sequence[float],
    local: LocalRate | None,
) -> float:
    """When the last of these encoders is done, if each item, the largest first, goes where
    it is done soonest."""
    unknown = _mean(rates) or (local.patches_per_s if local else 0.0) or START_PATCHES_PER_S
    speed = {view.url: view.rate if view.rate > 0 else unknown for view in encoders}
    loads = {view.url: view.load for view in encoders}
    last_s = 0.0
    for patches in sorted((one.patches for one in work), reverse=True):
        url = min(loads, key=lambda url: (loads[url] + patches) / speed[url])
        loads[url] += patches
        last_s = max(last_s, loads[url] / speed[url])
    return last_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class Link:
    """Learns `LinkCost` from requests that went through: a line through (bytes, seconds),
    by least squares, in which an old request counts less than a new one.

    It starts from two made-up requests of the starting figures, so that there is a line
    before anything is known; they fade as others come. No request counts as more than some
    times what was expected of it: one that met a pause somewhere says little of the link.
    When nothing has gone through for a minute it starts anew, because what it has learnt
    may be why nothing does.
    """

    _FADE = 0.95
    _BYTES_PER_S = (1e6, 1e12)
    _ROUND_TRIP_S = (1e-4, 10.0)
    _SURPRISE = 4.0
    _VALID_S = 60.0

    def __init__(self, start: LinkCost = LinkCost()) -> None:
        self._start = start
        self._learnt_at = 0.0
        self._begin()

    def _begin(self) -> None:
        # Sums over requests: weight, bytes, bytes squared, seconds, bytes times seconds.
        self._sums = [0.0] * 5
        for nbytes in (0.0, 64e6):
            self._add(nbytes, self._start.round_trip_s + nbytes / self._start.bytes_per_s)

    def learn(self, nbytes: float, seconds: float, now: float) -> None:
        """Learn from one request.

        Args:
            nbytes: of its embeddings.
            seconds: that it took beyond its encoders' computation.
            now: seconds of a clock that only goes on.
        """
        expected = self.cost(now)
        most = self._SURPRISE * (expected.round_trip_s + nbytes / expected.bytes_per_s)
        self._learnt_at = now
        self._sums = [value * self._FADE for value in self._sums]
        self._add(nbytes, min(max(0.0, seconds), most))

    def cost(self, now: float) -> LinkCost:
        """The current estimate, within bounds."""
        if now - self._learnt_at > self._VALID_S:
            self._begin()
        weight, x, xx, y, xy = self._sums
        spread = xx - x * x / weight
        # Where all requests have been of one size there is no slope to be seen.
        known = spread > 1e-6 * xx
        slope = (xy - x * y / weight) / spread if known else 1 / self._start.bytes_per_s
        least, most = self._BYTES_PER_S
        slope = min(max(slope, 1 / most), 1 / least)
        short, long = self._ROUND_TRIP_S
        round_trip_s = min(max((y - slope * x) / weight, short), long)
        return LinkCost(round_trip_s, 1 / slope)

    def _add(self, nbytes: float, seconds: float) -> None:
        values = (1.0, nbytes, nbytes * nbytes, seconds, nbytes * seconds)
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]


class LocalQueue:
    """The remaining work of this server's tower. It counts arriving items and assumes that the
    tower works at its rate. No report is needed when an item is done, or is not run because
    SGLang has its embedding in a cache."""

    def __init__(self) -> None:
        self._patches = 0.0
        self._at = 0.0

    def patches(self, now: float, rate: float) -> float:
        """The remaining work.

        Args:
            now: seconds of a clock that only goes on.
            rate: patches a second of the tower.

        Returns:
            patches.
        """
        self._patches = max(0.0, self._patches - max(0.0, now - self._at) * rate)
        self._at = now
        return self._patches

    def add(self, patches: float, now: float, rate: float) -> None:
        """Count an item that is to be encoded here.

        Args:
            patches: its cost.
            now, rate: as of `patches`.
        """
        self._patches = self.patches(now, rate) + patches
