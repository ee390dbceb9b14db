"""SGLang's prefix cache and queues, as `language.prefix` needs them, and embeddings that
SGLang has no more use for.

Leans on `managers.scheduler.Scheduler`: `_add_request_to_queue(req, is_retracted)`, which
every request passes on its way to a queue, with its token ids padded and its namespace in
the tree (cache salt, LoRA) set, but one that is refused first; `process_input_requests`, which
brings requests there, or to `grammar_manager.grammar_queue` first; `disaggregation_mode`;
`waiting_queue`, `disagg_prefill_bootstrap_queue.queue`; `chunked_req`,
`running_batch` with `batch_is_full` and `Req.is_prefill_only`, `prefill_decode_interval` and
`prefill_decode_interval_min_bs`, `collect_inflight_reqs` and `disagg_prefill_inflight_queue`;
`flush_cache`, which empties the tree;
`_release_aborted_request` and `release_aborted_prefill_waiting_req`. On
`managers.schedule_policy.PrefillAdder.add_one_req`, which locks a request's prefix when it
takes it; on `mem_cache.allocator.base.BaseTokenToKVPoolAllocator.evict_to_free_tokens`, by which
room is made for every batch; on `managers.schedule_batch`: `Req._compute_max_prefix_len` and
`MultimodalInputs.release_features`; on
`scheduler_components.load_inquirer.SchedulerLoadInquirer.get_loads`, which counts SGLang's own
queues; on `disaggregation.role_switch._reject_reason`, which is given
`PdRoleSwitchReqInput.new_role`; on
`disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue`;
`scheduler_components.output_streamer.SchedulerOutputStreamer`: `stream_output` and
`_stream_output_embedding`;
on `mem_cache.common._req_radix_key`; and on `match_prefix`,
`lock` and `unlock` of the tree cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_epd.language import manifest

if TYPE_CHECKING:  # imports zmq, in processes that need none of this
    from sglang_epd.language.backend import Leader
    from sglang_epd.language.parts import Parts
    from sglang_epd.language.prefix import PrefixGate
    from sglang_epd.language.relay import Receive


# Added to the name of a role where requests wait with the leading rank.
_UNLESS_WAITING = " unless requests wait"


class Installed:
    """Of this process's scheduler.

    Attributes:
        leader: holds requests back; None on ranks that do not lead.
        gate: before its queues; None where it is no language server's, and with several
            pipeline stages that prefill no parts.
        parts: parts of prompts that it prefills early; None where it does not.
        releases: whether it gives embeddings back as soon as SGLang is done with them.
    """

    leader: Leader | None = None
    gate: PrefixGate | None = None
    parts: Parts | None = None
    releases = False


class RadixTree:
    """A scheduler's tree cache."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def match(self, request: Any) -> tuple[int, Any]:
        """The match that SGLang would find at prefill, of KV that is on the device.

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

    def add(self, request: Any, *, retracted: bool) -> None:
        gate = Installed.gate
        assert gate is not None
        if getattr(request, "disagg_kv_sender", None) is None:
            self._scheduler._add_request_to_queue(request, is_retracted=retracted)
        elif gate.admit(request, retracted=retracted):
            # Of a prefill server, and its decode server is waiting already.
            self._scheduler.waiting_queue.append(request)

    def _batches(self) -> list[Any]:
        scheduler = self._scheduler
        return getattr(scheduler, "running_mbs", None) or [scheduler.running_batch]

    def _queues(self) -> Iterator[list[Any]]:
        yield self._scheduler.waiting_queue
        bootstrapping = getattr(self._scheduler, "disagg_prefill_bootstrap_queue", None)
        if bootstrapping is not None:
            yield bootstrapping.queue

    def remove(self, request: Any) -> bool:
        for queue in self._queues():
            for index, waiting in enumerate(queue):
                if waiting is request:
                    del queue[index]
                    return True
        return False

    def waiting(self) -> Collection[str]:
        return {manifest.name(request) for queue in self._queues() for request in queue}

    def look_again(self) -> None:
        # SGLang tries no prefill while its batch is full, until one of its requests ends.
        for batch in self._batches():
            batch.batch_is_full = False

    def running(self, request: Any) -> bool:
        scheduler = self._scheduler
        if request.finished():
            return False
        return scheduler.chunked_req is request or request in scheduler.collect_inflight_reqs()

    def holds(self, request: Any) -> bool:
        sent: Any = getattr(self._scheduler, "disagg_prefill_inflight_queue", None) or ()
        return (
            manifest.name(request) in self.waiting()
            or self.running(request)
            or any(one is request for one in sent)
        )

    def busy(self) -> tuple[bool, bool]:
        scheduler = self._scheduler
        waiting = bool(scheduler.waiting_queue) or scheduler.chunked_req is not None
        # Those that have ended leave it in the next tick, and an idle scheduler makes none. Those
        # whose prefill has been launched are about to decode, but on a prefill server.
        apart = scheduler.disaggregation_mode.value == "prefill"
        running = () if apart else scheduler.collect_inflight_reqs()
        decoding = sum(not one.finished() and not one.is_prefill_only for one in running)
        # After a prefill the next one waits for so many steps, unless few decode.
        spaced = scheduler.prefill_decode_interval > 0 and decoding >= max(
            1, scheduler.prefill_decode_interval_min_bs
        )
        return waiting or spaced, decoding > 0

    def discard(self, request: Any) -> None:
        scheduler = self._scheduler
        scheduler.beam_coordinator.retire_group(request)
        scheduler._release_aborted_request(request)
        if getattr(request, "disagg_kv_sender", None) is not None:
            scheduler.release_aborted_prefill_waiting_req(request)


def add_request(original: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Around `_add_request_to_queue`."""
    gate = Installed.gate
    # The KV of what a decode server retracts is in the host's memory, and needs no embeddings.
    kept = is_retracted and scheduler.disaggregation_mode.value == "decode"
    if gate is None or kept or gate.admit(req, retracted=is_retracted):
        original(scheduler, req, is_retracted)


