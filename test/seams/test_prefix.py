from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_epd import plugin
from sglang_epd.seams import prefix
from sglang_epd.seams.prefix import RadixTree, SchedulerQueue


@dataclass
class FakeGate:
    """Says what the test wants, and notes what it is told."""

    passes: bool = True
    runs: bool = True
    locks: int = 1
    yields: bool = False
    told: list[tuple] = field(default_factory=list)

    def admit(self, request: Any, *, retracted: bool = False) -> bool:
        self.told.append(("admit", request.rid, retracted))
        return self.passes

    def may_run(self, request: Any, prefix_len: int, batch: Any) -> bool:
        self.told.append(("may_run", request.rid, prefix_len, *batch))
        return self.runs

    def taken(self, request: Any) -> None:
        self.told.append(("taken", request.rid))

    def let_go(self) -> None:
        self.told.append(("let_go",))
        self.locks = 0

    def gives_way(self, request: Any) -> bool:
        return self.yields


@pytest.fixture
def gate(monkeypatch):
    gate = FakeGate()
    monkeypatch.setattr(prefix.Installed, "gate", gate)
    return gate


def request(rid: str = "r", **more: Any) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, prefix_len=7, **more)


def test_a_request_that_lost_its_match_is_passed_over(sglang, gate):
    results = sglang("managers.schedule_policy").AddReqResult
    gate.runs = False
    adder = SimpleNamespace(can_run_list=["another"])
    assert prefix.add_one(None, adder, request()) is results.CONTINUE
    assert gate.told == [("may_run", "r", 7, "another")]


@pytest.mark.parametrize("result", ["CONTINUE", "OTHER", "NO_TOKEN"])
@pytest.mark.parametrize("added", [True, False])
def test_locks_go_when_the_prefill_has_them_or_somebody_needs_the_memory(
    sglang, gate, result, added
):
    wanted = sglang("managers.schedule_policy").AddReqResult[result]
    one = request()
    adder = SimpleNamespace(can_run_list=[])

    def original(adder: Any, req: Any, *args: Any, **options: Any) -> Any:
        assert (args, options) == ((), {"has_chunked_req": False})
        if added:
            adder.can_run_list.append(req)
        return wanted

    assert prefix.add_one(original, adder, one, has_chunked_req=False) is wanted
    assert (("taken", "r") in gate.told) == added
    assert (("let_go",) in gate.told) == (result == "NO_TOKEN")


@pytest.mark.parametrize(("added", "passed"), [(True, "NO_TOKEN"), (False, "CONTINUE")])
def test_those_behind_a_part_that_there_is_no_memory_for_are_looked_at(sglang, gate, added, passed):
    """Unless it is the part that has taken the last of it."""
    results, gate.yields = sglang("managers.schedule_policy").AddReqResult, True
    one = request()
    adder = SimpleNamespace(can_run_list=[one] if added else [])
    assert prefix.add_one(lambda *_: results.NO_TOKEN, adder, one) is results[passed]
    assert (("let_go",) in gate.told) is added, "what gives way costs others nothing"


class Part:
    """A request, which is a part of a prompt."""


def test_a_part_is_not_streamed(monkeypatch):
    parts = [Part(), Part()]
    others = [Part(), Part()]

    def ended(request: Any, *, chunked: bool) -> bool:
        assert chunked == (request is skipped)
        return request in parts

    skipped: Any = parts[0]
    monkeypatch.setattr(prefix.Installed, "parts", SimpleNamespace(any=True, ended=ended))
    streamed = []

    def original(*arguments: Any) -> None:
        streamed.append(arguments)

    prefix.stream(original, "streamer", [*parts, *others], True, parts[0])
    assert streamed == [("streamer", others, True, parts[0])]
    skipped = None
    prefix.stream(original, "streamer", parts, False, skip_req=None)
    assert len(streamed) == 1, "there is nothing to send"


