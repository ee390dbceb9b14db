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
        self._threads = Threads(costs.host.workers)
        self._decodes = decodes
        self._prefilled = prefilled
        self._ended = ended
        # Requests that another server will prefill, until there is room for them here.
        self._roomless: deque[tuple[Request, Callable[[], None]]] = deque()
        # With its KV, from other servers: not seen yet, and seen but not in the batch yet.
        self._arrived: deque[Request] = deque()
        self._joining: list[Request] = []
        self._batch = DecodeBatch(costs)
        self._idle = True
        # With overlapped scheduling: prompts of the pass after the one that runs now.
        self._next: Pass | None = None
        # When the pass that was begun last ends; and when its launch did, if the server had not
        # decided on it before.
        self._pass_end = self._launched = 0.0
        # The end of many decode steps, which an arrival may bring forward; and their begin.
        self._steps_end: simpy.Timeout | None = None
        self._steps_begin = 0.0

    def fits(self, request: Request) -> bool:
        """Whether the KV cache can ever hold the request."""
        return self.prompts.needs(request) <= self.costs.kv_tokens

    def preparing_s(self, item: Item) -> float:
        """Time until an item that arrives now is ready for the tower."""
        seconds = self.costs.host.seconds(item.patches)
        return self._threads.end(self.env.now, seconds) - self.env.now

    def add(self, request: Request) -> None:
        """Take a request whose prompt is complete."""
        self.prompts.add(request)
        self._wake(self._may_prefill())

    def make_room(self, request: Request, then: Callable[[], None]) -> None:
        """Promise KV memory for a request that another server prefills, in order of arrival.

        Args:
            then: called when there is room, which the scheduler sees when it looks.
        """
        self._roomless.append((request, then))
        self._after(self.looks_s(), self._make_room)

    def drop(self, request: Request) -> None:
        """Forget a request that has failed before it was prefilled."""
        if request.roomy:
            self.prompts.release(request)
        else:
            self._roomless = deque(one for one in self._roomless if one[0] is not request)
        self._make_room()

    def _make_room(self) -> None:
        while self._roomless:
            request, then = self._roomless[0]
            wanted = self.prompts.kv_tokens + self.prompts.needs(request)
            if wanted > self.costs.kv_tokens:
                break
            self._roomless.popleft()
            self.prompts.kv_tokens = wanted
            request.roomy = True
            then()

    def add_prefilled(self, request: Request) -> None:
        """Take a request that another server prefilled, with its KV, for which there is room."""
        self._arrived.append(request)
        self._wake(self._may_join())

    def release(self, request: Request) -> None:
        """Free the KV of a prefilled request, which has been sent on."""
        self.prompts.release(request)
        self._wake(self._may_prefill())

    def looks_s(self) -> float:
        """Seconds until the scheduler looks at what has come: the running pass or step ends. It
        also looks when it has launched a pass and waits for no other."""
        if self._steps_end is None:
            launching = self.env.now <= self._launched
            return max(0.0, (self._launched if launching else self._pass_end) - self.env.now)
        steps = self._batch.steps_begun(self.env.now - self._steps_begin)
        return max(0.0, self._steps_begin + self._batch.seconds(steps) - self.env.now)

    def _may_prefill(self) -> bool:
        return self.prompts.may_begin(len(self._batch))

    def _may_join(self) -> bool:
        running = len(self._batch) + len(self._joining)
        return bool(self._arrived) and running < self.costs.running

    def _wake(self, useful: bool) -> None:
        """Go on if the server is idle, or after the current step if a request may begin."""
        if self._idle:
            self._idle = False
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
        """Begin the next pass or steps, if there is anything to do.

        Overlapped scheduling decides on a pass when the one before it begins. So a request
        waits for one pass more than the running one, unless that one leaves nothing to do.
        """
        for request in self._joining:
            self._batch.add(request)
        self._joining.clear()
        decided = self.costs.overlap and (self._next is not None or len(self._batch) > 0)
        self._take_arrived(at_once=not decided)
        taken, self._next = self._next, None
        ahead = taken is not None
        if taken is None and not decided and self._may_prefill():
            taken = self._take(len(self._batch))
        if taken is not None:
            self._prefill(taken)
            if self.costs.overlap and not ahead:
                self._launched = self.env.now + self.costs.prefill_launch_s
        elif len(self._batch):
            self._decode()
        else:
            self._idle = True

    def _take_arrived(self, *, at_once: bool) -> None:
        """Requests that another server prefilled: their first tokens leave, and they decode."""
        while self._may_join():
            request = self._arrived.popleft()
            request.first = max(self.env.now, request.passed_on)
            if at_once or request.output == 1:
                self._answer(request)
            else:
                self._joining.append(request)

    def _take(self, running: int) -> Pass:
        mixed = running if self.costs.mixed else 0
        return self.prompts.take(running, max(1, self.costs.chunk_tokens - mixed))

    def _decide(self, running: int) -> None:
        """Decide on the pass after the one that begins, which `running` sequences outlast."""
        if self.costs.overlap and self.prompts.may_begin(running):
            self._next = self._take(running)

    def _prefill(self, taken: Pass) -> None:
        """One pass; a server that mixes adds a step of the sequences that decode."""
        sequences = len(self._batch)
        mixed = self.costs.mixed and sequences > 0
        taken.begin(self.env.now)
        encode, prefill = taken.encode_seconds(self.costs), taken.seconds(self.costs)
        step = self.costs.step_s(sequences, self._batch.context) if mixed else 0.0
        self.encode_s += encode
        self.prefill_s += prefill
        self.decode_s += step
        taken.advance()
        self._decide(sequences + len(taken.parts))
        self._pass_end = self.env.now + encode + prefill + step
        self._after(encode + prefill + step, partial(self._passed, taken, mixed))

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
        self._decide(len(self._batch))
        steps = 1 if self._next or self._joining else self._batch.until_next()
        self._steps_begin = self.env.now
        self._steps_end = self._after(self._batch.seconds(steps), partial(self._stepped, steps))

    def _cut_short(self, steps_end: simpy.Timeout) -> None:
        """Stop after the step that has begun."""
        steps_end.callbacks.clear()
        steps = self._batch.steps_begun(self.env.now - self._steps_begin)
        self._steps_end = self._after(self.looks_s(), partial(self._stepped, steps))

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
        self._make_room()
