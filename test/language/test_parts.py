"""Parts of prompts on one rank: none is answered, none is computed twice, and a request never
waits for more than the part that runs."""

from __future__ import annotations

import gc
import math
import pickle
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_epd.language import parts as parts_module
from sglang_epd.language.assembly import Rows
from sglang_epd.language.parts import Parts
from sglang_epd.language.prefix import PrefixGate, Resting, mark
from sglang_epd.tally import Tally
from sglang_epd.wire.messages import Expect, Layout, TensorSpec

PAGE, LEAST = 4, 8
LAYOUT = Layout("IMAGE", TensorSpec("float32", (2, 4)), [[1, 2, 4]])


class Ended:
    """Why a request has ended."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def to_json(self) -> dict[str, str]:
        return {"type": self.kind}


class Request:
    """What SGLang makes of a request, as far as it is used."""

    def __init__(self, rid: str, tokens: int) -> None:
        self.rid = rid
        self.origin_input_ids = [0] * tokens
        self.multimodal_inputs: Any = None
        self.finished_reason: Ended | None = None
        self.cached_tokens = self.already_computed = self.prefix_len = 0
        self.cached_tokens_device = self.cached_tokens_host = self.cached_tokens_storage = 0
        self._cache_breakdown_computed = False
        self.retracted_stain = False
        self.skip_radix_cache_insert = True

    def finished(self) -> bool:
        return self.finished_reason is not None


class Scheduler:
    """A scheduler with a queue and a batch, and its tree."""

    def __init__(self) -> None:
        self.cached = 0
        self.queue: list[Request] = []
        self.batch: list[Request] = []
        self.discarded: list[str] = []
        self.decoding = False

    def match(self, request: Request) -> tuple[int, Any]:
        return min(self.cached, len(request.origin_input_ids) - 1) // PAGE * PAGE, "node"

    def lock(self, node: Any) -> Any:
        return node

    def unlock(self, lock: Any) -> None:
        """Nothing is counted."""

    def add(self, request: Request, *, retracted: bool) -> None:
        self.queue.append(request)

    def remove(self, request: Request) -> bool:
        there = request in self.queue
        self.queue = [one for one in self.queue if one is not request]
        return there

    def waiting(self) -> set[str]:
        return {request.rid for request in self.queue}

    def discard(self, request: Request) -> None:
        self.discarded.append(request.rid)

    def running(self, request: Request) -> bool:
        return not request.finished() and request in self.batch

    def holds(self, request: Request) -> bool:
        return request in self.queue or self.running(request)

    def busy(self) -> tuple[bool, bool]:
        return bool(self.queue), self.decoding


class World:
    def __init__(self, *, stages: bool = False) -> None:
        self.scheduler, self.tally = Scheduler(), Tally()
        self.parts = Parts(self.scheduler, self.scheduler, PAGE, self.tally, stages=stages)
        self.gate = PrefixGate(self.scheduler, self.scheduler, None, lambda _: [], self.parts)

    def begin(self, tokens: int, rid: str = "r.early-1") -> Request:
        """A part of the request "r" comes."""
        self.parts.expect(rid, "r", LEAST)
        return self.come(Request(rid, tokens))

    def come(self, request: Request) -> Request:
        if self.gate.admit(request):
            self.scheduler.queue.append(request)
        return request

    def run(self, request: Request) -> bool:
        """It is taken into a batch, if the gate lets it."""
        request.prefix_len, _ = self.scheduler.match(request)
        if not self.gate.may_run(request, request.prefix_len):
            return False
        self.scheduler.remove(request)
        self.gate.taken(request)
        request.cached_tokens = request.prefix_len - request.already_computed
        # As SGLang does, of what no tier but the device has.
        if not request._cache_breakdown_computed:
            request.cached_tokens_device = request.prefix_len
        self.scheduler.batch = [request]
        return True

    def end(self, request: Request, kind: str = "length") -> None:
        """Its result is processed: its KV is in the tree, and SGLang would stream it."""
        request.finished_reason = Ended(kind)
        self.scheduler.cached = len(request.origin_input_ids)
        assert self.parts.ended(request)

    def count(self, outcome: str) -> int:
        return self.tally.counts["parts", outcome]


@pytest.fixture
def world() -> World:
    return World()


def test_a_part_runs_and_its_request_finds_its_kv(world):
    part = world.begin(20)
    assert not part.skip_radix_cache_insert, "a fake bootstrap's would not be kept"
    assert world.run(part)
    assert world.parts.alive("r")
    world.end(part)
    assert world.parts.ended(part), "with overlap scheduling it comes twice"
    assert not world.parts.alive("r")
    assert world.tally.counts["tokens", ""] == 20
    assert (world.count("done"), world.scheduler.discarded) == (1, [])
    world.parts.settle("r")
    request = world.come(Request("r", 40))
    assert world.run(request)
    assert request.cached_tokens == 0, "nothing had been cached before it came"
    assert request.cached_tokens_device == 0
    assert not world.parts.ended(request)


def test_what_was_cached_before_is_told_as_cached(world):
    world.scheduler.cached = 12
    part = world.begin(24)
    assert world.run(part)
    world.end(part)
    assert world.tally.counts["tokens", ""] == 12
    world.parts.settle("r")
    request = world.come(Request("r", 40))
    assert world.run(request)
    assert (request.cached_tokens, request.cached_tokens_device) == (12, 12)


def test_what_was_loaded_back_or_came_meanwhile_is_told_as_cached_and_of_which_tier(world):
    part = world.begin(24)
    world.scheduler.cached = 12
    assert world.run(part)
    part.cached_tokens_device, part.cached_tokens_host = 4, 8
    world.end(part)
    world.parts.settle("r")
    request = world.come(Request("r", 40))
    assert world.run(request)
    assert (request.cached_tokens, request.already_computed) == (12, 12)
    assert (request.cached_tokens_device, request.cached_tokens_host) == (4, 8)


def test_a_part_that_did_not_run_is_in_no_count(world):
    part = world.begin(24)
    world.parts.settle("r")
    assert world.scheduler.queue == [] and world.count("withdrawn") == 1
    world.scheduler.cached = 12
    request = world.come(Request("r", 40))
    assert world.run(request)
    assert (request.cached_tokens, request.already_computed) == (12, 0)
    del part


def test_a_retracted_request_is_not_counted_again(world):
    world.run(part := world.begin(20))
    world.end(part)
    world.parts.settle("r")
    request = world.come(Request("r", 40))
    request.retracted_stain = True
    assert world.run(request)
    assert request.already_computed == 0


@pytest.mark.parametrize(("cached", "runs"), [(13, True), (16, False), (24, False)])
def test_a_part_that_the_tree_has_is_not_run(world, cached, runs):
    """Whole pages only: of 22 tokens 20 are kept."""
    world.scheduler.cached = cached
    part = world.begin(22)
    assert (part in world.scheduler.queue) is runs
    assert world.parts.alive("r") is runs
    assert world.count("covered") == (not runs)
    assert world.scheduler.discarded == ([] if runs else [part.rid])


def test_nothing_is_kept_of_a_request_that_is_refused_before_its_items_have_landed(world):
    """SGLang queues it without them, to have it answered."""
    part = world.begin(20)
    request = world.come(Request("r", 40))
    assert world.scheduler.queue == [request]
    assert world.scheduler.discarded == [part.rid]
    assert world.count("withdrawn") == 1
    world.scheduler.cached = 12
    other = world.begin(24)
    assert world.run(other)
    world.end(other)
    world.parts.settle("r")
    assert world.run(again := world.come(Request("r", 40)))
    assert again.cached_tokens == 12, "another of that name has its own beginning"


def test_a_part_that_waits_when_the_last_item_lands_is_withdrawn(world):
    part = world.begin(20)
    world.parts.settle("r")
    assert part not in world.scheduler.queue
    assert world.scheduler.discarded == [part.rid]
    assert world.count("withdrawn") == 1
    assert world.run(world.come(Request("r", 40)))


def test_a_part_that_comes_after_the_outcome_is_withdrawn(world):
    """Both in one tick: the ranks read all messages before they queue a request."""
    world.parts.expect("r.early-1", "r", LEAST)
    world.parts.settle("r")
    part = world.come(Request("r.early-1", 20))
    assert part not in world.scheduler.queue
    assert world.count("withdrawn") == 1
    assert world.parts.ended(part)


def test_a_request_waits_for_a_part_of_it_that_runs(world):
    part = world.begin(20)
    assert world.run(part)
    world.parts.settle("r")
    request = world.come(Request("r", 40))
    assert not world.run(request)
    assert request in world.scheduler.queue, "it keeps its place"
    assert world.run(other := world.come(Request("other", 40)))
    world.scheduler.batch = [part]
    world.end(part)
    assert world.run(request)
    assert not world.parts.ended(other)


def test_a_request_waits_for_a_part_whose_last_chunk_is_of_the_same_batch(world):
    """SGLang's scheduler has forgotten then that it was in chunks, and runs it only later."""
    part = world.begin(20)
    assert world.run(part)
    world.scheduler.batch = []
    world.parts.settle("r")
    request = world.come(Request("r", 40))
    assert not world.gate.may_run(request, 0, [part])
    assert request in world.scheduler.queue
    assert world.gate.may_run(request, 0, [world.come(Request("other", 40))])


