"""Published comparisons on emulated machines: their files, their profiles, their page."""

import os
import re
from collections import Counter
from pathlib import Path

import matplotlib as mpl
import msgspec
import pytest
import reproduce
from comparison import published_page
from comparison.arms import Arm, Place, Running
from comparison.figures import Limits, Outcome, Run
from comparison.files import read, read_all
from comparison.published import Busy, Comparison, Measured, Reproduced, accelerators
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client import Counter as Metric

from demo_emulated import Counted, counted
from make_checkpoint import ensure
from sglang_epd.errors import ConfigError
from sglang_epd.profile import load_profile

NAMES = [path.stem for path in reproduce.HERE.glob("*.toml")]
# What an arm's servers take from their environment.
_STRETCHED = (
    *("SGLANG_EPD_EMULATE", "SGLANG_EPD_EMULATE_DILATE"),
    "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT",
)
replace = msgspec.structs.replace


def _told(name: str) -> Comparison:
    return read(reproduce.HERE / f"{name}.toml", Comparison)


@pytest.mark.parametrize("name", NAMES)
def test_smaller_pictures_texts_and_answers_cost_what_published_ones_do(name: str) -> None:
    told = _told(name)
    for arm in told.arms:
        whole = reproduce.profile_of(told, arm)
        shrunk, by = told.shrunk(whole), told.shrink
        for size in (case.size for case in told.cases):
            side = whole.pixels.patch_px
            patches = (size.width // side) * (size.height // side)
            for of in ("encoder", "language"):
                tower, smaller = getattr(whole, of).tower, getattr(shrunk, of).tower
                expected = tower.seconds([(patches * by, 1)] * 3)
                assert smaller.seconds([(patches, 1)] * 3) == pytest.approx(expected)
                assert smaller.batch_patches * by == pytest.approx(tower.batch_patches, rel=0.01)
        assert shrunk.language.prefill_s([(500, 100)]) == pytest.approx(
            whole.language.prefill_s([(500 * by, 100 * by)])
        )
        steps = shrunk.language.step_s(3, 1000)
        assert steps == pytest.approx(told.answer_shrink * whole.language.step_s(3, 1000 * by))


@pytest.mark.parametrize("name", NAMES)
def test_arms_are_there_and_requests_are_what_the_page_says(name: str) -> None:
    told = _told(name)
    arms = read_all(reproduce.HERE / "arms", Arm, told.arms)
    families = {arm.family for arm in arms}
    assert families == {"colocated", "in-tree", "sglang-epd"} and arms[0].family == "colocated"
    for arm in arms:
        off = arm.env.get("SGLANG_EPD") == "off"
        assert off == (arm.family == "in-tree"), arm.name
    for case in told.cases:
        sent = reproduce.requests(case.workload(), "small", 0, lambda text: len(text.split()))
        request = next(sent)
        assert request.answer_tokens == case.answer_tokens
        assert len(request.turns) == case.turns and request.sliding == (case.turns > 1)
        for turn in request.turns:
            pictures = sum(part["type"] == "image_url" for part in turn)
            assert case.images.least <= pictures <= case.images.most


def test_accelerators_of_an_arm_are_its_ranks_and_what_they_stand_for() -> None:
    told = _told("vllm-goodput")
    arms = {arm.name: arm for arm in read_all(reproduce.HERE / "arms", Arm)}

    def counts(name: str, profile: str) -> tuple[int, int, float]:
        have = accelerators(arms[name], load_profile(profile))
        return have.encoders, have.language, have.gpus

    assert counts("dp4", told.profile.removesuffix("-fitted")) == (0, 4, 4)
    assert counts("epd-1e3pd", "a100-qwen3-vl-4b") == (1, 3, 4)
    assert counts("epd-e-p-d", "h100-qwen3-vl-8b") == (1, 2, 3)
    assert counts("2p-d", "h100-qwen3-vl-8b") == (0, 3, 3)
    assert counts("epd-2e1p", "h20-qwen3-vl-235b") == (2, 1, 6)


def _blog(dilation: float, **changes: object) -> Reproduced:
    told = _told("sglang-blog")
    heavy = replace(told.cases[0], name="heavy", loads=[1.0])
    changes |= {"cases": [heavy], "arms": ["one", "epd-2e1p"]}
    told = replace(told, dilation=dilation, answer_shrink=2.0, **changes)
    results = Reproduced(told.measured, {}, {})
    for arm, ttft_ms, seconds in (("one", 8000.0, 80.0), ("epd-2e1p", 2000.0, 40.0)):
        outcomes = [Outcome("media", ttft_ms, 200.0, 32), Outcome("media", None, None, 0, "lost")]
        run = Run(arm, "heavy", 0, 1.0, seconds, "", "", outcomes)
        encoder_s = 20.0 if arm == "epd-2e1p" else 0.0
        busy = Busy(encoder_s, {"prefill": 20.0, "decode": 10.0}, 1.0)
        results.runs.append(Measured(run, busy))
    results.comparison = told
    return results


def test_times_are_divided_by_what_passes_and_answers_were_stretched(tmp_path: Path) -> None:
    results = _blog(4.0, read="It shows this.")
    told = results.comparison
    page = reproduce.page_of(results, told)
    page.render(tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    one = (
        "| heavy | 1/s | one server | 4 | 1 of 2 | 2.00 | 2.00 | 2.00 |"
        " 25.0 | 25.0 | 25.0 | 3.55 | 3.55 | 3.55 | 0.050 |  | 0% | 25% | 12% | 3.3% |"
    )
    epd = (
        "| heavy | 1/s | sglang-epd 2E1P | 6 | 1 of 2 | 0.50 | 0.50 | 0.50 |"
        " 25.0 | 25.0 | 25.0 | 2.05 | 2.05 | 2.05 | 0.100 | 25% | 0% | 50% | 25% | 2.0% |"
    )
    assert one in text and epd in text
    # 4 GPUs do half of the requests of 6.
    assert "| sglang-epd 2E1P | 4.00x | 4.00x | 1.00x | 2.00x | 1.33x |" in text
    assert load_profile("h20-qwen3-vl-235b").source[0] in text and "It shows this." in text
    for name in ("ttft", "rate"):
        assert f"(page-{name}.svg)" in text
        assert "sglang-epd 2E1P" in (tmp_path / f"page-{name}.svg").read_text()


def test_arms_stand_beside_the_first_one_or_none() -> None:
    results = _blog(4.0)
    told, (one, epd) = results.comparison, results.runs
    page = reproduce.page_of(results, told)
    assert [row[2] for row in page.ratios(told.cases[0], 1.0)] == ["one server", "sglang-epd 2E1P"]
    results.runs = [one]
    assert [row[2] for row in page.ratios(told.cases[0], 1.0)] == ["one server"]
    results.runs = [epd]
    assert page.ratios(told.cases[0], 1.0) == []


def test_what_was_not_measured_has_no_bar(tmp_path: Path) -> None:
    results = _blog(4.0)
    (heavy,) = results.comparison.cases
    told = replace(results.comparison, cases=[heavy, replace(heavy, name="light")])
    results.comparison = told
    with mpl.rc_context({"svg.fonttype": "none"}):
        reproduce.page_of(results, told).render(tmp_path / "page.md")
    drawn = (tmp_path / f"page-{next(iter(published_page.PLOTS))}.svg").read_text()
    labels = re.findall(r"font-size: 7px[^>]*>([^<]+)<", drawn)
    assert labels == ["2", "0.5"]


def test_limits_hold_where_p99_is_within_them_and_all_were_answered() -> None:
    for limits, says in ((Limits(600.0, 30.0), "yes"), (Limits(400.0, 30.0), "no"),
                         (Limits(600.0, 20.0), "no")):  # fmt: skip
        results = _blog(4.0, limits=limits)
        (_, epd), told = results.runs, results.comparison
        arms = read_all(reproduce.HERE / "arms", Arm, told.arms)
        page = reproduce.page_of(results, told)
        assert page.row(arms[1], told.cases[0], 1.0)[-1] == "no"
        epd.run.outcomes.pop()
        assert page.row(arms[1], told.cases[0], 1.0)[-1] == says


def test_results_of_another_file_are_not_added_to(tmp_path: Path) -> None:
    results = _blog(4.0)
    told, kept = results.comparison, tmp_path / "kept.json"
    results.comparison = told.measured
    kept.write_bytes(msgspec.json.encode(results))
    assert reproduce.begin(replace(told, read="Other words."), kept, add=True) == results
    assert reproduce.begin(told, kept, add=False).runs == []
    with pytest.raises(SystemExit, match="measured by another sglang-blog"):
        reproduce.begin(replace(told, dilation=1.0), kept, add=True)
    (case, *_) = told.cases
    more = replace(told, cases=[*told.cases, replace(case, name="another")])
    begun = reproduce.begin(more, kept, add=True)
    assert (begun.runs, begun.comparison) == (results.runs, more.measured)
    with pytest.raises(SystemExit, match="measured by another sglang-blog"):
        reproduce.begin(replace(told, cases=[replace(case, requests=7)]), kept, add=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("requests = 30", "requests = 29"), "all at once"),
        (('arms = ["one-no-cache"', 'profiles = { two = "x" }\narms = ["one-no-cache"'), "no arms"),
        (("shrink = 12.915", "shrink = 0"), "> 0"),
        (("loads = [30]", "loads = []"), "length >= 1"),
    ],
)
def test_a_comparison_that_is_none_is_refused(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    text = (reproduce.HERE / "dynamo-window.toml").read_text()
    assert change[0] in text
    (tmp_path / "dynamo-window.toml").write_text(text.replace(*change, 1))
    with pytest.raises(ConfigError, match=says):
        read(tmp_path / "dynamo-window.toml", Comparison)


def test_what_accelerators_did_in_a_run_is_the_difference() -> None:
    before = {"encoder": [Counted({"tower": 1.0}, 0.5, 2)], "language": [Counted({}, 0.0, 0)] * 2}
    after = {
        "encoder": [Counted({"tower": 4.0}, 0.75, 9)],
        "language": [
            Counted({"prefill": 1.0}, 0.0, 1, Counter(kv=3, computed=1)),
            Counted({"decode": 2.0}, 0.5, 3, Counter(kv=1)),
        ],
    }
    before["language"][0] = Counted({}, 0.0, 0, Counter(kv=2))
    expected = Busy(3.0, {"prefill": 1.0, "decode": 2.0}, 0.75, {"kv": 2, "computed": 1})
    assert reproduce.busy(before, after) == expected


def test_where_pictures_came_from_is_shown_where_some_were_not_encoded() -> None:
    for items, shown in (
        ({"kv": 1, "computed": 3}, "| KV cached | encoded |\n|---|---|---|---|---|\n"
                                   "| heavy | sglang-epd 2E1P | 4 | 25% | 75% |"),
        ({"computed": 4}, ""),
    ):  # fmt: skip
        results = _blog(4.0)
        results.runs[1] = replace(results.runs[1], busy=replace(results.runs[1].busy, items=items))
        page = reproduce.page_of(results, results.comparison)._sources()
        assert (shown in page) and bool(shown) == bool(page)


@pytest.mark.parametrize("name", ["dp4", "epd-1e3pd"])
def test_a_router_of_whole_servers_is_ready_when_it_knows_them(name: str, tmp_path: Path) -> None:
    arm = read(reproduce.HERE / "arms" / f"{name}.toml", Arm)
    running = Running(arm, "model", "", Place(cores=[0]), tmp_path)
    router, servers = running.servers[-1], running.urls("server") + running.urls("language")
    first = router.command.index("--worker-urls") + 1
    assert router.command[first : first + len(servers)] == servers
    assert [one.ready_url for one in running.servers[-2:]] == [
        f"{servers[-1]}/health",
        f"{running.url}/readiness",
    ]


def test_pictures_are_counted_by_where_they_came_from() -> None:
    registry = CollectorRegistry()
    items = Metric("sglang:epd_dispatch_items", "Items", ["source"], registry=registry)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        items.labels("kv").inc(3)
        before = counted(url)
        assert before.items == {"kv": 3}
        items.labels("computed").inc(2)
        assert counted(url).since(before).items == {"computed": 2}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_in_tree_health_checks_wait_for_a_stretched_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = _told("vllm-equal-gpus")
    for name in _STRETCHED:
        monkeypatch.setenv(name, "0")
    (arm,) = read_all(reproduce.HERE / "arms", Arm, ["in-tree-1e1p"])
    reproduce.Measuring(told, arm, tmp_path / "arm", str(ensure(told.checkpoint)))
    assert float(os.environ["SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT"]) == 2 * told.dilation
