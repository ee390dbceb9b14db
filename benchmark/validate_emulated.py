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
import base64
import json
import os
import random
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
from pictures import jpeg  # noqa: E402
from validate_report import page, rows  # noqa: E402

from demo_emulated import counted  # noqa: E402
from make_checkpoint import ensure  # noqa: E402
from sglang_epd.profile import HostCosts, Profile  # noqa: E402
from sglang_epd.schema import convert, load  # noqa: E402
from sglang_epd_plan.clients import Demand, generators  # noqa: E402
from sglang_epd_plan.goodput import goodput  # noqa: E402
from sglang_epd_plan.model import simulate  # noqa: E402
from sglang_epd_plan.records import Request  # noqa: E402
from sglang_epd_plan.report import Report, Slo  # noqa: E402
from sglang_epd_plan.topology import Topology, parse  # noqa: E402
from sglang_epd_plan.workload import Closed, Traffic, Workload, intervals  # noqa: E402

MODEL = "tiny-qwen2_5-vl"
PROFILE = ROOT / "benchmark" / "simulated" / "h100-by-8.json"
KEPT = ROOT / "benchmark" / "results" / "planner.json"
ANSWER_TIMEOUT_S = 300.0
# Patches of the pictures that are used, by their names in `pictures`.
SIZES = {256.0: "224", 1024.0: "448"}
_SMALL, _LARGE = {"width": 224, "height": 224}, {"width": 448, "height": 448}
replace = msgspec.structs.replace


def _kind(**changes: Any) -> dict[str, Any]:
    return {"text_tokens": 60, "output_tokens": 24, "items": 1, "pictures": [_LARGE], **changes}


_ONE = [_kind()]
_TEXT = [_kind(items=0, pictures=[], text_tokens=200)]
_MIXED = [_kind(weight=3, items=0, pictures=[], output_tokens=48), _kind(items=2)]
_SIZED = [_kind(items={"kind": "uniform", "low": 1, "high": 3}, pictures=[_SMALL, _LARGE])]
_MANY = [_kind(items={"kind": "uniform", "low": 3, "high": 8}, output_tokens=12)]
# Of the SLO: as many times as long as a picture and a step by themselves, for a share of the
# requests; p99 of so few would be the slowest. Rates are sought near the prediction.
_SLO_TTFT, _SLO_TPOT, _SLO_QUANTILE = 3.0, 5.0, 0.9
_SHARES, _PROBES = (0.85, 1.18), 2
_POISSON = {"kind": "poisson"}
_BURSTS = {"kind": "gamma", "cv": 2.0}


@dataclass(frozen=True)
class Case:
    """A load: requests a second of the emulated machines, or users of a closed loop."""

    name: str
    topology: str
    kinds: list[dict[str, Any]]
    rate: float = 0.0
    users: int = 0
    bursts: bool = False

    def workload(self) -> Workload:
        arrival: dict[str, Any] = _BURSTS if self.bursts else _POISSON
        if self.users:
            arrival = {"kind": "closed", "users": self.users}
        asked = {"name": self.name, "kinds": self.kinds, "arrival": arrival}
        return convert(asked, Workload, self.name)

    @property
    def load(self) -> str:
        how = f"{self.users} users" if self.users else f"{self.rate:g} requests/s"
        return f"{how}, in bursts" if self.bursts else how


CASES = (
    Case("one picture", "1EPD", _ONE, rate=5.0),
    Case("one in four with 2 pictures", "1EPD", _MIXED, rate=7.0),
    Case("3 to 8 pictures", "1EPD", _MANY, users=3),
    Case("one picture", "2EPD", _ONE, rate=12.0, bursts=True),
    Case("1 to 3 pictures of two sizes", "2EPD", _SIZED, users=8),
    Case("one picture", "1E1PD", _ONE, rate=9.0),
    Case("one in four with 2 pictures", "1E1PD", _MIXED, rate=9.0),
    Case("3 to 8 pictures", "1E1PD", _MANY, rate=2.5),
    Case("one picture", "2E1PD", _ONE, rate=12.0, bursts=True),
    Case("1 to 3 pictures of two sizes", "2E1PD", _SIZED, users=6),
    Case("1 to 3 pictures of two sizes", "2E2PD", _SIZED, rate=12.0),
    Case("one in four with 2 pictures", "2E2PD", _MIXED, rate=16.0),
    Case("one picture", "1E1P1D", _ONE, rate=9.0),
    Case("one in four with 2 pictures", "1E1P1D", _MIXED, rate=9.0),
)


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
        servers += [Server(role=role, flags=flags)] * topology.language
    family: Any = "sglang-epd" if topology.encoders else "colocated"
    return Arm(name=topology.name, title=topology.name, family=family, servers=servers)


