"""The simulator against real servers: what it predicts of loads that it was not shown.

    .venv/bin/python benchmark/validate_sim.py [--seconds 25] [--goodput]

First a profile is measured, by single requests on idle servers, and by four texts and two
pictures that come at once: text alone, one small picture, one large one, on one server that
does everything and on an encoder and a language server, each server on one core of its own.
Then come loads of other sizes, numbers of pictures, mixtures and deployments, by the same
seeded requests at the same moments on the servers and in the simulation.

A machine's speed drifts over minutes. So single pictures are asked for before and after each
load, and all times of the profile are taken as much longer or shorter as these were; what
the profile says as it is is kept, too.

`--goodput` looks for the highest rates at which an SLO holds instead, on the servers and in
the simulation, by the same requests.

Everything that a server does shares its one core (`shared_cores`). Preparing a picture
counts as part of an encoder's tower. What was measured and predicted goes into
`results/simulator.json`; `benchmark/simulator.py` makes the page.
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
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from comparison.figures import Bisection
from pages import machine
from pictures import jpeg

from encoder import RESULTS
from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerProcess, free_port, stop_all
from sglang_epd.profile import Profile
from sglang_epd.schema import convert
from sglang_epd_plan.clients import Demand, generators
from sglang_epd_plan.goodput import goodput
from sglang_epd_plan.model import simulate
from sglang_epd_plan.records import Request
from sglang_epd_plan.report import Slo
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Closed, Traffic, Workload, intervals

HOST = "127.0.0.1"
START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 120.0
MODEL = "bench-qwen2_5-vl"
# Patches of the pictures that are used, by their names in `pictures`.
SIZES = {256.0: "224", 1024.0: "448"}
KEPT = RESULTS / "simulator.json"
_SMALL, _LARGE = {"width": 224, "height": 224}, {"width": 448, "height": 448}


def _kind(**changes: Any) -> dict[str, Any]:
    return {"text_tokens": 100, "output_tokens": 16, **changes}


_ONE = _kind(items=1, pictures=[_LARGE])
_MIXED = [_kind(weight=3), _kind(items=1, pictures=[_LARGE])]
_SIZED = _kind(items={"kind": "uniform", "low": 1, "high": 3}, pictures=[_SMALL, _LARGE])


@dataclass(frozen=True)
class Case:
    """A load: of so much of what one server that does everything can do, or closed."""

    name: str
    topology: str
    kinds: list[dict[str, Any]]
    share: float = 0.0
    users: int = 0

    def workload(self) -> Workload:
        arrival: dict[str, Any] = {"kind": "poisson"}
        if self.users:
            arrival = {"kind": "closed", "users": self.users}
        asked = {"name": self.name, "kinds": self.kinds, "arrival": arrival}
        return convert(asked, Workload, self.name)


CASES = (
    Case("one picture", "1EPD", [_ONE], share=0.6),
    Case("one picture", "1E1PD", [_ONE], share=0.6),
    Case("4 pictures", "1E1PD", [_kind(items=4, pictures=[_LARGE])], users=2),
    Case("one picture", "1E1PD", [_ONE], users=4),
    Case("one picture", "2EPD", [_ONE], users=4),
    Case("1 to 3 pictures of two sizes", "2EPD", [_SIZED], share=1.2),
    Case("one in four with a picture", "1E1PD", _MIXED, users=6),
    Case("one in four with a picture", "2EPD", _MIXED, users=6),
    Case("400 tokens of text and a picture", "1EPD", [{**_ONE, "text_tokens": 400}], users=3),
)

# For goodput: as many times as long as a picture by itself on one server that does everything.
_SLO_TTFT, _SLO_TPOT = 3.0, 8.0
# Of so few requests p99 would be the slowest.
_SLO_QUANTILE = 0.9
_LEAST = 25
# Of what one server that does everything can do: the least and the most that are tried.
_RATES = {"1EPD": (0.4, 1.3), "1E1PD": (0.4, 1.3), "2EPD": (0.8, 2.6)}
_PROBES = 4


class Servers:
    """An encoder and a language server, and two that do everything, one a core. The encoder
    and the first of the two share a core, but never have work at the same time."""

    def __init__(self, model: str, logs: Path) -> None:
        self._model, self._logs = model, logs
        encoder_url, encoder = self._server("encoder", 0, ["--encoder-only"])
        flags = ["--language-only", "--encoder-urls", encoder_url]
        flags += ["--encoder-bootstrap-port", str(free_port())]
        language_url, language = self._server("language", 1, flags)
        first_url, first = self._server("first", 0, [])
        second_url, second = self._server("second", 1, [])
        self.all = [encoder, language, first, second]
        self.urls = {
            "1E1PD": [language_url],
            "1EPD": [first_url],
            "2EPD": [first_url, second_url],
        }

    def _server(self, name: str, core: int, flags: list[str]) -> tuple[str, ServerProcess]:
        port = free_port()
        url = f"http://{HOST}:{port}"
        command = ["taskset", "-c", str(core), sys.executable, "-m", "sglang.launch_server"]
        command += ["--model-path", self._model, "--dtype", "float32", "--port", str(port), *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = self._logs / f"{name}.log"
        return url, ServerProcess(name, command, log_path=log, ready_url=f"{url}/health", env=env)

    def __enter__(self) -> Servers:
        try:
            for server in self.all:
                server.start()
            for server in self.all:
                server.wait_ready(START_TIMEOUT_S)
        except BaseException:
            stop_all(self.all)
            raise
        return self

    def __exit__(self, *_reason: object) -> None:
        stop_all(self.all)


@dataclass(frozen=True)
class Seen:
    """One answered request, seconds from when it was to be sent; prompt tokens by the server."""

    ttft_s: float
    total_s: float
    tokens: int
    prompt: int

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / (self.tokens - 1)


class Sender:
    """Streams chat completions.

    Attributes:
        fixed, each: prompt tokens without text, and of a word.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._pictures = 0
        self._rng = random.Random(0)
        self.fixed, self.each = 0.0, 1.0

    async def learn(self, url: str) -> None:
        """How many tokens a word is."""
        few, many = [await self.ask(url, self.body(words, [], 2)) for words in (20, 120)]
        self.each = (many.prompt - few.prompt) / 100
        self.fixed = few.prompt - 20 * self.each

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.each))

    def body(self, words: int, sizes: Iterable[str], output: int) -> bytes:
        """A request that nothing is known of: no two begin alike."""
        parts: list[dict[str, Any]] = []
        for size in sizes:
            self._pictures += 1
            data = base64.b64encode(jpeg(size, ("validate", self._pictures))).decode()
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
        return Seen(first - due, now - due, usage["completion_tokens"], usage["prompt_tokens"])


