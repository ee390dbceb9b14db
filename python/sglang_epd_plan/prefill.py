"""Which prompts a server prefills next, and the time that takes. Plain data, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sglang_epd.profile import LanguageCosts
from sglang_epd_plan.prefixes import Chain, PrefixCache, length
from sglang_epd_plan.records import Item, Request


@dataclass(slots=True)
class Pass:
    """One forward pass over prompts.

    Attributes:
        parts: requests, each with its tokens in this pass; all but the last reach their end.
        items: media that this server encodes first, because this pass has tokens of them.
        received: embeddings of those requests that came from encoders.
    """

    parts: list[tuple[Request, int]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    received: int = 0

    def seconds(self, costs: LanguageCosts) -> float:
        """Time of the prefill, without the tower."""
        if not self.parts:
            return 0.0
        parts = ((tokens, request.prefilled) for request, tokens in self.parts)
        return costs.prefill_s(parts) + self.received * costs.received_item_s

    def encode_seconds(self, costs: LanguageCosts) -> float:
        """Time of the tower, in batches within its bounds."""
        if not self.items:
            return 0.0
        batch: list[tuple[float, int]] = []
        seconds = patches = 0.0
        for item in self.items:
            full = len(batch) == costs.tower.batch_items
            if batch and (full or patches + item.patches > costs.tower.batch_patches):
                seconds += costs.tower.seconds(batch)
                batch, patches = [], 0.0
            batch.append((item.patches, item.steps))
            patches += item.patches
        return seconds + costs.tower.seconds(batch)

    def begin(self, now: float) -> None:
        """Of the requests whose first pass this is, the prefill begins."""
        for request, _ in self.parts:
            request.prefill_begun = request.prefill_begun or now

    def advance(self) -> None:
        """Count the tokens as prefilled."""
        for request, tokens in self.parts:
            request.prefilled += tokens


class PrefillQueue:
    """Requests that wait for their prefill, in order of arrival, and one server's KV cache.

    Attributes:
        kv_tokens: KV cache that is promised to requests.

    Args:
        encodes: this server encodes their media.
        decodes: requests need room for their answers, too.
    """

    def __init__(self, costs: LanguageCosts, *, encodes: bool, decodes: bool) -> None:
        self._costs = costs
        self._encodes = encodes
        self._decodes = decodes
        self._waiting: deque[Request] = deque()
        self._cache = PrefixCache()
        self.kv_tokens = 0

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def pin(self, request: Request) -> int:
        """Pin the request's cached prefix until its prefill begins.

        Returns:
            Items of the request whose KV is cached, so that they need no encoder.
        """
        if self._costs.prefix_cache:
            request.pinned = self._cache.match(request.chain)
            self._cache.pin(request.chain[: request.pinned])
        return min(request.pinned, len(request.items))

    def unpin(self, request: Request) -> None:
        """The request's prefill begins, or the request has ended."""
        self._cache.unpin(request.chain[: request.pinned])
        request.pinned = 0

    def keep(self, chain: Chain) -> None:
        """Cache a chain whose KV is here, as far as there is room."""
        if self._costs.prefix_cache:
            self._cache.insert(chain)
            self._shrink()

    def needs(self, request: Request) -> int:
        """Tokens of KV cache that the request will hold here."""
        return request.prompt + (request.output if self._decodes else 0)

    def may_begin(self, running: int) -> bool:
        """Whether the first request may run now, beside `running` sequences that decode."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        return first.begun or self._admits(first, running)

    def take(self, running: int, budget: int) -> Pass:
        """The next pass: prompts in order, until one does not fit.

        Args:
            running: sequences that decode.
            budget: tokens of the pass.
        """
        taken = Pass()
        while self._waiting and budget > 0:
            request = self._waiting[0]
            if not request.begun:
                if not self._admits(request, running + len(taken.parts)):
                    break
                self._begin(request, taken)
            tokens = min(request.prompt - request.prefilled, budget)
            if self._encodes:
                end, kept = request.prefilled + tokens, self._costs.keeps_embeddings
                taken.items += request.items_before(end, kept=kept)
            taken.parts.append((request, tokens))
            budget -= tokens
            if request.prefilled + tokens < request.prompt:
                break
            self._waiting.popleft()
        return taken

    def release(self, request: Request) -> None:
        """The request's KV is not needed here any more."""
        self.kv_tokens -= self.needs(request)

    def _admits(self, request: Request, running: int) -> bool:
        return (
            running < self._costs.running
            and self.kv_tokens + self.needs(request) <= self._costs.kv_tokens
        )

    def _begin(self, request: Request, taken: Pass) -> None:
        request.begun = True
        cached = 0
        if self._costs.prefix_cache:
            # Tokens that others have prefilled since its arrival count, too.
            cached = self._cache.match(request.chain)
            request.cached = request.prefilled = length(request.chain[:cached])
        request.encoded = min(cached, len(request.items))
        if not self._encodes:
            taken.received += len(request.items[request.pinned :])
        self.unpin(request)
        self.kv_tokens += self.needs(request)
        self._shrink()

    def _shrink(self) -> None:
        self._cache.shrink(max(0, self._costs.kv_tokens - self.kv_tokens))
