"""Published comparisons again, on emulated accelerators of their kind.

    .venv/bin/python benchmark/reproduce.py sglang-blog [--arms ...] [--rounds 1]
    .venv/bin/python benchmark/reproduce.py sglang-blog --render

The comparison is a file of benchmark/reproduce/, its arms are files of benchmark/reproduce/arms/.
Real servers run a tiny checkpoint, and each forward pass takes the time of the comparison's
profile (docs/emulated.md). In each round the arms are up one after the other, and get the same
requests. Pictures, texts and chunks are `shrink` times smaller than published and cost as many
times more, so that the tiny model's real passes fit into the emulated ones. Arrivals are stretched
as the passes are, and results divided: all times of the page are the emulated machines'.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

import msgspec  # noqa: E402
import tokenizers  # noqa: E402
from comparison.arms import Arm, Place, Running  # noqa: E402
from comparison.clients import BenchServing, Load, write_load  # noqa: E402
from comparison.figures import Run, mean, percentile  # noqa: E402
from comparison.files import read, read_all  # noqa: E402
from comparison.results import machine, versions  # noqa: E402
from comparison.workloads import Images, Scale, Size, Workload, requests  # noqa: E402
from pages import table  # noqa: E402

from demo_emulated import Counted, counted  # noqa: E402
from make_checkpoint import ensure  # noqa: E402
from sglang_epd.profile import Profile, load_profile  # noqa: E402
from sglang_epd.schema import Data  # noqa: E402

HERE = ROOT / "benchmark" / "reproduce"
RESULTS = ROOT / "benchmark" / "results"
replace = msgspec.structs.replace


class Comparison(Data, frozen=True):
    """A published comparison.

    Attributes:
        name: the file's.
        published: what it says, and of what.
        shrink: by what factor pictures, texts and chunks are smaller.
        rates: requests a second of the published machines.
        requests: of each run.
    """

    name: str
    title: str
    source: str
    published: str
    profile: str
    checkpoint: str
    shrink: float
    dilation: float
    rates: list[float]
    requests: int
    text_tokens: int
    answer_tokens: int
    images: Images
    size: Size

    def workload(self) -> Workload:
        scale = Scale(
            text_tokens=self.text_tokens,
            answer_tokens=self.answer_tokens,
            rates=self.rates,
            sizes=[self.size],
        )
        return Workload(
            name=self.name, title=self.title, images=self.images, small=scale, paper=scale
        )

    def shrunk(self) -> Profile:
        """The profile with tokens and patches of which each stands for `shrink`."""
        profile, by = load_profile(self.profile), self.shrink
        language = profile.language
        towers = [
            replace(
                tower,
                patch_s=tower.patch_s * by,
                patch2_s=tower.patch2_s * by**2,
                batch_patches=round(tower.batch_patches / by),
            )
            for tower in (profile.encoder.tower, language.tower)
        ]
        return replace(
            profile,
            name=f"{profile.name}, each token for {by:g}",
            encoder=replace(profile.encoder, tower=towers[0]),
            language=replace(
                language,
                tower=towers[1],
                prefill_token_s=language.prefill_token_s * by,
                prefill_context_s=language.prefill_context_s * by**2,
                decode_context_s=language.decode_context_s * by,
                chunk_tokens=round(language.chunk_tokens / by),
                kv_tokens=round(language.kv_tokens / by),
            ),
        )


class Busy(msgspec.Struct, frozen=True):
    """What the accelerators of an arm did in a run, in dilated seconds, by kind."""

    arm: str
    round: int
    rate: float
    encoders: int
    encoder_s: float
    language_s: dict[str, float]
    overrun_s: float


class Reproduced(msgspec.Struct):
    """Everything that was measured; times of runs are not divided yet.

    Attributes:
        read: what a person sees in it, written into the JSON by hand.
    """

    comparison: Comparison
    arms: list[Arm]
    command: str
    machine: dict[str, object]
    versions: dict[str, str]
    runs: list[Run] = []
    busy: list[Busy] = []
    read: str = ""


def reproduce(results: Reproduced, rounds: int, folder: Path, keep: Callable[[], None]) -> None:
    """Run all arms at all rates, and add to the results.

    Args:
        keep: called after each arm.
    """
    told = results.comparison
    profile = folder / "profile.json"
    profile.write_bytes(msgspec.json.encode(told.shrunk()))
    os.environ["SGLANG_EPD_EMULATE"] = str(profile)
    os.environ["SGLANG_EPD_EMULATE_DILATE"] = f"{told.dilation:g}"
    model = str(ensure(told.checkpoint))
    tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
    cores = sorted(os.sched_getaffinity(0))
    with BenchServing(model, folder, cores) as bench:
        for number in range(rounds):
            loads = [_load(told, number, rate, folder, tokenizer) for rate in (0.0, *told.rates)]
            for arm in results.arms:
                running = Running(arm, model, "", Place(cores=cores), folder)
                try:
                    print(f"{arm.name}: up after {running.start():.0f} s", flush=True)
                    for load in loads:
                        one(results, running, number, load, bench)
                finally:
                    running.stop()
                keep()


def _load(
    told: Comparison, number: int, rate: float, folder: Path, tokenizer: tokenizers.Tokenizer
) -> Load:
    """The requests of a round at a rate, stretched; at rate 0 a few that warm the servers."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    sent = requests(told.workload(), "small", (number, rate), count)
    path, size = folder / f"{number}-{rate:g}.jsonl", told.requests if rate else 2
    return write_load(path, sent, size, rate / told.dilation, number)


