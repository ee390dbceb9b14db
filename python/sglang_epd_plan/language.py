"""Servers that run the language model: prefill, decode or both, with or without a tower."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import simpy

from sglang_epd_plan.decode import Running
from sglang_epd_plan.prefill import Chunk, Prompts
from sglang_epd_plan.profile import Language
from sglang_epd_plan.records import Item, Request
from sglang_epd_plan.transfer import Port, Workers


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
        self.outstanding = 0
        self.encode_s = self.prefill_s = self.decode_s = 0.0
        self._workers = Workers(1 if costs.shared_cores else costs.host.workers)
        # Of shared cores, seconds that the model has not had.
        self._missed_s = 0.0
        self._decodes = decodes
        self._prefilled = prefilled
        self._ended = ended
        self.prompts = Prompts(costs, encodes=encodes, output=decodes)
        self._arrived: deque[Request] = deque()
        self._running = Running(costs)
        # Passes whose end is one event, but for the first: when each begins, and its seconds.
        self._passes: list[tuple[float, float]] = []
        self._asleep = True
        # The end of decode steps that go on until somebody comes, and when they began.
        self._leap: simpy.Timeout | None = None
        self._leapt = 0.0

    def fits(self, request: Request) -> bool:
        """Whether its KV can ever be here."""
        return self.prompts.needs(request) <= self.costs.kv_tokens

    def receiving_s(self) -> float:
        """Seconds until a request that comes now may be scheduled, or its media sent for."""
        if self.costs.shared_cores:
            return self._beside(self.costs.request_s)
        return self.costs.request_s

    def preparing_s(self, item: Item) -> float:
        """Seconds until an item that comes now is ready for the tower."""
        host = self.costs.host
        seconds = host.item_s + item.patches * host.patch_s
        if self.costs.shared_cores:
            return self._beside(seconds)
        return self._workers.end(self.env.now, seconds) - self.env.now

    def _beside(self, seconds: float) -> float:
        """Seconds until so many are done on cores that the model runs on as well."""
        now = self.env.now
        if not self._asleep:
            self._missed_s += seconds
            seconds *= 2
        return self._workers.end(now, seconds) - now

    def _made_up(self) -> float:
        """What the next pass or step takes longer."""
        seconds, self._missed_s = self._missed_s, 0.0
        return seconds

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

    def prefilling_s(self, now: float) -> float:
        """Seconds of all passes that have begun by now."""
        seconds = self.prefill_s
        for begin, one in self._passes:
            if begin <= now:
                seconds += one
        return seconds

    def _may_join(self) -> bool:
        if not self._arrived or len(self._running) >= self.costs.running:
            return False
        wanted = self.prompts.kv_tokens + self._needed(self._arrived[0])
        return wanted <= self.costs.kv_tokens

    @staticmethod
    def _needed(request: Request) -> int:
        return request.prompt + request.output

    def _wake(self, useful: bool) -> None:
        """Somebody came: the last thing that its event does."""
        if self._asleep:
            self._asleep = False
            if self.costs.shared_cores:
                self._missed_s = self._workers.backlog_s(self.env.now)
            if self.env.peek() > self.env.now:
                self._go_on()
            else:
                # After all that happens now.
                self._after(0.0, self._go_on)
        elif self._leap is not None and useful:
            self._cut_short(self._leap)

    def _after(self, seconds: float, then: Callable[[], None]) -> simpy.Timeout:
        timeout = self.env.timeout(seconds)
        timeout.callbacks.append(lambda _event: then())
        return timeout

    def _go_on(self) -> None:
        """A pass or steps are done, or it was asleep."""
        self._join()
        if self.prompts.may_begin(len(self._running)):
            self._prefill()
        elif len(self._running):
            self._decode()
        else:
            self._asleep = True

    def _join(self) -> None:
        """Sequences that came with their KV."""
        while self._may_join():
            request = self._arrived.popleft()
            self.prompts.kv_tokens += self._needed(request)
            request.first = self.env.now
            self._answer(request)

    def _prefill(self) -> None:
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
        chunk.advance()
        seconds = encode + prefill + step + self._made_up()
        certain = not (self.costs.mixed or self.costs.shared_cores)
        if certain and chunk.parts[0][0].prefilled < chunk.parts[0][0].prompt:
            seconds = self._further(seconds, budget)
        self._after(seconds, partial(self._did, chunk, mixed))

    def _further(self, seconds: float, budget: int) -> float:
        """Passes after one of so many seconds that are certain, as none ends a prompt: with
        them it is one event. What each begins at and takes is kept, because the run may be
        stopped meanwhile.

        Returns:
            Seconds of all of them.
        """
        now = self.env.now
        end = now + seconds
        while (chunk := self.prompts.further(budget)) is not None:
            prefill = chunk.seconds(self.costs)
            until = end + prefill
            if now + (until - now) != until:
                # Events come after seconds from now, and this end would be rounded.
                break
            self._passes.append((end, prefill))
            chunk.advance()
            seconds, end = until - now, until
        return seconds

    def _did(self, chunk: Chunk, mixed: bool) -> None:
        if self._passes:
            self.prefill_s = self.prefilling_s(self.env.now)
            self._passes.clear()
        if mixed:
            self._end(self._running.advance(1))
        now = self.env.now
        for request, _ in chunk.parts:
            if request.prefilled < request.prompt:
                continue
            request.prefill_ended = now
            said = request.says()[:1] if request.talk else ()
            self.prompts.keep((*request.chain, *said))
            if self._decodes:
                request.first = now
                self._answer(request)
            else:
                self._prefilled(request, self)
        self._go_on()

    def _decode(self) -> None:
        """Steps until one ends, or somebody comes who may begin."""
        steps = self._running.until_next()
        late = self._made_up()
        self._leapt = self.env.now + late
        seconds = late + self._running.seconds(steps)
        self._leap = self._after(seconds, partial(self._stepped, steps))

    def _cut_short(self, leap: simpy.Timeout) -> None:
        """To the end of the step that has begun."""
        leap.callbacks.clear()
        self._leap = None
        steps = self._running.steps_begun(max(0.0, self.env.now - self._leapt))
        left = self._leapt + self._running.seconds(steps) - self.env.now
        if left > 0:
            self._after(left, partial(self._stepped, steps))
        else:
            self._stepped(steps)

    def _stepped(self, steps: int) -> None:
        self._leap = None
        self.decode_s += self._running.seconds(steps)
        self._end(self._running.advance(steps))
        self._go_on()

    def _answer(self, request: Request) -> None:
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