def forgo_refused(scheduler: Any, requests: Iterable[Any]) -> None:
    """After `process_input_requests`: of these, what SGLang refused without queueing it needs no
    item. What waits for its grammar is queued when it has that."""
    leader = Installed.leader
    if leader is None or not (names := leader.undecided):
        return
    taken = [one for request in requests for one in getattr(request, "batch", None) or (request,)]
    refused = names & {manifest.name(one) for one in taken if manifest.waits(one)}
    for name in refused.difference(map(manifest.name, scheduler.grammar_manager.grammar_queue)):
        leader.forgo(name)


def add_one(original: Any, adder: Any, req: Any, *args: Any, **options: Any) -> Any:
    """Around `add_one_req`."""
    gate = Installed.gate
    if gate is None:
        return original(adder, req, *args, **options)
    from sglang.srt.managers.schedule_policy import AddReqResult

    if not gate.may_run(req, req.prefix_len, adder.can_run_list):
        # As if it had been taken: the next one in the queue is looked at.
        return AddReqResult.CONTINUE
    result = original(adder, req, *args, **options)
    taken = adder.can_run_list and adder.can_run_list[-1] is req
    if taken:
        gate.taken(req)
    if result is AddReqResult.NO_TOKEN:
        # A part of a prompt costs others nothing.
        if not taken and gate.gives_way(req):
            return AddReqResult.CONTINUE
        gate.let_go()
    return result


def free_tokens(original: Any, allocator: Any, tree_cache: Any, num_tokens: int) -> Any:
    """Around `evict_to_free_tokens`, which makes room for a batch: locks go first. SGLang counts
    on all that was unlocked when it chose the batch."""
    gate = Installed.gate
    enough = original(allocator, tree_cache, num_tokens)
    if gate is None or not gate.locks or allocator.available_size() >= num_tokens:
        return enough
    gate.let_go()
    return original(allocator, tree_cache, num_tokens)


