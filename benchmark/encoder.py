"""How close an encoder server comes to the bare vision transformer.

    .venv/bin/python benchmark/encoder.py [--rounds 3] [--sizes 224 448 1080p] [--socket]
    .venv/bin/python benchmark/encoder.py --probe
    .venv/bin/python benchmark/encoder.py --same-new-image 24

One run, side by side: a plain loop over the same tower and processor (`bare`), this
package's encoder server, and SGLang's own (its batching on, as it is by default). Clients
ask in a closed loop, one picture a request; embeddings are delivered to a language
server's end, ours or SGLang's, in a process of its own. The arms take turns in each
round and get the same pictures. `cold`: no picture comes twice. `hot`: four pictures, again
and again, after a warm-up, with --enable-prefix-mm-cache.

Writes a page and, beside it, every single figure as JSON. `--probe` asks both servers for
/health while 64 clients have 1080p pictures encoded; `--same-new-image` has that many
clients ask for one new picture at the same time. Each of these writes a page of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
from encoder_arms import Arm, Bare, InTree, Ours, Run, Server
from pages import quantile_ms, setting, table
from pictures import ROOT, SIZES, jpeg

from make_checkpoint import ensure

# Pictures a run of so many clients, by size: enough to keep them all busy, and all runs
# of three rounds within twelve minutes on two cores. 64 clients with 1080p pictures take
# as long as the rest of a round: in the first one only.
PICTURES = {
    "224": {1: 24, 8: 32, 64: 96},
    "448": {1: 10, 8: 16, 64: 64},
    "1080p": {1: 3, 8: 8, 64: 64},
}
BARE_PICTURES = {"224": 24, "448": 10, "1080p": 3}
HOT_PICTURES = {1: 32, 8: 64, 64: 128}
HOT_SET = 4
CLIENTS = (1, 8, 64)
# Of the time, where there are hot rounds too.
_COLD_SHARE = 0.8
RESULTS = ROOT / "benchmark" / "results"
FORWARDS = 'sglang:epd_encoder_stage_seconds_count{stage="forward"}'


@dataclass
class Case:
    """One run of one arm in one round."""

    round: int
    load: str
    size: str
    clients: int
    arm: str
    run: Run
    ratio: float

    def as_json(self) -> dict[str, Any]:
        kept = {"round": self.round, "load": self.load, "size": self.size}
        kept |= {"clients": self.clients, "arm": self.arm, "ratio_to_bare": round(self.ratio, 4)}
        return kept | self.run.as_json()


class Bench:
    """Starts the arms and lets them take turns."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = str(ensure(options.model))
        self.logs = Path(tempfile.mkdtemp(prefix="sglang-epd-bench-"))
        self.notes: list[str] = []
        self.idle_percent: dict[str, float] = {}
        self.cases: list[Case] = []
        self._begun = time.monotonic()
        # Seconds of a round that later ones will not take.
        self._once_s = 0.0

    def pictures(self, count: int, size: str, *seed: object) -> list[bytes]:
        return [jpeg(size, (self.options.seed, *seed, number)) for number in range(count)]

    @contextmanager
    def arms(self, *, cache: bool, bare: bool = True) -> Iterator[list[Arm]]:
        """Bare loops and servers, all of them ready and warm; ours and in-tree."""
        started: list[Arm] = []
        try:
            loop = Bare(self.model, self.logs) if bare else None
            if loop:
                started += [loop, Bare(self.model, self.logs, loop.child, overlapped=True)]
            servers: list[Server] = []
            for make in self._ours(cache):
                servers.append(make)
                started.append(make)
            started.append(InTree(self.model, self.logs, cache=cache))
            servers.append(started[-1])  # type: ignore[arg-type]
            if loop:
                loop.wait_ready()
            for server in servers:
                server.wait_ready()
            yield started
        finally:
            for arm in reversed(started):
                arm.stop()

    def _ours(self, cache: bool) -> Iterator[Server]:
        yield Ours(self.model, self.logs, cache=cache)
        if self.options.socket:
            yield Ours(self.model, self.logs, landing="socket", cache=cache)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    async def warm_up(self, arms: Sequence[Arm], sizes: Sequence[str]) -> None:
        for arm in arms:
            for size in sizes:
                await arm.run(self.pictures(3, size, arm.name, "warm-up", size), 3)

    def measure_idle(self, arms: Sequence[Arm], seconds: float = 5.0) -> None:
        """What a server costs while another one is measured."""
        before = [arm.cpu_s() for arm in arms]
        time.sleep(seconds)
        for arm, was in zip(arms, before, strict=True):
            if isinstance(arm, Server):
                self.idle_percent[arm.name] = 100 * (arm.cpu_s() - was) / seconds

    async def compare(self, load: str) -> None:
        """All rounds of `cold` or `hot`."""
        options = self.options
        with self.arms(cache=load == "hot") as arms:
            await self.warm_up(arms, options.sizes)
            if load == "cold":
                self.measure_idle(arms)
            share = _COLD_SHARE if load == "cold" and "hot" in options.loads else 1.0
            deadline = self._begun + 60 * share * options.minutes
            for number in range(options.rounds):
                begin, self._once_s = time.monotonic(), 0.0
                for size in options.sizes:
                    await self._round(load, number, size, arms)
                now = time.monotonic()
                another = now - begin - self._once_s
                if number + 1 < options.rounds and now + another > deadline:
                    self.note(f"{load}: {number + 1} of {options.rounds} rounds, for lack of time.")
                    break

    async def _round(self, load: str, number: int, size: str, arms: list[Arm]) -> None:
        loops = [arm for arm in arms if isinstance(arm, Bare)]
        servers = [arm for arm in arms if isinstance(arm, Server)]
        turn = number % len(servers)
        servers = servers[turn:] + servers[:turn]
        pictures = self.pictures(BARE_PICTURES[size], size, load, number, "bare")
        limit = 0.0
        for loop in loops[: 1 if load == "hot" else 2]:
            run = await loop.run(pictures, 1)
            limit = limit or run.rate
            self._add(Case(number, load, size, 1, loop.name, run, run.rate / limit))
        few = self.pictures(HOT_SET, size, "hot")
        if load == "hot" and number == 0:
            for arm in servers:
                await arm.run(few, 1)
        for clients in self.options.clients:
            once = (size, clients, load) == ("1080p", 64, "cold")
            if once and number > 0:
                continue
            if load == "hot":
                count = HOT_PICTURES[clients]
                pictures = [few[index % HOT_SET] for index in range(count)]
            else:
                count = PICTURES[size][clients]
                pictures = self.pictures(count, size, load, number, clients)
            for arm in servers:
                run = await arm.run(pictures, clients)
                self._add(Case(number, load, size, clients, arm.name, run, run.rate / limit))
                self._once_s += run.seconds if once else 0.0

    def _add(self, case: Case) -> None:
        self.cases.append(case)
        print(
            f"round {case.round} {case.load} {case.size} {case.clients} clients, {case.arm}: "
            f"{case.run.rate:.2f} images/s, {case.ratio:.2f} of bare",
            flush=True,
        )

    async def same_new_image(self, count: int) -> list[list[str]]:
        """`count` clients ask for one new picture at the same time."""
        rows = [
            ["server", "pictures computed", "processor time, as images alone", "wall clock (s)"]
        ]
        for cache in (False, True):
            with self.arms(cache=cache, bare=False) as arms:
                await self.warm_up(arms, ["448"])
                for arm in arms:
                    name = arm.name + (", with cache" if cache else "")
                    # The cost of one, of eight that are all different.
                    alone = await arm.run(self.pictures(8, "448", name, "alone"), 1)
                    before = arm.metrics().get(FORWARDS, 0.0) if isinstance(arm, Ours) else 0.0
                    picture = jpeg("448", (self.options.seed, name, "same"))
                    run = await arm.run([picture] * count, count)
                    computed = "not counted"
                    if isinstance(arm, Ours):
                        computed = f"{arm.metrics().get(FORWARDS, 0.0) - before:.0f}"
                    cost = run.cpu_s / (alone.cpu_s / alone.images)
                    rows.append([name, computed, f"{cost:.1f}", f"{run.seconds:.2f}"])
                    print(rows[-1], flush=True)
        return rows

    async def probe(self) -> tuple[list[list[str]], list[dict[str, Any]]]:
        """Ask the servers how they are while 64 clients have 1080p pictures encoded."""
        rows = [["server", "asked", "answers", "not 200", "p50 (ms)", "p99 (ms)", "longest (ms)"]]
        figures: list[dict[str, Any]] = []
        clients = max(self.options.clients)
        with self.arms(cache=False, bare=False) as arms:
            await self.warm_up(arms, ["448"])
            for arm in arms:
                assert isinstance(arm, Server)
                paths = ("/health", "/v1/status") if isinstance(arm, Ours) else ("/health",)
                probes = [asyncio.create_task(_ask_often(arm.url + path)) for path in paths]
                pictures = self.pictures(clients, "1080p", "probe")
                try:
                    run = await arm.run(pictures, clients)
                    print(f"{arm.name}: {run.rate:.2f} images/s", flush=True)
                except* RuntimeError as refused:
                    # Its answers to the probes count all the same.
                    self.note(f"{arm.name}: {refused.exceptions[0]}")
                for path, probe in zip(paths, probes, strict=True):
                    probe.cancel()
                    latencies, bad = await probe
                    figures.append({"arm": arm.name, "path": path, "not_200": bad, "s": latencies})
                    shown = [quantile_ms(latencies, at) for at in (0.5, 0.99, 1.0)]
                    rows.append([arm.name, path, str(len(latencies)), str(bad), *shown])
                    print(rows[-1], flush=True)
        return rows, figures


