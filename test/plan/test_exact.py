"""What is done in one event is what would be done in many."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from sglang_epd.dispatch.pool import View
from sglang_epd_plan.dispatch import Dispatch
from sglang_epd_plan.language import Server
from sglang_epd_plan.model import Failure, Traffic
from sglang_epd_plan.report import Report
from sglang_epd_plan.run import simulate
from sglang_epd_plan.topology import parse


def figures(report: Report) -> dict[str, object]:
    """All of a report."""
    return {**asdict(report), "steps": {name: list(of) for name, of in report.steps.items()}}


@pytest.mark.parametrize("shape", ["2EPD", "1E2PD", "2E2P1D"])
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_passes_of_a_prefill(profile, workload, monkeypatch, shape, stopped, seed):
    """Also of a run that is stopped amid them."""
    machine = profile(language={"chunk_tokens": 64, "prefill_token_s": 0.001})
    asked = workload(
        text_tokens={"kind": "uniform", "low": 1, "high": 900},
        output_tokens={"kind": "exponential", "mean": 20},
    )

    def run() -> dict[str, object]:
        chance = random.Random(seed)
        stop = (lambda _report, _request: chance.random() < 0.03) if stopped else None
        traffic = Traffic(rate=3.0, requests=150)
        return figures(simulate(machine, asked, parse(shape), traffic, seed=seed, stop=stop))

    leapt = 0
    further = Server._further

    def counted(self: Server, seconds: float, budget: int) -> float:
        nonlocal leapt
        longer = further(self, seconds, budget)
        leapt += longer > seconds
        return longer

    monkeypatch.setattr(Server, "_further", counted)
    at_once = run()
    assert leapt > 3
    monkeypatch.setattr(Server, "_further", lambda _self, seconds, _budget: seconds)
    assert run() == at_once


def test_loads_of_encoders(profile, workload, monkeypatch):
    """Those that a server has sent nothing to are as they said; nobody is left out but who is
    silent or full."""
    machine = profile(encoder={"max_items": 4})
    seen = 0

    def usable(self: Dispatch) -> tuple[View, ...]:
        nonlocal seen
        views, now = original(self), self._env.now
        expected = []
        for number, report in enumerate(self._reports.views):
            if number in self._reports.silent or self._busy_until.get(number, 0.0) > now:
                continue
            outstanding = self._outstanding.get(number, 0.0)
            queued = report.load + outstanding - self._reported.get(number, 0.0)
            expected.append((report.url, max(outstanding, queued), report.rate))
        assert [(view.url, view.load, view.rate) for view in views] == expected
        seen += len(views) < len(self._reports.views)
        return views

    original = Dispatch._usable
    monkeypatch.setattr(Dispatch, "_usable", usable)
    failures = (Failure(encoder=1, at_s=2.0, down_s=5.0),)
    asked = workload(items={"kind": "uniform", "low": 1, "high": 4})
    traffic = Traffic(rate=30.0, requests=300)
    simulate(machine, asked, parse("4E3PD"), traffic, seed=1, failures=failures)
    assert seen > 3
