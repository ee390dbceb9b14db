"""Requests whose prompts rest on the prefix cache: what is locked is unlocked once, and
nobody runs without the KV or the embeddings of its items."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from integrity import check_gate
from sglang_epd.errors import DeadlineError, from_code
from sglang_epd.language import manifest
from sglang_epd.language.assembly import Rows
from sglang_epd.language.prefix import PrefixGate, Resting, bare_items, end, mark
from sglang_epd.transfer.arena import ReceivedItem
from sglang_epd.wire.messages import Expect, Landed, Layout, Settled, TensorSpec

ROWS, WIDTH = 2, 4
LAYOUT = Layout("IMAGE", TensorSpec("float32", (ROWS, WIDTH)), [[1, 2, 4]])
# Text, then an item of two tokens and three of text, again and again.
STRIDE = 5


class FakeTree:
    """As long a prefix of every prompt as the test says."""

    def __init__(self) -> None:
        self.length = 0
        self.locked: dict[int, int] = {}
        self._names = itertools.count()

    def match(self, request: Any) -> tuple[int, Any]:
        return min(self.length, len(request.origin_input_ids) - 1), "node"

    def lock(self, node: Any) -> int:
        name = next(self._names)
        self.locked[name] = 1
        return name

    def unlock(self, lock: int) -> None:
        self.locked[lock] -= 1
        assert self.locked[lock] == 0, "unlocked twice"

    @property
    def held(self) -> int:
        return sum(self.locked.values())


class FakeQueue:
    """A scheduler with one queue; the gate stands before it as the seam puts it."""

    def __init__(self) -> None:
        self.gate: PrefixGate | None = None
        self.queue: list[Any] = []
        self.discarded: list[str] = []
        self.looks = 0

    def look_again(self) -> None:
        self.looks += 1

    def add(self, request: Any, *, retracted: bool) -> None:
        if self.gate.admit(request, retracted=retracted):
            self.queue.append(request)

    def remove(self, request: Any) -> bool:
        there = any(one is request for one in self.queue)
        self.queue = [one for one in self.queue if one is not request]
        return there

    def waiting(self) -> set[str]:
        return {manifest.name(request) for request in self.queue}

    def discard(self, request: Any) -> None:
        self.discarded.append(request.rid)


@dataclass
class FakeLeader:
    asked: list[tuple[str, tuple[int, ...], bool]] = field(default_factory=list)
    forgone: list[str] = field(default_factory=list)

    def ask(self, name, carrier, expect, covered, *, again) -> None:
        assert manifest.name(carrier) == name
        assert carrier.mm_inputs is None, "each rank makes its own"
        self.asked.append((name, covered, again))

    def forgo(self, rid) -> None:
        self.forgone.append(rid)


def receive(settled: Settled) -> list[ReceivedItem]:
    """Embeddings full of their slots' numbers."""
    if settled.code:
        raise from_code(settled.code, settled.message)
    return [
        ReceivedItem(item.key, item.layout, torch.full((ROWS, WIDTH), float(item.slot)))
        for item in settled.items
        if item is not None
    ]


def bare_again(item: Any) -> torch.Tensor:
    rows = item.precomputed_embeddings
    empty = rows.new_empty((0, WIDTH))
    vars(empty).update(vars(rows))
    return empty


