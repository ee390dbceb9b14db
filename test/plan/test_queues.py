"""The simulation against formulas of queueing theory."""

from __future__ import annotations

import statistics

import msgspec
import pytest

from sglang_epd_plan.model import Deployment, simulate
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Traffic

# One picture at a time, in nothing but the tower and the prefill.
ALONE = {"tower": {"batch_items": 1, "patch_s": 0.1 / 1024}}


@pytest.mark.parametrize("busy", [0.3, 0.6])
def test_encoder_queue_is_m_d_1(profile, workload, busy):
    """Mean wait of Poisson arrivals and equal work: rho s / (2 (1 - rho))."""
    asked = workload(output_tokens=1)
    traffic = Traffic(rate=busy / 0.1, requests=2500)
    runs = [
        simulate(profile(encoder=ALONE), asked, parse("1E1PD"), traffic, seed=seed)
        for seed in range(3)
    ]
    wait = statistics.fmean(statistics.fmean(run.steps["encoder queue"]) for run in runs)
    assert wait == pytest.approx(busy * 0.1 / (2 * (1 - busy)), rel=0.1)
    assert statistics.fmean(run.busy["encode"] for run in runs) == pytest.approx(busy, rel=0.05)


def test_prefill_queue_is_m_m_1(profile, workload):
    """Mean wait of Poisson arrivals and exponential work: rho / (mu - lambda)."""
    asked = workload(
        text_tokens={"kind": "exponential", "mean": 10_000},
        output_tokens=1,
        items=0,
        pictures=[],
    )
    # One at a time: a pass would else take all that wait along.
    machine = profile(language={"running": 1, "chunk_tokens": 1_000_000, "prefill_token_s": 1e-5})
    run = simulate(machine, asked, parse("1EPD"), Traffic(rate=7, requests=12_000))
    wait = statistics.fmean(run.steps["prefill queue"])
    assert wait == pytest.approx(0.7 / (10 - 7), rel=0.15)


def test_closed_loop_obeys_littles_law(profile, workload):
    users = 5
    asked = workload(arrival={"kind": "closed", "users": users, "think_s": 0.5})
    run = simulate(profile(), asked, parse("1E1PD"), Traffic(requests=2000))
    assert run.throughput * (run.mean("total") + 0.5) == pytest.approx(users, rel=0.02)


def test_an_unloaded_request_takes_the_sum_of_its_parts(profile, workload):
    asked = workload(arrival="constant")
    run = simulate(profile(), asked, parse("1E1PD"), Traffic(rate=0.1, requests=5))
    # Tower, link (bytes at 1 TB/s and latency), 356 tokens of prefill.
    ttft = 0.1 + 256 * 8192 / 1e12 + 1e-3 + 356 * 1e-4
    assert run.quantile("ttft", 0.5) == pytest.approx(ttft, rel=1e-6)
    assert run.quantile("tpot", 0.5) == pytest.approx(0.02)
    alone = simulate(profile(), asked, parse("1EPD"), Traffic(rate=0.1, requests=5))
    assert alone.quantile("ttft", 0.5) == pytest.approx(0.1 + 356 * 1e-4, rel=1e-6)
    apart = simulate(profile(), asked, parse("1E1P1D"), Traffic(rate=0.1, requests=5))
    assert apart.quantile("ttft", 0.5) == pytest.approx(ttft + 356 * 1000 / 1e12, rel=1e-6)


def test_pictures_of_one_request_share_a_batch_up_to_the_bound(profile, workload):
    launch = {"tower": {"launch_s": 0.5, "batch_items": 2}}
    asked = workload(arrival="constant", items=4, output_tokens=1)
    run = simulate(profile(encoder=launch), asked, parse("1E1PD"), Traffic(rate=0.1, requests=3))
    # Two passes of two.
    assert run.quantile("ttft", 0.5) == pytest.approx(2 * 0.5 + 4 * 0.1 + 0.001 + 0.1124, rel=1e-3)


def test_decoding_beside_prefill_is_delayed_by_it(profile, workload):
    """Servers that prefill first let those that decode wait; those that mix do less so per
    pass, and neither loses time."""
    asked = workload(items=0, pictures=[], text_tokens=2000, output_tokens=50)
    traffic = Traffic(rate=2, requests=300)
    runs = [
        simulate(profile(language={"mixed": mixed}), asked, parse("1EPD"), traffic)
        for mixed in (False, True)
    ]
    for run in runs:
        assert run.quantile("tpot", 0.9) > 0.02
        assert run.busy["prefill"] == pytest.approx(2 * 0.2, rel=0.1)


def test_many_decode_steps_at_once_are_as_long_as_one_by_one(profile):
    from sglang_epd_plan.decode import DecodeBatch
    from sglang_epd_plan.records import Request

    costs = profile(language={"decode_sequence_s": 1e-3, "decode_context_s": 1e-5}).language
    many, single = DecodeBatch(costs), DecodeBatch(costs)
    for number, (prompt, output) in enumerate([(100, 40), (7, 40), (1000, 41)]):
        for running in (many, single):
            running.add(Request(number, 0, 0.0, 1e9, prompt, output))
    seconds = many.seconds(30)
    each = []
    for _ in range(30):
        each.append(single.seconds(1))
        single.advance(1)
    assert sum(each) == pytest.approx(seconds)
    assert many.steps_begun(sum(each[:12]) + each[12] / 2) == 13
    assert many.steps_begun(0.0) == 1
    assert not many.advance(38)
    assert [request.number for request in many.advance(1)] == [0, 1]
    assert [request.number for request in many.advance(1)] == [2]
    assert many.context == 0


def test_a_run_is_at_its_end_with_nothing_left(profile, workload):
    deployment = Deployment(
        profile(), workload(items=3), parse("2E1P1D"), Traffic(rate=3, requests=200)
    )
    report = deployment.run()
    assert report.counted == 200 and deployment.live == 0
    assert all(not encoder.items and encoder.queued < 1e-6 for encoder in deployment.encoders)
    servers = [*deployment.prefills, *deployment.decodes]
    assert all(server.outstanding == 0 for server in servers)
    assert all(server.prompts.kv_tokens == 0 for server in servers)
    assert all(budget.extents.taken_bytes == 0 for budget in deployment.budgets)


def test_requests_that_end_early_leave_nothing_outstanding(profile, workload):
    """Late ones, in deployments whose encoders refuse."""
    asked = msgspec.structs.replace(workload(items=4), deadline_s=3.0)
    machine, traffic = profile(encoder={"max_items": 40}), Traffic(rate=6, requests=200)
    deployment = Deployment(machine, asked, parse("2E2PD"), traffic)
    report = deployment.run()
    assert report.outcomes["late"] > 20 and report.outcomes["done"] > 20
    assert report.items["refused"] > 0 and report.items["sent again"] > 0
    for dispatch in deployment.dispatches:
        assert not any(dispatch._outstanding)
