"""Which prompts run next, and how long that takes. Plain data, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sglang_epd_plan.prefixes import Chain, Prefixes, length
from sglang_epd_plan.profile import Language
from sglang_epd_plan.records import Item, Request


@dataclass(slots=True)
class Chunk:
    """What one pass does to prompts.

    Attributes:
        parts: requests, and how many of their tokens; each but the last to its end.
        items: media that are encoded before, because their requests begin now.
        received: media of those requests that were encoded elsewhere.
    """

    parts: list[tuple[Request, int]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    received: int = 0

    def seconds(self, costs: Language) -> float:
        """Of the prefill."""
        if not self.parts:
            return 0.0
        seconds = costs.prefill_launch_s + self.received * costs.received_item_s
        for request, tokens in self.parts:
            context = request.prefilled + tokens / 2
            seconds += tokens * (costs.prefill_token_s + context * costs.prefill_context_s)
        return seconds

    def advance(self) -> None:
        """Count its tokens as prefilled."""
        for request, tokens in self.parts:
            request.prefilled += tokens

    def encode_seconds(self, costs: Language) -> float:
        """Of the tower, in passes of as many items as may run together."""
        if not self.items:
            return 0.0
        batch: list[float] = []
        seconds = patches = 0.0
        for item in self.items:
            full = len(batch) == costs.tower.batch_items
            if batch and (full or patches + item.patches > costs.tower.batch_patches):
                seconds += costs.tower.seconds(batch)
                batch, patches = [], 0.0
            batch.append(item.patches)
            patches += item.patches
        return seconds + costs.tower.seconds(batch)


class Prompts:
    """Requests that wait for their prefill, in the order in which they came.

    Args:
        encodes: their media are encoded here.
        output: whether room for their answers is needed, too.
    """

    def __init__(self, costs: Language, *, encodes: bool, output: bool) -> None:
        self._costs = costs
        self._encodes = encodes
        self._output = output
        self._waiting: deque[Request] = deque()
        self._prefixes = Prefixes()
        self.kv_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def find(self, request: Request) -> int:
        """How many of its items need not be encoded for it: their KV is here, and stays until
        its prefill begins."""
        if self._costs.prefix_cache:
            request.found = self._prefixes.match(request.chain)
            if request.found:
                self._prefixes.pin(request.chain, request.found)
        return min(request.found, len(request.items))

    def keep(self, chain: Chain) -> None:
        """KV that is here and may serve another prompt, as far as there is room for it."""
        if self._costs.prefix_cache:
            self._prefixes.keep(chain)
            self._shrink()

    def forget(self, request: Request) -> None:
        """It ends before its prefill."""
        if request.found:
            self._prefixes.unpin(request.chain, request.found)
            request.found = 0

    def _shrink(self) -> None:
        self._prefixes.shrink(max(0, self._costs.kv_tokens - self.kv_tokens))

    def needs(self, request: Request) -> int:
        """Tokens of KV cache that it will hold here."""
        return request.prompt + (request.output if self._output else 0)

    def may_begin(self, running: int) -> bool:
        """Whether the first may run now."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        return first.begun or self._admits(first, running)

    def _admits(self, request: Request, running: int) -> bool:
        return (
            running < self._costs.running
            and self.kv_tokens + self.needs(request) <= self._costs.kv_tokens
        )

    def take(self, running: int, budget: int, now: float) -> Chunk:
        """The next pass: prompts in their order, until one does not fit.

        Args:
            running: sequences that decode.
            budget: tokens.
        """
        chunk = Chunk()
        while self._waiting and budget > 0:
            request = self._waiting[0]
            if not request.begun and not self._admits(request, running + len(chunk.parts)):
                break
            if not request.begun:
                self._begin(request, chunk, now)
            tokens = min(request.prompt - request.prefilled, budget)
            chunk.parts.append((request, tokens))
            budget -= tokens
            if request.prefilled + tokens < request.prompt:
                break
            self._waiting.popleft()
        return chunk

    def further(self, budget: int) -> Chunk | None:
        """A pass that is full of the first one's tokens and does not end it, so that nobody
        who comes meanwhile changes it; None if the next is not one."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        if not first.begun or first.prompt - first.prefilled <= budget:
            return None
        return Chunk([(first, budget)])

    def _begin(self, request: Request, chunk: Chunk, now: float) -> None:
        request.begun, request.began = True, now
        found = request.found
        if self._costs.prefix_cache:
            # What others have prefilled since it came counts, too.
            found = self._prefixes.match(request.chain)
            request.covered = request.prefilled = length(request.chain[:found])
        if self._encodes:
            chunk.items += request.items[found:]
        else:
            chunk.received += len(request.items[request.found :])
        self.forget(request)
        self.kv_tokens += self.needs(request)
        self._shrink()

    def release(self, request: Request) -> None:
        """Its KV is not needed here any more."""
        self.kv_tokens -= self.needs(request)
