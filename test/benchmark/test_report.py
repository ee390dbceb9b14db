"""The page and the plots are made of raw results alone."""

from pathlib import Path

import msgspec
import pytest
from compare import arguments, dry_run, empty, resumed
from comparison import aims, report, schedule
from comparison.arms import Arm, Server
from comparison.figures import Goodput, Limits, Outcome, Run
from comparison.results import Question, Results, Search, Start, load
from comparison.workloads import Images, Scale, Size, Workload
from comparison.workloads import Search as Looked

from sglang_epd.errors import ConfigError

LIMITS = Limits(500.0, 30.0)


def arm(name: str, family: str) -> Arm:
    return Arm(name=name, title=f"the {name}", family=family, servers=[Server(role="server")])


def workload(name: str, rates: list[float]) -> Workload:
    looked = Looked(low=1, high=4) if name == "four_images" else None
    scale = Scale(
        text_tokens=8,
        answer_tokens=4,
        rates=rates,
        sizes=[Size(width=56, height=56)],
        goodput=looked,
    )
    return Workload(name=name, title=name, small=scale, paper=scale, images=Images())


def outcomes(ttft_ms: float, tpot_ms: float) -> list[Outcome]:
    """The later ones are slower."""
    return [
        Outcome("text" if number else "media", ttft_ms + number, tpot_ms, 4) for number in range(4)
    ]


# TTFT and TPOT, by arm.
TIMES = {
    "colocated": (100.0, 20.0),
    "colocated-dp": (110.0, 22.0),
    "in-tree-1e1p": (200.0, 10.0),
    "epd-1e1p": (95.0, 8.0),
}


@pytest.fixture
def results() -> Results:
    made = Results(
        command="compare.py",
        machine={"cores": 2, "load": 0.5},
        versions={"sglang": "0.5.23"},
        model="bench",
        flags="--dtype float32",
        scale="small",
        seed=1,
        cores=[0, 1],
        gpus=[],
        client_cores=[0, 1],
        arms=[
            arm("colocated", "colocated"),
            arm("colocated-dp", "colocated"),
            arm("in-tree-1e1p", "in-tree"),
            arm("epd-1e1p", "sglang-epd"),
        ],
        workloads=[
            workload("single", [0]),
            workload("interference", [1, 2]),
            workload("four_images", [0]),
        ],
        note="A test.",
    )
    for one in made.arms:
        ttft_ms, tpot_ms = TIMES[one.name]
        made.starts.append(Start(one.name, 0, 12.0, [f"python of {one.name}"], 0.3))
        for number in range(2):
            drift = 1.0 + number  # the machine is slower in the second round
            for kind, rates in (("single", [0]), ("interference", [1, 2])):
                for rate in rates:
                    found = outcomes(ttft_ms * drift, tpot_ms * drift)
                    run = Run(
                        one.name, kind, number, rate, 10.0, f"{kind} {rate} {number}", "", found
                    )
                    made.runs.append(run)
            answer = Question(one.name, "single", number, 0, ["a", "b"], [-1.0, -2.0])
            made.questions.append(answer)
        rate = 4.0 if one.family == "sglang-epd" else 2.0
        tried = [(1.0, True), (4.0, rate == 4.0)]
        made.searches.append(
            Search(one.name, "four_images", 0, LIMITS, Goodput(rate, rate == 4.0, tried))
        )
    return made


def test_what_is_saved_is_read_back(results: Results, tmp_path: Path) -> None:
    results.save(tmp_path / "results.json")
    again = load(tmp_path / "results.json")
    assert again == results
    assert report.page(again) == report.page(results)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"arms": 3}', b"\xff"])
def test_what_is_no_results_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"^x\.json"):
        load(tmp_path / "x.json")


def test_aims_are_judged_by_figures(results: Results) -> None:
    judged = {one.aim.partition(":")[0]: one for one in aims.judge(results)}
    assert (
        judged["interference"].met
        and judged["interference"].measured == "0.40 (0.40 to 0.40) times"
    )
    cold = judged["a single cold image"]
    assert cold.met and cold.measured.endswith("by round 96 and 101, 191 and 201")
    assert judged["never behind in-tree EPD (p50 TTFT, 1E1P)"].met
    goodput = judged["goodput with 4 images ahead of one server at dp 2"]
    assert goodput.met and goodput.measured == "epd-1e1p 4/s, colocated-dp 2/s"
    # Nothing is said of what was not run.
    assert not any("repeats" in one for one in judged)
    slow = [msgspec.structs.replace(o, ttft_ms=500.0) for o in outcomes(1, 1)]
    results.runs = [
        msgspec.structs.replace(run, outcomes=slow) if run.arm == "epd-1e1p" else run
        for run in results.runs
    ]
    missed = {one.aim.partition(":")[0]: one for one in aims.judge(results)}
    assert not missed["a single cold image"].met
    assert "single at 0/s" in missed["never behind in-tree EPD (p50 TTFT, 1E1P)"].measured


