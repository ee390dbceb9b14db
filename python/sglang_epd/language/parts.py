"""Parts of prompts that are prefilled before all of their request's items have landed, on every
rank.

A part is a request of its own, of which no client knows: the beginning of another's prompt, to
generate nothing. When it has ended its KV is in the prefix cache, where its request finds it
like any other prefix, and loses it like any other. Until the last item has landed the request
waits as it always does; then a part that is still queued is withdrawn, and a part that runs is
waited for, or both would compute the same.

Every rank decides by itself, and alike: by its tree, its queue and its batches. Clocks say on the
rank that leads when a part is worth it, and nothing else. Later pipeline stages, which get requests
without what they carried, are told what the first one heard of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from sglang_epd.language import manifest
from sglang_epd.language.prefix import Queue, Tree, bare_items, end
from sglang_epd.tally import Tally

# Courses whose request has not been queued yet: SGLang refused it, or compiles its grammar.
_MAX_SETTLED = 256


@dataclass(eq=False)
class _Course:
    """How far a request's prompt has been prefilled early.

    Attributes:
        base: tokens that the prefix cache had when the first part ran.
        tiers: these, of the device, the host and storage, once that part has ended.
        queued: SGLang's request of the last one, once it is queued; while SGLang has it.
        over: whether that one has ended, or was never queued.
        settled: whether all items of the request have landed, or will not.
    """

    base: int | None = None
    tiers: tuple[int, int, int] | None = None
    queued: ref[Any] | None = None
    over: bool = True
    settled: bool = False

    @property
    def part(self) -> Any:
        return None if self.queued is None else self.queued()


class Parts:
    """The parts of one rank's scheduler.

    Args:
        tree: this rank's radix tree.
        queue: this rank's scheduler.
        page: tokens of a page of KV.
        tally: counts parts, on the rank that leads.
        always: whether every part is worth it.

    Attributes:
        stages: whether there are later pipeline stages to be told.
        broken: whether a part could not be laid out of a prompt that could; there are no more
            then.
        heard: what later stages have not been told of yet: methods of theirs, and arguments.
    """

    def __init__(
        self,
        tree: Tree,
        queue: Queue,
        page: int,
        tally: Tally,
        *,
        always: bool = False,
        stages: bool = False,
    ) -> None:
        self._always = always
        self.stages = stages
        self.heard: list[tuple[Any, ...]] = []
        self._tree = tree
        self._queue = queue
        self._page = page
        self._tally = tally
        # By the name of their request, from its first part until SGLang queues it.
        self._courses: dict[str, _Course] = {}
        # By id: whose parts they are, and their least tokens, until SGLang queues them.
        self._awaited: dict[str, tuple[str, int]] = {}
        self._parts: WeakKeyDictionary[Any, _Course] = WeakKeyDictionary()
        # Requests that are queued, and had parts.
        self._queued: WeakKeyDictionary[Any, _Course] = WeakKeyDictionary()
        # When requests were taken into a batch, with how many tokens, until their first output.
        self._timed: WeakKeyDictionary[Any, tuple[float, int]] = WeakKeyDictionary()
        # Seconds and tokens of the fastest prefill of any request but the server's first, whose
        # pass is slow to begin; and seconds of a token, where a token took least.
        self._fastest: tuple[float, int] | None = None
        self._token_s = 0.0
        self._warm = False
        self.broken = False

    @property
    def any(self) -> bool:
        """Whether the next output may be a part's, or a request's first one."""
        return len(self._parts) > 0 or len(self._timed) > 0

    def has(self, request: Any) -> bool:
        """Whether a request is a part that was queued."""
        return len(self._parts) > 0 and request in self._parts

    def expect(self, rid: str, of: str, least: int) -> None:
        """A part is about to be queued, to be run for so many new tokens at least."""
        self._hear("expect", rid, of, least)
        course = self._courses.setdefault(of, _Course())
        course.queued, course.over = None, False
        self._awaited[rid] = of, least

    def fail(self, rid: str) -> None:
        """A part that was expected will not come."""
        self._hear("fail", rid)
        of, _ = self._awaited.pop(rid)
        course = self._courses.get(of)
        self._tally.add("parts", "failed")
        if course is not None:
            course.over = True

    def admit(self, request: Any) -> bool | None:
        """Before a request is queued: whether a part of a prompt may be; None of a request that
        is no part."""
        if self.has(request):
            # It has lost its match, or gave way to others.
            self._drop(request, self._parts[request], "failed")
            return False
        awaited = self._awaited.pop(request.rid, None)
        if awaited is None:
            name = manifest.name(request)
            course = self._courses.get(name)
            if course is not None and course.settled:
                self._queued[request] = self._courses.pop(name)
            return None
        of, least = awaited
        course = self._courses.get(of, _Course(settled=True))
        self._parts[request] = course
        if course.settled:
            self._drop(request, course, "withdrawn")
            return False
        length, _ = self._tree.match(request)
        covered = all(end(item) <= length for item, _ in bare_items(request))
        if not covered or self._whole(request) - length < least:
            self._drop(request, course, "covered" if covered else "failed")
            return False
        course.queued = ref(request)
        # That of a fake bootstrap is not kept otherwise.
        request.skip_radix_cache_insert = False
        return True

    def holds_back(self, request: Any, batch: Sequence[Any] = ()) -> bool:
        """Whether a request is not to run yet: a part of it does.

        Args:
            batch: that is being made; it may have the part's last chunk, of which the scheduler
                knows nothing else at that moment.
        """
        course = self._queued.get(request) if self._queued else None
        part = None if course is None or course.over else course.part
        if part is None:
            return False
        return any(one is part for one in batch) or self._queue.running(part)

    def taken(self, request: Any) -> None:
        """A request goes into the next batch."""
        tokens = len(request.origin_input_ids) - request.prefix_len
        self._timed[request] = time.monotonic(), tokens
        part_of = self._parts.get(request)
        if part_of is not None and part_of.base is None:
            part_of.base = request.prefix_len
        course = self._queued.pop(request, None)
        fresh = not request.retracted_stain and not request.already_computed
        if course is not None and course.base is not None and fresh:
            # Tokens that its parts have prefilled are not reported as cached, nor as of a tier.
            request.already_computed = max(request.prefix_len - course.base, 0)
            if request.already_computed:
                device, host, storage = course.tiers or (course.base, 0, 0)
                request.cached_tokens_device = device
                request.cached_tokens_host, request.cached_tokens_storage = host, storage
                request._cache_breakdown_computed = True

    def ended(self, request: Any, *, chunked: bool = False) -> bool:
        """Whether a request that SGLang would stream is a part, which may have ended.

        Args:
            chunked: whether more chunks of it follow.
        """
        if not chunked and (timed := self._timed.pop(request, None)) is not None:
            self._learn(*timed)
        course = self._parts.get(request)
        if course is None:
            return False
        if request.finished() and course.part is request and not course.over:
            course.over = True
            course.tiers = course.tiers or (
                request.cached_tokens_device,
                request.cached_tokens_host,
                request.cached_tokens_storage,
            )
            computed = len(request.origin_input_ids) - request.cached_tokens
            if request.finished_reason.to_json()["type"] == "abort" or computed <= 0:
                self._tally.add("parts", "failed")
            else:
                self._tally.add("parts", "done")
                self._tally.add("tokens", amount=computed)
        return True

    def settle(self, name: str) -> None:
        """All items of a request have landed, or will not."""
        course = self._courses.get(name)
        if course is None:
            return
        self._hear("settle", name)
        course.settled = True
        if (part := course.part) is not None and self._queue.remove(part):
            self._drop(part, course, "withdrawn")
        settled = [name for name, one in self._courses.items() if one.settled]
        if len(settled) > _MAX_SETTLED:
            del self._courses[settled[0]]

    def abort(self, named: Callable[[str], bool]) -> None:
        """Requests of such ids are aborted, before SGLang looks at its queues: it would release a
        part's media, and leave it in the queue of a prefill server."""
        for request, course in list(self._parts.items()):
            if not course.over and named(request.rid) and self._queue.remove(request):
                self._drop(request, course, "withdrawn")

    def forget(self, name: str) -> None:
        """A request has failed: another of that name has nothing of its parts."""
        if self._courses.pop(name, None) is not None:
            self._hear("forget", name)

    def told(self, heard: Sequence[tuple[Any, ...]]) -> None:
        """Hear what the first stage has heard."""
        for name, *arguments in heard:
            getattr(self, name)(*arguments)

    def alive(self, name: str) -> bool:
        """Whether a part of a request waits or runs."""
        course = self._courses.get(name)
        if course is None or course.over:
            return False
        part = course.part
        if course.queued is not None and (part is None or not self._queue.holds(part)):
            # Aborted while it was queued, of which SGLang says nothing here.
            course.over = True
            self._tally.add("parts", "failed")
        return not course.over

    def least(self) -> int | None:
        """New tokens of the smallest part that is worth a forward pass now; None where none is.

        Prefilling early gains what the accelerator would have been idle for. So there is no part
        while others wait to be prefilled, which have the accelerator already. A pass takes some
        time however small it is, and so many tokens come free. A part has as many tokens as that;
        and four times as many where others decode, who wait for each pass.
        """
        if self.broken:
            return None
        free = 0.0
        if not self._always:
            waiting, decoding = self._queue.busy()
            if waiting:
                return None
            free = self._free_tokens() * (4 if decoding else 1)
        return max(self._page + 1, math.ceil(free))

    def pause_s(self) -> float:
        """How long a part waits for an item of another encoder, which may land right behind: an
        eighth of a pass that is as short as any."""
        return 0.0 if self._always or self._fastest is None else self._fastest[0] / 8

    def _free_tokens(self) -> float:
        """How many more tokens the fastest prefill had time for; 0 until one is known that had
        few."""
        if self._fastest is None:
            return 0.0
        seconds, tokens = self._fastest
        return seconds / self._token_s - tokens

    def _learn(self, since: float, tokens: int) -> None:
        took, warm, self._warm = time.monotonic() - since, self._warm, True
        if warm:
            took_of_token = took / max(tokens, 1)
            self._fastest = min(self._fastest or (took, tokens), (took, tokens))
            self._token_s = min(self._token_s or took_of_token, took_of_token)

    def _hear(self, *call: Any) -> None:
        if self.stages:
            self.heard.append(call)

    def _whole(self, request: Any) -> int:
        """Tokens of a part whose KV will be kept."""
        return int(len(request.origin_input_ids) // self._page * self._page)

    def _drop(self, request: Any, course: _Course, outcome: str) -> None:
        self._queue.discard(request)
        course.over = True
        self._tally.add("parts", outcome)
