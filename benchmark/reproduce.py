"""Published comparisons again, on emulated accelerators of their kind.

    .venv/bin/python benchmark/reproduce.py sglang-blog
    .venv/bin/python benchmark/reproduce.py sglang-blog --arms epd-2e1p --add
    .venv/bin/python benchmark/reproduce.py sglang-blog --render

The comparison is a file of benchmark/reproduce/, its arms are files of benchmark/reproduce/arms/.
Real servers run a tiny checkpoint, and each forward pass takes the time of the comparison's
profile (docs/emulated.md). Arms get the same requests, `together` of them at a time.
Pictures, texts and chunks are `shrink` times smaller than published and cost as many times more,
so that the tiny model's real passes fit into the emulated ones; so are answers, by
`answer_shrink`. Arrivals are stretched as the passes are, and results divided: all times of the
page are the emulated machines'.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

import msgspec  # noqa: E402
import tokenizers  # noqa: E402
from comparison.arms import Arm, Place, Running  # noqa: E402
from comparison.clients import BenchServing, converse, write_load  # noqa: E402
from comparison.figures import Run  # noqa: E402
from comparison.files import read, read_all  # noqa: E402
from comparison.published import Busy, Case, Comparison, Measured, Reproduced  # noqa: E402
from comparison.published_page import Page  # noqa: E402
from comparison.results import machine, versions  # noqa: E402
from comparison.workloads import Request, requests  # noqa: E402

from demo_emulated import Counted, counted  # noqa: E402
from make_checkpoint import ensure  # noqa: E402
from sglang_epd.profile import Profile, load_profile  # noqa: E402

HERE = ROOT / "benchmark" / "reproduce"
RESULTS = ROOT / "benchmark" / "results"
# Of an answer, of the emulated machines' time.
ANSWER_TIMEOUT_S = 300.0
replace = msgspec.structs.replace


def profile_of(told: Comparison, arm: str) -> Profile:
    """As published."""
    name = told.profiles.get(arm, told.profile)
    path = HERE / "profiles" / f"{name}.json"
    return load_profile(str(path) if path.exists() else name)


class Measuring:
    """An arm's servers, its own client, and the loads on it.

    Args:
        folder: for logs, requests and the profile.
    """

    def __init__(self, told: Comparison, arm: Arm, folder: Path, model: str) -> None:
        self._told, self._folder, self.arm = told, folder, arm
        self._tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
        folder.mkdir()
        profile = folder / "profile.json"
        profile.write_bytes(msgspec.json.encode(told.shrunk(profile_of(told, arm.name))))
        os.environ["SGLANG_EPD_EMULATE"] = str(profile)
        os.environ["SGLANG_EPD_EMULATE_DILATE"] = f"{told.dilation:g}"
        # In-tree encoders answer no probe during a pass, and their servers forget them after this.
        os.environ["SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT"] = f"{2 * told.dilation:g}"
        self._running = Running(arm, model, "", Place(cores=_cores()), folder)
        self._bench = BenchServing(model, folder, _cores())

    def measure(self, cases: list[Case], up: Callable[[], object]) -> Iterator[Measured]:
        """Start the servers, put every load on them, and stop them.

        Args:
            up: called once they are up.
        """
        running = self._running
        try:
            print(f"{self.arm.name}: up after {running.start():.0f} s", flush=True)
            warm = write_load(self._folder / "warm.jsonl", self._requests(cases[0], 0.0), 2, 0, 0)
            self._bench.run(running.url, warm, ANSWER_TIMEOUT_S)
            up()
            for case in cases:
                for load in case.loads:
                    before = spent(running)
                    run = self._run(case, load)
                    yield Measured(run, busy(before, spent(running)))
        finally:
            running.stop()
            self._bench.close()

    def _requests(self, case: Case, load: float) -> Iterator[Request]:
        def count(text: str) -> int:
            return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

        return requests(case.workload(), "small", load, count)

    def _run(self, case: Case, load: float) -> Run:
        dilation, url = self._told.dilation, self._running.url
        rate = 0.0 if case.closed else load / dilation
        path, sent = self._folder / f"{case.name}-{load:g}.jsonl", self._requests(case, load)
        at_once = round(load) if case.closed else 1
        written = write_load(path, sent, case.requests, rate, 0, at_once=at_once)
        if case.turns > 1:
            talks = list(islice(self._requests(case, load), case.requests))
            outcomes, seconds = asyncio.run(
                converse(url, talks, float("inf"), 0, ANSWER_TIMEOUT_S * dilation)
            )
        else:
            timeout_s = ANSWER_TIMEOUT_S * dilation + (case.requests / rate if rate else 0.0)
            outcomes, seconds = self._bench.run(url, written, timeout_s)
        return Run(self.arm.name, case.name, 0, load, seconds, written.digest, "", outcomes)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def spent(running: Running) -> dict[str, list[Counted]]:
    """What each server's accelerator has done so far; servers by whether they only encode."""
    return {
        "encoder": [counted(url) for url in running.urls("encoder")],
        "language": [
            counted(url)
            for role in ("server", "language", "prefill", "decode")
            for url in running.urls(role)
        ],
    }