def test_limits_are_multiples_of_the_unloaded_baseline(results: Results) -> None:
    looked_for = results.workloads[-1]
    assert results.limits(looked_for, 0) is None  # it was not run at rate 0
    alone = msgspec.structs.replace(results.runs[0], workload="four_images")
    results.runs.append(msgspec.structs.replace(alone, arm="epd-1e1p"))
    assert results.limits(looked_for, 0) is None  # the baseline was not
    results.runs.append(alone)
    assert results.limits(looked_for, 0) == Limits(505.0, 60.0)
    assert results.limits(results.workloads[0], 0) is None  # nobody asks for it
    results.runs[-1] = msgspec.structs.replace(
        alone, outcomes=[*alone.outcomes, Outcome("media", None, None, 0, "HTTP 500")]
    )
    assert results.limits(looked_for, 0) is None


def spent(arm: str, what: str, seconds: float) -> schedule.Spent:
    return schedule.Spent(arm, 0, what, seconds)


def test_later_rounds_repeat_what_there_is_time_for(results: Results) -> None:
    arms, loads = results.arms[:2], results.workloads
    took = [spent(one.name, schedule.START, 40) for one in arms]
    # Of both rates of a round.
    took += 2 * [
        spent(one.name, load.name, (10 + n) / 2) for one in arms for n, load in enumerate(loads)
    ]
    took.append(spent("colocated", schedule.GOODPUT, 1000))  # is not repeated
    cost = schedule.measured(took)
    plan = schedule.Plan(arms, loads, arms, together=False, most=3)
    first = plan.round(0, None, cost, 0)
    assert first == schedule.Round(["colocated", "colocated-dp"], [one.name for one in loads])
    assert plan.round(1, first, cost, 99) is None
    some = plan.round(1, first, cost, 100)
    assert some == schedule.Round(["colocated-dp", "colocated"], ["single"])
    # What is too long is passed for what is not.
    assert plan.round(2, some, cost, 124).workloads == ["single", "interference"]
    assert plan.round(2, some, cost, 1e9).arms == ["colocated", "colocated-dp"]
    assert plan.round(3, some, cost, 1e9) is None
    once = schedule.Plan(arms, loads, [], together=False, most=3)
    assert once.round(0, None, cost, 0) and once.round(1, first, cost, 1e9) is None


def test_the_projects_own_comparison_is_reckoned_within_its_minutes() -> None:
    told = dry_run(arguments([]))
    assert all(f", {name}:" in told for name in arguments([]).arms)
    assert told.count(", epd-1e1p:") > 1
    assert float(told.splitlines()[-1].split()[1]) <= 30
    assert dry_run(arguments(["--scale", "paper"])).endswith("minutes")


def test_a_dry_run_says_that_there_are_too_few_gpus():
    with pytest.raises(ValueError, match="epd-2e1p: GPUs: 3 are wanted by some servers, of 2"):
        dry_run(arguments(["--gpus", "0", "1"]))
    pair = ["--arms", "colocated-dp", "in-tree-1e1p", "epd-1e1p"]
    assert "round 1, epd-1e1p" in dry_run(arguments(["--gpus", "0", "1", *pair]))


def test_a_run_that_was_ended_is_partial_and_gone_on_with(tmp_path: Path) -> None:
    typed = ["--arms", "colocated", "epd-1e1p", "--workloads", "single", "--out"]
    options = arguments([*typed, str(tmp_path / "x.md")])
    made = empty(options)
    made.finished = False
    made.planned = [schedule.Round(["colocated", "epd-1e1p"], ["single"])]
    made.done = [("colocated", 0)]
    for name in ("colocated", "epd-1e1p"):
        made.starts.append(Start(name, 0, 12.0, ["python"], 0.3))
        found = outcomes(100.0, 10.0)
        made.runs.append(Run(name, "single", 0, 0, 10.0, "digest", "", found))
        made.spent.append(spent(name, schedule.START, 12))
    page = report.page(made)
    assert "**Partial: it has not come to its end.**" in page
    assert "- round 1: colocated; all workloads" in page
    made.save(tmp_path / "x.json")
    again = resumed(options)
    for kept in (again.starts, again.runs, again.spent):
        assert [one.arm for one in kept] == ["colocated"]
    for other, says in (
        (["--seed", "2"], "another seed"),
        (["--flags", "x"], "another flags"),
        (["--arms", "colocated"], "other arms"),
    ):
        with pytest.raises(ConfigError, match=says):
            resumed(arguments([*typed, str(tmp_path / "x.md"), *other]))
    with pytest.raises(ConfigError, match=r"y\.json"):
        resumed(arguments([*typed, str(tmp_path / "y.md")]))
