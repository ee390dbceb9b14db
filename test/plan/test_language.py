"""One language server by itself: which pass a request waits for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import simpy

from sglang_epd_plan.language import Server
from sglang_epd_plan.model import simulate
from sglang_epd_plan.prefill import PrefillQueue
from sglang_epd_plan.records import Item, Request
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Traffic

# (arrival, prompt tokens, answer tokens); 100 tokens take 10 ms, a step 20 ms.
Asked = Sequence[tuple[float, int, int]]


def first_tokens(costs: Any, asked: Asked, *, prefilled: bool = False) -> list[float]:
    """When the requests have their first token; `prefilled` ones come with their KV."""
    env = simpy.Environment()
    server = Server(
        env,
        costs,
        encodes=False,
        decodes=True,
        prefilled=lambda _request, _server: pytest.fail("it decodes itself"),
        ended=lambda _request: None,
    )
    requests = [
        Request(number, 0, at, 99.0, prompt, output)
        for number, (at, prompt, output) in enumerate(asked)
    ]
    take: Callable[[Request], None] = server.add_prefilled if prefilled else server.add
    for request in requests:
        event = env.timeout(request.arrived)
        event.callbacks.append(partial(lambda one, _event: take(one), request))
    env.run()
    return [request.first for request in requests]


@pytest.mark.parametrize(("overlap", "first"), [(True, 0.14), (False, 0.12)])
def test_a_request_waits_for_the_step_that_was_decided_before_it_came(profile, overlap, first):
    """One comes at 100 ms, in the step from 90 to 110 ms."""
    costs = profile(language={"overlap": overlap}).language
    assert first_tokens(costs, [(0.0, 100, 20), (0.1, 100, 2)]) == pytest.approx([0.01, first])


@pytest.mark.parametrize(("overlap", "first"), [(True, 0.23), (False, 0.21)])
def test_behind_a_prefill_is_a_step_of_those_that_it_made(profile, overlap, first):
    costs = profile(language={"overlap": overlap}).language
    assert first_tokens(costs, [(0.0, 2000, 20), (0.1, 100, 2)]) == pytest.approx([0.2, first])


def test_nothing_is_decided_where_the_pass_leaves_nothing_to_do(profile):
    """A request comes while the only other one has its only token made."""
    assert first_tokens(profile().language, [(0.0, 2000, 1), (0.1, 100, 2)])[1] == pytest.approx(
        0.21
    )


def test_those_that_come_in_one_pass_run_together(profile):
    """Two come in the same step, and are prefilled in one pass after the next step."""
    asked = [(0.0, 100, 20), (0.1, 100, 2), (0.105, 100, 2)]
    assert first_tokens(profile().language, asked)[1:] == pytest.approx([0.15, 0.15])


def test_kv_that_arrives_is_seen_at_the_end_of_a_step(profile):
    """The first token leaves then; the sequence is not in the step that begins then, but in
    the next, so the answer of two tokens ends 40 ms later."""
    ends: list[float] = []
    env = simpy.Environment()
    server = Server(
        env,
        profile().language,
        encodes=False,
        decodes=True,
        prefilled=lambda _request, _server: None,
        ended=lambda request: ends.append(env.now if request.number else -1.0),
    )
    first, second = (Request(number, 0, 0.0, 99.0, 100, out) for number, out in ((0, 20), (1, 2)))
    server.add_prefilled(first)
    env.run(until=0.03)
    assert server.looks_s() == pytest.approx(0.01)
    server.add_prefilled(second)
    env.run()
    assert second.first == pytest.approx(0.04)
    assert ends[0] == pytest.approx(0.08)


def test_a_decode_server_makes_room_when_it_looks(profile, workload):
    """Prefill waits for it: at most for a step of 20 ms, and half of one on average."""
    asked = workload(items=0, pictures=[], output_tokens=200)
    run = simulate(profile(), asked, parse("1EP1D"), Traffic(rate=2, requests=300))
    queue = sorted(run.steps["prefill queue"])
    assert queue[len(queue) // 2] == pytest.approx(0.01, abs=0.003)
    assert queue[int(0.9 * len(queue))] < 0.0201


def test_a_decode_server_keeps_memory_for_a_request_from_before_its_prefill(profile, workload):
    """It holds two prompts and answers. A request is prefilled in 1 s and decoded in 0.4 s, so
    that its own would be free long before it is prefilled."""
    machine = profile(language={"kv_tokens": 2 * 1020, "prefill_token_s": 1e-3})
    asked = workload("constant", items=0, pictures=[], text_tokens=1000, output_tokens=20)
    runs = {
        shape: simulate(machine, asked, parse(shape), Traffic(rate=10, requests=20))
        for shape in ("4EP1D", "4EP9D")
    }
    few, many = (statistics.fmean(run.steps["prefill queue"]) for run in runs.values())
    # Two at a time take 1.4 s each in the one, four at a time 1 s in the other.
    assert runs["4EP1D"].throughput == pytest.approx(2 / 1.4, rel=0.1)
    assert runs["4EP9D"].throughput == pytest.approx(4, rel=0.2)
    assert few > 2 * many
    assert all(run.outcomes == {"done": 20} for run in runs.values())


def test_an_answer_begins_when_the_prefill_server_has_seen_that_its_kv_arrived(profile, workload):
    """Three requests come every 50 ms, and are prefilled in 210 ms each. When the first has ended
    at 260 ms, the server launches the next, and looks. It has decided on the third before the
    second ends, so it looks no more until the third has ended at 680 ms."""
    machine = profile(language={"chunk_tokens": 2000, "prefill_launch_s": 0.01})
    asked = workload("constant", items=0, pictures=[], text_tokens=2000, output_tokens=3)
    run = simulate(machine, asked, parse("1EP1D"), Traffic(rate=20, requests=3))
    ends = (0.27 - 0.05, 0.68 - 0.15, 0.68 - 0.10)
    assert sorted(run.ttft) == pytest.approx(ends, abs=1e-4)
    assert sorted(run.steps["hand over"]) == pytest.approx([0.0, 0.01, 0.21], abs=1e-4)


def test_a_tower_that_keeps_no_embeddings_encodes_a_picture_again_for_each_chunk(profile):
    costs = profile(language={"chunk_tokens": 300, "keeps_embeddings": False}).language
    queue = PrefillQueue(costs, encodes=True, decodes=True)
    request = Request(0, 0, 0.0, 99.0, 1124, 2)
    request.items = [Item(request, bytes([number]), 2048.0, 512) for number in range(2)]
    queue.add(request)
    taken = []
    while request.prefilled < request.prompt:
        one = queue.take(0, 300)
        taken.append([item.key[0] for item in one.items])
        one.advance()
    # Tokens 0 to 511 are the first picture's, those to 1023 the second's.
    assert taken == [[0], [0, 1], [1], [1]]


def test_a_tower_encodes_the_pictures_whose_tokens_a_chunk_begins(profile):
    queue = PrefillQueue(profile().language, encodes=True, decodes=True)
    request = Request(0, 0, 0.0, 99.0, 1124, 2)
    request.items = [Item(request, b"%d" % number, 1024.0, 256) for number in range(4)]
    queue.add(request)
    encoded = []
    while request.prefilled < request.prompt:
        taken = queue.take(0, 500)
        encoded.append(len(taken.items))
        taken.advance()
    assert encoded == [2, 2, 0]
