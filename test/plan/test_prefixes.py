"""The prefix cache: what it holds, and what it spares a deployment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd_plan.model import Deployment, simulate
from sglang_epd_plan.prefixes import Chain, PrefixCache, length
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Traffic

A, B, C = (b"a", 100), (b"b", 50), (b"c", 10)


def test_a_chain_is_found_as_far_as_it_is_alike() -> None:
    held = PrefixCache()
    held.insert((A, B))
    assert held.match((A, B, C)) == 2 and held.match((A, C)) == 1
    assert held.match((B,)) == 0  # the same picture behind another beginning
    assert held.tokens == 150


def test_ends_go_before_beginnings_and_the_least_recently_used_first() -> None:
    held = PrefixCache()
    held.insert((A, B))
    held.insert((C,))
    held.shrink(120)
    assert held.match((A, B)) == 1 and held.match((C,)) == 1
    held.match((A,))
    held.shrink(100)
    assert held.match((C,)) == 0 and held.match((A,)) == 1


def test_what_is_pinned_stays() -> None:
    held = PrefixCache()
    held.insert((A, B))
    held.pin((A, B))
    held.shrink(0)
    assert held.match((A, B)) == 2
    held.unpin((A, B))
    held.shrink(0)
    assert held.match((A, B)) == 0 and not held.tokens


PARTS = st.sampled_from([A, B, C, (b"d", 7)])


@given(st.lists(st.tuples(st.lists(PARTS, max_size=4), st.integers(0, 400))))
def test_tokens_are_those_that_are_found(steps: list[tuple[list[tuple[bytes, int]], int]]) -> None:
    held = PrefixCache()
    kept: set[Chain] = set()
    for parts, room in steps:
        chain = tuple(parts)
        held.insert(chain)
        assert held.match(chain) == len(chain)
        kept |= {chain[:end] for end in range(1, len(chain) + 1)}
        held.shrink(room)
        assert held.tokens <= room
        there = {chain for chain in kept if held.match(chain) == len(chain)}
        assert sum(length(chain[-1:]) for chain in there) == held.tokens


def test_later_turns_prefill_their_own_text_alone(profile, workload):
    asked = workload(turns=4, items=2, text_tokens=50, output_tokens=10)
    report = simulate(profile(), asked, parse("1E1PD"), Traffic(rate=0.2, requests=200))
    first = 2 * 256 + 50
    prompts = [first + turn * 60 for turn in range(4)]
    found = sum(prompt - 50 for prompt in prompts[1:]) / sum(prompts)
    assert report.summary()["prefix_cache"] == pytest.approx(found, abs=0.01)
    # Pictures are encoded once a conversation.
    encode_s = report.busy["encode"] * report.end_s
    assert encode_s == pytest.approx(2 * 0.1 * report.counted / 4, rel=0.02)
    late = min(report.ttft)
    assert late == pytest.approx(50 * 1e-4, rel=0.01)


def test_a_prefill_server_does_not_have_the_answers(profile, workload):
    asked = workload(turns=2, items=1, text_tokens=50, output_tokens=10)
    report = simulate(profile(), asked, parse("1E1P1D"), Traffic(rate=0.2, requests=200))
    both = (256 + 50) + (256 + 50 + 10 + 50)
    assert report.summary()["prefix_cache"] == pytest.approx((256 + 50) / both, abs=0.01)


def test_the_turns_of_conversations_are_requests_of_the_rate(profile, workload):
    asked = workload(turns=4, think_s=0.5)
    report = simulate(profile(), asked, parse("2EPD"), Traffic(rate=4, requests=2000), seed=1)
    assert report.throughput == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD", "1E1P1D"])
def test_users_of_a_closed_loop_talk_to_the_end(profile, workload, topology):
    asked = workload({"kind": "closed", "users": 3}, turns=3, think_s=0.5)
    deployment = Deployment(profile(), asked, parse(topology), Traffic(requests=30), seed=1)
    report = deployment.run()
    # A turn that has begun is answered.
    assert 30 <= report.counted <= 32 and report.outcomes == {"done": report.counted}
    assert not deployment.live


def test_pictures_of_a_catalogue_are_found_unless_the_cache_is_off(profile, workload):
    asked = workload(catalogue=5)
    traffic = Traffic(rate=2, requests=400)
    with_cache = simulate(profile(), asked, parse("1EPD"), traffic)
    without = simulate(profile(language={"prefix_cache": False}), asked, parse("1EPD"), traffic)
    assert with_cache.summary()["prefix_cache"] > 0.6 and not without.cached
    assert with_cache.mean("ttft") < 0.5 * without.mean("ttft")


def test_there_is_no_room_for_what_is_not_running(profile, workload):
    """A KV cache of two prompts: what the second needs, the first gives up."""
    small = profile(language={"kv_tokens": 2 * (256 + 100 + 20)})
    report = simulate(
        small, workload(catalogue=50, zipf=0.0), parse("1EPD"), Traffic(rate=1, requests=300)
    )
    assert report.outcomes == {"done": 300}
    assert report.summary()["prefix_cache"] < 0.1