async def in_turns(sender: Sender, servers: Servers, repeats: int) -> dict[str, list[list[Seen]]]:
    """Answers to every kind of request that a profile is from, those that were sent at once
    together. The kinds take turns, as speeds drift over minutes; the first turn is left out.
    """
    one, apart = servers.urls["1EPD"][0], servers.urls["1E1PD"][0]
    kinds: dict[str, tuple[str, int, list[str], int]] = {
        "text, short": (one, 40, [], 1),
        "text, long": (one, 440, [], 1),
        "text, short, apart": (apart, 40, [], 1),
        "4 texts": (one, 40, [], 4),
    }
    for name, url in (("encoder", apart), ("language", one)):
        kinds[f"224 px, {name}"] = url, 40, ["224"], 1
        kinds[f"448 px, {name}"] = url, 40, ["448"], 1
        kinds[f"2 of 448 px, {name}"] = url, 40, ["448"], 2
    seen: dict[str, list[list[Seen]]] = {name: [] for name in kinds}
    for turn in range(repeats + 1):
        for name, (url, words, sizes, count) in kinds.items():
            bodies = [sender.body(words, sizes, 16) for _ in range(count)]
            answers = await asyncio.gather(*(sender.ask(url, body) for body in bodies))
            if turn:
                seen[name].append(sorted(answers, key=lambda answer: answer.ttft_s))
    return seen


