"""Clients: the requests of a workload and the times at which they arrive, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import simpy

from sglang_epd.profile import Profile
from sglang_epd_plan.prefixes import Chain, length
from sglang_epd_plan.records import Conversation, Item, Outcome, Request
from sglang_epd_plan.workload import (
    Closed,
    Kind,
    Popularity,
    Traffic,
    Workload,
    drawn,
    intervals,
    turns,
)


class Demand:
    """Makes the requests of one workload, one after the other.

    Attributes:
        count: requests made so far.
    """

    def __init__(self, workload: Workload, profile: Profile, rng: random.Random) -> None:
        self.workload = workload
        self.count = 0
        self._pixels = profile.pixels
        self._rng = rng
        self._weights = [kind.weight for kind in workload.kinds]
        self._popularities = [Popularity(kind.catalogue, kind.zipf) for kind in workload.kinds]
        # Patches and steps of catalogue items by kind and number: the same in each request.
        self._patches: dict[tuple[int, int], tuple[float, int]] = {}

    def next(self, now: float) -> Request:
        """A new request, which arrives now."""
        index = 0
        if len(self._weights) > 1:
            index = self._rng.choices(range(len(self._weights)), self._weights)[0]
        kind = self.workload.kinds[index]
        request = self._request(index, now)
        request.items = [
            self._item(request, index, kind) for _ in range(drawn(kind.items, self._rng))
        ]
        _lay_out(request, ())
        if kind.turns != 1:
            request.conversation = Conversation(max(1, drawn(kind.turns, self._rng)) - 1)
        return request

    def think_s(self, request: Request) -> float:
        """Time from the request's answer to the next turn."""
        return self.workload.kinds[request.kind].think_s

    def next_turn(self, request: Request, now: float) -> Request:
        """The turn after one that was answered and is not the last. It arrives now."""
        conversation = request.conversation
        assert conversation is not None
        conversation.turns_left -= 1
        conversation.history += request.turn()
        turn = self._request(request.kind, now)
        turn.conversation = conversation
        turn.items = [
            Item(turn, one.key, one.patches, one.tokens, one.steps) for one in request.items
        ]
        _lay_out(turn, tuple(conversation.history))
        return turn

    def _request(self, index: int, now: float) -> Request:
        kind = self.workload.kinds[index]
        text = max(1, drawn(kind.text_tokens, self._rng))
        output = max(1, drawn(kind.output_tokens, self._rng))
        deadline = now + self.workload.deadline_s
        self.count += 1
        return Request(self.count - 1, index, now, deadline, text, output, text=text)

    def _item(self, request: Request, index: int, kind: Kind) -> Item:
        if kind.catalogue:
            number = self._popularities[index].draw(self._rng)
            if (index, number) not in self._patches:
                self._patches[index, number] = self._drawn_patches(kind)
            patches, steps = self._patches[index, number]
            key = index.to_bytes(8) + number.to_bytes(8)
        else:
            patches, steps = self._drawn_patches(kind)
            key = self._rng.randbytes(16)
        return Item(request, key, patches, max(1, round(patches / self._pixels.merge)), steps)

    def _drawn_patches(self, kind: Kind) -> tuple[float, int]:
        if kind.patches is not None:
            return float(max(1, drawn(kind.patches, self._rng))), 1
        picture = self._rng.choice(kind.pictures)
        return picture.patches(self._pixels), picture.frames


def _lay_out(request: Request, history: Chain) -> None:
    """A prompt begins with its media; earlier turns and its own text follow."""
    request.chain = (*((item.key, item.tokens) for item in request.items), *history)
    request.prompt += length(request.chain)
    request.items_left = len(request.items)


def generators(seed: int) -> tuple[random.Random, random.Random]:
    """Random generators of arrivals and of demand: another rate brings the same requests."""
    return random.Random(f"{seed} arrivals"), random.Random(f"{seed} demand")


class Clients:
    """Send the requests of a run.

    Args:
        send: takes a request.
        all_sent: called after the last request.
    """

    def __init__(
        self,
        env: simpy.Environment,
        demand: Demand,
        traffic: Traffic,
        rng: random.Random,
        *,
        send: Callable[[Request], None],
        all_sent: Callable[[], None],
    ) -> None:
        self._env = env
        self._demand = demand
        self._traffic = traffic
        self._send = send
        self._all_sent = all_sent
        # Processes that may still send, and the events that wake them.
        self._sending = 0
        self._answered: dict[int, simpy.Event] = {}
        arrival = demand.workload.arrival
        if isinstance(arrival, Closed):
            for _ in range(arrival.users):
                self._start(self._user(arrival.think_s))
        else:
            rate = traffic.rate / turns(demand.workload)
            self._start(self._arrivals(intervals(arrival, rate, rng)))

    def ended(self, request: Request) -> None:
        """A request has ended: its next turn follows, or its user goes on."""
        waiting = self._answered.pop(request.number, None)
        if waiting is not None:
            waiting.succeed()

    def _start(self, steps: Generator[simpy.Event, Any, None]) -> None:
        self._sending += 1
        self._env.process(steps).callbacks.append(self._over)

    def _over(self, _process: simpy.Event) -> None:
        self._sending -= 1
        if not self._sending:
            self._all_sent()

    def _has_next_turn(self, request: Request) -> bool:
        conversation = request.conversation
        return (
            request.outcome is Outcome.DONE
            and conversation is not None
            and conversation.turns_left > 0
            and not self._enough(self._env.now)
        )

    def _enough(self, now: float) -> bool:
        return self._demand.count >= self._traffic.requests or now >= self._traffic.seconds

    def _arrivals(self, gaps: Iterator[float]) -> Generator[simpy.Event, Any, None]:
        for gap in gaps:
            if self._enough(self._env.now + gap):
                break
            yield self._env.timeout(gap)
            request = self._demand.next(self._env.now)
            if request.conversation is None:
                self._send(request)
            else:
                self._start(self._talk(request))

    def _user(self, think_s: float) -> Generator[simpy.Event, Any, None]:
        while not self._enough(self._env.now):
            yield from self._talk(self._demand.next(self._env.now))
            if think_s:
                yield self._env.timeout(think_s)

    def _talk(self, request: Request) -> Generator[simpy.Event, Any, None]:
        """Send a request, and the later turns of its conversation as they are answered."""
        while True:
            answered = self._answered[request.number] = self._env.event()
            self._send(request)
            yield answered
            if not self._has_next_turn(request):
                break
            yield self._env.timeout(self._demand.think_s(request))
            request = self._demand.next_turn(request, self._env.now)
