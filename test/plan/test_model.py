"""What has to hold of any run."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.machines import KIND, PROFILE
from sglang_epd.errors import ConfigError
from sglang_epd.profile import Profile, load_profile
from sglang_epd.schema import convert, load
from sglang_epd_plan.model import Deployment, simulate
from sglang_epd_plan.records import Outcome, Request
from sglang_epd_plan.report import Slo
from sglang_epd_plan.topology import Topology, parse
from sglang_epd_plan.workload import Traffic, Workload

SHAPES = ("1EPD", "3EPD", "1E1PD", "3E2PD", "2E1P1D", "2E2P3D", "1EP1D")


@settings(max_examples=25)
@given(
    shape=st.sampled_from(SHAPES),
    rate=st.floats(0.1, 200),
    items=st.integers(0, 6),
    catalogue=st.sampled_from([0, 3]),
    output=st.integers(1, 40),
    policy=st.sampled_from(["affinity", "least_loaded", "round_robin", "shuffle"]),
    seed=st.integers(0, 5),
)
def test_every_request_ends_once(shape, rate, items, catalogue, output, policy, seed):
    machine = convert(PROFILE, Profile, "profile")
    kind = {**KIND, "items": items, "output_tokens": output, "catalogue": catalogue}
    asked = convert({"name": "w", "kinds": [kind], "deadline_s": 5}, Workload, "workload")
    topology = parse(shape, policy=policy)
    run = simulate(machine, asked, topology, Traffic(rate=rate, requests=60), seed=seed)
    assert run.counted == 60
    assert len(run.ttft) == run.outcomes["done"]
    assert all(
        sum(steps) == pytest.approx(ttft)
        for ttft, steps in zip(run.ttft, zip(*run.steps.values(), strict=True), strict=True)
    )
    assert all(seconds >= -1e-9 for step in run.steps.values() for seconds in step)
    assert all(share <= 1 + 1e-9 for share in run.busy.values())


def test_a_request_does_not_end_twice():
    request = Request(0, 0, 0.0, 1.0, 1, 1)
    request.finish(Outcome.DONE, 1.0)
    with pytest.raises(AssertionError, match="twice"):
        request.finish(Outcome.LATE, 2.0)


def test_the_same_seed_gives_the_same_report(profile, workload):
    asked = workload(items={"kind": "uniform", "low": 1, "high": 4})
    runs = [
        simulate(profile(), asked, parse("2E1PD"), Traffic(rate=4, requests=300), seed=seed)
        for seed in (1, 1, 2)
    ]
    first, again, other = (json.dumps(run.summary()) for run in runs)
    assert first == again != other
    assert runs[0].ttft == runs[1].ttft


def test_cells_share_the_requests_and_the_rate(profile, workload):
    topology = parse("2E1PD", cells=3)
    run = simulate(profile(), workload(), topology, Traffic(rate=12, requests=300), seed=3)
    one = simulate(profile(), workload(), parse("2E1PD"), Traffic(rate=4, requests=100), seed=3)
    assert run.counted == len(run.ttft) == 300 and len(set(run.ttft)) > 200
    assert run.busy["encode"] == pytest.approx(one.busy["encode"], rel=0.3)
    assert run.throughput == pytest.approx(3 * one.throughput, rel=0.3)


@pytest.mark.parametrize("shapes", [("1E2PD", "2E2PD", "4E2PD"), ("1EPD", "2EPD", "4EPD")])
def test_more_servers_are_not_worse(profile, workload, shapes):
    asked = workload(items={"kind": "uniform", "low": 1, "high": 4})
    means = [
        simulate(
            profile(), asked, parse(shape, policy="least_loaded"), Traffic(rate=3.5, requests=800)
        ).mean("ttft")
        for shape in shapes
    ]
    assert means == sorted(means, reverse=True)


def test_a_higher_rate_is_not_faster(profile, workload):
    means = [
        simulate(profile(), workload(), parse("1E1PD"), Traffic(rate=rate, requests=800)).mean(
            "ttft"
        )
        for rate in (1, 4, 8)
    ]
    assert means == sorted(means)


def test_policies_balance_as_they_do_in_the_package(profile, workload):
    """Affinity finds what was encoded before; least_loaded spreads patches."""
    machine = profile(encoder={"cache_mb": 20})
    asked = workload(items=1, catalogue=40, zipf=1.0)
    found, spread = {}, {}
    for name in ("affinity", "shuffle"):
        topology = parse("4E2PD", policy=name)
        run = simulate(machine, asked, topology, Traffic(rate=10, requests=800))
        found[name] = run.items["found"] + run.items["shared"]
    # 40 embeddings of 2 MiB: each cache holds a quarter of them.
    assert found["affinity"] > 1.2 * found["shuffle"]
    for name in ("least_loaded", "shuffle"):
        mixed = workload(pictures=[{"width": 224, "height": 224}, {"width": 896, "height": 896}])
        traffic = Traffic(rate=8, requests=800)
        deployment = Deployment(profile(), mixed, parse("4E2PD", policy=name), traffic)
        spread[name] = statistics.fmean(deployment.run().steps["encoder queue"])
        busy = [encoder.busy_s for encoder in deployment.encoders]
        assert max(busy) < 1.1 * statistics.fmean(busy)
    assert spread["least_loaded"] < 0.7 * spread["shuffle"]


def test_encoders_that_are_full_refuse_and_are_asked_again(profile, workload):
    machine = profile(encoder={"max_items": 2})
    run = simulate(machine, workload(), parse("2E1PD"), Traffic(rate=18, requests=200))
    assert run.items["refused"] > 0
    assert run.counted == 200


def test_what_is_late_or_too_large_is_said_to_be(profile, workload):
    small = profile(language={"kv_tokens": 300})
    run = simulate(small, workload(), parse("1E1PD"), Traffic(rate=1, requests=20))
    assert run.outcomes == {"too large": 20}
    assert run.quantile("ttft", 0.5) == float("inf")
    assert run.summary()["ttft_ms"]["p99"] is None
    held = profile(language={"receive_mb": 1})
    run = simulate(held, workload(), parse("1E1PD"), Traffic(rate=1, requests=20))
    assert run.outcomes == {"too large": 20}
    kind = {**KIND, "items": 4}
    asked = convert({"name": "w", "kinds": [kind], "deadline_s": 0.5}, Workload, "workload")
    run = simulate(profile(), asked, parse("1E1PD"), Traffic(rate=20, requests=200))
    assert run.outcomes["late"] > 100
    assert not run.meets(Slo(ttft_s=100, tpot_s=100))


def test_a_receive_budget_makes_encoders_wait(profile, workload):
    asked = workload(items=4, output_tokens=200)
    runs = [
        simulate(
            profile(language={"receive_mb": megabytes}),
            asked,
            parse("4E1PD"),
            Traffic(rate=4, requests=200),
        )
        for megabytes in (12, 2048)
    ]
    # Embeddings stay for the 4 s of an answer; 12 MiB are those of one request.
    assert statistics.fmean(runs[0].steps["memory"]) > 10
    assert max(runs[1].steps["memory"]) == 0
    assert runs[0].mean("ttft") > runs[1].mean("ttft")


def _profile(**changes):
    return {**PROFILE, **changes}


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (_profile(colour="red"), Profile, "unknown field `colour`"),
        (_profile(source=[]), Profile, "source"),
        (_profile(encoder={"tower": {"patch_s": -1}}), Profile, ">= 0.0"),
        (_profile(encoder={"tower": {"patch_s": float("nan")}}), Profile, "not a finite"),
        (_profile(encoder={"tower": {"patch_s": 1, "patch_ms": 1}}), Profile, "patch_ms"),
        (_profile(pixels={"patch_px": 0, "merge": 4}), Profile, ">= 1"),
        ({"name": "w", "kinds": []}, Workload, "at least one kind"),
        ({"name": "w", "kinds": [{**KIND, "items": -1}]}, Workload, "items"),
        ({"name": "w", "kinds": [{**KIND, "text_tokens": 0}]}, Workload, "text_tokens"),
        ({"name": "w", "kinds": [{**KIND, "pictures": []}]}, Workload, "pictures or by patches"),
        ({"name": "w", "kinds": [{**KIND, "weight": 0}]}, Workload, "weight"),
        (
            {"name": "w", "kinds": [{**KIND, "items": {"kind": "uniform", "low": 5, "high": 2}}]},
            Workload,
            "above high",
        ),
        ({"name": "w", "kinds": [KIND], "arrival": {"kind": "weekly"}}, Workload, "weekly"),
        ({"encoders": 1}, Topology, "prefills"),
        ({"prefills": 1, "encoders": -1}, Topology, ">= 0"),
        ({"prefills": 1, "policy": "best"}, Topology, "not a policy"),
        ({"prefills": 1, "cells": 0}, Topology, ">= 1"),
        ({"ttft_s": 1, "tpot_s": 1, "quantile": 1}, Slo, "below 1"),
        ({"ttft_s": 0, "tpot_s": 1}, Slo, "ttft_s"),
    ],
)
def test_nonsense_is_refused_with_what_is_wrong(value, kind, says):
    with pytest.raises(ConfigError, match=says):
        convert(value, kind, "this")


@pytest.mark.parametrize("text", ["", "EPD", "0EPD", "1E0PD", "2PD", "1P1D", "1E1EP1D", "-1EPD"])
def test_what_is_no_topology_is_refused(text):
    with pytest.raises(ConfigError, match="is no topology"):
        parse(text)


@pytest.mark.parametrize("text", ["4EPD", "1E3PD", "2E1P1D", "1EP2D"])
def test_a_topology_is_called_what_it_was_written_as(text):
    assert parse(text).name == text
    assert parse(text, cells=3).name == f"3 x {text}"


@pytest.mark.parametrize(
    "traffic",
    [
        {"rate": -1, "requests": 5},
        {"rate": float("inf"), "requests": 5},
        {"rate": 1},
        {"rate": 1, "requests": 0},
    ],
)
def test_traffic_has_a_rate_and_an_end(traffic):
    with pytest.raises(ConfigError):
        Traffic(**traffic)


def test_a_patch_of_a_video_attends_to_its_step_or_to_all_of_it(profile, workload):
    """Ten steps of 1,024 patches: 1 s of the square term where they are apart, 10 s where not."""
    clip = [{"width": 448, "height": 448, "frames": 10}]
    times = []
    for within in (True, False):
        tower = {"patch_s": 0.0, "patch2_s": 0.1 / 1024**2, "within_steps": within}
        machine = profile(encoder={"tower": tower}, language={"tower": tower})
        for shape in ("1E1PD", "1EPD"):
            traffic = Traffic(rate=0.001, requests=1)
            run = simulate(machine, workload(pictures=clip), parse(shape), traffic)
            times.append(run.mean("ttft") - 2660 * 1e-4)
    assert times == pytest.approx([1, 1, 10, 10], abs=0.1)


def test_servers_apart_need_the_size_of_what_is_sent(profile, workload):
    machine = profile(links={"kv_bytes_per_token": None})
    traffic = Traffic(rate=1, requests=5)
    assert simulate(machine, workload(), parse("1E1PD"), traffic).counted == 5
    with pytest.raises(ConfigError, match="small: prefill and decode apart need"):
        simulate(machine, workload(), parse("1E1P1D"), traffic)
    for name in ("h100-qwen3-vl-8b", "h100-qwen2_5-vl-7b", "h20-qwen3-vl-235b", "a100-qwen3-vl-4b"):
        assert load_profile(name).links.kv_bytes_per_token


def test_arrivals_and_rates_go_together(profile, workload):
    closed = workload(arrival={"kind": "closed", "users": 2})
    with pytest.raises(ConfigError, match="closed loop"):
        simulate(profile(), closed, parse("1EPD"), Traffic(rate=1, requests=5))
    with pytest.raises(ConfigError, match="closed loop"):
        simulate(profile(), workload(), parse("1EPD"), Traffic(requests=5))


def test_files_are_read_as_json_and_yaml(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    text = "name: w\nkinds:\n- {text_tokens: 5, output_tokens: {kind: uniform, low: 1, high: 9}}\n"
    (tmp_path / "w.yaml").write_text(text)
    assert load_profile(str(tmp_path / "p.json")).name == "small"
    assert load(tmp_path / "w.yaml", Workload).kinds[0].output_tokens.high == 9
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.yaml").write_text("name: .inf\n")
    for name in ("bad.json", "bad.yaml", "none.json"):
        with pytest.raises(ConfigError, match=name):
            load(tmp_path / name, Profile)


@pytest.mark.parametrize("name", ["h20-qwen3-vl-235b", "a100-qwen3-vl-4b"])
def test_profiles_that_come_along_state_their_sources(name):
    assert all(
        "measured" in one or "https" in one or len(one) > 40 for one in load_profile(name).source
    )
    with pytest.raises(ConfigError, match=name):
        load_profile("none")