def note_waiting(leader: Leader, requests: Iterable[Any]) -> None:
    """On the leading rank: a change of role that is among the requests is to be refused by every
    rank if others wait with this one. SGLang broadcasts those of the first group of ranks alone."""
    for request in requests:
        if getattr(request, "new_role", None) and leader.waiting:
            request.new_role += _UNLESS_WAITING


def refuse_switch(original: Any, scheduler: Any, new_role: str) -> Any:
    """Around `_reject_reason`: a server with requests that wait here is not idle."""
    role, waiting, _ = new_role.partition(_UNLESS_WAITING)
    reason = original(scheduler, role)
    if reason is None and (waiting or (Installed.gate is not None and len(Installed.gate))):
        return "instance is not idle: requests wait for their media", True
    return reason


def count_held(loads: Any, _inquirer: Any) -> None:
    """After `get_loads`, by which replicas and servers are chosen: requests that are held back
    wait, too."""
    if Installed.leader is not None:
        requests, tokens = Installed.leader.load()
        loads.num_waiting_reqs += requests
        loads.num_total_tokens += tokens
        loads.num_active_tokens += tokens


def flush(original: Any, scheduler: Any, *args: Any, **options: Any) -> Any:
    """Around `flush_cache`."""
    if Installed.gate is not None:
        # Locks of an emptied tree would be undone in another.
        Installed.gate.let_go()
    return original(scheduler, *args, **options)


def drop(_result: None, mm_inputs: Any) -> None:
    """After `release_features`, which SGLang calls when a request has ended and none of its
    session follows: the embeddings go with the features.

    SGLang keeps a request's `precomputed_embeddings` until it forgets the request's inputs,
    and its scheduler keeps the inputs of the last prefill batch for as long as there is no
    other. Where memory is short the next prefill may be waiting for just that.
    """
    if Installed.releases:
        for item in mm_inputs.mm_items:
            item.precomputed_embeddings = None


def release_sent(done: list[Any], _scheduler: Any, *_arguments: Any, **_options: Any) -> None:
    """After `process_disagg_prefill_inflight_queue`, which returns the requests whose KV has
    been sent: none of them is computed again."""
    for request in done if Installed.releases else ():
        if request.multimodal_inputs is not None and request.session is None:
            request.multimodal_inputs.release_features()


def release_embedded(_result: None, _streamer: Any, reqs: Iterable[Any]) -> None:
    """After `_stream_output_embedding`, of requests for embeddings: SGLang releases the features
    of generations only."""
    for request in reqs if Installed.releases else ():
        if request.finished() and request.multimodal_inputs is not None:
            request.multimodal_inputs.release_features()


def stream(
    original: Any, streamer: Any, reqs: Any, return_logprob: bool, skip_req: Any = None
) -> None:
    """Around `stream_output`: of a part of a prompt no client knows. With overlap scheduling
    one that has ended may come twice."""
    parts = Installed.parts
    if parts is not None and parts.any:
        reqs = [one for one in reqs if not parts.ended(one, chunked=one is skip_req)]
        if not reqs:
            return
    original(streamer, reqs, return_logprob, skip_req)


def install(
    scheduler: Any, leader: Leader | None, receive: Receive, parts: Parts | None
) -> PrefixGate:
    """Put a gate before this process's scheduler.

    Args:
        leader: None on ranks that do not lead.
        receive: reads the items of a claim.
        parts: parts of prompts; None where there are none.
    """
    from sglang_epd.language.prefix import PrefixGate

    tree, queue = RadixTree(scheduler.tree_cache), SchedulerQueue(scheduler)
    Installed.parts = parts
    gate = Installed.gate = PrefixGate(tree, queue, leader, receive, parts)
    return gate
