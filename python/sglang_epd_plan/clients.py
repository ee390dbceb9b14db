"""Requests as they come: their kinds, media and times, all drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import simpy

from sglang_epd_plan.prefixes import Chain, length
from sglang_epd_plan.profile import Profile
from sglang_epd_plan.records import Item, Outcome, Request, Talk
from sglang_epd_plan.workload import Closed, Kind, Popularity, Workload, drawn, intervals


@dataclass
class Demand:
    """Requests of one workload, one after the other.

    Attributes:
        rng: of what they are.
    """

    workload: Workload
    profile: Profile
    rng: random.Random
    count: int = 0
    _popularities: dict[int, Popularity] = field(default_factory=dict)
    _costs: dict[tuple[int, int], float] = field(default_factory=dict)

    def next(self, now: float) -> Request:
        """One that arrives now."""
        kinds = self.workload.kinds
        index = 0
        if len(kinds) > 1:
            index = self.rng.choices(range(len(kinds)), [kind.weight for kind in kinds])[0]
        kind = kinds[index]
        request = self._request(index, now)
        for _ in range(drawn(kind.items, self.rng)):
            request.items.append(self._item(request, index, kind))
        self._lay_out(request, ())
        if kind.turns != 1:
            request.talk = Talk(request.number, max(1, drawn(kind.turns, self.rng)) - 1)
        return request

    def think_s(self, request: Request) -> float:
        """From its answer to the next turn."""
        return self.workload.kinds[request.kind].think_s

    def following(self, request: Request, now: float) -> Request | None:
        """The turn after one that was answered, which comes now; None after the last."""
        talk = request.talk
        if talk is None or not talk.left:
            return None
        talk.left -= 1
        talk.said += request.says()
        turn = self._request(request.kind, now)
        turn.talk = talk
        turn.items = [Item(turn, one.key, one.patches, one.tokens) for one in request.items]
        self._lay_out(turn, tuple(talk.said))
        return turn

    def _request(self, index: int, now: float) -> Request:
        kind = self.workload.kinds[index]
        text = max(1, drawn(kind.text_tokens, self.rng))
        output = max(1, drawn(kind.output_tokens, self.rng))
        deadline = now + self.workload.deadline_s
        request = Request(self.count, index, now, deadline, text, output, text=text)
        self.count += 1
        return request

    @staticmethod
    def _lay_out(request: Request, said: Chain) -> None:
        """Its media come first, then what was said, then its text."""
        request.chain = (*((item.key, item.tokens) for item in request.items), *said)
        request.prompt += length(request.chain)
        request.left = len(request.items)

    def _item(self, request: Request, index: int, kind: Kind) -> Item:
        merge = self.profile.pixels.merge
        if not kind.catalogue:
            patches = self._patches(kind, self.rng)
            return Item(request, self.rng.randbytes(16), patches, max(1, round(patches / merge)))
        if index not in self._popularities:
            self._popularities[index] = Popularity(kind.catalogue, kind.zipf)
        number = self._popularities[index].draw(self.rng)
        # What an item of the catalogue is does not change from one request to the next.
        if (index, number) not in self._costs:
            self._costs[index, number] = self._patches(kind, self.rng)
        patches = self._costs[index, number]
        key = index.to_bytes(8) + number.to_bytes(8)
        return Item(request, key, patches, max(1, round(patches / merge)))

    def _patches(self, kind: Kind, rng: random.Random) -> float:
        if kind.patches is not None:
            return float(max(1, drawn(kind.patches, rng)))
        return rng.choice(kind.pictures).patches(self.profile.pixels)


def generators(seed: int) -> tuple[random.Random, random.Random]:
    """Of arrivals and of what is asked for: apart, so that another rate brings the same
    requests."""
    return random.Random(f"{seed} arrivals"), random.Random(f"{seed} demand")


class Clients:
    """Send requests until there have been enough.

    Args:
        send: takes a request.
        rate: requests a second, of open arrivals.
        requests, seconds: what ends it, whichever comes first.
        over: told when the last request has been sent.
    """

    def __init__(
        self,
        env: simpy.Environment,
        demand: Demand,
        send: Callable[[Request], None],
        *,
        rate: float,
        requests: float,
        seconds: float,
        rng: random.Random,
        over: Callable[[], None],
    ) -> None:
        self._env = env
        self._demand = demand
        self._send = send
        self._requests = requests
        self._seconds = seconds
        self._over = over
        self._answered: dict[int, simpy.Event] = {}
        # Turns that somebody thinks about, and whether nobody new comes.
        self._coming = 0
        self._last_came = False
        arrival = demand.workload.arrival
        if isinstance(arrival, Closed):
            self._users = arrival.users
            for _ in range(arrival.users):
                env.process(self._user(arrival.think_s))
        else:
            env.process(self._arrivals(intervals(arrival, rate, rng)))

    def ended(self, request: Request) -> None:
        """A request is over: who waits for its answer may go on."""
        waiting = self._answered.pop(request.number, None)
        if waiting is not None:
            waiting.succeed()
        elif self._goes_on(request):
            self._coming += 1
            pause = self._env.timeout(self._demand.think_s(request))
            pause.callbacks.append(partial(self._go_on, request))
        elif self._last_came and not self._coming:
            self._over()

    def _goes_on(self, request: Request) -> bool:
        talk = request.talk
        answered = request.outcome is Outcome.DONE
        return answered and talk is not None and talk.left > 0 and not self._enough()

    def _go_on(self, request: Request, _event: simpy.Event) -> None:
        self._coming -= 1
        turn = self._demand.following(request, self._env.now)
        assert turn is not None
        self._send(turn)

    def _enough(self) -> bool:
        return self._demand.count >= self._requests or self._env.now >= self._seconds

    def _arrivals(self, gaps: Iterator[float]) -> Generator[simpy.Event, Any, None]:
        for gap in gaps:
            if self._demand.count >= self._requests or self._env.now + gap >= self._seconds:
                break
            yield self._env.timeout(gap)
            self._send(self._demand.next(self._env.now))
        self._last_came = True
        if not self._coming:
            self._over()

    def _user(self, think_s: float) -> Generator[simpy.Event, Any, None]:
        while not self._enough():
            request: Request | None = self._demand.next(self._env.now)
            while request is not None:
                answered = self._answered[request.number] = self._env.event()
                self._send(request)
                yield answered
                if not self._goes_on(request):
                    break
                yield self._env.timeout(self._demand.think_s(request))
                request = self._demand.following(request, self._env.now)
            if think_s:
                yield self._env.timeout(think_s)
        self._users -= 1
        if not self._users:
            self._over()