async def calibrate(
    sender: Sender, servers: Servers, repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A profile, and what it is from: requests that meet nobody, and few that come at once."""
    await sender.learn(servers.urls["1EPD"][0])
    turns = await in_turns(sender, servers, repeats)

    def ttft(name: str, index: int = 0) -> float:
        """Of the first, or the last, of those that came at once; the median of the turns."""
        return statistics.median(answers[index].ttft_s for answers in turns[name])

    def later(name: str, alone: str) -> float:
        """How much later the first has its first token than one has by itself."""
        pairs = zip(turns[name], turns[alone], strict=True)
        return statistics.median(many[0].ttft_s - one[0].ttft_s for many, one in pairs)

    def total(name: str) -> float:
        return statistics.median(answers[0].total_s for answers in turns[name])

    def step(name: str) -> float:
        return statistics.median(seen.tpot_s for answers in turns[name] for seen in answers)

    def prompt(name: str) -> float:
        return statistics.median(answers[0].prompt for answers in turns[name])

    single = [name for name, answers in turns.items() if len(answers[0]) == 1]
    told = {
        name: {"first_s": ttft(name), "last_s": ttft(name, -1), "total_s": total(name),
               "step_s": step(name), "prompt": prompt(name)}
        for name in turns
    }  # fmt: skip
    short, long = ttft("text, short"), ttft("text, long")
    token_s = max(0.0, (long - short) / (prompt("text, long") - prompt("text, short")))
    launch_s = max(0.0, short - prompt("text, short") * token_s)
    # The first of four begins when all have been received, which is done by the same core.
    request_s = min(max(0.0, later("4 texts", "text, short") / 3), launch_s / 2)
    # What the language server of the pair has less to do than one that does everything.
    less = min(1.0, ttft("text, short, apart") / short)
    towers = {}
    for name, share in (("encoder", less), ("language", 1.0)):
        left = [
            ttft(f"{px} px, {name}") - share * launch_s - prompt(f"{px} px, {name}") * token_s
            for px in (224, 448)
        ]
        both = f"2 of 448 px, {name}"
        patch_s = max(0.0, (left[1] - left[0]) / (1024 - 256))
        if name == "language":
            # One that comes with another begins when that one was received and prepared.
            later_s = later(both, "448 px, language")
            beside_s = item_s = min(max(0.0, later_s - request_s), left[0] / 2)
        else:
            # The second one has its embedding when the encoder has made it; what is on its
            # way, or at the language server, meanwhile keeps nobody waiting.
            encoded_s = statistics.median(
                answers[1].ttft_s - answers[0].ttft_s for answers in turns[both]
            )
            beside_s = latency_s = min(max(0.0, left[1] - encoded_s), left[0] / 2)
        towers[name] = {
            "patch_s": patch_s,
            "launch_s": max(0.0, left[0] - beside_s - 256 * patch_s),
            "batch_patches": 2048,
        }
    step_s = statistics.median(step(name) for name in single)
    # All steps of the last of four are beside the other three.
    together_s = statistics.median(answers[-1].tpot_s for answers in turns["4 texts"])
    sequence_s = max(0.0, together_s - step_s) / 3
    value = {
        "name": "this machine",
        "source": ["measured by benchmark/validate_sim.py"],
        "hardware": f"one core of {os.cpu_count()} a server",
        "model": MODEL,
        "pixels": {"patch_px": 14, "merge": 4},
        "encoder": {"tower": towers["encoder"]},
        "language": {
            "tower": towers["language"],
            "shared_cores": True,
            "request_s": request_s,
            "host": {"item_s": item_s},
            "prefill_launch_s": launch_s - request_s,
            "prefill_token_s": token_s,
            "decode_launch_s": max(1e-6, step_s - sequence_s),
            "decode_sequence_s": sequence_s,
            "running": 128,
            "kv_tokens": 65_536,
        },
        "links": {"bytes_per_token": 2048, "latency_s": latency_s},
    }
    return value, told


def slowed(value: Any, factor: float) -> Any:
    """A profile's values with all times as many times as long."""
    if isinstance(value, dict):
        return {
            name: one * factor
            if name.endswith("_s") and isinstance(one, float)
            else slowed(one, factor)
            for name, one in value.items()
        }
    return value


def capacity(profile: Profile, case: Case) -> float:
    """Requests a second of one server that does everything, at most."""
    asked = msgspec.structs.replace(case.workload(), arrival=Closed(users=8))
    return simulate(profile, asked, parse("1EPD"), Traffic(requests=400)).throughput


class Load:
    """One case on real servers: the requests that the simulation has, at its moments."""

    def __init__(self, sender: Sender, urls: Sequence[str], profile: Profile, case: Case) -> None:
        self._sender, self._urls = sender, urls
        self._outstanding = [0] * len(urls)
        self._workload = case.workload()
        arrivals, demand = generators(0)
        self._arrivals = arrivals
        self._demand = Demand(self._workload, profile, demand)
        self.seen: list[Seen] = []

    def _body(self, request: Request) -> bytes:
        text = request.prompt - sum(item.tokens for item in request.items)
        sizes = [SIZES[item.patches] for item in request.items]
        return self._sender.body(self._sender.words(text), sizes, request.output)

    async def _send(self, body: bytes, due: float) -> None:
        """To whoever has the fewest requests."""
        index = min(range(len(self._urls)), key=lambda index: self._outstanding[index])
        self._outstanding[index] += 1
        try:
            self.seen.append(await self._sender.ask(self._urls[index], body, due))
        finally:
            self._outstanding[index] -= 1

    async def run(self, rate: float, requests: int) -> float:
        """All of them; requests a second."""
        bodies = [self._body(self._demand.next(0.0)) for _ in range(requests)]
        begin = time.perf_counter()
        first = begin
        async with asyncio.TaskGroup() as group:
            if isinstance(self._workload.arrival, Closed):
                coming = iter(bodies)
                for _ in range(self._workload.arrival.users):
                    group.create_task(self._user(coming))
            else:
                due = begin
                gaps = intervals(self._workload.arrival, rate, self._arrivals)
                for number, (gap, body) in enumerate(zip(gaps, bodies, strict=False)):
                    due += gap
                    first = due if not number else first
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    group.create_task(self._send(body, due))
        return len(self.seen) / (time.perf_counter() - first)

    def meets(self, slo: Slo) -> bool:
        """Whether what was seen does."""
        return all(
            np.quantile([getattr(seen, name) for seen in self.seen], slo.quantile) <= most
            for name, most in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s))
        )

    async def _user(self, coming: Iterable[bytes]) -> None:
        for body in coming:
            await self._send(body, time.perf_counter())


