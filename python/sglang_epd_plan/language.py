"""Servers that run the language model: prefill, decode or both, with or without a tower."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import simpy

from sglang_epd.profile import LanguageCosts
from sglang_epd_plan.decode import DecodeBatch
from sglang_epd_plan.prefill import Pass, PrefillQueue
from sglang_epd_plan.records import Item, Request
from sglang_epd_plan.transfer import Port, Threads


class Server:
    """One server's scheduler.

    Attributes:
        prompts: requests that wait for their prefill, and the KV cache.
        outstanding: requests that were sent here and have not left.
        encode_s, prefill_s, decode_s: time that its accelerators spent on each.

    Args:
        encodes: the server preprocesses and encodes media itself.
        decodes: the server goes on after the first token.
        prefilled: takes a request whose answer another server decodes.
        ended: takes a request that has its last token.
    """

    def __init__(
        self,
        env: simpy.Environment,
        costs: LanguageCosts,
        *,
        encodes: bool,
        decodes: bool,
        prefilled: Callable[[Request, Server], None],
        ended: Callable[[Request], None],
    ) -> None:
        self.env = env
        self.costs = costs
        self.prompts = PrefillQueue(costs, encodes=encodes, decodes=decodes)
        self.inward, self.outward = Port(), Port()
        self.outstanding = 0
        self.encode_s = self.prefill_s = self.decode_s = 0.0
        self._threads = Threads(1 if costs.shared_cores else costs.host.workers)
        # With shared cores: time that other work took from the model since its last pass.
        self._taken_s = 0.0
        self._decodes = decodes
        self._prefilled = prefilled
        self._ended = ended
        self._arrived: deque[Request] = deque()
        self._batch = DecodeBatch(costs)
        self._idle = True
        # The end of many decode steps, which an arrival may bring forward; and their begin.
        self._steps_end: simpy.Timeout | None = None
        self._steps_begin = 0.0

    def fits(self, request: Request) -> bool:
        """Whether the KV cache can ever hold the request."""
        return self.prompts.needs(request) <= self.costs.kv_tokens

    def receiving_s(self) -> float:
        """Time until a request that arrives now may be scheduled, or its media sent for."""
        if self.costs.shared_cores:
            return self._beside_model(self.costs.request_s)
        return self.costs.request_s

    def preparing_s(self, item: Item) -> float:
        """Time until an item that arrives now is ready for the tower."""
        seconds = self.costs.host.seconds(item.patches)
        if self.costs.shared_cores:
            return self._beside_model(seconds)
        return self._threads.end(self.env.now, seconds) - self.env.now

    def add(self, request: Request) -> None:
        """Take a request whose prompt is complete."""
        self.prompts.add(request)
        self._wake(self._may_prefill())

    def add_prefilled(self, request: Request) -> None:
        """Take a request that another server prefilled, with its KV."""
        self._arrived.append(request)
        self._wake(self._may_join())

    def release(self, request: Request) -> None:
        """Free the KV of a prefilled request, which has been sent on."""
        self.prompts.release(request)
        self._wake(self._may_prefill())

    def _beside_model(self, seconds: float) -> float:
        """Time that work takes on the model's cores: twice as long while the model runs."""
        now = self.env.now
        if not self._idle:
            self._taken_s += seconds
            seconds *= 2
        return self._threads.end(now, seconds) - now

    def _delay_s(self) -> float:
        """By how much the next pass or step is longer."""
        seconds, self._taken_s = self._taken_s, 0.0
        return seconds

    def _may_prefill(self) -> bool:
        return self.prompts.may_begin(len(self._batch))

    def _may_join(self) -> bool:
        if not self._arrived or len(self._batch) >= self.costs.running:
            return False
        wanted = self.prompts.kv_tokens + self.prompts.needs(self._arrived[0])
        return wanted <= self.costs.kv_tokens

    def _wake(self, useful: bool) -> None:
        """Go on if the server is idle, or after the current step if a request may begin."""
        if self._idle:
            self._idle = False
            if self.costs.shared_cores:
                self._taken_s = self._threads.backlog_s(self.env.now)
            if self.env.peek() > self.env.now:
                self._go_on()
            else:
                # Simultaneous arrivals may run together.
                self._after(0.0, self._go_on)
        elif self._steps_end is not None and useful:
            self._cut_short(self._steps_end)

    def _after(self, seconds: float, then: Callable[[], None]) -> simpy.Timeout:
        timeout = self.env.timeout(seconds)
        timeout.callbacks.append(lambda _event: then())
        return timeout

    def _go_on(self) -> None:
        """Begin the next pass or steps, if there is anything to do."""
        while self._may_join():
            request = self._arrived.popleft()
            self.prompts.kv_tokens += self.prompts.needs(request)
            request.first = self.env.now
            self._answer(request)
        if self._may_prefill():
            self._prefill()
        elif len(self._batch):
            self._decode()
        else:
            self._idle = True

    def _prefill(self) -> None:
        """One pass; a server that mixes adds a step of the sequences that decode."""
        sequences = len(self._batch)
        mixed = self.costs.mixed and sequences > 0
        budget = max(1, self.costs.chunk_tokens - (sequences if mixed else 0))
        taken = self.prompts.take(sequences, budget, self.env.now)
        encode, prefill = taken.encode_seconds(self.costs), taken.seconds(self.costs)
        step = self.costs.step_s(sequences, self._batch.context) if mixed else 0.0
        self.encode_s += encode
        self.prefill_s += prefill
        self.decode_s += step
        taken.advance()
        seconds = encode + prefill + step + self._delay_s()
        self._after(seconds, partial(self._passed, taken, mixed))

    def _passed(self, taken: Pass, mixed: bool) -> None:
        if mixed:
            self._end(self._batch.advance(1))
        now = self.env.now
        for request, _ in taken.parts:
            if request.prefilled < request.prompt:
                continue
            request.prefill_ended = now
            text = request.turn()[:1] if request.conversation else ()
            self.prompts.keep((*request.chain, *text))
            if self._decodes:
                request.first = now
                self._answer(request)
            else:
                self._prefilled(request, self)
        self._go_on()

    def _decode(self) -> None:
        """Steps until a sequence ends, or until a request arrives that may begin."""
        steps = self._batch.until_next()
        delay = self._delay_s()
        self._steps_begin = self.env.now + delay
        seconds = delay + self._batch.seconds(steps)
        self._steps_end = self._after(seconds, partial(self._stepped, steps))

    def _cut_short(self, steps_end: simpy.Timeout) -> None:
        """Stop after the step that has begun."""
        steps_end.callbacks.clear()
        self._steps_end = None
        steps = self._batch.steps_begun(max(0.0, self.env.now - self._steps_begin))
        left = self._steps_begin + self._batch.seconds(steps) - self.env.now
        if left > 0:
            self._after(left, partial(self._stepped, steps))
        else:
            self._stepped(steps)

    def _stepped(self, steps: int) -> None:
        self._steps_end = None
        self.decode_s += self._batch.seconds(steps)
        self._end(self._batch.advance(steps))
        self._go_on()

    def _answer(self, request: Request) -> None:
        """The request has its first token."""
        if request.output > 1:
            self._batch.add(request)
        else:
            self._end([request])

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            self.prompts.release(request)
            if request.conversation is not None:
                self.prompts.keep((*request.chain, *request.turn()))
            self._ended(request)