def busy(before: dict[str, list[Counted]], after: dict[str, list[Counted]]) -> Busy:
    """What they did in between."""
    since = {
        role: [now.since(then) for then, now in zip(before[role], found, strict=True)]
        for role, found in after.items()
    }
    kinds = {kind for one in since["language"] for kind in one.seconds}
    return Busy(
        sum(sum(one.seconds.values()) for one in since["encoder"]),
        {kind: sum(one.seconds.get(kind, 0.0) for one in since["language"]) for kind in kinds},
        sum(one.overrun_s for found in since.values() for one in found),
        dict(sum((one.items for one in since["language"]), Counter[str]())),
    )


def reproduce(
    results: Reproduced, arms: list[Arm], cases: list[Case], folder: Path, keep: Callable[[], None]
) -> None:
    """Run arms at all loads of cases; results take the place of those that there are.

    Args:
        keep: called after each run.
    """
    told = results.comparison
    model, keeping = str(ensure(told.checkpoint)), threading.Lock()
    again = {(arm.name, case.name) for arm in arms for case in cases}
    results.runs = [one for one in results.runs if (one.run.arm, one.run.workload) not in again]
    for first in range(0, len(arms), told.together):
        group = [
            Measuring(told, arm, folder / arm.name, model)
            for arm in arms[first : first + told.together]
        ]
        # They are put under load when all of them are up.
        up = threading.Barrier(len(group))

        def measure(one: Measuring, up: threading.Barrier = up) -> None:
            try:
                for measured in one.measure(cases, up.wait):
                    with keeping:
                        results.runs.append(measured)
                        keep()
            finally:
                up.abort()

        with ThreadPoolExecutor(len(group)) as threads:
            list(threads.map(measure, group))


def page_of(results: Reproduced, told: Comparison) -> Page:
    arms = read_all(HERE / "arms", Arm, told.arms)
    return Page(results, told, arms, {arm.name: profile_of(told, arm.name) for arm in arms})


def begin(told: Comparison, kept: Path, add: bool) -> Reproduced:
    """Results to add to.

    Raises:
        SystemExit: those that there are were measured by another file.
    """
    if not add or not kept.exists():
        return Reproduced(told.measured, machine(), versions())
    results = msgspec.json.decode(kept.read_bytes(), type=Reproduced)
    now, before = told.measured, results.comparison
    if replace(now, cases=before.cases) != before or any(c not in now.cases for c in before.cases):
        raise SystemExit(f"{kept}: measured by another {told.name}.toml")
    return replace(results, comparison=now)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", choices=sorted(path.stem for path in HERE.glob("*.toml")))
    parser.add_argument("--arms", nargs="+", help="of the comparison's; all without")
    parser.add_argument("--cases", nargs="+", help="likewise")
    parser.add_argument("--add", action="store_true", help="keep other arms' and cases' results")
    parser.add_argument("--requests", type=int, help="of each run, in place of the file's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="write the page anew")
    options = parser.parse_args()
    told = read(HERE / f"{options.comparison}.toml", Comparison)
    out = options.out / f"reproduce_{options.comparison.replace('-', '_')}.md"
    kept = out.with_suffix(".json")
    if options.render:
        page_of(msgspec.json.decode(kept.read_bytes(), type=Reproduced), told).render(out)
        return
    if options.requests:
        cases = [replace(case, requests=options.requests) for case in told.cases]
        told = replace(told, cases=cases)
    arms = read_all(HERE / "arms", Arm, [a for a in told.arms if a in (options.arms or told.arms)])
    chosen = [case for case in told.cases if case.name in (options.cases or [case.name])]
    results = begin(told, kept, options.add)
    folder = Path(tempfile.mkdtemp(prefix="sglang-epd-reproduce-"))
    print("logs:", folder, flush=True)

    def keep() -> None:
        kept.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        last = results.runs[-1].run
        case = next(case for case in told.cases if case.name == last.workload)
        arm = next(arm for arm in arms if arm.name == last.arm)
        page = page_of(results, told)
        print(" | ".join(page.row(arm, case, last.rate)), flush=True)
        page.render(out)

    reproduce(results, arms, chosen, folder, keep)


if __name__ == "__main__":
    main()