class Calibrated:
    """Servers, and the profile that was measured on them.

    Attributes:
        value: the profile's values.
        told: what they are from.
    """

    def __init__(
        self, sender: Sender, servers: Servers, value: dict[str, Any], told: dict[str, Any]
    ) -> None:
        self.sender, self.servers, self.value, self.told = sender, servers, value, told
        self.profile = convert(value, Profile, "measured")
        one, apart = (told[f"448 px, {name}"]["total_s"] for name in ("language", "encoder"))
        self._was_s = {"1EPD": one, "2EPD": one, "1E1PD": apart}

    async def slower(self, topology: str) -> float:
        """How much slower the machine is just now than when the profile was made: by what
        pictures and 16 tokens take idle servers."""
        urls = self.servers.urls[topology]
        seen = [
            await self.sender.ask(url, self.sender.body(40, ["448"], 16)) for url in (*urls, *urls)
        ]
        return statistics.median(answer.total_s for answer in seen) / self._was_s[topology]

    def at(self, slower: float) -> Profile:
        """The profile of a machine that is so much slower."""
        return convert(slowed(self.value, slower), Profile, "measured")

    def load(self, case: Case) -> Load:
        return Load(self.sender, self.servers.urls[case.topology], self.profile, case)


@asynccontextmanager
async def calibrated(model: str, repeats: int) -> AsyncIterator[Calibrated]:
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-validate-"))
    print(f"logs in {logs}", flush=True)
    with Servers(model, logs) as servers:
        async with aiohttp.ClientSession() as session:
            sender = Sender(session)
            value, told = await calibrate(sender, servers, repeats)
            print(json.dumps(told), flush=True)
            yield Calibrated(sender, servers, value, told)


