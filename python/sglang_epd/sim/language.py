"""Servers that run the language model: prefill, decode or both, with or without a tower."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import simpy

from sglang_epd.sim.decode import Running
from sglang_epd.sim.prefill import Chunk, Prompts
from sglang_epd.sim.profile import Language
from sglang_epd.sim.records import Request
from sglang_epd.sim.transfer import Port, Workers


class Server:
    """One server's scheduler.

    Attributes:
        prompts: that wait for their prefill, and the KV promised to those that had it.
        outstanding: requests that were sent here and have not left.
        encode_s, prefill_s, decode_s: what its accelerators have done, in seconds.

    Args:
        encodes: it prepares and encodes media itself.
        decodes: it goes on after the first token.
        prefilled: takes a request that has its first token and goes on elsewhere.
        ended: takes one that has its last.
    """

    def __init__(
        self,
        env: simpy.Environment,
        costs: Language,
        *,
        encodes: bool,
        decodes: bool,
        prefilled: Callable[[Request, Server], None],
        ended: Callable[[Request], None],
    ) -> None:
        self.env = env
        self.costs = costs
        self.inward, self.outward = Port(), Port()
        self.workers = Workers(costs.host.workers)
        self.outstanding = 0
        self.encode_s = self.prefill_s = self.decode_s = 0.0
        self._decodes = decodes
        self._prefilled = prefilled
        self._ended = ended
        self.prompts = Prompts(costs, encodes=encodes, output=decodes)
        self._arrived: deque[Request] = deque()
        self._running = Running(costs)
        self._asleep: simpy.Event | None = None
        self._leaping = False
        self._process = env.process(self._run())

    def fits(self, request: Request) -> bool:
        """Whether its KV can ever be here."""
        return self.prompts.needs(request) <= self.costs.kv_tokens

    def add(self, request: Request) -> None:
        """A request whose prompt is complete."""
        self.prompts.add(request)
        self._wake(self.prompts.may_begin(len(self._running)))

    def add_prefilled(self, request: Request) -> None:
        """One that was prefilled elsewhere and whose KV is here; decoding alone."""
        self._arrived.append(request)
        self._wake(self._may_join())

    def release(self, request: Request) -> None:
        """A prefilled request's KV has left."""
        self.prompts.release(request)
        self._wake(self.prompts.may_begin(len(self._running)))

    def _may_join(self) -> bool:
        if not self._arrived or len(self._running) >= self.costs.running:
            return False
        wanted = self.prompts.kv_tokens + self._needed(self._arrived[0])
        return wanted <= self.costs.kv_tokens

    @staticmethod
    def _needed(request: Request) -> int:
        return request.prompt + request.output

    def _wake(self, useful: bool) -> None:
        if self._asleep is not None:
            self._asleep.succeed()
            self._asleep = None
        elif self._leaping and useful:
            self._leaping = False
            self._process.interrupt()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._join()
            if self.prompts.may_begin(len(self._running)):
                yield from self._prefill()
            elif len(self._running):
                yield from self._decode()
            else:
                self._asleep = self.env.event()
                yield self._asleep

    def _join(self) -> None:
        """Sequences that came with their KV."""
        while self._may_join():
            request = self._arrived.popleft()
            self.prompts.kv_tokens += self._needed(request)
            request.first = self.env.now
            self._go_on(request)

    def _prefill(self) -> Generator[simpy.Event, Any, None]:
        """One pass; of a server that mixes, with a step of those that decode."""
        sequences = len(self._running)
        mixed = self.costs.mixed and sequences > 0
        budget = max(1, self.costs.chunk_tokens - (sequences if mixed else 0))
        chunk = self.prompts.take(sequences, budget, self.env.now)
        encode, prefill = chunk.encode_seconds(self.costs), chunk.seconds(self.costs)
        step = self.costs.step_s(sequences, self._running.context) if mixed else 0.0
        self.encode_s += encode
        self.prefill_s += prefill
        self.decode_s += step
        yield self.env.timeout(encode + prefill + step)
        if mixed:
            self._end(self._running.advance(1))
        self._did(chunk)

    def _did(self, chunk: Chunk) -> None:
        now = self.env.now
        for request, tokens in chunk.parts:
            request.prefilled += tokens
            if request.prefilled < request.prompt:
                continue
            request.prefill_ended = now
            said = request.says()[:1] if request.talk else ()
            self.prompts.keep((*request.chain, *said))
            if self._decodes:
                request.first = now
                self._go_on(request)
            else:
                self._prefilled(request, self)

    def _decode(self) -> Generator[simpy.Event, Any, None]:
        """Steps until one ends, or somebody comes who may begin."""
        steps = self._running.until_next()
        began, self._leaping = self.env.now, True
        try:
            yield self.env.timeout(self._running.seconds(steps))
        except simpy.Interrupt:
            steps = self._running.steps_begun(self.env.now - began)
            left = began + self._running.seconds(steps) - self.env.now
            if left > 0:
                yield self.env.timeout(left)
        self._leaping = False
        self.decode_s += self._running.seconds(steps)
        self._end(self._running.advance(steps))

    def _go_on(self, request: Request) -> None:
        """One that has its first token."""
        if request.output > 1:
            self._running.add(request)
        else:
            self._end([request])

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            self.prompts.kv_tokens -= self._needed(request)
            if request.talk is not None:
                self.prompts.keep((*request.chain, *request.says()))
            self._ended(request)
