"""Arms side by side on one machine: equal cores, the same checkpoint, the same requests.

    .venv/bin/python benchmark/compare.py [--minutes 30] [--arms ...] [--workloads ...]
    .venv/bin/python benchmark/compare.py --scale paper --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --arms colocated-dp in-tree-1e1p epd-1e1p --gpus 0 1 --cores 0-31 --client-cores 32-47
    .venv/bin/python benchmark/compare.py --render benchmark/results/compare.json

Arms are files of benchmark/arms/, workloads of benchmark/workloads/. The arms of a round are
up together, each pinned to the same cores, as many as fit, and always the first one named:
the baseline. They take turns: each load is put on one after the other, so that a machine
whose speed drifts is as fast for one as for the next; those that are not in work are idle.
Before its first loads an arm is asked a sample of questions one by one, whose answers have to
be the baseline's. Goodput's limits are multiples of what the baseline does without load in
the same round. `--no-together` has one arm up at a time, which with `--gpus` is the default:
those that are idle hold memory.

All arms and workloads have a round. In the time that is left of `--minutes` further ones
have the arms of `--repeat`, and as many of the workloads as fit, by what they took;
`--dry-run` says what to expect.

Requests are written to files beforehand, seeded, the same for all arms; loads are sent by
`sglang.bench_serving` (one process that runs it again and again), conversations by the
project's open loop. Every run is in the JSON beside the page. Both are written after each
round, the page marked as partial; `--resume` goes on after the last round that was run to its
end, and `--render` makes page and plots anew.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Photographs and checkpoints; clips of the tests.
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

import tokenizers  # noqa: E402
from comparison import report, schedule  # noqa: E402
from comparison.arms import Arm, Place  # noqa: E402
from comparison.clients import ClientError  # noqa: E402
from comparison.files import read_all  # noqa: E402
from comparison.results import Results, load, machine, versions  # noqa: E402
from comparison.runner import QUESTIONS, Effort, Made, Runner  # noqa: E402
from comparison.workloads import Workload  # noqa: E402

from make_checkpoint import SPECS, ensure  # noqa: E402
from sglang_epd.cli.processes import ServerError  # noqa: E402
from sglang_epd.errors import ConfigError  # noqa: E402

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def compare(options: argparse.Namespace, before: Results | None = None) -> Results:
    """Run all arms.

    Args:
        before: results to go on with.

    Raises:
        ServerError, ClientError, ValueError: it cannot be begun.
    """
    folder = Path(tempfile.mkdtemp(prefix="sglang-epd-compare-"))
    print("logs:", folder, flush=True)
    model = str(ensure(options.model)) if options.model in SPECS else options.model
    results = before or empty(options)
    made = Made(results, folder, partial(_tokens, _tokenizer(model)))
    os.sched_setaffinity(0, options.client_cores)
    effort = Effort(options.minutes, options.goodput_rounds)
    Runner(
        *(results, plan(options, results), effort),
        model=model,
        made=made,
        folder=folder,
        keep=partial(write, out=options.out),
    ).run()
    return results


def plan(options: argparse.Namespace, results: Results) -> schedule.Plan:
    arms = results.arms
    repeat = repeated(options.repeat, arms)
    together, most = options.together, options.rounds
    return schedule.Plan(arms, results.workloads, repeat, together=together, most=most)


def repeated(names: Sequence[str] | None, arms: Sequence[Arm]) -> list[Arm]:
    """Arms of the rounds after the first: those that are named, or those that aims
    compare, or all.
    """
    if names is not None:
        return [arm for arm in arms if arm.name in names]
    return [arm for arm in arms if arm.name in REPEATED] or list(arms)


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


def dry_run(options: argparse.Namespace) -> str:
    """What would be run, and how long that is likely to take.

    Raises:
        ValueError: the servers of an arm want more cores or GPUs than there are.
    """
    results, minutes = empty(options), options.minutes
    for arm in results.arms:
        Place(cores=results.cores, gpus=results.gpus).deal(arm)
    cost = schedule.reckoned(results.workloads, options.scale, QUESTIONS)
    rounds, lines, taken = plan(options, results), [], 0.0
    before, seen = None, set[str]()
    for number in itertools.count():
        planned = rounds.round(number, before, cost, 60 * minutes - taken)
        if planned is None:
            break
        each = rounds.seconds(planned, before, cost)
        for name in planned.arms:
            extras = [] if name in seen else [schedule.QUESTIONS]
            if options.goodput_rounds and not seen.issuperset(planned.arms):
                extras.append(schedule.GOODPUT)
            each[name] += sum(cost(results.arm(name), what) for what in extras)
            loads = ", ".join(planned.workloads)
            lines.append(f"round {number + 1}, {name}: {each[name]:.0f} s ({loads})")
            taken += each[name]
        seen.update(planned.arms)
        before = planned
    limit = "" if minutes == float("inf") else f" of {minutes:g}"
    return "\n".join([*lines, f"some {taken / 60:.0f} minutes{limit}"])


def write(results: Results, out: Path) -> None:
    """The raw results, and their page; plots, which take seconds, once they are complete."""
    results.save(out.with_suffix(".json"))
    from comparison import plots  # matplotlib takes a second

    drawn = plots.draw(results, out.parent / out.stem) if results.finished else []
    out.write_text(report.page(results, [path.relative_to(out.parent) for path in drawn]))


def _tokens(tokenizer: tokenizers.Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def _tokenizer(model: str) -> tokenizers.Tokenizer:
    local = Path(model) / "tokenizer.json"
    if local.exists():
        return tokenizers.Tokenizer.from_file(str(local))
    return tokenizers.Tokenizer.from_pretrained(model)


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
    parser.add_argument("--rounds", type=positive, default=3, help="of an arm, at most")
    parser.add_argument(
        "--together",
        action=argparse.BooleanOptionalAction,
        help="the arms of a round take turns; the default without --gpus",
    )
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
    parser.add_argument("--goodput-rounds", type=int, default=1, help="searches an arm")
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
    if options.together is None:
        options.together = not options.gpus
    if options.minutes is None:
        options.minutes = 30.0 if options.scale == "small" else float("inf")
    return options


# Workloads whose figures the aims are about.
FIRST = ("single", "interference", "repeats", "turns", "four_images", "images", "video")
# What aims compare; the other arms have one round.
REPEATED = ("colocated", "in-tree-1e1p", "epd-1e1p")
# The baseline first.
DEFAULT_ARMS = (*REPEATED, "colocated-dp", "epd-2e1p", "epd-e-p-d")


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
        compare(options, resumed(options) if options.resume else None)
    except (ClientError, ServerError, ValueError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