class World:
    def __init__(self, leads: bool = True) -> None:
        self.tree, self.scheduler, self.leader = FakeTree(), FakeQueue(), FakeLeader()
        leader: Any = self.leader if leads else None
        self.gate = PrefixGate(self.tree, self.scheduler, leader, receive)
        self.scheduler.gate = self.gate

    def request(self, rid: str, items: int = 2, worker: str | None = None) -> Any:
        """As SGLang makes it of a bare output."""
        mm_items = [
            SimpleNamespace(
                offsets=[(1 + STRIDE * number, ROWS + STRIDE * number)],
                precomputed_embeddings=torch.empty((0, WIDTH)),
            )
            for number in range(items)
        ]
        keys = tuple(bytes([number]) * 32 for number in range(items))
        expect = Expect(f"ticket {rid}", items, 60.0, keys, (LAYOUT,) * items)
        inputs = SimpleNamespace(mm_items=mm_items)
        rows = [Rows(number, 0, ROWS) for number in range(items)]
        carrier = SimpleNamespace(rid=rid, http_worker_ipc=worker, mm_inputs=inputs)
        mark(inputs, rows, Resting(carrier, expect))
        ids = [0] * (STRIDE * items + 1)
        return SimpleNamespace(
            rid=rid, http_worker_ipc=worker, multimodal_inputs=inputs, origin_input_ids=ids
        )

    def prefill(self, request: Any) -> bool:
        """One candidate of the next batch, as the seam asks about it."""
        length, _ = self.tree.match(request)
        if not self.gate.may_run(request, length):
            return False
        for item in request.multimodal_inputs.mm_items:
            assert end(item) <= length or len(item.precomputed_embeddings) == ROWS
        self.scheduler.remove(request)
        self.gate.taken(request)
        return True

    def land(self, rid: str, covered: tuple[int, ...], items: int = 2) -> Any:
        landed = tuple(
            None if number in covered else Landed(bytes([number]) * 32, LAYOUT, 32, 7 + number, 0)
            for number in range(items)
        )
        return self.gate.resolve(rid, Settled("c", landed))


@pytest.fixture
def world() -> World:
    return World()


def test_what_is_covered_goes_on_at_once_and_is_locked_until_it_is_prefilled(world):
    world.tree.length = 2 * STRIDE
    request = world.request("r")
    world.scheduler.add(request, retracted=False)
    assert world.scheduler.queue == [request]
    assert world.leader.asked == [("r", (0, 1), False)], "nothing is needed"
    assert world.tree.held == 1
    assert world.prefill(request)
    assert world.tree.held == 0


def test_what_is_not_covered_is_asked_for_and_waited_for(world):
    world.tree.length = STRIDE
    request = world.request("r")
    world.scheduler.add(request, retracted=True)
    assert not world.scheduler.queue
    assert world.leader.asked == [("r", (0,), False)]
    assert world.gate.holds("r")
    assert world.tree.held == 1, "what it has is held meanwhile"
    assert world.land("r", covered=(0,)) is None
    assert world.scheduler.queue == [request]
    covered, landed = request.multimodal_inputs.mm_items
    assert len(covered.precomputed_embeddings) == 0
    assert torch.equal(landed.precomputed_embeddings, torch.full((ROWS, WIDTH), 8.0))
    assert len(world.leader.asked) == 1
    assert world.prefill(request)
    assert world.tree.held == 0


@pytest.mark.parametrize("tokens", range(2 * STRIDE + 1))
def test_an_item_is_covered_when_its_last_token_is(world, tokens):
    world.tree.length = tokens
    world.scheduler.add(world.request("r"), retracted=False)
    ((_, covered, _),) = world.leader.asked
    assert covered == tuple(n for n in range(2) if tokens >= ROWS + 1 + STRIDE * n)


def test_a_match_that_is_lost_before_the_prefill_is_made_up_for(world):
    world.tree.length = 2 * STRIDE
    request = world.request("r")
    world.scheduler.add(request, retracted=False)
    world.tree.length = 0
    assert not world.prefill(request)
    assert not world.prefill(request), "asked in every tick until it has left the queue"
    world.gate.tidy()
    assert not world.scheduler.queue
    assert world.leader.asked[1:] == [("r", (), True)], "under a new ticket"
    assert world.tree.held == 0, "its old match is of no use"
    world.land("r", covered=())
    assert world.prefill(request)
    assert world.tree.held == 0


def test_a_request_that_waits_again_gives_its_embeddings_up(world):
    """Those that it waits for may need their memory, and would not come."""
    world.tree.length = STRIDE
    request = world.request("r")
    world.scheduler.add(request, retracted=False)
    assert world.land("r", covered=(0,)) is None
    landed = request.multimodal_inputs.mm_items[1]
    memory = weakref.ref(landed.precomputed_embeddings.untyped_storage())
    world.tree.length = 0
    assert not world.prefill(request)
    world.gate.tidy()
    assert world.leader.asked[1:] == [("r", (), True)], "both are asked for"
    assert memory() is None
    assert landed.precomputed_embeddings.shape == (0, WIDTH)
    world.land("r", covered=())
    assert world.prefill(request)