async def _ask_often(url: str, every_s: float = 0.05) -> tuple[list[float], int]:
    """Seconds of each GET until cancelled, the one that is open then included."""
    latencies: list[float] = []
    bad = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        begin = None
        try:
            while True:
                begin = time.monotonic()
                try:
                    async with session.get(url) as response:
                        bad += response.status != 200
                        await response.read()
                except (aiohttp.ClientError, TimeoutError):
                    bad += 1
                latencies.append(time.monotonic() - begin)
                begin = None
                await asyncio.sleep(every_s)
        except asyncio.CancelledError:
            if begin is not None:
                latencies.append(time.monotonic() - begin)
            return latencies, bad


def compare_table(cases: list[Case], load: str) -> str:
    head = ["picture", "clients", "arm", "images/s", "of bare", "lowest to highest"]
    rows = [[*head, "p50 (ms)", "p99 (ms)", "CPU s/image"]]
    keys = list(dict.fromkeys((c.size, c.clients, c.arm) for c in cases if c.load == load))
    for size, clients, arm in sorted(keys, key=lambda key: (list(SIZES).index(key[0]), key[1])):
        chosen = [
            c for c in cases if (c.load, c.size, c.clients, c.arm) == (load, size, clients, arm)
        ]
        ratios = [case.ratio for case in chosen]
        latencies = [one for case in chosen for one in case.run.latencies_s]
        cpu = sum(c.run.cpu_s for c in chosen) / sum(c.run.images for c in chosen)
        row = [size, "" if arm.startswith("bare") else str(clients), arm]
        row += [f"{statistics.median(case.run.rate for case in chosen):.2f}"]
        row += [f"{statistics.median(ratios):.2f}"]
        row += [f"{min(ratios):.2f} to {max(ratios):.2f}"] if len(ratios) > 1 else ["one run"]
        row += [quantile_ms(latencies, 0.5), quantile_ms(latencies, 0.99), f"{cpu:.3f}"]
        rows.append(row)
    return table(rows)


