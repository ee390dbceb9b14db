"""Runs: one deployment, or many independent cells of one on several processes."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from sglang_epd_plan.model import Deployment, Failure, Traffic
from sglang_epd_plan.profile import Profile
from sglang_epd_plan.report import Report, StopWhen
from sglang_epd_plan.topology import Topology
from sglang_epd_plan.workload import Workload


def simulate(
    profile: Profile,
    workload: Workload,
    topology: Topology,
    traffic: Traffic,
    *,
    seed: int = 0,
    failures: tuple[Failure, ...] = (),
    stop: StopWhen | None = None,
    jobs: int = 1,
) -> Report:
    """Run a deployment.

    The same arguments give the same report, whatever `jobs` is.

    Args:
        traffic: of all cells together; each gets its share.
        failures: in each cell.
        stop: may end the run early, cell by cell.
        jobs: processes that run cells.

    Raises:
        ConfigError: arguments that do not go together.
    """
    if topology.cells == 1:
        deployment = Deployment(
            profile, workload, topology, traffic, seed=seed, failures=failures, stop=stop
        )
        return deployment.run()
    one = msgspec.structs.replace(topology, cells=1)
    share = replace(
        traffic,
        rate=traffic.rate / topology.cells,
        requests=traffic.requests / topology.cells,
    )
    whole = Report(profile, topology)
    calls = [
        _Cell(profile, workload, one, share, seed * 1_000_003 + cell, failures)
        for cell in range(topology.cells)
    ]
    if jobs == 1 or stop is not None:
        for call in calls:
            whole.merge(call.run(stop))
        return whole
    with ProcessPoolExecutor(jobs) as pool:
        for report in pool.map(_Cell.run, calls):
            whole.merge(report)
    return whole


@dataclass(frozen=True)
class _Cell:
    """One cell's run, to be sent to another process."""

    profile: Profile
    workload: Workload
    topology: Topology
    traffic: Traffic
    seed: int
    failures: tuple[Failure, ...]

    def run(self, stop: StopWhen | None = None) -> Report:
        return Deployment(
            self.profile,
            self.workload,
            self.topology,
            self.traffic,
            seed=self.seed,
            failures=self.failures,
            stop=stop,
        ).run()