def one(
    results: Reproduced, running: Running, number: int, load: Load, bench: BenchServing
) -> None:
    """One load."""
    told = results.comparison
    before = spent(running)
    outcomes, seconds = bench.run(running.url, load, 20 * told.dilation * told.requests)
    if not load.rate:
        return
    name, rate = running.arm.name, round(load.rate * told.dilation, 6)
    after = {
        role: [now.since(then) for then, now in zip(before[role], found, strict=True)]
        for role, found in spent(running).items()
    }
    (language,) = after["server"] + after["language"]
    run = Run(name, told.name, number, rate, seconds, load.digest, "", outcomes)
    results.runs.append(run)
    results.busy.append(
        Busy(
            *(name, number, rate, len(after["encoder"])),
            sum(sum(each.seconds.values()) for each in after["encoder"]),
            language.seconds,
            sum(each.overrun_s for found in after.values() for each in found),
        )
    )
    print(" | ".join(row(results, running.arm, rate)), flush=True)


def spent(running: Running) -> dict[str, list[Counted]]:
    return {
        role: [counted(url) for url in running.urls(role)]
        for role in ("server", "encoder", "language")
    }


HEAD = ("rate", "arm", "answered", "mean TTFT (s)", "p50", "p99", "mean TPOT (ms)", "requests/s")
BUSY = ("encoders busy", "language busy: tower", "prefill", "decode", "overrun")


def row(results: Reproduced, arm: Arm, rate: float) -> list[str]:
    """An arm at a rate, in the emulated machines' time."""
    by = results.comparison.dilation
    runs = [run for run in results.runs if (run.arm, run.rate) == (arm.name, rate)]
    busy = [each for each in results.busy if (each.arm, each.rate) == (arm.name, rate)]
    seconds = sum(run.seconds for run in runs)
    ttfts = [ms / by / 1e3 for run in runs for ms in run.ttfts_ms()]
    tpots = [ms / by for run in runs for ms in run.tpots_ms()]
    failed, sent = sum(len(run.failed) for run in runs), sum(len(run.outcomes) for run in runs)
    cells = [f"{rate:g}", arm.title, f"{sent - failed} of {sent}"]
    shown = [mean(ttfts), percentile(ttfts, 0.5), percentile(ttfts, 0.99)]
    cells += [f"{value:.2f}" for value in shown]
    cells += [f"{mean(tpots):.0f}", f"{by * (sent - failed) / seconds:.3f}"]
    encoders = busy[0].encoders
    encoder_s = sum(each.encoder_s for each in busy)
    cells.append(f"{encoder_s / seconds / encoders:.0%}" if encoders else "")
    kinds = [sum(each.language_s.get(kind, 0.0) for each in busy)
             for kind in ("tower", "prefill", "decode")]  # fmt: skip
    cells += [f"{kind / seconds:.0%}" for kind in kinds]
    overrun = sum(each.overrun_s for each in busy) / (encoder_s + sum(kinds))
    return [*cells, f"{overrun:.1%}"]


