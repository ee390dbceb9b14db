"""Arms side by side on one machine: equal cores, the same checkpoint, the same requests.

    .venv/bin/python benchmark/compare.py [--minutes 30] [--arms ...] [--workloads ...]
    .venv/bin/python benchmark/compare.py --scale paper --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --gpus 0 1 --cores 0-31 --client-cores 32-47
    .venv/bin/python benchmark/compare.py --render benchmark/results/compare.json

Arms are files of benchmark/arms/, workloads of benchmark/workloads/. In the first round every
arm is started, pinned to the same cores, asked a sample of questions one by one, whose answers
have to be the baseline's, and put under every load; then it is stopped. So one arm is up at
a time, and none keeps memory or a core from another. In the time that is left of `--minutes`
further rounds have the arms of `--repeat`, in another order, and as many of the workloads as
fit, by what they took; `--dry-run` says what to expect. The first arm named is the baseline:
it is the first of the first round, and what it does without load is what goodput's limits are
multiples of.

Requests are written to files beforehand, seeded, the same for all arms; loads are sent by
`sglang.bench_serving` (one process that runs it again and again), conversations by the
project's open loop. Every run is in the JSON beside the page. Both are written after each
arm, the page marked as partial; `--resume` goes on after the last arm that was run to its end,
and `--render` makes page and plots anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Photographs and checkpoints; clips of the tests.
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

import tokenizers  # noqa: E402
from comparison import plots, report, schedule  # noqa: E402
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
from sglang_epd.errors import ConfigError  # noqa: E402

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# Questions of each workload whose answers are compared, and their tokens.
QUESTIONS, QUESTION_TOKENS = 2, 8


class Comparison:
    """Runs all arms, and keeps what was measured.

    Args:
        before: results to go on with.
    """

    def __init__(self, options: argparse.Namespace, before: Results | None = None) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="sglang-epd-compare-"))
        print("logs:", self._folder, flush=True)
        self._model = str(ensure(options.model)) if options.model in SPECS else options.model
        encoder = _tokenizer(self._model)
        self._count = lambda text: len(encoder.encode(text, add_special_tokens=False).ids)
        self.results = before or empty(options)
        self.results.finished = False
        # Of the round, by workload and rate: made once, sent to each arm.
        self._loads: dict[tuple[str, float, bool], Load] = {}
        self._place = Place(cores=options.cores, gpus=options.gpus)
        for arm in self.results.arms:
            self._place.deal(arm)  # before anything is started
        self._begin = time.monotonic() - 60 * self.results.minutes

    @property
    def _left_s(self) -> float:
        return 60 * self._options.minutes - (time.monotonic() - self._begin)

    def run(self) -> None:
        """All rounds that there is time for; what is there already is not run again."""
        os.sched_setaffinity(0, self._options.client_cores)
        results = self.results
        with BenchServing(self._model, self._folder, self._options.client_cores) as bench:
            for number in range(self._options.rounds):
                if number == len(results.planned):
                    planned = self._plan(number)
                    if planned is None:
                        break
                    results.planned.append(planned)
                self._forget_loads()
                for name in results.planned[number].arms:
                    if (name, number) not in results.done:
                        self._session(results.arm(name), number, bench)
                        results.done.append((name, number))
                        self._write()
        results.finished = True
        self._write()

    def _plan(self, number: int) -> schedule.Round | None:
        results = self.results
        if not number:
            return schedule.first(results.arms, results.workloads)
        arms, cost = repeated(self._options, results.arms), schedule.measured(results.spent)
        return schedule.again(number, arms, results.workloads, cost, self._left_s)

    def _write(self) -> None:
        self.results.minutes = (time.monotonic() - self._begin) / 60
        write(self.results, self._options.out)

    def _forget_loads(self) -> None:
        for sent in self._loads.values():
            sent.path.unlink()
        self._loads = {}

    def _session(self, arm: Arm, number: int, bench: BenchServing) -> None:
        """One arm in one round. What it cannot do is noted, and the others go on."""
        if self._left_s <= 0:
            self._note(f"{arm.name} in round {number + 1}: no time")
            return
        running = Running(arm, self._model, self._options.flags, self._place, self._folder)
        try:
            with self._spending(arm, number, schedule.START):
                self._start(running, number)
            if not number:
                with self._spending(arm, number, schedule.QUESTIONS):
                    for workload in self.results.workloads:
                        self._ask(workload, running, number)
            for workload in self.results.workloads:
                if workload.name in self.results.planned[number].workloads:
                    self._work(workload, running, number, bench)
        except (ServerError, ClientError) as error:
            self._note(f"{arm.name} in round {number + 1}: {str(error).splitlines()[0]}")
        finally:
            running.stop()

    def _work(self, workload: Workload, running: Running, number: int, bench: BenchServing) -> None:
        """All runs of one workload."""
        arm, scale = running.arm, workload.scale(self._options.scale)
        if self._left_s <= 0:
            self._note(f"{arm.name} in round {number + 1}: no time for {workload.name}")
            return
        with self._spending(arm, number, workload.name):
            for rate in scale.rates:
                self._run(workload, running, number, rate, bench)
        if scale.goodput is not None and number < self._options.goodput_rounds:
            with self._spending(arm, number, schedule.GOODPUT):
                self._search(workload, running, number, bench)

    @contextlib.contextmanager
    def _spending(self, arm: Arm, number: int, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        spent = schedule.Spent(arm.name, number, what, time.monotonic() - begin)
        self.results.spent.append(spent)

    def _note(self, text: str) -> None:
        self.results.notes.append(text)
        _say(text)

    def _start(self, running: Running, number: int) -> None:
        load_average = round(os.getloadavg()[0], 1)
        seconds = running.start()
        name = running.arm.name
        start = Start(name, number, seconds, running.commands, load_average)
        self.results.starts.append(start)
        _say(f"round {number + 1}: {name} is up after {seconds:.0f} s")

    def _revive(self, running: Running, number: int, workload: Workload) -> None:
        """Start an arm anew if a load has ended one of its servers."""
        try:
            for server in running.servers:
                server.check_running()
        except ServerError as error:
            told = str(error).splitlines()[0]
            where = f"before {workload.name} of round {number + 1}"
            self._note(f"{told.rstrip('.')}; all were started anew {where}")
            running.stop()
            self._start(running, number)

    def _ask(self, workload: Workload, running: Running, number: int) -> None:
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


def empty(options: argparse.Namespace) -> Results:
    """Results of these arms and workloads, before anything was run.

    Raises:
        ConfigError: there is none of a name.
    """
    names = options.workloads or ordered(path.stem for path in (HERE / "workloads").glob("*.toml"))
    return Results(
        command=shlex.join([".venv/bin/python", "benchmark/compare.py", *sys.argv[1:]]),
        machine=machine(),
        versions=versions(),
        model=options.model,
        flags=options.flags,
        scale=options.scale,
        seed=options.seed,
        cores=options.cores,
        gpus=options.gpus,
        client_cores=options.client_cores,
        arms=read_all(HERE / "arms", Arm, options.arms),
        workloads=read_all(HERE / "workloads", Workload, names),
        note=options.note,
    )


def ordered(names: Iterable[str]) -> list[str]:
    """Those that the aims are about first: they are repeated first."""
    return sorted(names, key=lambda name: (name not in FIRST, *map(name.__ne__, FIRST), name))


def resumed(options: argparse.Namespace) -> Results:
    """What an earlier run left, to go on with.

    Raises:
        ConfigError: there is nothing, or it is of other arms, workloads, servers or requests.
    """
    before, new = load(options.out.with_suffix(".json")), empty(options)
    for name in ("model", "flags", "scale", "seed", "cores", "gpus", "client_cores", "versions"):
        if getattr(before, name) != getattr(new, name):
            raise ConfigError(f"{options.out.name} has another {name.replace('_', ' ')}")
    if (before.arms, before.workloads) != (new.arms, new.workloads):
        raise ConfigError(f"{options.out.name} has other arms or workloads")
    before.forget_unfinished()
    return before


def repeated(options: argparse.Namespace, arms: list[Arm]) -> list[Arm]:
    """Those of the rounds after the first: as typed, or those that aims compare, if any."""
    if options.repeat is not None:
        return [arm for arm in arms if arm.name in options.repeat]
    return [arm for arm in arms if arm.name in REPEATED] or arms


def dry_run(options: argparse.Namespace) -> str:
    """What would be run, and how long that is likely to take."""
    results = empty(options)
    arms, minutes = results.arms, options.minutes
    cost = schedule.reckoned(results.workloads, options.scale, QUESTIONS)
    extras = (schedule.QUESTIONS, *([schedule.GOODPUT] if options.goodput_rounds else []))
    planned: schedule.Round | None = schedule.first(arms, results.workloads)
    lines, taken = [], 0.0
    repeat = repeated(options, arms)
    for number in range(options.rounds):
        if number:
            left_s = 60 * minutes - taken
            planned = schedule.again(number, repeat, results.workloads, cost, left_s)
        if planned is None:
            break
        for arm in (arm for name in planned.arms for arm in arms if arm.name == name):
            told = {what: cost(arm, what) for what in (schedule.START, *planned.workloads)}
            told |= {} if number else {what: cost(arm, what) for what in extras}
            each = ", ".join(f"{what} {seconds:.0f}" for what, seconds in told.items())
            lines.append(f"round {number + 1}, {arm.name}: {sum(told.values()):.0f} s ({each})")
            taken += sum(told.values())
    limit = "" if minutes == float("inf") else f" of {minutes:g}"
    return "\n".join([*lines, f"some {taken / 60:.0f} minutes{limit}"])


def write(results: Results, out: Path) -> None:
    """The raw results, and their page; plots, which take seconds, once they are complete."""
    results.save(out.with_suffix(".json"))
    drawn = plots.draw(results, out.parent / out.stem) if results.finished else []
    out.write_text(report.page(results, [path.relative_to(out.parent) for path in drawn]))


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


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes")
    return value


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
    parser.add_argument("--rounds", type=positive, default=3, help="at most")
    parser.add_argument(
        "--repeat",
        nargs="*",
        metavar="ARM",
        help="arms of the rounds after the first",
    )
    parser.add_argument(
        "--minutes", type=minutes, help="for all; 30 at the small scale, else no limit"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what --out has")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, how long")
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
    options = parser.parse_args(argv)
    if options.minutes is None:
        options.minutes = 30.0 if options.scale == "small" else float("inf")
    return options


# Workloads whose figures the aims are about.
FIRST = ("single", "interference", "repeats", "turns", "four_images", "images", "video")
# What aims compare; the other arms are in the first round alone.
REPEATED = ("colocated", "in-tree-1e1p", "epd-1e1p")
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
    # Ends the servers, and leaves the page of what was run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.dry_run:
            print(dry_run(options))
            return 0
        if options.render:
            write(load(options.render), options.render.with_suffix(".md"))
            print(options.render.with_suffix(".md"))
            return 0
        Comparison(options, resumed(options) if options.resume else None).run()
    except (ClientError, ServerError, ValueError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