@pytest.mark.parametrize(("needed", "let_go"), [(2, False), (4, True)])
def test_a_batch_finds_the_memory_that_a_lock_held(sglang, monkeypatch, tree, needed, let_go):
    """Where SGLang finds none it ends, or retracts a request that decodes."""
    base = sglang("mem_cache.allocator.base").BaseTokenToKVPoolAllocator
    allocators = sglang("mem_cache.allocator.token")
    allocator = allocators.TokenToKVPoolAllocator(8, torch.float32, "cpu", None, need_sort=False)
    cache = tree(eagle=False, allocator=allocator)
    ids = array("q", [*range(1, 7), 9])
    one = prompt(origin_input_ids=ids, output_ids=array("q"), cache_salt=None)
    length, node = RadixTree(cache).match(one)
    assert (length, allocator.available_size()) == (6, 2)
    gate = FakeGate()
    lock = RadixTree(cache).lock(node)
    monkeypatch.setattr(gate, "let_go", lambda: RadixTree(cache).unlock(lock))
    monkeypatch.setattr(prefix.Installed, "gate", gate)
    prefix.free_tokens(base.evict_to_free_tokens, allocator, cache, needed)
    assert allocator.alloc(needed) is not None
    assert cache.protected_size() == (0 if let_go else 6)


@pytest.mark.parametrize(("reason", "parked"), [(None, 0), (None, 1), (("in progress", False), 1)])
def test_a_server_with_requests_that_wait_takes_no_other_role(monkeypatch, reason, parked):
    monkeypatch.setattr(prefix.Installed, "gate", [None] * parked)
    told = prefix.refuse_switch(lambda _scheduler, _role: reason, "scheduler", "decode")
    waits = ("instance is not idle: requests wait for their media", True)
    assert told == (reason or (waits if parked else None))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("reason", [None, ("in progress", False)])
def test_nor_does_one_with_requests_that_wait_with_the_leader(waits, reason):
    """Every rank is told: they are to do the same."""
    leader = SimpleNamespace(waiting=["request"] if waits else [])
    change, other = SimpleNamespace(new_role="decode"), SimpleNamespace(rid="r")
    prefix.note_waiting(leader, [other, change])
    asked: list[str] = []

    def original(_scheduler: str, role: str) -> tuple[str, bool] | None:
        asked.append(role)
        return reason

    told = prefix.refuse_switch(original, "scheduler", change.new_role.lower())
    assert asked == ["decode"]
    words = ("instance is not idle: requests wait for their media", True)
    assert told == (reason or (words if waits else None))


class FakeCache:
    def __init__(self) -> None:
        self.disable = False
        self.mamba = self.swa = False
        self.params: Any = None

    def supports_mamba(self) -> bool:
        return self.mamba

    def supports_swa(self) -> bool:
        return self.swa

    def swa_reprefill_tail_tokens(self, req: Any) -> int:
        return 0

    def match_prefix(self, params: Any) -> Any:
        self.params = params
        return SimpleNamespace(device_prefix_len=3, last_device_node="node")


def prompt(**more: Any) -> SimpleNamespace:
    values = {
        "session": None,
        "positional_embed_overrides": None,
        "is_dllm": lambda: False,
        "origin_input_ids": array("q", [1, 2, 3, 4]),
        "output_ids": array("q", [5]),
        "extra_key": "lora",
        "cache_salt": "salt",
        "_compute_max_prefix_len": lambda length: length - 1,
    }
    return SimpleNamespace(**{**values, **more})


def test_the_tree_is_asked_as_sglang_asks_it_in_the_requests_own_namespace(sglang):
    cache = FakeCache()
    one = prompt()
    assert RadixTree(cache).match(one) == (3, "node")
    key = cache.params.key
    assert list(key) == [1, 2, 3, 4], "all tokens but the last"
    assert (key.extra_key, key.cache_salt) == ("lora", "salt")
    assert cache.params.req is one


@pytest.mark.parametrize(
    "more",
    [{"session": "s"}, {"positional_embed_overrides": "o"}, {"is_dllm": lambda: True}],
)
def test_special_requests_are_not_covered(sglang, more):
    cache = FakeCache()
    assert RadixTree(cache).match(prompt(**more)) == (0, None)
    assert cache.params is None


