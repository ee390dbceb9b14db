"""Goodput and plans: against what can be reckoned by hand."""

from __future__ import annotations

import msgspec
import pytest

from sglang_epd.errors import ConfigError
from sglang_epd_plan import plots
from sglang_epd_plan.goodput import goodput
from sglang_epd_plan.model import simulate
from sglang_epd_plan.planning import SHAPES, NoPlanError, enough, plan, work
from sglang_epd_plan.report import Slo
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Traffic

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def test_goodput_is_the_tower_s_rate_where_only_that_binds(profile, workload):
    asked = workload(arrival="constant", output_tokens=1, text_tokens=1)
    machine = profile(language={"prefill_token_s": 1e-7})
    found = goodput(machine, asked, parse("1E1PD"), SLO, seconds=60, start=4)
    # 100 ms a picture.
    assert found.rate == pytest.approx(10, rel=0.08)
    held, failed = found.last(holds=True), found.last(holds=False)
    assert held is not None and failed is not None
    assert held.rate == found.rate < failed.rate <= found.rate * 1.03


def test_goodput_is_nothing_where_one_request_alone_is_late(profile, workload):
    found = goodput(profile(), workload(), parse("1E1PD"), Slo(ttft_s=0.01, tpot_s=1), seconds=10)
    assert found.rate == 0


def test_a_second_tower_doubles_goodput_until_prefill_binds(profile, workload):
    asked = workload(arrival="constant", output_tokens=1, text_tokens=1)
    topologies = [parse(shape, policy="least_loaded") for shape in ("1E1PD", "2E1PD", "8E1PD")]
    rates = [
        goodput(profile(), asked, topology, SLO, seconds=25, start=8).rate
        for topology in topologies
    ]
    assert rates[1] / rates[0] == pytest.approx(2, rel=0.15)
    # 257 tokens are 25.7 ms.
    assert rates[2] == pytest.approx(1 / 0.0257, rel=0.15)


def test_goodput_refuses_what_has_no_rate(profile, workload):
    closed = workload(arrival={"kind": "closed", "users": 2})
    with pytest.raises(ConfigError, match="no rate"):
        goodput(profile(), closed, parse("1EPD"), SLO)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_holds_and_one_server_less_does_not(profile, workload, shape):
    asked = workload(items=2)
    found = plan(profile(), asked, SLO, 12, shape, requests=300)
    assert found.report.meets(SLO)
    tried = dict(found.steps)
    assert tried[found.topology.name]
    for name in SHAPES[shape]:
        count = getattr(found.topology, name)
        if count == 1:
            continue
        # One fewer was tried, with as many of the others or more, and failed.
        smaller = msgspec.structs.replace(found.topology, **{name: count - 1})
        failed = [parse(one) for one, holds in found.steps if not holds]
        assert any(
            getattr(one, name) == count - 1
            and all(getattr(one, other) >= getattr(smaller, other) for other in SHAPES[shape])
            for one in failed
        )
    assert found.limit.rate >= 12 * 0.9
    assert "requests/s" in found.breaks
    assert found.topology.hour_cost(profile(gpu_hour_cost=3)) == 3 * found.topology.gpus(profile())


def test_what_breaks_first_is_named(profile, workload):
    """Encoders that are just enough, before a language server with nothing to do."""
    machine = profile(language={"prefill_token_s": 1e-6, "decode_launch_s": 1e-3})
    found = plan(machine, workload(items=2), SLO, 25, "E+PD", requests=300)
    assert "TTFT" in found.breaks and "encode" in found.breaks
    slow = profile(language={"decode_sequence_s": 0.004})
    found = plan(slow, workload(output_tokens=100), SLO, 4, "E+PD", requests=300)
    assert "TPOT" in found.breaks


def test_what_no_number_of_servers_can_do_is_said(profile, workload):
    with pytest.raises(NoPlanError, match="to itself"):
        plan(profile(), workload(), Slo(ttft_s=0.05, tpot_s=1), 1, "E+PD", requests=100)
    with pytest.raises(ConfigError, match="no shape"):
        plan(profile(), workload(), SLO, 1, "P+E")
    with pytest.raises(ConfigError, match="positive rate"):
        plan(profile(), workload(), SLO, 0, "EPD")


def test_servers_that_are_overloaded_a_little_are_no_plan(profile, workload):
    """By 3%: a short run ends before their queue is too long. A picture takes 0.1 s of a tower."""
    asked = workload(arrival="constant", output_tokens=1, text_tokens=1)
    machine = profile(language={"prefill_token_s": 1e-7})
    found = plan(machine, asked, SLO, 103, "E+PD", requests=300)
    assert found.topology.encoders > 10
    assert found.report.counted >= 12_000, "two minutes"


def test_a_rate_is_held_for_several_answers_and_conversations(profile, workload):
    slo, rate = Slo(ttft_s=1.0, tpot_s=0.1), 2.0
    assert enough(workload(), slo, rate, 10) == 240
    assert enough(workload(), slo, rate, 1000) == 1000
    assert enough(workload(), Slo(ttft_s=10.0, tpot_s=0.1), rate, 10) == 1000
    assert enough(workload(output_tokens=999), slo, rate, 10) == pytest.approx(1009, abs=1)
    talk = 3 * (1 + 20 * 0.1) + 2 * 60
    assert enough(workload(turns=3, think_s=60.0), slo, rate, 10) == 5 * talk * rate


def test_the_work_of_a_mean_request_is_that_of_the_run(profile, workload):
    asked = workload(items={"kind": "uniform", "low": 1, "high": 3})
    one = work(profile(), asked, SLO)
    run = simulate(profile(), asked, parse("1E1P1D"), Traffic(rate=2, requests=2000))
    assert run.busy["encode"] == pytest.approx(2 * one["encoders"], rel=0.05)
    assert run.busy["prefill"] == pytest.approx(2 * one["prefills"], rel=0.05)


def test_plots_are_files_that_do_not_change(profile, workload, tmp_path):
    runs = [
        (rate, simulate(profile(), workload(), parse("1E1PD"), Traffic(rate=rate, requests=30)))
        for rate in (1, 5)
    ]
    for number in range(2):
        plots.sweep(tmp_path / f"sweep{number}.svg", {"1E1PD": runs}, SLO)
        plots.steps(tmp_path / f"steps{number}.svg", {"1E1PD": runs[0][1]})
        plots.bars(tmp_path / f"bars{number}.svg", {"a": {"x": 1, "y": 2}, "b": {"x": 3}}, "n")
        plots.lines(tmp_path / f"lines{number}.png", {"a": [(1, 2), (2, 3)]}, "x, y")
    for name in ("sweep", "steps", "bars"):
        first, second = ((tmp_path / f"{name}{number}.svg").read_text() for number in range(2))
        assert first == second and "</svg>" in first
    assert (tmp_path / "lines0.png").read_bytes()[:4] == b"\x89PNG"
