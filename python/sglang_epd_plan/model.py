"""One deployment, put together and run."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import simpy

from sglang_epd.errors import ConfigError
from sglang_epd_plan.clients import Clients, Demand, generators
from sglang_epd_plan.dispatch import PROBE_S, Dispatch, Reports
from sglang_epd_plan.encoders import Encoder
from sglang_epd_plan.language import Server
from sglang_epd_plan.profile import Profile
from sglang_epd_plan.records import Item, Outcome, Request
from sglang_epd_plan.report import Report, StopWhen
from sglang_epd_plan.schema import Cost, Count, Data, Rate, convert
from sglang_epd_plan.topology import Topology
from sglang_epd_plan.transfer import Arena, arrival
from sglang_epd_plan.workload import Closed, Workload


class Failure(Data, frozen=True):
    """An encoder that dies and comes back, with nothing in its cache."""

    encoder: Count
    at_s: Cost
    down_s: Rate


_FAILURE = re.compile(r"(?P<encoder>\d+)@(?P<at_s>[\d.]+)\+(?P<down_s>[\d.]+)")


def parse_failure(text: str) -> Failure:
    """A failure as it is written: 0@60+30 is the first encoder, dead from second 60 for 30.

    Raises:
        ConfigError: it is not one.
    """
    found = _FAILURE.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError
        at_s, down_s = float(found["at_s"]), float(found["down_s"])
    except ValueError:
        raise ConfigError(f"{text!r} is no failure: write ENCODER@SECONDS+SECONDS") from None
    values = {"encoder": int(found["encoder"]), "at_s": at_s, "down_s": down_s}
    return convert(values, Failure, f"failure {text}")


@dataclass(frozen=True)
class Traffic:
    """How much of a workload.

    Attributes:
        rate: requests a second; 0 for closed loops.
        requests, seconds: what ends it, whichever comes first; those who came by then are
            served to their end.
        warmup_s: requests that come before are not counted.

    Raises:
        ConfigError: a number is out of its range, or nothing would end it.
    """

    rate: float = 0.0
    requests: float = float("inf")
    seconds: float = float("inf")
    warmup_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rate < 0 or self.rate == float("inf"):
            raise ConfigError(f"a rate of {self.rate} requests a second is none")
        if min(self.requests, self.seconds) <= 0 or self.warmup_s < 0:
            raise ConfigError("requests and seconds have to be positive")
        if min(self.requests, self.seconds) == float("inf"):
            raise ConfigError("say how many requests, or for how many seconds")
        if self.warmup_s >= self.seconds:
            raise ConfigError("the warm-up takes all of the time")


class Deployment:
    """Servers, and requests on their way between them.

    Args:
        stop: asked after each request that has ended; ends the run where it says so.
    """

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        topology: Topology,
        traffic: Traffic,
        *,
        seed: int = 0,
        failures: tuple[Failure, ...] = (),
        stop: StopWhen | None = None,
    ) -> None:
        if isinstance(workload.arrival, Closed) == bool(traffic.rate):
            raise ConfigError("arrivals have a rate, unless they are a closed loop")
        for failure in failures:
            if failure.encoder >= topology.encoders:
                raise ConfigError(f"there is no encoder {failure.encoder} that could fail")
        self.env = env = simpy.Environment()
        self._profile = profile
        self._traffic = traffic
        self._stop = stop
        # Each source of chance has its own, so that one more draw here changes nothing there.
        arrivals, demand = generators(seed)
        policies, routes = random.Random(f"{seed} policy"), random.Random(f"{seed} routes")
        self._routes = routes
        self.encoders = [
            Encoder(
                env,
                f"http://encoder-{number}:30000",
                profile,
                grant=self._grant,
                deliver=self._deliver,
                lose=self._lose,
            )
            for number in range(topology.encoders)
        ]
        apart = topology.prefills > 0
        server = partial(Server, env, profile.language, ended=self._ended)
        self.prefills = [
            server(encodes=not self.encoders, decodes=not apart, prefilled=self._prefilled)
            for _ in range(topology.prefills or topology.language)
        ]
        self.decodes = [
            server(encodes=False, decodes=True, prefilled=self._prefilled)
            for _ in range(topology.decodes)
        ]
        budget = profile.language.receive_mb << 20
        self.arenas = [Arena(env, budget) for _ in self.prefills]
        self._reports = Reports(self.encoders)
        self.dispatches = [
            Dispatch(
                env,
                self.encoders,
                self._reports,
                topology.policy,
                random.Random(policies.random()),
            )
            for _ in self.prefills
        ]
        self._at: dict[int, int] = {}
        self._behind: dict[int, Server] = {}
        # Requests whose media are on their way, with the end of waiting, in that order; and
        # whether a timeout stands for the first of them or one before it.
        self._awaited: deque[tuple[float, Request]] = deque()
        self._watching = False
        self.report = Report(profile, topology)
        self.live = 0
        self._idle: simpy.Event | None = None
        self._clients = Clients(
            env,
            Demand(workload, profile, demand),
            self._arrive,
            rate=traffic.rate,
            requests=traffic.requests,
            seconds=traffic.seconds,
            rng=arrivals,
            over=self._all_sent,
        )
        self._sent_all = False
        self._done = env.event()
        if self.encoders:
            env.process(self._probe())
        for failure in failures:
            env.process(self._fail(failure))

    def run(self) -> Report:
        """To the end of the last request, or until `stop` says so."""
        self.env.run(until=self._done)
        self.report.close(
            self.env.now,
            encoders=self.encoders,
            prefills=self.prefills,
            decodes=self.decodes,
            arenas=self.arenas,
            dispatches=self.dispatches,
        )
        return self.report

    # A request's way

    def _arrive(self, request: Request) -> None:
        self.live += 1
        self.report.arrived += 1
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()
        number = self._route(self.prefills)
        server = self.prefills[number]
        server.outstanding += 1
        self._at[request.number] = number
        fits = server.fits(request) and (
            not self.encoders
            or self.arenas[number].fits(self._nbytes(request))
            or not request.items
        )
        if self.decodes:
            fits = fits and self.decodes[0].fits(request)
        if not fits:
            self._finish(request, Outcome.TOO_LARGE)
            return
        self._after(server.receiving_s(), partial(self._media, request, server))

    def _media(self, request: Request, server: Server) -> None:
        """Its media are sent for, or prepared here; of what is in the prefix cache only the
        latter, as SGLang has to know the prompt first."""
        found = server.prompts.find(request)
        if self.encoders:
            request.left -= found
            for item in request.items[:found]:
                item.landed = self.env.now
            if not request.left:
                self._complete(request)
                return
            self._await(request)
            self.dispatches[self._at[request.number]].send(request.items[found:])
        elif not request.items:
            self._complete(request)
        else:
            for item in request.items:
                item.prepared = self.env.now + server.preparing_s(item)
            last = max(item.prepared for item in request.items)
            self._after(last - self.env.now, partial(self._complete, request))

    def _complete(self, request: Request) -> None:
        """Nothing of its prompt is missing."""
        request.landed = self.env.now
        self.prefills[self._at[request.number]].add(request)

    def _prefilled(self, request: Request, server: Server) -> None:
        """Its KV goes to a decode server."""
        links = self._profile.links
        behind = self.decodes[self._route(self.decodes)]
        behind.outstanding += 1
        self._behind[request.number] = behind
        end = arrival(
            self.env.now,
            request.prompt * links.kv_bytes_per_token,
            server.outward,
            behind.inward,
            latency_s=links.kv_latency_s,
            bytes_per_s=links.kv_bytes_per_s,
        )
        self._after(end - self.env.now, partial(self._handed_over, request, server, behind))

    def _handed_over(self, request: Request, server: Server, behind: Server) -> None:
        server.outstanding -= 1
        server.release(request)
        self.arenas[self._at[request.number]].release(request)
        behind.add_prefilled(request)

    def _ended(self, request: Request) -> None:
        self._finish(request, Outcome.DONE)

    def _await(self, request: Request) -> None:
        """Its media, until its deadline. Deadlines come in the order of requests, so there is
        one timeout at a time, and not one for each of them."""
        while self._awaited and not self._waits(self._awaited[0][1]):
            self._awaited.popleft()
        left = max(0.0, request.deadline - self.env.now)
        self._awaited.append((self.env.now + left, request))
        if not self._watching:
            self._watching = True
            self._after(left, self._expire)

    def _expire(self) -> None:
        now = self.env.now
        while self._awaited:
            at, request = self._awaited[0]
            if at > now and self._waits(request):
                # It came before `now`, so this is less than twice `now`, and the difference
                # is exact.
                self._after(at - now, self._expire)
                return
            self._awaited.popleft()
            if self._waits(request):
                self._finish(request, Outcome.LATE)
        self._watching = False

    @staticmethod
    def _waits(request: Request) -> bool:
        return request.left > 0 and request.outcome is None

    def _finish(self, request: Request, outcome: Outcome) -> None:
        request.finish(outcome, self.env.now)
        number = self._at.pop(request.number)
        for item in request.items:
            if item.encoder >= 0 and not item.landed:
                self.dispatches[number].landed(item)
        self.prefills[number].prompts.forget(request)
        behind = self._behind.pop(request.number, None)
        (behind or self.prefills[number]).outstanding -= 1
        if behind is None:
            self.arenas[number].release(request)
        self.live -= 1
        counted = request.arrived >= self._traffic.warmup_s
        if counted:
            self.report.add(request)
        self._clients.ended(request)
        stopped = counted and self._stop is not None and self._stop(self.report, request)
        if request.talk is None:
            # Items know their request: without the circle all of it is freed at once, and the
            # garbage collector has nothing to do. (The next turn of a talk copies them.)
            request.items.clear()
        self._maybe_done(stopped)

    def _all_sent(self) -> None:
        self._sent_all = True
        self._maybe_done(False)

    def _maybe_done(self, stopped: bool) -> None:
        if (stopped or (self._sent_all and not self.live)) and not self._done.triggered:
            self._done.succeed()

    # An item's way

    def _grant(self, item: Item, then: Callable[[], None]) -> None:
        request = item.request
        if request.outcome is not None:
            # The receiver declines what nobody wants: the encoder is told so at once.
            then()
            return
        arena = self.arenas[self._at[request.number]]
        if arena.holds(request):
            then()
        else:
            arena.grant(request, self._nbytes(request), then)

    def _deliver(self, item: Item) -> None:
        request, links = item.request, self._profile.links
        if request.outcome is not None:
            return
        number = self._at[request.number]
        end = arrival(
            self.env.now,
            item.tokens * links.bytes_per_token,
            self.encoders[item.encoder].out,
            self.prefills[number].inward,
            latency_s=links.latency_s,
            bytes_per_s=links.bytes_per_s,
        )
        self._after(end - self.env.now, partial(self._landed, item))

    def _landed(self, item: Item) -> None:
        request = item.request
        if request.outcome is not None:
            return
        item.landed = self.env.now
        self.dispatches[self._at[request.number]].landed(item)
        request.left -= 1
        if not request.left:
            self._complete(request)

    def _lose(self, items: list[Item]) -> None:
        for item in items:
            if item.request.outcome is None:
                self.dispatches[self._at[item.request.number]].lost(item)

    # Around it

    def _nbytes(self, request: Request) -> int:
        return sum(item.tokens for item in request.items) * self._profile.links.bytes_per_token

    def _route(self, servers: list[Server]) -> int:
        """Whoever has the fewest requests, by chance among equals."""
        outstanding = [server.outstanding for server in servers]
        least = min(outstanding)
        if outstanding.count(least) == 1:
            return outstanding.index(least)
        equal = [number for number, count in enumerate(outstanding) if count == least]
        return self._routes.choice(equal)

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        self.env.timeout(max(0.0, seconds)).callbacks.append(lambda _event: then())

    def _probe(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self.live:
                # Nobody would see the difference.
                self._idle = self.env.event()
                yield self._idle
                self._idle = None
            yield self.env.timeout(PROBE_S)
            self._reports.renew()

    def _fail(self, failure: Failure) -> Generator[simpy.Event, Any, None]:
        encoder = self.encoders[failure.encoder]
        yield self.env.timeout(failure.at_s)
        encoder.die()
        yield self.env.timeout(failure.down_s)
        encoder.revive()