@pytest.mark.parametrize("switch", ["disable", "mamba", "swa"])
def test_nothing_is_covered_without_a_radix_cache_or_where_prefill_may_begin_earlier(
    sglang, switch
):
    cache = FakeCache()
    setattr(cache, switch, True)
    assert RadixTree(cache).match(prompt()) == (0, None)


@pytest.fixture
def tree(sglang):
    """SGLang's own tree, which has the KV of the tokens 1 to 6 of an adapter."""
    module = sglang("mem_cache.unified_radix_cache")
    base = sglang("mem_cache.base_prefix_cache")
    full = sglang("mem_cache.unified_cache.components").ComponentType.FULL

    def make(*, eagle: bool, allocator: Any = None) -> Any:
        parameters = sglang("mem_cache.cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator or SimpleNamespace(device="cpu"),
            page_size=1,
            is_eagle=eagle,
            tree_components=(full,),
        )
        tree = module.UnifiedRadixCache(parameters)
        ids = array("q", range(1, 7))
        key = sglang("mem_cache.radix_cache").RadixKey(token_ids=ids, extra_key="lora")
        value = torch.arange(6) if allocator is None else allocator.alloc(6)
        tree.insert(base.InsertParams(key=key, value=value))
        return tree

    return make


@pytest.mark.parametrize(("eagle", "covered"), [(False, 6), (True, 5)])
def test_a_draft_models_tree_covers_pairs_of_tokens(tree, eagle, covered):
    """The KV of a draft model depends on the token behind, too."""
    cache = tree(eagle=eagle)
    ids = array("q", [*range(1, 7), 9, 9])
    one = prompt(origin_input_ids=ids, output_ids=array("q"), cache_salt=None)
    length, node = RadixTree(cache).match(one)
    assert length == covered
    lock = RadixTree(cache).lock(node)
    assert (cache.protected_size(), cache.evictable_size()) == (covered, 0)
    RadixTree(cache).unlock(lock)
    assert (cache.protected_size(), cache.evictable_size()) == (0, covered)


def test_the_kv_of_an_adapter_covers_no_other(sglang, tree):
    request = sglang("managers.schedule_batch").Req
    sampling = sglang("sampling.sampling_params").SamplingParams()
    cache = tree(eagle=False)
    covered = {}
    for adapter in ("lora", "other", None):
        one = request("r", "", array("q", [*range(1, 7), 9]), sampling, lora_id=adapter)
        covered[adapter], _ = RadixTree(cache).match(one)
    assert covered == {"lora": 6, "other": 0, None: 0}


class FakeScheduler:
    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.chunked_req = None
        self.prefill_decode_interval = self.prefill_decode_interval_min_bs = 0
        self.calls: list[tuple] = []
        self.beam_coordinator = self

    def retire_group(self, req: Any) -> None:
        self.calls.append(("retire", req.rid))

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self.calls.append(("add", req.rid, is_retracted))

    def _release_aborted_request(self, req: Any) -> None:
        self.calls.append(("release", req.rid))

    def release_aborted_prefill_waiting_req(self, req: Any) -> None:
        self.calls.append(("release sender", req.rid))


@pytest.fixture
def scheduler():
    return FakeScheduler()


@pytest.fixture
def queue(scheduler, gate):
    return SchedulerQueue(scheduler)


def test_what_sglang_refused_without_queueing_it_needs_no_item(scheduler, monkeypatch):
    forgone: list[str] = []
    waits = {"encoder_urls": [], "need_wait_for_mm_inputs": True}
    taken = [request(rid, **waits) for rid in ("refused", "compiles", "queued")]
    scheduler.grammar_manager = SimpleNamespace(grammar_queue=[request("compiles")])
    # One that SGLang takes in a later tick is among them, too.
    leader = SimpleNamespace(undecided={"refused", "compiles", "held"}, forgo=forgone.append)
    monkeypatch.setattr(prefix.Installed, "leader", leader)
    target = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
    (process,) = [hook.function for hook in plugin.HOOKS if hook.target == target]
    for requests in ([*taken, SimpleNamespace(rid="an abort")], [SimpleNamespace(batch=taken)]):
        process(lambda _scheduler, _requests: forgone.append("taken"), scheduler, requests)
    assert forgone == ["taken", "refused"] * 2


