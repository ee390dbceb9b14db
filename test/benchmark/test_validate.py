"""The planner beside emulated servers: what is sent, what is taken for idle, what is within."""

import json
from collections import Counter
from typing import Any

import aiohttp
import msgspec
import pytest
import validate_client as client
import validate_emulated as validate
import validate_loads as loads
import validate_report as report
from aiohttp import web
from aiohttp.test_utils import TestServer
from comparison.arms import Place, Running

from sglang_epd.profile import Profile
from sglang_epd.schema import load
from sglang_epd_plan.topology import parse

PROFILE = load(loads.PROFILE, Profile)
KEPT = json.loads(validate.KEPT.read_text())
HOST = loads.Host(request_s=0.002, small_s=0.001, large_s=0.004, step_s=0.0)


@pytest.mark.parametrize("name", sorted({case.topology for case in loads.CASES}))
def test_servers_are_those_of_the_topology(name: str, tmp_path) -> None:
    topology = parse(name)
    running = Running(validate.arm(topology), "model", "", Place(cores=[0]), tmp_path)
    assert len(running.urls("encoder")) == topology.encoders
    role = "prefill" if topology.decodes else "language" if topology.encoders else "server"
    assert len(running.urls(role)) == topology.prefills
    assert len(running.urls("decode")) == len(running.urls("router")) == topology.decodes


def test_topologies_share_the_servers_of_the_largest() -> None:
    assert validate.sharing(["1EPD", "2E1PD", "2EPD", "2E2PD", "1E1P1D", "1E1PD"]) == [
        ["2EPD", "1EPD"],
        ["2E2PD", "2E1PD"],
        ["1E1P1D"],
        ["1E1PD"],
    ]


async def test_each_server_has_sent_as_many_pictures_to_one_encoder_as_to_another() -> None:
    came: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        parts = (await request.json())["messages"][0]["content"]
        came[str(request.url.origin())] += sum(part["type"] == "image_url" for part in parts)
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        delta = json.dumps({"choices": [{"delta": {"content": "a"}}], "usage": usage})
        return web.Response(text=f"data: {delta}\n\n")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as one, TestServer(app) as two, aiohttp.ClientSession() as session:
        urls = [str(server.make_url("")).rstrip("/") for server in (one, two)]
        sender = client.Sender(session, "seed")
        await sender.ask(urls[0], sender.body(9, ["224"] * 4, 2))
        for _ in range(2):
            await sender.level(urls, 3)
        assert came == {urls[0]: 6}


def test_what_is_kept_takes_the_place_of_an_earlier_run_of_its_load(tmp_path) -> None:
    out = tmp_path / "planner.json"
    for run, topology, name, overrun in [
        (1, "2EPD", "a", 0.0),
        (2, "1EPD", "a", 0.0),
        (3, "2EPD", "b", 0.01),
        (4, "2EPD", "a", 0.0),
        (5, "1EPD", "a", 0.02),
    ]:
        spent = {"tower": 0.5, "prefill": 0.5, "decode": 0.0, "overrun": overrun}
        told = {"topology": topology, "case": "c", "load": name, "run": run}
        validate.keep(out, "loads", {**told, "accelerator_s": spent})
    found = validate.kept(out)
    assert [one["run"] for one in found["loads"]] == [2, 4, 3] and not found["goodput"]


def test_idle_times_are_what_a_simulated_request_takes_beside_its_passes() -> None:
    case = loads.Case("one picture", "1E1PD", [loads._kind()], rate=0.01)
    _, found = loads.predict(HOST.on(PROFILE), case, 3)
    passes = PROFILE.encoder.tower.seconds([(1024.0, 1)]) + PROFILE.language.prefill_s([(316, 0)])
    assert found["ttft_p50_s"] == pytest.approx(passes + 0.002 + 0.004, abs=1e-6)


def test_simulated_work_is_that_of_all_servers() -> None:
    case = loads.Case("one picture", "2EPD", [loads._kind()], rate=1.0)
    run, _ = loads.predict(PROFILE, case, 20)
    tower = PROFILE.language.tower.seconds([(1024.0, 1)])
    assert loads.worked(run)["tower"] == pytest.approx(20 * tower, rel=0.2)


def outcome(**predicted: float) -> dict[str, Any]:
    figures = loads.figures([0.1, 0.2], [0.01, 0.02], 5.0)
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


@pytest.mark.parametrize(("tpot_s", "within"), [(0.0, True), (0.0001, True), (0.007, False)])
def test_tokens_that_arrive_together_are_predicted_to_a_part_of_a_millisecond(
    tpot_s: float, within: bool
) -> None:
    together = outcome(tpot_p50_s=tpot_s)
    together["measured"] = {**together["measured"], "tpot_p50_s": 0.00002}
    assert report.inside(together) == within


def test_the_page_says_how_far_off_each_figure_is() -> None:
    kept = {"loads": [outcome(), outcome(requests_per_s=5.5)], "machine": "m", "versions": "v"}
    kept |= {"checkpoint": "c", "profile": "p"}
    found = {
        "topology": "1EPD",
        "requests": 40,
        "slo": msgspec.to_builtins(loads.Slo(ttft_s=0.3, tpot_s=0.03)),
        "tried": [[4.0, True], [6.0, False]],
        "measured": 5.0,
        "predicted": 5.5,
    }
    page = report.page({**kept, "goodput": [found]})
    assert "| 5.00, +0% |" in page and "| 5.00, +10% |" in page
    assert "1 of 2, 2 of 2" in page and "in all of\nthem: 1 of 2" in page
    assert "| 300, 30.0 | 4.0 yes, 6.0 no | 5.0 | 5.5 | +10% |" in page
    assert "| +10.0% | +0.0% | +0.0% |" in page


def test_the_simulation_says_what_servers_measured() -> None:
    """Of all loads but two, whose median time a token hangs on which pass a token waits for."""
    assert all(report.overrun(one) <= report.FAITHFUL for one in KEPT["loads"])
    found = {", ".join(loads.told(one)): loads.again(one) for one in KEPT["loads"]}
    outside = {
        name: {bound: f"{report.off(one, bound):+.1%}" for bound in report.BOUNDS}
        for name, one in found.items()
        if not report.inside(one)
    }
    excepted = {f"{name}, 3 to 8 pictures" for name in ("1EPD", "1E1P1D")}
    assert {name.rpartition(",")[0] for name in outside} <= excepted, outside


@pytest.mark.parametrize("one", KEPT["goodput"], ids=lambda one: one["topology"])
def test_the_simulated_goodput_is_that_of_servers(one: dict[str, Any]) -> None:
    found = loads.goodput_again(one)
    assert found["predicted"] == pytest.approx(one["measured"], rel=report.GOODPUT_BOUND)


def test_the_page_says_what_the_simulation_says_now() -> None:
    page = validate.KEPT.with_suffix(".md").read_text()
    assert page == report.page(loads.simulated(KEPT)), "benchmark/validate_emulated.py --render"