@dataclass(frozen=True)
class Seen:
    """One answered request, seconds from when it was to be sent; the prompt's tokens without the
    cached ones, which are those of the chat template's beginning."""

    ttft_s: float
    total_s: float
    tokens: int
    prompt: int

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / (self.tokens - 1)


class Sender:
    """Streams chat completions.

    Args:
        seed: another one makes other texts and pictures, which no server has seen.

    Attributes:
        fixed, each: prompt tokens without text, and of a word.
    """

    def __init__(self, session: aiohttp.ClientSession, seed: str) -> None:
        self._session, self._seed = session, seed
        self._pictures = 0
        self._rng = random.Random(seed)
        self.fixed, self.each = 0.0, 1.0

    async def learn(self, url: str) -> None:
        """How many tokens a word is."""
        _, few, many = [await self.ask(url, self.body(words, [], 2)) for words in (9, 20, 120)]
        self.each = (many.prompt - few.prompt) / 100
        self.fixed = few.prompt - 20 * self.each

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.each))

    def body(self, words: int, sizes: Iterable[str], output: int) -> bytes:
        """A request that nothing is known of: no two begin alike."""
        parts: list[dict[str, Any]] = []
        for size in sizes:
            self._pictures += 1
            data = base64.b64encode(jpeg(size, (self._seed, self._pictures))).decode()
            url = {"url": f"data:image/jpeg;base64,{data}"}
            parts.append({"type": "image_url", "image_url": url})
        letters = "abcdefghijklmnopqrstuvwxyz"
        text = " ".join(self._rng.choice(letters) for _ in range(words))
        parts.append({"type": "text", "text": text})
        return json.dumps(
            {
                "model": "default",
                "messages": [{"role": "user", "content": parts}],
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    def body_of(self, request: Request) -> bytes:
        """A simulated request, of the tokens and pictures that it has."""
        text = request.prompt - sum(item.tokens for item in request.items)
        sizes = [SIZES[item.patches] for item in request.items]
        return self.body(self.words(text), sizes, request.output)

    async def ask(self, url: str, body: bytes, due: float | None = None) -> Seen:
        """Send and read to the end.

        Raises:
            RuntimeError: it was not answered as asked.
        """
        due = time.perf_counter() if due is None else due
        first, usage = 0.0, None
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with self._session.post(
            f"{url}/v1/chat/completions",
            data=body,
            headers={"Content-Type": "application/json"},
            timeout=timeout,
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if not first and event.get("choices") and event["choices"][0]["delta"]:
                    delta = event["choices"][0]["delta"]
                    first = time.perf_counter() if delta.get("content") else 0.0
                usage = event.get("usage") or usage
        if not first or usage is None:
            raise RuntimeError("an answer without a token")
        now = time.perf_counter()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        prompt = usage["prompt_tokens"] - cached
        return Seen(first - due, now - due, usage["completion_tokens"], prompt)


class Load:
    """One case on real servers: the requests that the simulation has, at its moments, which are
    stretched as the passes are."""

    def __init__(self, sender: Sender, urls: Sequence[str], profile: Profile, case: Case) -> None:
        self._sender, self._urls = sender, urls
        self._outstanding = [0] * len(urls)
        self._workload = case.workload()
        self._arrivals, demand = generators(0)
        self._demand = Demand(self._workload, profile, demand)
        self._routes = random.Random("0 routes")
        self.seen: list[Seen] = []

    async def _send(self, body: bytes, due: float) -> None:
        """Send to the server with the fewest requests, as the simulation does."""
        least = min(self._outstanding)
        equal = [index for index, count in enumerate(self._outstanding) if count == least]
        index = equal[0] if len(equal) == 1 else self._routes.choice(equal)
        self._outstanding[index] += 1
        try:
            self.seen.append(await self._sender.ask(self._urls[index], body, due))
        finally:
            self._outstanding[index] -= 1

    async def run(self, rate: float, requests: int) -> float:
        """All of them; requests a second."""
        bodies = [self._sender.body_of(self._demand.next(0.0)) for _ in range(requests)]
        first = due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if isinstance(self._workload.arrival, Closed):
                coming = iter(bodies)
                for _ in range(self._workload.arrival.users):
                    group.create_task(self._user(coming))
            else:
                gaps = intervals(self._workload.arrival, rate, self._arrivals)
                for number, (gap, body) in enumerate(zip(gaps, bodies, strict=False)):
                    due += gap
                    first = due if not number else first
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    group.create_task(self._send(body, due))
        return len(self.seen) / (time.perf_counter() - first)

    async def _user(self, coming: Iterable[bytes]) -> None:
        for body in coming:
            await self._send(body, time.perf_counter())


@dataclass(frozen=True)
class Host:
    """What single requests to idle servers take beside their passes, in the emulated machines'
    time: a text, and how much more for a picture of each size; a step. Pictures are prepared in
    `threads`."""

    request_s: float
    small_s: float
    large_s: float
    step_s: float
    threads: int = os.cpu_count() or 1

    def on(self, profile: Profile, topology: Topology) -> Profile:
        """The profile with them."""
        patch_s = max(0.0, (self.large_s - self.small_s) / (1024 - 256))
        item_s = max(0.0, self.large_s - 1024 * patch_s)
        host = HostCosts(workers=self.threads, item_s=item_s, patch_s=patch_s)
        return replace(
            profile,
            encoder=replace(profile.encoder, host=host),
            language=replace(
                profile.language,
                host=host,
                request_s=self.request_s,
                decode_launch_s=profile.language.decode_launch_s + self.step_s,
            ),
        )


class Options(argparse.Namespace):
    """The options of the command line."""

    topologies: list[str]
    requests: int
    repeats: int
    dilate: float
    out: Path
    goodput: list[str]
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
        tower[size] = profile.encoder.tower.seconds([patches])
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


def spent(running: Running) -> dict[str, float]:
    """Seconds of all accelerators by kind, and the overrun."""
    total = {"tower": 0.0, "prefill": 0.0, "decode": 0.0, "overrun": 0.0}
    for role in ("server", "encoder", "language", "prefill", "decode"):
        for url in running.urls(role):
            one = counted(url)
            for kind, seconds in one.seconds.items():
                total[kind] += seconds
            total["overrun"] += one.overrun_s
    return total


def figures(ttft: Sequence[float], tpot: Sequence[float], rate: float) -> dict[str, float]:
    return {
        "requests_per_s": rate,
        **{
            f"{name}_{quantile}_s": float(np.quantile(values, share))
            for name, values in (("ttft", ttft), ("tpot", tpot))
            for quantile, share in (("p50", 0.5), ("p99", 0.99))
        },
        "ttft_mean_s": statistics.fmean(ttft),
        "tpot_mean_s": statistics.fmean(tpot),
    }


def worked(run: Report) -> dict[str, float]:
    """Seconds of all simulated accelerators by kind."""
    topology = run.topology
    prefills = topology.prefills or topology.language
    servers = {
        "tower": ("encode", topology.encoders or prefills),
        "prefill": ("prefill", prefills),
        "decode": ("decode", topology.decodes or prefills),
    }
    return {kind: run.busy[name] * run.end_s * count for kind, (name, count) in servers.items()}


def predict(profile: Profile, case: Case, requests: int) -> tuple[Report, dict[str, float]]:
    traffic = Traffic(rate=case.rate, requests=requests)
    run = simulate(profile, case.workload(), parse(case.topology), traffic)
    return run, figures(run.ttft, run.tpot, run.throughput)


def again(one: dict[str, Any]) -> dict[str, Any]:
    """A load that was measured, with what the simulation says of it now."""
    told = one["topology"], one["case"], one["load"]
    case = next(case for case in CASES if (case.topology, case.name, case.load) == told)
    profile = Host(**one["host"]).on(load(PROFILE, Profile), parse(case.topology))
    run, predicted = predict(profile, case, one["requests"])
    return {**one, "predicted": predicted, "predicted_s": worked(run)}


async def measure(
    running: Running, cases: Sequence[Case], profile: Profile, options: Options
) -> None:
    """All cases of one topology; and its goodput, if it is asked for. Each is kept at once.

    Args:
        running: its servers, and others of the same kinds perhaps, which are idle.
    """
    topology, dilation = parse(cases[0].topology), options.dilate
    urls = [running.url]
    if not topology.decodes:
        urls = running.urls("language" if topology.encoders else "server")[: topology.language]
    outcomes: list[dict[str, Any]] = []
    # A connection of its own for each request: servers close idle ones after 5 s.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        sender = Sender(session, topology.name)
        await sender.learn(urls[0])
        host = await idle(sender, urls, profile, dilation, options.repeats)
        print(topology.name, host, flush=True)
        for case in cases:
            before = spent(running)
            begin = time.monotonic()
            sent = Load(sender, urls, profile, case)
            rate = await sent.run(case.rate / dilation, options.requests)
            after = {name: now - before[name] for name, now in spent(running).items()}
            ttft = [one.ttft_s / dilation for one in sent.seen]
            tpot = [one.tpot_s / dilation for one in sent.seen]
            measured = {
                "topology": case.topology,
                "case": case.name,
                "load": case.load,
                "requests": options.requests,
                "dilation": dilation,
                "host": asdict(host),
                "measured": figures(ttft, tpot, rate * dilation),
                "accelerator_s": {name: one / dilation for name, one in after.items()},
                "prompt_tokens": sum(one.prompt for one in sent.seen),
                "seconds": time.monotonic() - begin,
                "load_average": os.getloadavg()[0],
            }
            outcomes.append(again(measured))
            print("\n".join(map(" | ".join, rows(outcomes[-1:]))), flush=True)
            keep(options.out, "loads", topology.name, outcomes)
        if topology.name in options.goodput:
            found = await search(sender, urls, host.on(profile, topology), topology, options)
            keep(options.out, "goodput", topology.name, [found])


async def search(
    sender: Sender, urls: Sequence[str], profile: Profile, topology: Topology, options: Options
) -> dict[str, Any]:
    """The highest rate of single pictures at which the SLO holds: predicted, and then measured
    by bisection around it, by the same requests."""
    requests = options.requests
    case = Case("one picture", topology.name, _ONE)
    picture = profile.encoder.tower.seconds([1024.0])
    first_s = picture + profile.language.prefill_s([(256 + 60, 0)])
    slo = Slo(ttft_s=_SLO_TTFT * first_s, tpot_s=_SLO_TPOT * profile.language.step_s(1, 300),
              quantile=_SLO_QUANTILE)  # fmt: skip
    predicted = goodput(
        profile, case.workload(), topology, slo,
        least_requests=requests, most_requests=requests, start=4.0,
    ).rate  # fmt: skip
    low, high = (share * predicted for share in _SHARES)
    trials = Bisection(low, high, _PROBES)
    while trials.rate is not None:
        load = Load(sender, urls, profile, case)
        await load.run(trials.rate / options.dilate, requests)
        held = all(
            np.quantile([getattr(one, name) for one in load.seen], slo.quantile)
            <= most * options.dilate
            for name, most in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s))
        )
        trials.tell(held)
    print(topology.name, "goodput", trials.found, predicted, flush=True)
    return {
        "topology": topology.name,
        "requests": requests,
        "slo": msgspec.to_builtins(slo),
        "tried": trials.found.tried,
        "measured": trials.found.rate,
        "predicted": predicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(dict.fromkeys(case.topology for case in CASES))
    parser.add_argument("--topologies", nargs="+", default=names, choices=names)
    parser.add_argument("--requests", type=int, default=40, help="of each load")
    parser.add_argument("--repeats", type=int, default=4, help="of each single request")
    parser.add_argument("--dilate", type=float, default=5.0)
    parser.add_argument("--render", action="store_true", help="predict and write the page anew")
    parser.add_argument("--out", type=Path, default=KEPT)
    sought = parser.add_argument("--goodput", nargs="*", default=[], choices=names)
    sought.help = "look for the highest rate of these at which an SLO holds, too"
    options = parser.parse_args(namespace=Options())
    if not options.render:
        run(options)
    kept = json.loads(options.out.read_text())
    kept["loads"] = [again(one) for one in kept["loads"]]
    options.out.write_text(json.dumps(kept, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(kept))


def run(options: Options) -> None:
    profile = load(PROFILE, Profile)
    os.environ["SGLANG_EPD_EMULATE"] = str(PROFILE)
    os.environ["SGLANG_EPD_EMULATE_DILATE"] = f"{options.dilate:g}"
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-validate-"))
    print(f"logs in {logs}", flush=True)
    place = Place(cores=sorted(os.sched_getaffinity(0)))
    for names in sharing(options.topologies):
        running = Running(arm(parse(names[0])), str(ensure(MODEL)), "", place, logs)
        try:
            print(f"{names[0]}: up after {running.start():.0f} s", flush=True)
            for name in names:
                cases = [case for case in CASES if case.topology == name]
                asyncio.run(measure(running, cases, profile, options))
        finally:
            running.stop()


def sharing(names: Iterable[str]) -> list[list[str]]:
    """Topologies that the same servers are enough for, those of the most servers first."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name in names:
        topology = parse(name)
        groups.setdefault((topology.encoders, topology.decodes), []).append(name)
    return [
        sorted(group, key=lambda name: parse(name).language, reverse=True)
        for group in groups.values()
    ]


def keep(out: Path, part: str, topology: str, outcomes: list[dict[str, Any]]) -> None:
    """Put a topology's outcomes in place of its earlier ones."""
    kept = json.loads(out.read_text()) if out.exists() else {}
    others = [one for one in kept.get(part, []) if one["topology"] != topology]
    order = [case.topology for case in CASES]
    kept[part] = sorted([*others, *outcomes], key=lambda one: order.index(one["topology"]))
    kept |= {"machine": machine(), "checkpoint": MODEL, "profile": PROFILE.name}
    kept["versions"] = f"sglang {version('sglang')}, torch {version('torch')}"
    out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