@pytest.mark.parametrize(
    ("mode", "retracted", "asked"),
    [("DECODE", True, False), ("DECODE", False, True), ("NULL", True, True)],
)
def test_what_a_decode_server_retracts_waits_for_nothing(
    sglang, scheduler, gate, mode, retracted, asked
):
    scheduler.disaggregation_mode = sglang("disaggregation.utils").DisaggregationMode[mode]
    gate.passes = False
    prefix.add_request(FakeScheduler._add_request_to_queue, scheduler, request(), retracted)
    assert scheduler.calls == ([] if asked else [("add", "r", True)])
    assert bool(gate.told) == asked


@pytest.mark.parametrize(
    ("ended", "only_prefilled", "mode", "decodes"),
    [
        (False, False, "NULL", True),
        (True, False, "NULL", False),
        (False, True, "NULL", False),
        (False, False, "PREFILL", False),
    ],
    ids=["answers", "has ended", "is a part", "is answered elsewhere"],
)
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_decodes_is_answering(
    sglang, monkeypatch, ended, only_prefilled, mode, decodes, launched, stages
):
    """A batch still has what has ended in it, until the next one is made. One whose prefill has
    been launched is in no running batch yet."""
    module = sglang("managers.scheduler")
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(pp_size=stages))

    class Running(SimpleNamespace):
        __hash__ = object.__hash__

    one = Running(finished=lambda: ended, is_prefill_only=only_prefilled)
    batch, empty = SimpleNamespace(reqs=[one]), SimpleNamespace(reqs=[])
    scheduler = module.Scheduler.__new__(module.Scheduler)
    scheduler.waiting_queue, scheduler.chunked_req = [], None
    scheduler.prefill_decode_interval, scheduler.enable_continuous_input_polling = 0, False
    scheduler.prefill_decode_interval_min_bs = 0
    scheduler.disaggregation_mode = sglang("disaggregation.utils").DisaggregationMode[mode]
    scheduler.running_batch, scheduler.last_batch = (empty, batch) if launched else (batch, None)
    scheduler.running_mbs, scheduler.mbs = [empty, scheduler.running_batch], [batch, None]
    if not launched:
        scheduler.mbs = [None, None]
    queue = SchedulerQueue(scheduler)
    assert queue.busy() == (False, decodes)
    scheduler.prefill_decode_interval = 22
    assert queue.busy() == (decodes, decodes), "the request would wait for as many steps"
    scheduler.prefill_decode_interval_min_bs = 2
    assert queue.busy() == (False, decodes), "beside so few SGLang prefills in every round"


@pytest.mark.parametrize("stages", [1, 2])
def test_a_full_batch_is_looked_at_again(scheduler, queue, stages):
    batches = [SimpleNamespace(reqs=[], batch_is_full=True) for _ in range(stages)]
    scheduler.running_batch = batches[0]
    if stages > 1:
        scheduler.running_mbs = batches
    queue.look_again()
    assert not any(batch.batch_is_full for batch in batches)


def test_a_request_is_taken_out_of_the_queue_once(scheduler, queue):
    one, twin = request("one"), request("one")
    scheduler.waiting_queue = [twin, one]
    assert queue.remove(one)
    assert scheduler.waiting_queue[0] is twin
    assert not queue.remove(one)


def test_a_request_is_taken_out_of_a_prefill_servers_first_queue(scheduler, queue):
    """There it waits for its decode server, or for a buffer."""
    one, other = request("one"), request("other")
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[other, one])
    assert queue.remove(one)
    assert scheduler.disagg_prefill_bootstrap_queue.queue == [other]
    assert set(queue.waiting()) == {"other"}


@pytest.mark.parametrize("sends", [True, False])
def test_a_request_that_ends_where_it_waits_is_let_go_of_as_in_sglangs_queue(
    scheduler, queue, sends
):
    queue.discard(request(disagg_kv_sender=object() if sends else None))
    told = [("retire", "r"), ("release", "r"), ("release sender", "r")]
    assert scheduler.calls == told[: 3 if sends else 2]
