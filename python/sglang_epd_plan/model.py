"""One deployment, put together and run; or many independent cells of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import simpy

from sglang_epd.dispatch.pool import View
from sglang_epd.errors import ConfigError
from sglang_epd.profile import Profile
from sglang_epd_plan.clients import Clients, Demand, generators
from sglang_epd_plan.dispatch import PROBE_S, Dispatch
from sglang_epd_plan.encoders import Encoder
from sglang_epd_plan.language import Server
from sglang_epd_plan.records import Item, Outcome, Request
from sglang_epd_plan.report import Report
from sglang_epd_plan.topology import Topology
from sglang_epd_plan.transfer import ReceiveBudget, arrival
from sglang_epd_plan.workload import Closed, Traffic, Workload

# Whether a run may end, asked after each request that has ended.
StopWhen = Callable[[Request], bool]


def simulate(
    profile: Profile,
    workload: Workload,
    topology: Topology,
    traffic: Traffic,
    *,
    seed: int = 0,
    stop: StopWhen | None = None,
) -> Report:
    """Run a deployment, one cell after the other. The same arguments give the same report.

    Args:
        traffic: of all cells together; each gets its share.
        stop: may end a run early; for one cell only.

    Raises:
        ConfigError: the arguments do not go together.
    """
    make = partial(Deployment, profile, workload)
    cells = topology.cells
    if cells == 1:
        return make(topology, traffic, seed=seed, stop=stop).run()
    assert stop is None
    one = msgspec.structs.replace(topology, cells=1)
    share = replace(traffic, rate=traffic.rate / cells, requests=traffic.requests / cells)
    whole = Report(profile, topology)
    for cell in range(cells):
        whole.merge(make(one, share, seed=seed * 1_000_003 + cell).run())
    return whole


class Deployment:
    """Servers, and the requests on their way between them.

    Attributes:
        live: requests that have arrived and not ended.

    Raises:
        ConfigError: a closed loop has a rate, or open arrivals have none; or the profile does
            not tell how large the KV is that has to be sent.
    """

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        topology: Topology,
        traffic: Traffic,
        *,
        seed: int = 0,
        stop: StopWhen | None = None,
    ) -> None:
        if isinstance(workload.arrival, Closed) == bool(traffic.rate):
            raise ConfigError("arrivals have a rate, unless they are a closed loop")
        kv_bytes = profile.links.kv_bytes_per_token
        if topology.decodes and kv_bytes is None:
            raise ConfigError(
                f"profile {profile.name}: prefill and decode apart need links.kv_bytes_per_token"
            )
        self._kv_bytes_per_token = kv_bytes or 0
        self.env = env = simpy.Environment()
        self._links = profile.links
        self._stop = stop
        # Each source of chance has a generator, so that one more draw here changes nothing there.
        arrivals, demand = generators(seed)
        policies, self._routes = random.Random(f"{seed} policy"), random.Random(f"{seed} routes")
        self.encoders = [
            Encoder(
                env,
                f"http://encoder-{number}:30000",
                profile,
                grant=self._grant,
                deliver=self._deliver,
            )
            for number in range(topology.encoders)
        ]
        server = partial(
            Server, env, profile.language, prefilled=self._prefilled, ended=self._answered
        )
        self.prefills = [
            server(encodes=not self.encoders, decodes=not topology.decodes)
            for _ in range(topology.prefills)
        ]
        self.decodes = [server(encodes=False, decodes=True) for _ in range(topology.decodes)]
        self.budgets = [ReceiveBudget(profile.language.receive_mb << 20) for _ in self.prefills]
        self.dispatches = [
            Dispatch(env, self.encoders, topology.policy, random.Random(policies.random()))
            for _ in self.prefills
        ]
        # By request: the number of the server that prefills it, and the one that decodes it.
        self._prefill_of: dict[int, int] = {}
        self._decode_of: dict[int, Server] = {}
        self.report = Report(profile, topology)
        self.live = 0
        self._wake_prober: simpy.Event | None = None
        self._all_sent = False
        self._done = env.event()
        self._clients = Clients(
            env,
            Demand(workload, profile, demand),
            traffic,
            arrivals,
            send=self._arrive,
            all_sent=self._last_sent,
        )
        if self.encoders:
            env.process(self._probe())

    def run(self) -> Report:
        """Run to the end of the last request, or until `stop` says so."""
        self.env.run(until=self._done)
        self.report.close(self)
        return self.report

    # The way of a request

    def _arrive(self, request: Request) -> None:
        self.live += 1
        if self._wake_prober is not None and not self._wake_prober.triggered:
            self._wake_prober.succeed()
        number = self._prefill_of[request.number] = self._route(self.prefills)
        server = self.prefills[number]
        server.outstanding += 1
        fits = server.fits(request) and all(one.fits(request) for one in self.decodes[:1])
        if self.encoders and request.items:
            fits = fits and self.budgets[number].fits(self._nbytes(request))
        if fits:
            if self.decodes:
                # Routers choose both servers.
                decode = self._decode_of[request.number] = self.decodes[self._route(self.decodes)]
                decode.outstanding += 1
                request.roomy = False
                decode.make_room(request, partial(self._prefill_if, request))
            self._after(server.costs.request_s, partial(self._received, request, server))
        else:
            self._finish(request, Outcome.TOO_LARGE)

    def _received(self, request: Request, server: Server) -> None:
        """Send for the media, or preprocess them here. Only the former asks the prefix cache
        first: SGLang has to preprocess media before it knows the prompt."""
        cached = server.prompts.pin(request)
        if self.encoders:
            request.items_left -= cached
            for item in request.items[:cached]:
                item.received = self.env.now
            if request.items_left:
                self._after(request.deadline - self.env.now, partial(self._expire, request))
                self._dispatch_of(request).send(request.items[cached:])
            else:
                self._complete(request)
        elif request.items:
            for item in request.items:
                item.prepared = self.env.now + server.preparing_s(item)
            last = max(item.prepared for item in request.items)
            self._after(last - self.env.now, partial(self._complete, request))
        else:
            self._complete(request)

    def _complete(self, request: Request) -> None:
        """Nothing of the prompt is missing."""
        request.complete, request.whole = self.env.now, True
        self._prefill_if(request)

    def _prefill_if(self, request: Request) -> None:
        """Have a prompt prefilled that is complete, and for whose answer there is room."""
        if request.whole and request.roomy:
            self.prefills[self._prefill_of[request.number]].add(request)

    def _prefilled(self, request: Request, server: Server) -> None:
        """Send the KV to a decode server."""
        decode = self._decode_of[request.number]
        end = arrival(
            self.env.now,
            request.prompt * self._kv_bytes_per_token,
            server.outward,
            decode.inward,
            latency_s=self._links.kv_latency_s,
            bytes_per_s=self._links.kv_bytes_per_s,
        )
        self._after(end - self.env.now, partial(self._handed_over, request, server, decode))

    def _handed_over(self, request: Request, server: Server, decode: Server) -> None:
        """The decode server has the KV, which the prefill server sees when it looks."""
        budget = self.budgets[self._prefill_of[request.number]]
        request.passed_on = self.env.now + server.looks_s()
        self._at(request.passed_on, partial(self._sent, request, server, budget))
        decode.add_prefilled(request)

    def _sent(self, request: Request, server: Server, budget: ReceiveBudget) -> None:
        server.outstanding -= 1
        server.release(request)
        budget.release(request)

    def _answered(self, request: Request) -> None:
        """The last token was made; its router may still hold the answer back."""
        self._at(request.first, partial(self._finish, request, Outcome.DONE))

    def _expire(self, request: Request) -> None:
        if request.items_left and request.outcome is None:
            self._finish(request, Outcome.LATE)

    def _finish(self, request: Request, outcome: Outcome) -> None:
        request.finish(outcome, self.env.now)
        for item in request.items:
            if item.encoder >= 0 and not item.received:
                self._dispatch_of(request).settle(item)
        number = self._prefill_of.pop(request.number)
        self.prefills[number].prompts.unpin(request)
        decode = self._decode_of.pop(request.number, None)
        if decode is not None:
            decode.outstanding -= 1
            if outcome is not Outcome.DONE:
                decode.drop(request)
        if decode is None or outcome is not Outcome.DONE:
            self.prefills[number].outstanding -= 1
            self.budgets[number].release(request)
        self.live -= 1
        self.report.add(request)
        self._clients.ended(request)
        stopped = self._stop is not None and self._stop(request)
        if request.conversation is None:
            # Items refer to their request: without the cycle reference counts free it at once.
            # (The next turn of a conversation copies them.)
            request.items.clear()
        self._end_if(stopped)

    def _last_sent(self) -> None:
        self._all_sent = True
        self._end_if(False)

    def _end_if(self, stopped: bool) -> None:
        if (stopped or (self._all_sent and not self.live)) and not self._done.triggered:
            self._done.succeed()

    # The way of an item

    def _grant(self, item: Item, then: Callable[[], None]) -> None:
        request = item.request
        if request.outcome is None:
            budget = self.budgets[self._prefill_of[request.number]]
            budget.grant(request, self._nbytes(request), then)
        else:
            # The receiver declines an item of a request that has ended.
            then()

    def _deliver(self, item: Item) -> None:
        request = item.request
        if request.outcome is not None:
            return
        end = arrival(
            self.env.now,
            item.tokens * self._links.bytes_per_token,
            self.encoders[item.encoder].outward,
            self.prefills[self._prefill_of[request.number]].inward,
            latency_s=self._links.latency_s,
            bytes_per_s=self._links.bytes_per_s,
        )
        self._after(end - self.env.now, partial(self._item_received, item))

    def _item_received(self, item: Item) -> None:
        request = item.request
        if request.outcome is not None:
            return
        item.received = self.env.now
        self._dispatch_of(request).settle(item)
        request.items_left -= 1
        if not request.items_left:
            self._complete(request)

    # Around both

    def _dispatch_of(self, request: Request) -> Dispatch:
        return self.dispatches[self._prefill_of[request.number]]

    def _nbytes(self, request: Request) -> int:
        return sum(item.tokens for item in request.items) * self._links.bytes_per_token

    def _route(self, servers: list[Server]) -> int:
        """The server with the fewest requests, by chance among equals."""
        outstanding = [server.outstanding for server in servers]
        least = min(outstanding)
        if outstanding.count(least) == 1:
            return outstanding.index(least)
        equal = [number for number, count in enumerate(outstanding) if count == least]
        return self._routes.choice(equal)

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        self.env.timeout(max(0.0, seconds)).callbacks.append(lambda _event: then())

    def _at(self, moment: float, then: Callable[[], None]) -> None:
        """Call `then` at a moment, at once if that has come."""
        if moment > self.env.now:
            self._after(moment - self.env.now, then)
        else:
            then()

    def _probe(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self.live:
                # Reports make no difference while no request is here.
                self._wake_prober = self.env.event()
                yield self._wake_prober
                self._wake_prober = None
            yield self.env.timeout(PROBE_S)
            views = [View(one.url, load=one.queued, rate=one.rate) for one in self.encoders]
            for dispatch in self.dispatches:
                dispatch.hear(views)
