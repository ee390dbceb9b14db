"""SGLang's prefix cache and queues, as `language.prefix` needs them.

Leans on `managers.scheduler.Scheduler`: `_add_request_to_queue(req, is_retracted)`, which
every request passes on its way to a queue, with its token ids padded and its namespace in
the tree (cache salt, LoRA) set; `waiting_queue`, `grammar_manager.grammar_queue`,
`disagg_prefill_bootstrap_queue.queue`; `flush_cache`, which empties the tree;
`_release_aborted_request` and `release_aborted_prefill_waiting_req`. On
`managers.schedule_policy.PrefillAdder.add_one_req`, which locks a request's prefix when it
takes it; on `managers.schedule_batch.ScheduleBatch.check_decode_mem` and
`Req._compute_max_prefix_len`; on `mem_cache.common._req_radix_key`; and on `match_prefix`,
`lock` and `unlock` of the tree cache.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sglang_epd.language.backend import Leader
from sglang_epd.language.prefix import Gate
from sglang_epd.seams.hooks import hook
from sglang_epd.transfer.arena import Arena

_SRT = "sglang.srt"


class RadixTree:
    """A scheduler's tree cache."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def match(self, request: Any) -> tuple[int, Any]:
        """What SGLang's own match at prefill would find, of what is on the device.

        Nothing for requests and models whose prefill may begin before the end of the match.
        """
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.common import _req_radix_key

        cache = self._cache
        special = (
            request.session is not None
            or request.positional_embed_overrides is not None
            or request.is_dllm()
            or cache.supports_mamba()
            or cache.supports_swa()
        )
        if special or cache.disable:
            return 0, None
        ids = request.origin_input_ids + request.output_ids
        limit = request._compute_max_prefix_len(len(ids))
        key = _req_radix_key(cache, request, ids, limit)
        found = cache.match_prefix(MatchPrefixParams(key=key, req=request))
        return found.device_prefix_len, found.last_device_node

    def lock(self, node: Any) -> Any:
        return self._cache.lock(node)

    def unlock(self, lock: Any) -> None:
        self._cache.unlock(lock)


class SchedulerQueue:
    """A scheduler's queues."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.gate: Gate | None = None

    def add(self, request: Any, *, retracted: bool) -> None:
        assert self.gate is not None
        if getattr(request, "disagg_kv_sender", None) is None:
            self._scheduler._add_request_to_queue(request, is_retracted=retracted)
        elif self.gate.admit(request, retracted=retracted):
            # Of a prefill server, and its decode server is waiting already.
            self._scheduler.waiting_queue.append(request)

    def remove(self, request: Any) -> bool:
        queue = self._scheduler.waiting_queue
        for index, waiting in enumerate(queue):
            if waiting is request:
                del queue[index]
                return True
        return False

    def waiting(self) -> Collection[str]:
        scheduler = self._scheduler
        rids = {request.rid for request in scheduler.waiting_queue}
        bootstrapping = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
        if bootstrapping is not None:
            rids |= {request.rid for request in bootstrapping.queue}
        return rids

    def discard(self, request: Any) -> None:
        scheduler = self._scheduler
        scheduler._release_aborted_request(request)
        if getattr(request, "disagg_kv_sender", None) is not None:
            scheduler.release_aborted_prefill_waiting_req(request)


class Hooks:
    """What runs around SGLang's own functions."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def add_request(
        self, original: Any, scheduler: Any, req: Any, is_retracted: bool = False
    ) -> None:
        if self._gate.admit(req, retracted=is_retracted):
            original(scheduler, req, is_retracted)

    def add_one(self, original: Any, adder: Any, req: Any, *args: Any, **options: Any) -> Any:
        from sglang.srt.managers.schedule_policy import AddReqResult

        if not self._gate.may_run(req, req.prefix_len):
            # As if it had been taken: the next one in the queue is looked at.
            return AddReqResult.CONTINUE
        result = original(adder, req, *args, **options)
        if adder.can_run_list and adder.can_run_list[-1] is req:
            self._gate.taken(req)
        if result is AddReqResult.NO_TOKEN:
            self._gate.let_go()
        return result

    def check_memory(self, original: Any, batch: Any, *args: Any, **options: Any) -> Any:
        enough = original(batch, *args, **options)
        if enough or not self._gate.locks:
            return enough
        self._gate.let_go()
        return original(batch, *args, **options)

    def flush(self, original: Any, scheduler: Any, *args: Any, **options: Any) -> Any:
        # Locks of an emptied tree would be undone in another.
        self._gate.let_go()
        return original(scheduler, *args, **options)


def install(scheduler: Any, leader: Leader | None, arena: Arena, reader: int) -> Gate:
    """Put a gate before this process's scheduler."""
    queue = SchedulerQueue(scheduler)
    gate = queue.gate = Gate(RadixTree(scheduler.tree_cache), queue, leader, arena, reader)
    hooks = Hooks(gate)
    module = f"{_SRT}.managers.scheduler"
    hook(module, "Scheduler._add_request_to_queue", hooks.add_request, "around")
    hook(module, "Scheduler.flush_cache", hooks.flush, "around")
    module = f"{_SRT}.managers.schedule_policy"
    hook(module, "PrefillAdder.add_one_req", hooks.add_one, "around")
    module = f"{_SRT}.managers.schedule_batch"
    hook(module, "ScheduleBatch.check_decode_mem", hooks.check_memory, "around")
    return gate
