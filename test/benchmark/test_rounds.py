"""What a comparison does round by round, with servers and clients that are none."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import compare
import pytest
from compare import arguments
from comparison import runner
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

    commands: tuple[str, ...] = ()
    servers: tuple[Any, ...] = ()
    broken: tuple[str, ...] = ()
    up: ClassVar[list[str]] = []
    # All that were up at a time.
    together: ClassVar[list[set[str]]] = []

    def __init__(self, arm: Any, *_: object) -> None:
        self.arm = arm
        self.url = f"http://{arm.name}"

    def start(self) -> float:
        if self.arm.name in self.broken:
            raise ServerError(f"{self.arm.name} exited with status 1.\nIts log")
        self.up.append(self.arm.name)
        self.together.append(set(self.up))
        return 1.0

    def stop(self) -> None:
        if self.arm.name in self.up:
            self.up.remove(self.arm.name)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(runner, "Running", Servers)
    monkeypatch.setattr(runner, "BenchServing", Clients)
    monkeypatch.setattr(runner, "question", answer)
    monkeypatch.setattr(compare, "ensure", lambda name: tmp_path / name)
    words = SimpleNamespace(encode=lambda text, **_: SimpleNamespace(ids=text.split()))
    monkeypatch.setattr(compare, "_tokenizer", lambda _: words)
    for name, value in (("broken", ()), ("up", []), ("together", [])):
        monkeypatch.setattr(Servers, name, value)
    typed = ["--arms", *MAIN, "colocated-dp", "epd-2e1p"]
    typed += ["--workloads", "single", "--out", str(tmp_path / "x.md"), "--rounds", "3"]
    return arguments(typed)


def answer(*_: object) -> dict[str, Any]:
    return {"tokens": ["a"], "logprobs": [-1.0]}


def turns(results: Any) -> list[list[str]]:
    """Arms of the runs, in their order, by round."""
    found: dict[int, list[str]] = {}
    for run in results.runs:
        found.setdefault(run.round, []).append(run.arm)
    return [found[number] for number in sorted(found)]


def test_a_server_is_asked_before_it_is_measured_whenever_it_was_started(options, monkeypatch):
    events: list[tuple[str, str]] = []
    begin, run, calls = Servers.start, Clients.run, itertools.count(1)

    def start(servers: Servers) -> float:
        events.append(("start", servers.url))
        return begin(servers)

    def load(clients: Clients, url: str, sent: Load, seconds: float) -> Any:
        events.append(("load", url))
        return run(clients, url, sent, seconds)

    def question(url: str, *_: object) -> dict[str, Any]:
        events.append(("question", url))
        return answer()

    def check_running() -> None:
        if next(calls) == 4:
            raise ServerError("a load has ended it.")

    monkeypatch.setattr(Servers, "start", start)
    monkeypatch.setattr(Servers, "servers", (SimpleNamespace(check_running=check_running),))
    monkeypatch.setattr(Clients, "run", load)
    monkeypatch.setattr(runner, "question", question)
    compare.compare(options)
    starts = [number for number, (what, _) in enumerate(events) if what == "start"]
    assert len(starts) == len(MAIN) + len(OTHERS) + 1
    for number in starts:
        _, url = events[number]
        assert next(what for what, other in events[number + 1 :] if other == url) == "question"


MAIN = ["colocated", "in-tree-1e1p", "epd-1e1p"]
OTHERS = ["colocated", "colocated-dp", "epd-2e1p"]


def test_arms_that_fit_are_up_together_and_take_turns(options):
    results = compare.compare(options)
    assert load(options.out.with_suffix(".json")) == results
    rounds = turns(results)
    assert [sorted(one) for one in rounds] == [sorted(OTHERS), *3 * [sorted(MAIN)]]
    # The first one is another each time.
    assert len({tuple(one) for one in rounds[1:]}) == 3
    # Those of the later rounds stayed up, and all that were up were of one round.
    assert [(one.arm, one.round) for one in results.starts] == [
        *((name, 0) for name in OTHERS),
        *((name, 1) for name in MAIN),
    ]
    assert set(OTHERS) in Servers.together and set(MAIN) in Servers.together
    assert max(map(len, Servers.together)) == 3 and not Servers.up
    assert len(results.questions) == len({(one.arm, one.number) for one in results.questions})
    assert {one.arm for one in results.questions} == {*MAIN, *OTHERS}
    page = options.out.read_text()
    assert results.finished and "Partial" not in page and "took turns" in page


def test_an_arm_that_does_not_start_is_noted_and_the_others_go_on(options, monkeypatch):
    monkeypatch.setattr(Servers, "broken", ("in-tree-1e1p",))
    results = compare.compare(options)
    assert {run.arm for run in results.runs} == {*MAIN, *OTHERS} - {"in-tree-1e1p"}
    assert results.notes[0] == "in-tree-1e1p in round 2: in-tree-1e1p exited with status 1."
    assert not Servers.up and results.finished


def test_what_was_run_is_not_run_again(options, monkeypatch):
    class EndedError(Exception):
        pass

    def end(url: str, *_: object) -> dict[str, Any]:
        if url == "http://in-tree-1e1p":
            raise EndedError
        return answer()

    monkeypatch.setattr(runner, "question", end)
    with pytest.raises(EndedError):
        compare.compare(options)
    assert not Servers.up
    partial = load(options.out.with_suffix(".json"))
    assert not partial.finished and "**Partial" in options.out.read_text()
    assert [sorted(one) for one in turns(partial)] == [sorted(OTHERS)]
    monkeypatch.setattr(runner, "question", answer)
    again = compare.compare(options, compare.resumed(options))
    assert [sorted(one) for one in turns(again)] == [sorted(OTHERS), *3 * [sorted(MAIN)]]
    assert again.finished
