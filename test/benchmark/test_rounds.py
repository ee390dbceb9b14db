"""What a comparison does round by round, with servers and clients that are none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import compare
import pytest
from compare import Comparison, arguments
from comparison.clients import Load
from comparison.figures import Outcome
from comparison.results import load

from sglang_epd.cli.processes import ServerError


class Clients:
    """Stands in for `BenchServing`."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def command(self, url: str, sent: Load) -> list[str]:
        return [url]

    def run(self, url: str, sent: Load, seconds: float) -> tuple[list[Outcome], float]:
        return [Outcome(kind, 100.0, 10.0, 8) for kind in sent.kinds], 1.0


class Servers:
    """Stands in for `Running`; those of a name in `broken` do not start."""

    url = "http://127.0.0.1:1"
    commands: tuple[str, ...] = ()
    servers: tuple[Any, ...] = ()
    broken: tuple[str, ...] = ()
    stopped = 0

    def __init__(self, arm: Any, *_: object) -> None:
        self.arm = arm

    def start(self) -> float:
        if self.arm.name in self.broken:
            raise ServerError(f"{self.arm.name} exited with status 1.\nIts log")
        return 1.0

    def stop(self) -> None:
        Servers.stopped += 1


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(compare, "Running", Servers)
    monkeypatch.setattr(compare, "BenchServing", Clients)
    monkeypatch.setattr(compare, "question", lambda *_: {"tokens": ["a"], "logprobs": [-1.0]})
    monkeypatch.setattr(compare, "ensure", lambda name: tmp_path / name)
    words = SimpleNamespace(encode=lambda text, **_: SimpleNamespace(ids=text.split()))
    monkeypatch.setattr(compare, "_tokenizer", lambda _: words)
    monkeypatch.setattr(Servers, "broken", ())
    typed = ["--arms", "colocated", "colocated-dp", "in-tree-1e1p", "epd-1e1p"]
    typed += ["--workloads", "single", "--out", str(tmp_path / "x.md"), "--rounds", "2"]
    return arguments(typed)


def sessions(results: Any) -> list[tuple[str, int]]:
    return [(run.arm, run.round) for run in results.runs]


MAIN = ["colocated", "in-tree-1e1p", "epd-1e1p"]


def test_all_arms_are_in_the_first_round_and_those_that_aims_compare_in_others(options):
    Comparison(options).run()
    results = load(options.out.with_suffix(".json"))
    assert [arm for arm, number in sessions(results) if not number] == options.arms
    # In another order.
    assert [arm for arm, number in sessions(results) if number] == [*MAIN[1:], MAIN[0]]
    assert results.finished and "Partial" not in options.out.read_text()


def test_an_arm_that_does_not_start_is_noted_and_the_others_go_on(options, monkeypatch):
    monkeypatch.setattr(Servers, "broken", ("in-tree-1e1p",))
    before = Servers.stopped
    Comparison(options).run()
    results = load(options.out.with_suffix(".json"))
    assert {arm for arm, _ in sessions(results)} == {"colocated", "colocated-dp", "epd-1e1p"}
    assert results.notes[0] == "in-tree-1e1p in round 1: in-tree-1e1p exited with status 1."
    assert Servers.stopped - before == len(results.done) == 7


def test_what_was_run_is_not_run_again(options, monkeypatch):
    class EndedError(Exception):
        pass

    def end(self: Any, *_: object, **__: object) -> None:
        raise EndedError

    ask = Comparison._ask
    monkeypatch.setattr(
        Comparison,
        "_ask",
        lambda self, one, running, number: (end if running.arm.name == "in-tree-1e1p" else ask)(
            self, one, running, number
        ),
    )
    with pytest.raises(EndedError):
        Comparison(options).run()
    partial = load(options.out.with_suffix(".json"))
    assert not partial.finished and "**Partial" in options.out.read_text()
    assert sessions(partial) == [("colocated", 0), ("colocated-dp", 0)]
    monkeypatch.setattr(Comparison, "_ask", ask)
    again = Comparison(options, compare.resumed(options))
    again.run()
    assert len(sessions(again.results)) == len(set(sessions(again.results))) == 7
    assert again.results.finished


def test_without_time_nothing_is_begun(options):
    options.minutes = 1e-9
    Comparison(options).run()
    results = load(options.out.with_suffix(".json"))
    assert not results.starts and len(results.done) == 4
    assert results.notes[0] == "colocated in round 1: no time"
