"""Loads are reckoned for few encoders at a time, and are those that all would have."""

from __future__ import annotations

from sglang_epd.dispatch.pool import View
from sglang_epd_plan.dispatch import Dispatch
from sglang_epd_plan.model import simulate
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Traffic


def test_loads_of_encoders(profile, workload, monkeypatch):
    """An encoder that a server has sent nothing to has the load that it reported. Only full
    encoders are left out."""
    machine = profile(encoder={"max_items": 4})
    seen = 0

    def usable(self: Dispatch) -> tuple[View, ...]:
        nonlocal seen
        views, now = original(self), self._env.now
        expected = []
        for number, report in enumerate(self._reports.views):
            if self._full_until.get(number, 0.0) > now:
                continue
            outstanding = self._outstanding.get(number, 0.0)
            queued = report.load + outstanding - self._reported.get(number, 0.0)
            expected.append((report.url, max(outstanding, queued), report.rate))
        assert [(view.url, view.load, view.rate) for view in views] == expected
        seen += len(views) < len(self._reports.views)
        return views

    original = Dispatch._usable
    monkeypatch.setattr(Dispatch, "_usable", usable)
    asked = workload(items={"kind": "uniform", "low": 1, "high": 4})
    traffic = Traffic(rate=30.0, requests=300)
    simulate(machine, asked, parse("4E3PD"), traffic, seed=1)
    assert seen > 3
