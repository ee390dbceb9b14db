"""Arms side by side on one machine: equal cores, the same checkpoint, the same requests.

    .venv/bin/python benchmark/compare.py [--rounds 2] [--arms ...] [--workloads ...]
    .venv/bin/python benchmark/compare.py --scale paper --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --gpus 0 1 --cores 0-31 --client-cores 32-47
    .venv/bin/python benchmark/compare.py --render benchmark/results/compare.json

Arms are files of benchmark/arms/, workloads of benchmark/workloads/. In each round every arm
is started, pinned to the same cores, asked a sample of questions one by one, whose answers
have to be the baseline's, and put under every load; then it is stopped. So one arm is up at
a time, and none keeps memory or a core from another; the order of the arms is another in
each round. The first arm named is the baseline: it is the first of the first round, and what
it does without load is what goodput's limits are multiples of.

Requests are written to files beforehand, seeded, the same for all arms; loads are sent by
`sglang.bench_serving` (one process that runs it again and again), conversations by the
project's open loop. Every run is in the JSON beside the page, which is written after each
arm, and from which `--render` makes page and plots anew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Photographs and checkpoints; clips of the tests.
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

import tokenizers  # noqa: E402
from comparison import plots, report  # noqa: E402
from comparison.arms import Arm, Place, Running  # noqa: E402
from comparison.clients import (  # noqa: E402
    BenchServing,
    ClientError,
    Load,
    converse,
    question,
    write_load,
)
from comparison.figures import Run, goodput  # noqa: E402
from comparison.files import read_all  # noqa: E402
from comparison.results import (  # noqa: E402
    Question,
    Results,
    Search,
    Start,
    load,
    machine,
    versions,
)
from comparison.workloads import Workload, requests  # noqa: E402

from make_checkpoint import SPECS, ensure  # noqa: E402
from sglang_epd.cli.processes import ServerError  # noqa: E402

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# Questions of each workload whose answers are compared, and their tokens.
QUESTIONS, QUESTION_TOKENS = 2, 8


class Comparison:
    """Runs all arms, and keeps what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="sglang-epd-compare-"))
        print("logs:", self._folder, flush=True)
        self._model = str(ensure(options.model)) if options.model in SPECS else options.model
        encoder = _tokenizer(self._model)
        self._count = lambda text: len(encoder.encode(text, add_special_tokens=False).ids)
        self.results = Results(
            command=shlex.join([".venv/bin/python", "benchmark/compare.py", *sys.argv[1:]]),
            machine=machine(),
            versions=versions(),
            model=options.model,
            flags=options.flags,
            scale=options.scale,
            seed=options.seed,
            rounds=options.rounds,
            cores=options.cores,
            gpus=options.gpus,
            client_cores=options.client_cores,
            arms=read_all(HERE / "arms", Arm, options.arms),
            workloads=read_all(HERE / "workloads", Workload, options.workloads),
            note=options.note,
        )
        # Of the round, by workload and rate: made once, sent to each arm.
        self._loads: dict[tuple[str, float, bool], Load] = {}
        self._place = Place(cores=options.cores, gpus=options.gpus)
        for arm in self.results.arms:
            self._place.deal(arm)  # before anything is started

    def run(self) -> None:
        begin = time.monotonic()
        os.sched_setaffinity(0, self._options.client_cores)
        with BenchServing(self._model, self._folder, self._options.client_cores) as bench:
            for number in range(self._options.rounds):
                self._forget_loads()
                for arm in rotated(self.results.arms, number, self._options.rounds):
                    self._session(arm, number, bench)
                    self.results.minutes = (time.monotonic() - begin) / 60
                    self.results.save(self._options.out.with_suffix(".json"))

    def _forget_loads(self) -> None:
        for sent in self._loads.values():
            sent.path.unlink()
        self._loads = {}

    def _session(self, arm: Arm, number: int, bench: BenchServing) -> None:
        """One arm in one round."""
        options = self._options
        running = Running(arm, self._model, options.flags, self._place, self._folder)
        try:
            self._start(running, number)
            for workload in self.results.workloads:
                self._ask(workload, running, number)
            for workload in self.results.workloads:
                scale = workload.scale(options.scale)
                for rate in scale.rates:
                    self._run(workload, running, number, rate, bench)
                if scale.goodput is not None and number < options.goodput_rounds:
                    self._search(workload, running, number, bench)
        finally:
            running.stop()

    def _start(self, running: Running, number: int) -> None:
        load_average = round(os.getloadavg()[0], 1)
        seconds = running.start()
        name = running.arm.name
        start = Start(name, number, seconds, running.commands, load_average)
        self.results.starts.append(start)
        _say(f"round {number + 1} of {self._options.rounds}: {name} is up after {seconds:.0f} s")

    def _revive(self, running: Running, number: int, workload: Workload) -> None:
        """Start an arm anew if a load has ended one of its servers."""
        try:
            for server in running.servers:
                server.check_running()
        except ServerError as error:
            told = str(error).splitlines()[0]
            where = f"before {workload.name} of round {number + 1}"
            self.results.notes.append(f"{told.rstrip('.')}; all were started anew {where}")
            _say(self.results.notes[-1])
            running.stop()
            self._start(running, number)

    def _ask(self, workload: Workload, running: Running, number: int) -> None:
        """The questions are the same in every round: servers have been started anew."""
        seed = (self._options.seed, "questions")
        chosen = requests(workload, self._options.scale, seed, self._count)
        for which, one in enumerate(islice(chosen, QUESTIONS)):
            told: dict[str, Any] = question(running.url, one, QUESTION_TOKENS)
            asked = Question(running.arm.name, workload.name, number, which, **told)
            self.results.questions.append(asked)
            if asked.failure:
                _say(f"{running.arm.name}, {workload.name}: {asked.failure}")

    def _run(
        self,
        workload: Workload,
        running: Running,
        number: int,
        rate: float,
        bench: BenchServing,
        *,
        probe: bool = False,
    ) -> Run:
        """One load; pictures of one are in no other on the same servers."""
        options = self._options
        self._revive(running, number, workload)
        scale = workload.scale(options.scale)
        seed = (options.seed, number, rate, probe)
        made = requests(workload, options.scale, seed, self._count)
        sent = self._loads.get((workload.name, rate, probe))
        if sent is None:
            path = self._folder / f"{workload.name}-{rate:g}-{probe}.jsonl"
            sent = write_load(path, made, scale.count(rate), rate, options.seed + number)
            self._loads[workload.name, rate, probe] = sent
        if workload.turns > 1:
            command = f"open loop of conversations, {rate:g}/s"
            made = requests(workload, options.scale, seed, self._count)
            talks = list(islice(made, scale.count(rate)))
            told, seconds = asyncio.run(converse(running.url, talks, rate, sent.seed))
        else:
            command = shlex.join(["sglang.bench_serving", *bench.command(running.url, sent)])
            told, seconds = bench.run(running.url, sent, scale.seconds)
        run = Run(
            running.arm.name,
            *(workload.name, number, rate, seconds),
            sent.digest,
            command,
            told,
            probe,
        )
        self.results.runs.append(run)
        _say(report.line(run))
        return run

    def _search(
        self, workload: Workload, running: Running, number: int, bench: BenchServing
    ) -> None:
        limits = self.results.limits(workload)
        looked_for = workload.scale(self._options.scale).goodput
        assert looked_for is not None
        if limits is None:
            _say(f"{workload.name}: the baseline answered nothing without load; no goodput")
            return

        def holds(rate: float) -> bool:
            run = self._run(workload, running, number, rate, bench, probe=True)
            return limits.hold(run)

        found = goodput(holds, looked_for.low, looked_for.high, looked_for.probes)
        search = Search(running.arm.name, workload.name, number, limits, found)
        self.results.searches.append(search)
        _say(f"{running.arm.name}, {workload.name}: goodput {found.rate:g} requests/s")