def test_a_request_does_not_wait_for_a_part_that_is_gone(world):
    part = world.begin(20)
    assert world.run(part)
    world.parts.settle("r")
    request = world.come(Request("r", 40))
    world.scheduler.batch = []  # aborted, without a word
    assert world.run(request)


def test_a_request_does_not_wait_for_a_part_that_was_refused(world):
    world.parts.expect("r.early-1", "r", LEAST)  # and is never queued
    world.parts.settle("r")
    assert world.run(world.come(Request("r", 40)))


@pytest.mark.parametrize("ends", ["run", "withdrawn", "gone"])
def test_a_part_is_forgotten_with_sglangs_request(world, ends):
    part = world.begin(20)
    if ends == "run":
        assert world.run(part)
        world.end(part)
    elif ends == "withdrawn":
        world.parts.settle("r")
    else:  # SGLang has aborted it between two chunks, and tells nobody
        world.scheduler.queue.clear()
    world.scheduler.batch = []
    del part
    gc.collect()
    assert not world.parts.any
    assert not world.parts.alive("r")


def test_a_part_that_is_aborted_in_the_queue_does_not_stop_the_next_one(world):
    part = world.begin(20)
    assert world.parts.alive("r")
    world.scheduler.remove(part)
    assert not world.parts.alive("r")
    assert world.count("failed") == 1
    assert world.run(world.begin(30, "r.early-2"))