async def goodputs(model: str, seconds: float, repeats: int) -> dict[str, Any]:
    async with calibrated(model, repeats) as made:
        profile, told = made.profile, made.told
        alone = told["448 px, language"]
        slo = Slo(
            ttft_s=_SLO_TTFT * alone["first_s"],
            tpot_s=_SLO_TPOT * alone["step_s"],
            quantile=_SLO_QUANTILE,
        )
        found = []
        for topology, shares in _RATES.items():
            case = Case("one picture", topology, [_ONE])
            low, high = (share * capacity(profile, case) for share in shares)
            speeds: list[float] = []
            search = Bisection(low, high, _PROBES)
            while search.rate is not None:
                speeds.append(await made.slower(topology))
                load = made.load(case)
                await load.run(search.rate, max(_LEAST, round(search.rate * seconds)))
                search.tell(load.meets(slo))
            tries, slower = search.found.tried, statistics.fmean(speeds)
            predicted = [
                goodput(
                    made.at(factor),
                    case.workload(),
                    parse(topology),
                    slo,
                    seconds=seconds,
                    least_requests=_LEAST,
                    start=low,
                ).rate
                for factor in (slower, 1.0)
            ]
            found.append(
                {
                    "case": case.name,
                    "topology": topology,
                    "tries": tries,
                    "measured": search.found.rate,
                    "predicted": predicted[0],
                    "slower": slower,
                    "predicted_as_it_was": predicted[1],
                }
            )
            print(json.dumps(found[-1]), flush=True)
    return {
        **made_with(),
        "slo": msgspec.to_builtins(slo),
        "profile": made.value,
        "told": told,
        "outcomes": found,
    }


def made_with() -> dict[str, str]:
    """What a page says of the machine."""
    return {
        "machine": machine(),
        "versions": f"sglang {version('sglang')}, torch {version('torch')}",
        "model": MODEL,
        "command": " ".join([".venv/bin/python", "benchmark/validate_sim.py", *sys.argv[1:]]),
    }


async def validate(model: str, seconds: float, repeats: int) -> dict[str, Any]:
    async with calibrated(model, repeats) as made:
        profile, told = made.profile, made.told
        outcomes, loads = [], []
        for case in CASES:
            most = capacity(profile, case)
            rate = case.share * most
            # A deployment of two cores does about twice of it.
            requests = max(12, round((rate or 1.4 * most) * seconds))
            load = made.load(case)
            around = [await made.slower(case.topology)]
            throughput = await load.run(rate, requests)
            around.append(await made.slower(case.topology))
            slower = statistics.fmean(around)
            traffic = Traffic(rate=rate, requests=requests)
            runs = [
                simulate(
                    made.at(factor),
                    case.workload(),
                    parse(case.topology),
                    traffic,
                )
                for factor in (slower, 1.0)
            ]
            measured = {
                "requests_per_s": throughput,
                "ttft_p50_s": statistics.median(seen.ttft_s for seen in load.seen),
                "ttft_mean_s": statistics.fmean(seen.ttft_s for seen in load.seen),
                "tpot_p50_s": statistics.median(seen.tpot_s for seen in load.seen),
            }
            predicted, as_it_was = (
                {
                    "requests_per_s": run.throughput,
                    "ttft_p50_s": run.quantile("ttft", 0.5),
                    "ttft_mean_s": run.mean("ttft"),
                    "tpot_p50_s": run.quantile("tpot", 0.5),
                }
                for run in runs
            )
            loads.append(os.getloadavg()[0])
            how = f"{case.users} users" if case.users else f"{rate:.2f} requests/s"
            outcomes.append(
                {
                    "case": case.name,
                    "topology": case.topology,
                    "load": how,
                    "requests": requests,
                    "measured": measured,
                    "predicted": predicted,
                    "slower": slower,
                    "predicted_as_it_was": as_it_was,
                }
            )
            print(json.dumps(outcomes[-1]), flush=True)
    return {
        **made_with(),
        # Of everything on the machine, the servers included.
        "load_average": statistics.median(loads),
        "profile": msgspec.to_builtins(profile),
        "told": told,
        "outcomes": outcomes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=25.0, help="of each load, about")
    parser.add_argument("--repeats", type=int, default=9, help="of each kind of request")
    parser.add_argument(
        "--profile", type=Path, help="write the measured profile there, for sglang-epd plan"
    )
    parser.add_argument("--goodput", action="store_true", help="look for that, not at loads")
    options = parser.parse_args()
    part = "goodput" if options.goodput else "validation"
    measure = goodputs if options.goodput else validate
    figures = asyncio.run(measure(str(ensure(MODEL)), options.seconds, options.repeats))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if options.profile:
        options.profile.write_text(json.dumps(figures["profile"], indent=1) + "\n")
    kept[part] = figures
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