def rotated(arms: list[Arm], number: int, rounds: int) -> list[Arm]:
    """The order of a round: each begins a share of the way further on than the one before."""
    shift = number * len(arms) // rounds
    return arms[shift:] + arms[:shift]


def _tokenizer(model: str) -> tokenizers.Tokenizer:
    local = Path(model) / "tokenizer.json"
    if local.exists():
        return tokenizers.Tokenizer.from_file(str(local))
    return tokenizers.Tokenizer.from_pretrained(model)


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def core_list(text: str) -> list[int]:
    """`0-3,8` as numbers.

    Raises:
        argparse.ArgumentTypeError: it is none, or names no core that this process may use.
    """
    try:
        cores: set[int] = set()
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of cores") from None
    missing = sorted(cores - os.sched_getaffinity(0))
    if missing or not cores:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no core {missing}")
    return sorted(cores)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = sorted(os.sched_getaffinity(0))
    parser.add_argument("--arms", nargs="+", metavar="ARM", default=list(DEFAULT_ARMS))
    parser.add_argument("--workloads", nargs="+", metavar="WORKLOAD", help="default: all")
    parser.add_argument("--scale", choices=("small", "paper"), default="small")
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--goodput-rounds", type=int, default=1, help="in which it is looked for")
    parser.add_argument("--model", default="bench-qwen2_5-vl", help="of scripts/, a folder, a name")
    parser.add_argument("--flags", default="", help="of every server, after `=`")
    parser.add_argument("--cores", type=core_list, default=every, help="of each arm: 0-3,8")
    parser.add_argument("--client-cores", type=core_list, default=every)
    parser.add_argument("--gpus", type=int, nargs="+", default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--note", default="", help="for the page: what else the machine did")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare.md")
    parser.add_argument("--render", type=Path, metavar="JSON", help="write its page anew")
    return parser.parse_args(argv)


# The baseline first.
DEFAULT_ARMS = (
    "colocated",
    "colocated-dp",
    "in-tree-1e1p",
    "epd-1e1p",
    "epd-2e1p",
    "epd-e-p-d",
)


def main() -> int:
    options = arguments()
    try:
        if options.render:
            results, out = load(options.render), options.render.with_suffix(".md")
        else:
            comparison = Comparison(options)
            comparison.run()
            results, out = comparison.results, options.out
    except (ClientError, ServerError, ValueError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1
    drawn = plots.draw(results, out.parent / out.stem)
    out.write_text(report.page(results, [path.relative_to(out.parent) for path in drawn]))
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