def ratios(results: Reproduced) -> list[list[str]]:
    """Each arm beside the first one, rate by rate."""
    rows = [["rate", "arm", "TTFT, the first by it", "TPOT, the first by it", "requests/s by it"]]
    for rate in results.comparison.rates:
        first: list[float] = []
        for arm in results.arms:
            runs = [run for run in results.runs if (run.arm, run.rate) == (arm.name, rate)]
            mine = [
                mean([ms for run in runs for ms in run.ttfts_ms()]),
                mean([ms for run in runs for ms in run.tpots_ms()]),
                mean([1 / run.throughput for run in runs]),
            ]
            first = first or mine
            shown = [f"{theirs / ours:.1f}x" for theirs, ours in zip(first, mine, strict=True)]
            rows.append([f"{rate:g}", arm.title, *shown])
    return rows


def page(results: Reproduced) -> str:
    told = results.comparison
    where = ", ".join(f"{name} {value}" for name, value in results.machine.items() if value)
    packages = ", ".join(f"{name} {value}" for name, value in results.versions.items())
    measured = [arm for arm in results.arms if any(run.arm == arm.name for run in results.runs)]
    results = replace(results, arms=measured)
    arms = [[*HEAD, *BUSY]] + [row(results, arm, rate) for rate in told.rates for arm in measured]
    sources = "\n".join(f"- {line}" for line in load_profile(told.profile).source)
    rounds = 1 + max(run.round for run in results.runs)
    return f"""# {told.title}, on emulated machines

`{results.command}`: {where}; {packages}; checkpoint {told.checkpoint}, {rounds} round(s) of
{told.requests} requests a rate, passes and arrivals stretched {told.dilation:g} times, and times
divided by it. No GPU was used: [emulated machines](../../docs/emulated.md) says what is real here.

Published ({told.source}): {told.published}

Sent: {told.images.least} to {told.images.most} pictures of {told.size.width} px, {told.text_tokens}
tokens in and {told.answer_tokens} out, each token and patch for {told.shrink:g} of the published
machines', Poisson arrivals; the same requests to all arms. The profile `{told.profile}`:

{sources}

{results.read}

## Times, and shares of the time in which accelerators were busy

{table(arms)}

*Overrun*: by how much real passes took longer than their emulated time, of all emulated time. A
run of a few percent is faithful.

## Beside the first arm

{table(ratios(results))}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", choices=sorted(path.stem for path in HERE.glob("*.toml")))
    parser.add_argument("--arms", nargs="+", help="the first is what others stand beside")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rates", nargs="+", type=float, help="in place of the file's")
    parser.add_argument("--render", action="store_true", help="write the page anew")
    options = parser.parse_args()
    out = RESULTS / f"reproduce_{options.comparison.replace('-', '_')}.md"
    kept = out.with_suffix(".json")
    if options.render:
        out.write_text(page(msgspec.json.decode(kept.read_bytes(), type=Reproduced)))
        return
    results = empty(options.comparison, options.arms, options.rates)
    folder = Path(tempfile.mkdtemp(prefix="sglang-epd-reproduce-"))
    print("logs:", folder, flush=True)

    def keep() -> None:
        kept.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        out.write_text(page(results))

    reproduce(results, options.rounds, folder, keep)


ARMS = ["one", "in-tree-1e1p", "in-tree-2e1p", "epd-1e1p", "epd-2e1p"]


def empty(name: str, arms: Sequence[str] | None, rates: list[float] | None) -> Reproduced:
    """Results before anything was run."""
    comparison = read(HERE / f"{name}.toml", Comparison)
    if rates:
        comparison = replace(comparison, rates=rates)
    command = " ".join([".venv/bin/python", "benchmark/reproduce.py", *sys.argv[1:]])
    chosen = read_all(HERE / "arms", Arm, list(arms or ARMS))
    return Reproduced(comparison, chosen, command, machine(), versions())


if __name__ == "__main__":
    main()
