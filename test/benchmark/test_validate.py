"""The planner beside emulated servers: what is sent, what is taken for idle, what is within."""

import json
from typing import Any

import msgspec
import pytest
import validate_emulated as validate
import validate_report as report
from comparison.arms import Place, Running

from sglang_epd.profile import Profile
from sglang_epd.schema import load
from sglang_epd_plan.topology import parse

PROFILE = load(validate.PROFILE, Profile)
HOST = validate.Host(request_s=0.002, small_s=0.001, large_s=0.004, step_s=0.0)


@pytest.mark.parametrize("name", sorted({case.topology for case in validate.CASES}))
def test_servers_are_those_of_the_topology(name: str, tmp_path) -> None:
    topology = parse(name)
    running = Running(validate.arm(topology), "model", "", Place(cores=[0]), tmp_path)
    assert len(running.urls("encoder")) == topology.encoders
    assert len(running.urls("prefill")) == topology.prefills
    assert len(running.urls("decode")) == len(running.urls("router")) == topology.decodes
    asked = running.urls("language" if topology.encoders else "server")
    assert len(asked) == topology.language


def test_topologies_share_the_servers_of_the_largest() -> None:
    assert validate.sharing(["1EPD", "2E1PD", "2EPD", "2E2PD", "1E1P1D", "1E1PD"]) == [
        ["2EPD", "1EPD"],
        ["2E2PD", "2E1PD"],
        ["1E1P1D"],
        ["1E1PD"],
    ]


def test_what_is_kept_takes_the_place_of_the_topology_s_earlier_loads(tmp_path) -> None:
    out = tmp_path / "planner.json"
    validate.keep(out, "loads", "2EPD", [{"topology": "2EPD", "run": 1}])
    validate.keep(out, "loads", "1EPD", [{"topology": "1EPD", "run": 1}])
    validate.keep(out, "loads", "2EPD", [{"topology": "2EPD", "run": 2}])
    kept = json.loads(out.read_text())["loads"]
    assert kept == [{"topology": "1EPD", "run": 1}, {"topology": "2EPD", "run": 2}]


def test_idle_times_are_what_a_simulated_request_takes_beside_its_passes() -> None:
    case = validate.Case("one picture", "1E1PD", [validate._kind()], rate=0.01)
    _, found = validate.predict(HOST.on(PROFILE, parse("1E1PD")), case, 3)
    passes = PROFILE.encoder.tower.seconds([1024.0]) + PROFILE.language.prefill_s([(316, 0)])
    assert found["ttft_p50_s"] == pytest.approx(passes + 0.002 + 0.004, abs=1e-6)


def test_simulated_work_is_that_of_all_servers() -> None:
    case = validate.Case("one picture", "2EPD", [validate._kind()], rate=1.0)
    run, _ = validate.predict(PROFILE, case, 20)
    tower = PROFILE.language.tower.seconds([1024.0])
    assert validate.worked(run)["tower"] == pytest.approx(20 * tower, rel=0.2)


def outcome(**predicted: float) -> dict[str, Any]:
    figures = validate.figures([0.1, 0.2], [0.01, 0.02], 5.0)
    return {
        "topology": "1EPD",
        "case": "one picture",
        "load": "5 requests/s",
        "requests": 2,
        "dilation": 8.0,
        "load_average": 1.5,
        "host": {"request_s": 0.002, "large_s": 0.004, "step_s": 0.0},
        "measured": figures,
        "predicted": {**figures, **predicted},
        "accelerator_s": {"tower": 1.0, "prefill": 2.0, "decode": 1.0, "overrun": 0.04},
        "predicted_s": {"tower": 1.1, "prefill": 2.0, "decode": 1.0},
    }


def test_a_prediction_is_within_all_bounds_or_not() -> None:
    assert report.inside(outcome())
    assert not report.inside(outcome(requests_per_s=5.4))
    assert report.inside(outcome(ttft_p50_s=0.15 * 1.14))
    assert not report.inside(outcome(tpot_p99_s=0.02 * 1.2))


def test_the_page_says_how_far_off_each_figure_is() -> None:
    kept = {"loads": [outcome(), outcome(requests_per_s=5.5)], "machine": "m", "versions": "v"}
    kept |= {"checkpoint": "c", "profile": "p"}
    found = {
        "topology": "1EPD",
        "requests": 40,
        "slo": msgspec.to_builtins(validate.Slo(ttft_s=0.3, tpot_s=0.03)),
        "tried": [[4.0, True], [6.0, False]],
        "measured": 5.0,
        "predicted": 5.5,
    }
    page = report.page({**kept, "goodput": [found]})
    assert "| 5.00, +0% |" in page and "| 5.00, +10% |" in page
    assert "1 of 2, 2 of 2" in page and "in all of\nthem: 1 of 2" in page
    assert "of at most 1%:\n1 of 2; with more: 0 of\n0." in page
    assert "| 4.0 yes, 6.0 no | 5.0 | 5.5 | +10% |" in page
    assert "| +10.0% | +0.0% | +0.0% |" in page