def test_a_part_whose_request_is_aborted_leaves_the_queue(world):
    """SGLang would release its media and run it all the same, in a prefill server's queue."""
    other = world.come(Request("s", 40))
    world.begin(20)
    world.parts.abort(lambda rid: rid.startswith("r"))
    assert world.scheduler.queue == [other]
    assert world.scheduler.discarded == ["r.early-1"]
    assert not world.parts.alive("r")
    running = world.begin(30, "r.early-2")
    world.run(running)
    world.parts.abort(lambda _rid: True)
    assert world.parts.alive("r"), "SGLang ends what runs"


def test_an_aborted_part_is_not_answered_and_not_counted_as_computed(world):
    part = world.begin(20)
    world.run(part)
    world.end(part, "abort")
    assert world.count("failed") == 1
    assert world.tally.counts["tokens", ""] == 0


def test_a_user_that_knows_how_parts_are_called_is_answered(world):
    request = world.come(Request("r.early-1", 20))
    assert request in world.scheduler.queue
    assert not world.parts.ended(request)


def test_covered_items_have_to_be_in_the_tree(world):
    part = Request("r.early-1", 40)
    item = type("Item", (), {"offsets": [(2, 9)], "precomputed_embeddings": torch.empty(0, 4)})
    part.multimodal_inputs = type("Inputs", (), {"mm_items": [item()]})
    expect = Expect("ticket", 1, 60.0, (bytes(32),), (LAYOUT,))
    mark(part.multimodal_inputs, [Rows(0, 0, 8)], Resting(part, expect))
    world.parts.expect(part.rid, "r", LEAST)
    assert world.come(part) not in world.scheduler.queue
    assert world.count("failed") == 1


def covered(rid: str) -> Request:
    """Of 40 tokens, with an item without rows in the first ten."""
    request = Request(rid, 40)
    item = type("Item", (), {"offsets": [(2, 9)], "precomputed_embeddings": torch.empty(0, 4)})
    request.multimodal_inputs = type("Inputs", (), {"mm_items": [item()]})
    expect = Expect("ticket", 1, 60.0, (bytes(32),), (LAYOUT,))
    mark(request.multimodal_inputs, [Rows(0, 0, 8)], Resting(request, expect))
    return request