def test_a_request_that_gave_an_embedding_up_rests_on_no_match_any_more(world):
    """It might wait again and again: retracted, it had lost the KV of an item without rows."""
    request = world.request("r")
    world.scheduler.add(request, retracted=False)
    assert world.land("r", covered=()) is None
    first, second = request.multimodal_inputs.mm_items
    second.precomputed_embeddings = bare_again(second)
    world.tree.length = STRIDE
    world.scheduler.remove(request)
    world.scheduler.add(request, retracted=True)
    assert world.leader.asked[1:] == [("r", (), True)]
    assert not len(first.precomputed_embeddings)
    world.tree.length = 0
    assert world.land("r", covered=()) is None
    assert world.scheduler.queue == [request]
    assert world.prefill(request)
    assert world.tree.held == 0


def test_memory_that_only_locks_kept_from_a_request_is_asked_for_again(world):
    """The scheduler takes it for that of running requests, and would wait for their end."""
    world.tree.length = STRIDE
    world.scheduler.add(world.request("r"), retracted=False)
    assert not world.gate.tidy()
    assert (world.tree.held, world.scheduler.looks) == (1, 0)
    world.gate.let_go()
    assert world.gate.tidy(), "later pipeline stages are to do the same"
    assert not world.gate.tidy()
    assert (world.tree.held, world.scheduler.looks) == (0, 1)
    world.gate.let_go()
    assert not world.gate.tidy(), "there was nothing to let go"
    assert world.scheduler.looks == 1


def test_a_tree_that_promises_what_the_prefill_does_not_find_is_believed_once(world):
    world.tree.length = 2 * STRIDE
    request = world.request("r")
    world.scheduler.add(request, retracted=False)
    assert not world.gate.may_run(request, 0)
    world.gate.tidy()
    assert world.gate.holds("r")
    assert world.leader.asked[1:] == [("r", (), True)]
    world.land("r", covered=())
    assert world.gate.may_run(request, 0)


def test_a_failure_ends_the_request_and_what_it_holds(world):
    world.tree.length = STRIDE
    request = world.request("r")
    world.scheduler.add(request, retracted=False)
    failure = world.gate.resolve("r", Settled("c", (), "DeadlineError", "too late"))
    assert failure == (request, "too late", HTTPStatus.GATEWAY_TIMEOUT)
    assert world.scheduler.discarded == ["r"]
    assert world.tree.held == 0
    world.scheduler.add(world.request("s"), retracted=False)
    assert world.gate.fail("s", DeadlineError("gone"))[1] == "gone"
    assert world.tree.held == 0


def test_requests_of_two_tokenizer_workers_may_have_one_id(world):
    world.tree.length = 1
    one, two = world.request("r", items=1, worker="a"), world.request("r", items=2, worker="b")
    for request in (one, two):
        world.scheduler.add(request, retracted=False)
    assert world.tree.held == 2
    assert world.land(manifest.name(one), covered=(), items=1) is None
    assert world.scheduler.queue == [one]
    assert world.prefill(one)
    assert world.gate.holds(manifest.name(two))
    assert world.land(manifest.name(two), covered=()) is None
    assert world.prefill(two)
    assert world.tree.held == 0


def test_another_picture_than_the_prompt_was_laid_out_for_ends_the_request(world):
    request = world.request("r")
    world.scheduler.add(request, retracted=False)
    landed = tuple(Landed(bytes([key]) * 32, LAYOUT, 32, 7, 0) for key in (0, 9))
    failure = world.gate.resolve("r", Settled("c", landed))
    assert failure is not None
    assert failure[2] is HTTPStatus.BAD_REQUEST
    assert not world.scheduler.queue