def stage_table(cases: list[Case]) -> str:
    """Where an image's time went on our server, as its replies say."""
    chosen = [c for c in cases if c.load == "cold" and c.run.stages_ms and c.arm == Ours.name]
    names = sorted({name for case in chosen for one in case.run.stages_ms for name in one})
    rows = [["picture", "clients", *names]]
    for size, clients in sorted(
        {(c.size, c.clients) for c in chosen}, key=lambda key: (list(SIZES).index(key[0]), key[1])
    ):
        ms = [
            one for c in chosen if (c.size, c.clients) == (size, clients) for one in c.run.stages_ms
        ]
        means = [statistics.fmean(one.get(name, 0.0) for one in ms) for name in names]
        rows.append([size, str(clients), *(f"{mean:.1f}" for mean in means)])
    return table(rows)


def write(path: Path, page: str, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    path.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    print(page)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bench-qwen2_5-vl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--clients", nargs="+", type=int, choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--loads", nargs="+", choices=("cold", "hot"), default=["cold", "hot"])
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="no round begins that ends later"
    )
    parser.add_argument("--socket", action="store_true", help="add an arm without shared memory")
    parser.add_argument("--probe", action="store_true", help="this alone")
    parser.add_argument("--same-new-image", type=int, metavar="CLIENTS", help="this alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: a page of its own in results/")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    bench = Bench(options)
    if options.probe:
        rows, probes = asyncio.run(bench.probe())
        page = f"""# Asking a busy encoder how it is

{setting(options)} While {max(options.clients)} clients have 1920x1080 pictures encoded, one
each; asked every 50 ms. In-tree `/health` encodes a picture itself, unless others are.

{table(rows)}
{"".join(chr(10) + note + chr(10) for note in bench.notes)}"""
        write(options.out or RESULTS / "encoder_probe.md", page, {"probes": probes})
        return
    if options.same_new_image:
        count = options.same_new_image
        rows = asyncio.run(bench.same_new_image(count))
        page = f"""# One new picture, {count} clients at the same time

{setting(options)} A 448x448 picture that the server has not seen. Pictures computed are
those that went through the tower, by our `/metrics`; processor time is the server's, by
that of one picture of eight different ones, one after the other.

{table(rows)}
{"".join(chr(10) + note + chr(10) for note in bench.notes)}"""
        write(options.out or RESULTS / "encoder_same_image.md", page, {"rows": rows})
        return
    begin = time.monotonic()
    for load in options.loads:
        asyncio.run(bench.compare(load))
    idle = ", ".join(f"{name} {share:.1f}%" for name, share in bench.idle_percent.items())
    parts = {
        "cold": f"""## Cold: no picture twice

{compare_table(bench.cases, "cold")}

Mean milliseconds an image spent in each stage of our server:

{stage_table(bench.cases)}
""",
        "hot": f"""## Hot: {HOT_SET} pictures again and again, with --enable-prefix-mm-cache

{compare_table(bench.cases, "hot")}
""",
    }
    page = f"""# An encoder server next to the bare tower

{setting(options)} {options.rounds} rounds in {(time.monotonic() - begin) / 60:.0f} minutes,
the arms in turn in each of them. Images/s and ratios are medians over the rounds, each
ratio to `bare` of its own round; latencies are those of all rounds. Processor time is
that of the server process alone; clients and receivers share the cores with it.
{f"Idle, while another arm runs, of a core: {idle}." if idle else ""}
{"".join(chr(10) + note + chr(10) for note in bench.notes)}
{chr(10).join(parts[load] for load in options.loads)}"""
    figures = {
        "command": sys.argv,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {one: version(one) for one in ("sglang", "torch", "transformers", "pyzmq")},
        "model": options.model,
        "seed": options.seed,
        "idle_percent": bench.idle_percent,
        "notes": bench.notes,
        "cases": [case.as_json() for case in bench.cases],
    }
    write(options.out or RESULTS / "encoder.md", page, figures)


if __name__ == "__main__":
    main()