@pytest.mark.parametrize("runs", [True, False])
def test_a_request_that_turns_out_to_be_covered_has_nothing_to_wait_for(world, runs):
    """Its layouts became known when a part of it had been begun, and nothing is sent for."""
    part = world.begin(20)
    if runs:
        assert world.run(part)
    world.scheduler.cached = 12
    request = world.come(covered("r"))
    assert not world.parts._courses
    assert world.count("withdrawn") == (not runs)
    assert world.run(request) is not runs, "it waits for a part that runs"
    if runs:
        world.end(part)
        assert world.run(request)


def test_a_part_that_loses_the_match_of_its_covered_items_is_dropped(world):
    part = covered("r.early-1")
    world.scheduler.cached = 12
    world.parts.expect(part.rid, "r", LEAST)
    assert world.come(part) in world.scheduler.queue
    world.scheduler.cached = 0
    assert not world.run(part)
    world.scheduler.add = lambda request, retracted: world.come(request)
    world.gate.tidy()
    assert part not in world.scheduler.queue
    assert world.count("failed") == 1
    assert not world.parts.alive("r")


def test_a_request_by_the_name_of_one_that_failed_has_nothing_of_its_parts(world):
    """A client may ask again under the id that it chose."""
    first = world.begin(20)
    world.run(first)
    world.end(first)
    world.parts.settle("r")
    world.parts.forget("r")
    part = world.begin(40, "r.early-2")
    assert part in world.scheduler.queue, "its parts are prefilled as any other's"
    world.scheduler.queue.clear()
    world.parts.forget("r")
    again = world.come(Request("r", 40))
    assert world.run(again)
    assert again.cached_tokens == 20, "all of it is a hit"


def test_courses_of_requests_that_sglang_refuses_are_not_kept_for_ever(world):
    for number in range(1000):
        world.parts.expect(f"{number}.early-1", str(number), LEAST)
        world.parts.settle(str(number))
    assert len(world.parts._courses) <= 256