@pytest.mark.parametrize("shape", [(ROWS - 1, WIDTH), (ROWS + 1, WIDTH)])
def test_an_embedding_of_another_size_than_the_prompt_has_places_for_ends_the_request(world, shape):
    """SGLang's scheduler would end with fewer rows, and the answer be wrong with more."""
    request = world.request("r")
    world.scheduler.add(request, retracted=False)
    other = msgspec.structs.replace(LAYOUT, embedding=TensorSpec("float32", shape))
    landed = [
        Landed(bytes([number]) * 32, layout, 32, 7, 0)
        for number, layout in enumerate((LAYOUT, other))
    ]
    failure = world.gate.resolve("r", Settled("c", tuple(landed)))
    assert failure is not None
    assert failure[2] is HTTPStatus.SERVICE_UNAVAILABLE and "settings of pixels" in failure[1]
    assert not world.scheduler.queue


def test_requests_with_embeddings_or_without_items_are_not_asked_about(world):
    text = SimpleNamespace(rid="text", multimodal_inputs=None)
    assert world.gate.admit(text)
    assert world.gate.may_run(text, 0)
    item = SimpleNamespace(precomputed_embeddings=torch.ones(2, 4), offsets=[(0, 1)])
    whole = SimpleNamespace(rid="whole", multimodal_inputs=SimpleNamespace(mm_items=[item]))
    assert world.gate.admit(whole)
    assert world.gate.may_run(whole, 0)
    assert not bare_items(whole)
    assert world.leader.forgone == ["text", "whole"]
    assert not world.leader.asked


class GateMachine(RuleBasedStateMachine):
    """Two ranks see the same: requests come, are prefilled, lose their match, are aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [World(), World(leads=False)]
        self.names = itertools.count()

    @property
    def first(self) -> World:
        return self.ranks[0]

    def parked(self) -> list[str]:
        return sorted(self.first.gate._parked)

    @rule(length=st.integers(0, 3 * STRIDE))
    def change_the_tree(self, length: int) -> None:
        # What is locked cannot be evicted.
        for rank in self.ranks:
            if not rank.tree.held or length > rank.tree.length:
                rank.tree.length = length

    @rule(items=st.integers(1, 3), retracted=st.booleans())
    def come(self, items: int, retracted: bool) -> None:
        rid = f"r{next(self.names)}"
        for rank in self.ranks:
            rank.scheduler.add(rank.request(rid, items), retracted=retracted)

    @rule()
    def need_memory(self) -> None:
        for rank in self.ranks:
            rank.gate.let_go()

    @precondition(lambda self: self.first.scheduler.queue)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.first.scheduler.queue) - 1))
        ran = {rank.prefill(rank.scheduler.queue[index]) for rank in self.ranks}
        assert len(ran) == 1

    @precondition(lambda self: self.first.scheduler.queue)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.first.scheduler.queue) - 1))
        for rank in self.ranks:
            del rank.scheduler.queue[index]

    @rule()
    def tick(self) -> None:
        for rank in self.ranks:
            rank.gate.tidy()
            check_gate(rank.gate)

    @precondition(lambda self: self.parked())
    @rule(data=st.data(), fails=st.booleans())
    def settle(self, data: st.DataObject, fails: bool) -> None:
        rid = data.draw(st.sampled_from(self.parked()))
        covered = [entry[1] for entry in self.first.leader.asked if entry[0] == rid][-1]
        for rank in self.ranks:
            if fails:
                assert rank.gate.resolve(rid, Settled("c", (), "DeadlineError", "no"))
                continue
            request, _ = rank.gate._parked[rid]
            assert rank.land(rid, covered, len(request.multimodal_inputs.mm_items)) is None

    @invariant()
    def what_waits_has_no_embedding(self) -> None:
        """Others may wait for their memory."""
        for rank in self.ranks:
            for request, _ in rank.gate._parked.values():
                assert len(bare_items(request)) == len(request.multimodal_inputs.mm_items)

    @invariant()
    def ranks_agree(self) -> None:
        one, two = self.ranks
        assert [r.rid for r in one.scheduler.queue] == [r.rid for r in two.scheduler.queue]
        assert sorted(one.gate._parked) == sorted(two.gate._parked)
        assert one.tree.held == two.tree.held == one.gate.locks

    def teardown(self) -> None:
        for rank in self.ranks:
            rank.scheduler.queue.clear()
            for rid in list(rank.gate._parked):
                rank.gate.fail(rid, DeadlineError("over"))
            rank.gate.tidy()
            assert rank.tree.held == 0, "a lock was left"


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
