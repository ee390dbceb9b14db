from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_epd.seams import prefix
from sglang_epd.seams.prefix import RadixTree, SchedulerQueue, release_sent


@dataclass
class FakeGate:
    """Says what the test wants, and notes what it is told."""

    passes: bool = True
    runs: bool = True
    locks: int = 1
    told: list[tuple] = field(default_factory=list)

    def admit(self, request: Any, *, retracted: bool = False) -> bool:
        self.told.append(("admit", request.rid, retracted))
        return self.passes

    def may_run(self, request: Any, prefix_len: int) -> bool:
        self.told.append(("may_run", request.rid, prefix_len))
        return self.runs

    def taken(self, request: Any) -> None:
        self.told.append(("taken", request.rid))

    def let_go(self) -> None:
        self.told.append(("let_go",))
        self.locks = 0


@pytest.fixture
def gate(monkeypatch):
    gate = FakeGate()
    monkeypatch.setattr(prefix.Installed, "gate", gate)
    return gate


def request(rid: str = "r", **more: Any) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, prefix_len=7, **more)


@pytest.mark.parametrize("passes", [True, False])
def test_a_request_is_queued_if_the_gate_lets_it_pass(gate, passes):
    gate.passes = passes
    queued = []
    prefix.add_request(lambda *args: queued.append(args), "scheduler", request(), True)
    assert gate.told == [("admit", "r", True)]
    assert [args[2] for args in queued] == [True] * passes


def test_a_request_that_lost_its_match_is_passed_over(sglang, gate):
    results = sglang("managers.schedule_policy").AddReqResult
    gate.runs = False
    adder = SimpleNamespace(can_run_list=[])
    assert prefix.add_one(None, adder, request()) is results.CONTINUE
    assert gate.told == [("may_run", "r", 7)]


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


@pytest.mark.parametrize(
    ("answers", "locks", "asked", "enough"),
    [([True], 1, 1, True), ([False], 0, 1, False), ([False, True], 1, 2, True)],
)
def test_nobody_is_retracted_for_the_sake_of_a_lock(gate, answers, locks, asked, enough):
    gate.locks = locks
    calls = []

    def original(batch: Any, selected_indices: Any = None) -> bool:
        calls.append(selected_indices)
        return answers[len(calls) - 1]

    assert prefix.check_memory(original, "batch", selected_indices=[1]) is enough
    assert calls == [[1]] * asked
    assert (("let_go",) in gate.told) == (asked == 2)


def test_nothing_is_locked_when_the_tree_is_emptied(gate):
    def original(scheduler: Any, empty_cache: bool = True) -> bool:
        assert gate.told == [("let_go",)]
        return True

    assert prefix.flush(original, "scheduler", empty_cache=False)


def test_a_scheduler_without_a_gate_is_as_sglang_has_it(monkeypatch):
    monkeypatch.setattr(prefix.Installed, "gate", None)
    seen = []
    prefix.add_request(lambda *args: seen.append(args), "scheduler", "req", True)
    assert seen == [("scheduler", "req", True)]
    for hook in (prefix.add_one, prefix.check_memory, prefix.flush):
        assert hook(lambda *args, **options: (args, options), 1, 2, a=3) == ((1, 2), {"a": 3})


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


class FakeScheduler:
    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.calls: list[tuple] = []

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
    queue = SchedulerQueue(scheduler)
    queue.gate = gate
    return queue


def test_requests_come_back_the_way_they_came(scheduler, queue, gate):
    queue.add(request(), retracted=True)
    assert scheduler.calls == [("add", "r", True)]
    bootstrapped = request("p", disagg_kv_sender="sender")
    queue.add(bootstrapped, retracted=False)
    assert scheduler.waiting_queue == [bootstrapped]
    gate.passes = False
    queue.add(request("q", disagg_kv_sender="sender"), retracted=False)
    assert scheduler.waiting_queue == [bootstrapped]
    assert scheduler.calls == [("add", "r", True)], "its decode server is waiting already"


def test_a_request_is_taken_out_of_the_queue_once(scheduler, queue):
    one, twin = request("one"), request("one")
    scheduler.waiting_queue = [twin, one]
    assert queue.remove(one)
    assert scheduler.waiting_queue[0] is twin
    assert not queue.remove(one)


def test_those_that_wait_to_be_bootstrapped_wait_too(scheduler, queue):
    scheduler.waiting_queue = [request("one")]
    assert set(queue.waiting()) == {"one"}
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[request("two")])
    assert set(queue.waiting()) == {"one", "two"}


def test_what_a_failed_request_holds_is_given_back(scheduler, queue):
    queue.discard(request("one"))
    queue.discard(request("two", disagg_kv_sender="sender"))
    assert scheduler.calls == [
        ("release", "one"),
        ("release", "two"),
        ("release sender", "two"),
    ]


@pytest.fixture
def inputs(sglang, hooked, monkeypatch):
    """Makes SGLang's inputs of a request with two items, in a language server's scheduler."""
    hooked("MultimodalInputs.release_features")
    monkeypatch.setattr(prefix.Installed, "gate", object())
    batch = sglang("managers.schedule_batch")

    def make():
        made = batch.MultimodalInputs(mm_items=[])
        for _ in range(2):
            item = batch.MultimodalDataItem(modality=batch.Modality.IMAGE)
            item.feature = item.precomputed_embeddings = object()
            made.mm_items.append(item)
        return made

    return make


def held(inputs) -> int:
    return sum(item.precomputed_embeddings is not None for item in inputs.mm_items)


def test_they_go_with_the_features(inputs):
    one = inputs()
    one.release_features()
    assert held(one) == 0


def test_another_server_keeps_them(inputs, monkeypatch):
    monkeypatch.setattr(prefix.Installed, "gate", None)
    one = inputs()
    release_sent([SimpleNamespace(multimodal_inputs=one, session=None)], None)
    assert all(item.feature is not None for item in one.mm_items)
    one.release_features()
    assert held(one) == 2


def test_a_prefill_server_drops_what_it_has_sent_but_not_a_sessions(inputs):
    sent = SimpleNamespace(multimodal_inputs=inputs(), session=None)
    kept = SimpleNamespace(multimodal_inputs=inputs(), session=object())
    text = SimpleNamespace(multimodal_inputs=None, session=None)
    release_sent([sent, kept, text], None, rids_to_check=None)
    assert held(sent.multimodal_inputs) == 0
    assert held(kept.multimodal_inputs) == 2
