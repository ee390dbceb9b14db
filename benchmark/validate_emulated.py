"""The simulator against real servers on emulated accelerators: loads that it was not shown.

    .venv/bin/python benchmark/validate_emulated.py [--topologies 1EPD 2E1PD] [--goodput 1EPD]
    .venv/bin/python benchmark/validate_emulated.py --render

Real servers run a tiny checkpoint, and each of their forward passes takes the time of a profile
(docs/emulated.md). The simulation has the same profile, the same requests and the same arrivals,
so nothing is fitted. Work of the host remains: receiving a request, decoding a picture, sending
tokens. Single requests to the idle servers of a topology tell its time, which the simulation
takes as a constant.

All times of `results/planner.json` and of its page are the emulated machines'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

import aiohttp  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from comparison.arms import Arm, Place, Running, Server  # noqa: E402
from comparison.figures import Bisection  # noqa: E402
from pages import machine  # noqa: E402
from validate_client import SIZES, Load, Sender  # noqa: E402
from validate_loads import (  # noqa: E402
    CASES,
    POLICY,
    PROFILE,
    Case,
    Host,
    again,
    bounds,
    figures,
    goodput_again,
    simulated,
    sought,
    told,
)
from validate_report import FAITHFUL, overrun, page, rows  # noqa: E402

from demo_emulated import counted  # noqa: E402
from make_checkpoint import ensure  # noqa: E402
from sglang_epd.profile import Profile  # noqa: E402
from sglang_epd.schema import load  # noqa: E402
from sglang_epd_plan.topology import Topology, parse  # noqa: E402

MODEL = "tiny-qwen2_5-vl"
KEPT = ROOT / "benchmark" / "results" / "planner.json"
# Rates are sought near the predicted goodput.
_SHARES, _PROBES = (0.85, 1.18), 2


def arm(topology: Topology) -> Arm:
    """The servers of a topology. Clients spread requests over those that users would ask."""
    flags = "--enable-metrics --enable-cache-report"
    servers = [Server(role="encoder", count=topology.encoders)] if topology.encoders else []
    if topology.decodes:
        servers += [Server(role="prefill", count=topology.prefills, flags=flags)]
        servers += [Server(role="decode", count=topology.decodes, flags=flags)]
        # As in `sglang-epd up`; another router takes requests before it knows its servers.
        servers += [Server(role="router", flags="--mini-lb")]
    else:
        role: Any = "language" if topology.encoders else "server"
        servers += [Server(role=role, flags=flags)] * topology.prefills
    family: Any = "sglang-epd" if topology.encoders else "colocated"
    return Arm(name=topology.name, title=topology.name, family=family, servers=servers)


class Options(argparse.Namespace):
    """The options of the command line."""

    topologies: list[str]
    requests: int
    repeats: int
    dilate: float
    out: Path
    goodput: list[str]
    missing: bool
    render: bool


async def idle(
    sender: Sender, urls: Sequence[str], profile: Profile, dilation: float, repeats: int
) -> Host:
    """Single requests, in turns; the first turn is left out."""
    costs = profile.language
    beside: dict[str, list[float]] = {"": [], "224": [], "448": []}
    steps: list[float] = []
    tower = {"": 0.0}
    for patches, size in SIZES.items():
        tower[size] = profile.encoder.tower.seconds([(patches, 1)])
    for turn in range(repeats + 1):
        for url in urls:
            for size, values in beside.items():
                sizes = [size] if size else []
                seen = await sender.ask(url, sender.body(sender.words(60), sizes, 12))
                passes = tower[size] + costs.prefill_s([(seen.prompt, 0)])
                step = costs.step_s(1, seen.prompt + 6)
                if turn:
                    values.append(seen.ttft_s / dilation - passes)
                    steps.append(seen.tpot_s / dilation - step)
    text, small, large = (statistics.median(values) for values in beside.values())
    return Host(max(0.0, text), small - text, large - text, max(0.0, statistics.median(steps)))


@dataclass(frozen=True)
class Fleet:
    """Servers that run, and what single requests to them take beside their passes.

    Attributes:
        running: the servers of the topology, and others of the same kinds perhaps, which are idle.
        urls: those that clients ask.
    """

    topology: Topology
    running: Running
    urls: Sequence[str]
    sender: Sender
    host: Host

    async def serve(
        self, case: Case, rate: float, profile: Profile, options: Options
    ) -> tuple[Load, float, dict[str, float]]:
        """Send a load; requests a second, and seconds of all accelerators, in their time."""
        load, before = Load(self.sender, self.urls, profile, case), self.spent()
        answered = await load.run(rate / options.dilate, options.requests)
        after = {name: now - before[name] for name, now in self.spent().items()}
        await self.level()
        busy = {name: one / options.dilate for name, one in after.items()}
        return load, answered * options.dilate, busy

    async def level(self) -> None:
        """Leave each server where its next picture goes to the first encoder again."""
        await self.sender.level(self.urls, max(1, self.topology.encoders))

    def spent(self) -> dict[str, float]:
        """Seconds of all accelerators by kind, and the overrun."""
        total = {"tower": 0.0, "prefill": 0.0, "decode": 0.0, "overrun": 0.0}
        for role in ("server", "encoder", "language", "prefill", "decode"):
            for url in self.running.urls(role):
                one = counted(url)
                for kind, seconds in one.seconds.items():
                    total[kind] += seconds
                total["overrun"] += one.overrun_s
        return total


async def measure(
    running: Running,
    topology: Topology,
    cases: Sequence[Case],
    profile: Profile,
    options: Options,
) -> None:
    """Cases of one topology; and its goodput, if it is asked for. Each is kept at once."""
    urls = [running.url]
    if not topology.decodes:
        urls = running.urls("language" if topology.encoders else "server")[: topology.prefills]
    # A connection of its own for each request: servers close idle ones after 5 s.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        sender = Sender(session, topology.name)
        await sender.learn(urls[0])
        host = await idle(sender, urls, profile, options.dilate, options.repeats)
        print(topology.name, host, flush=True)
        fleet = Fleet(topology, running, urls, sender, host)
        await fleet.level()
        for case in cases:
            keep(options.out, "loads", await one_load(fleet, case, profile, options))
        if topology.name in options.goodput:
            keep(options.out, "goodput", await search(fleet, profile, options))


async def one_load(fleet: Fleet, case: Case, profile: Profile, options: Options) -> dict[str, Any]:
    """A load that was measured, and predicted."""
    begin = time.monotonic()
    load, rate, busy = await fleet.serve(case, case.rate, profile, options)
    ttft = [one.ttft_s / options.dilate for one in load.seen]
    tpot = [one.tpot_s / options.dilate for one in load.seen]
    outcome = again(
        {
            "topology": case.topology,
            "case": case.name,
            "load": case.load,
            "requests": options.requests,
            "dilation": options.dilate,
            "host": asdict(fleet.host),
            "measured": figures(ttft, tpot, rate),
            "accelerator_s": busy,
            "routes": load.routes,
            "prompt_tokens": sum(one.prompt for one in load.seen),
            "seconds": time.monotonic() - begin,
            "load_average": os.getloadavg()[0],
        }
    )
    print("\n".join(map(" | ".join, rows([outcome]))), flush=True)
    return outcome


async def search(fleet: Fleet, profile: Profile, options: Options) -> dict[str, Any]:
    """The highest rate of single pictures at which the SLO holds: predicted, and then measured
    by bisection around it, by the same requests."""
    name, slo = fleet.topology.name, bounds(profile)
    case, total = sought(name), dict[str, float]()
    found = goodput_again(
        {
            "topology": name,
            "case": case.name,
            "load": "goodput",
            "requests": options.requests,
            "host": asdict(fleet.host),
            "slo": msgspec.to_builtins(slo),
        }
    )
    low, high = (share * found["predicted"] for share in _SHARES)
    trials = Bisection(low, high, _PROBES)
    while trials.rate is not None:
        load, _, busy = await fleet.serve(case, trials.rate, profile, options)
        total = {name: seconds + total.get(name, 0.0) for name, seconds in busy.items()}
        held = all(
            np.quantile([getattr(one, name) for one in load.seen], slo.quantile)
            <= most * options.dilate
            for name, most in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s))
        )
        trials.tell(held)
    print(name, "goodput", trials.found, found["predicted"], flush=True)
    measured = {"tried": trials.found.tried, "measured": trials.found.rate}
    return {**found, **measured, "accelerator_s": total}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(dict.fromkeys(case.topology for case in CASES))
    parser.add_argument("--topologies", nargs="+", default=names, choices=names)
    parser.add_argument("--requests", type=int, default=40, help="of each load")
    parser.add_argument("--repeats", type=int, default=4, help="of each single request")
    parser.add_argument("--dilate", type=float, default=5.0)
    parser.add_argument("--missing", action="store_true", help="only loads that are not kept yet")
    parser.add_argument("--render", action="store_true", help="predict and write the page anew")
    parser.add_argument("--out", type=Path, default=KEPT)
    sought = parser.add_argument("--goodput", nargs="*", default=[], choices=names)
    sought.help = "look for the highest rate of these at which an SLO holds, too"
    options = parser.parse_args(namespace=Options())
    if not options.render:
        run(options)
    found = simulated(kept(options.out))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(found))


def run(options: Options) -> None:
    profile = load(PROFILE, Profile)
    os.environ["SGLANG_EPD_EMULATE"] = str(PROFILE)
    os.environ["SGLANG_EPD_DISPATCH_POLICY"] = POLICY
    # The planner has prompts prefilled once all of their items are there.
    os.environ["SGLANG_EPD_PREFILL_EARLY"] = "off"
    os.environ["SGLANG_EPD_EMULATE_DILATE"] = f"{options.dilate:g}"
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-validate-"))
    print(f"logs in {logs}", flush=True)
    place = Place(cores=sorted(os.sched_getaffinity(0)))
    done = [told(one) for one in kept(options.out)["loads"]] if options.missing else []
    wanted = [case for case in CASES if case.told not in done]
    for names in sharing(options.topologies):
        running = Running(arm(parse(names[0])), str(ensure(MODEL)), "", place, logs)
        try:
            print(f"{names[0]}: up after {running.start():.0f} s", flush=True)
            for name in names:
                cases = [case for case in wanted if case.topology == name]
                asyncio.run(measure(running, parse(name), cases, profile, options))
        finally:
            running.stop()


def sharing(names: Iterable[str]) -> list[list[str]]:
    """Topologies that the same servers are enough for, those of the most servers first."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name in names:
        topology = parse(name)
        groups.setdefault((topology.encoders, topology.decodes), []).append(name)
    return [
        sorted(group, key=lambda name: parse(name).prefills, reverse=True)
        for group in groups.values()
    ]


def kept(out: Path) -> dict[str, Any]:
    """Kept figures of earlier runs."""
    return json.loads(out.read_text()) if out.exists() else {"loads": [], "goodput": []}


def keep(out: Path, part: str, outcome: dict[str, Any]) -> None:
    """Put an outcome in place of an earlier one of the same load, unless its passes overran."""
    if overrun(outcome) > FAITHFUL:
        print(f"not kept: its passes overran by {overrun(outcome):.1%}", flush=True)
        return
    found, order = kept(out), [case.topology for case in CASES]
    others = [one for one in found[part] if told(one) != told(outcome)]
    found[part] = sorted(
        [*others, outcome], key=lambda one: (order.index(one["topology"]), told(one))
    )
    found |= {"machine": machine(), "checkpoint": MODEL, "profile": PROFILE.name}
    found["versions"] = f"sglang {version('sglang')}, torch {version('torch')}"
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