@pytest.fixture
def prefill(world, monkeypatch):
    """Runs a prefill of so many tokens that takes so many seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(parts_module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def run(tokens: int, seconds: float, *, chunked: bool = False) -> None:
        request = world.come(Request(str(tokens), tokens))
        assert world.run(request)
        clock.now += seconds
        world.parts.ended(request, chunked=chunked)
        clock.now += 5.0
        world.parts.ended(request)  # another token of its answer

    run(8, 100.0)  # a server's first pass is slow
    return run


def test_a_part_has_as_many_tokens_as_the_fastest_prefill_had_time_for(world, prefill):
    assert world.parts.pause_s() == 0
    assert world.parts.least() == PAGE + 1, "nothing is known yet, and less than a page is lost"
    prefill(10, 2.0)
    assert world.parts.least() == PAGE + 1
    prefill(100, 4.0)
    prefill(50, 4.0)
    # Two seconds of tokens that take 0.04 each.
    assert world.parts.least() == 50 - 10
    assert world.parts.pause_s() == 2.0 / 8
    world.scheduler.decoding = True
    assert world.parts.least() == 4 * 40
    assert not world.parts.any, "nothing has to be looked at"
    prefill(1000, 4.0, chunked=True)
    assert world.parts.least() == math.ceil(4 * (2.0 / 0.009 - 10)), "all of its chunks"


def test_long_prefills_do_not_tell_what_a_short_one_has_time_for(world, prefill):
    """A server that has seen long prompts alone would have no part of them prefilled, and learn
    nothing."""
    prefill(1000, 20.0)
    prefill(500, 10.0)
    assert world.parts.least() == PAGE + 1
    prefill(10, 2.0)
    assert world.parts.least() == 100 - 10


def test_no_part_is_worth_it_while_others_wait_or_after_one_that_failed_by_surprise(world):
    world.come(Request("other", 10))
    assert world.parts.least() is None
    always = Parts(world.scheduler, world.scheduler, PAGE, Tally(), always=True)
    assert always.least() == PAGE + 1
    assert always.pause_s() == 0
    always.broken = True
    assert always.least() is None


class Stages:
    """Two pipeline stages, which take the same requests in and run the same batches."""

    def __init__(self) -> None:
        self.first, self.later = self.both = World(stages=True), World()
        self.known: list[tuple[Request, ...]] = []

    def hear(self, name: str, *arguments: Any) -> None:
        getattr(self.first.parts, name)(*arguments)

    def tell(self) -> None:
        heard, self.first.parts.heard = self.first.parts.heard, []
        self.later.parts.told(pickle.loads(pickle.dumps(heard)))

    def come(self, rid: str, tokens: int) -> None:
        self.known.append(tuple(world.come(Request(rid, tokens)) for world in self.both))

    def run(self, choice: int) -> None:
        """One of those that wait, if the gates let it."""
        first = self.first.scheduler
        if first.queue and not first.batch:
            ours = first.queue[choice % len(first.queue)]
            (pair,) = (pair for pair in self.known if pair[0] is ours)
            ran = [world.run(one) for world, one in zip(self.both, pair, strict=True)]
            assert ran[0] == ran[1]

    def end(self) -> None:
        for world in self.both:
            for one in world.scheduler.batch:
                one.finished_reason = Ended("length")
                world.parts.ended(one)
                world.scheduler.cached = max(world.scheduler.cached, len(one.origin_input_ids))
            world.scheduler.batch = []

    def give_way(self, choice: int) -> None:
        """Memory is short for one of them."""
        first = self.first.scheduler
        if not first.queue:
            return
        ours = first.queue[choice % len(first.queue)]
        (pair,) = (pair for pair in self.known if pair[0] is ours)
        gave = [world.gate.gives_way(one) for world, one in zip(self.both, pair, strict=True)]
        assert gave[0] == gave[1]
        for world in self.both:
            world.gate.tidy()

    def go_on(self, name: str, number: int, tokens: int, what: str) -> list[tuple[str, int]]:
        """Something happens to a request that waits; the requests that come of it."""
        rid = f"{name}.early-{number}"
        if what in ("lands", "fails"):
            self.hear("settle", name)
            if what == "lands":
                return [(name, tokens + PAGE)]
            self.hear("forget", name)
        elif what != "nothing" and not self.first.parts.alive(name):
            self.hear("expect", rid, name, LEAST)
            if what == "part":
                return [(rid, tokens)]
            self.hear("fail", rid)
        return []

    def check(self) -> None:
        seen = []
        for world in self.both:
            one = world.scheduler
            queued, batch = [each.rid for each in one.queue], [each.rid for each in one.batch]
            books = len(world.parts._courses), len(world.parts._awaited)
            seen.append((queued, batch, one.discarded, one.cached, books))
        assert seen[0] == seen[1]


def play(seed: int) -> Any:
    """Requests come, with parts or without, and end or fail, at any time; outcomes of parts."""
    draw, stages = random.Random(seed), Stages()
    waiting: dict[str, int] = {}
    for number in range(120):
        came = []
        for name in list(waiting):
            what = draw.choice(["part", "part", "nothing", "lands", "fails", "surprise"])
            waiting[name] += draw.randrange(3 * PAGE)
            came += stages.go_on(name, number, waiting[name], what)
            if what in ("lands", "fails"):
                del waiting[name]
        waiting[f"r{number}"] = draw.randrange(8, 60)
        stages.tell()
        for request in came:
            stages.come(*request)
        stages.check()
        for step in draw.sample(["run", "end", "give way"], draw.randrange(4)):
            if step == "end":
                stages.end()
            else:
                (stages.run if step == "run" else stages.give_way)(draw.randrange(9))
            stages.check()
        for world in stages.both if number % 10 == 0 else ():
            world.scheduler.cached = 0  # evicted
    return stages.first.tally.counts


def test_a_later_stage_queues_and_runs_what_the_first_one_does():
    seen = sum((play(seed) for seed in range(40)), Counter())
    assert all(seen["parts", one] for one in ("done", "withdrawn", "covered", "failed"))


def test_what_the_first_stage_hears_is_kept_for_later_ones_alone():
    alone, first = World(), World(stages=True)
    for world in (alone, first):
        world.begin(20)
        world.parts.settle("r")
        world.parts.settle("another, without parts")
        world.parts.forget("r")
    assert alone.parts.heard == []
    assert [name for name, *_ in first.parts.heard] == ["expect", "settle", "forget"]
