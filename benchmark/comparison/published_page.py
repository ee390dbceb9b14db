"""The page of a published comparison that was repeated; all times are the emulated machines'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pages import table

from comparison.arms import Arm
from comparison.figures import NAN, Run, mean, percentile
from comparison.published import Accelerators, Case, Comparison, Reproduced, accelerators
from sglang_epd.profile import Profile
from sglang_epd_plan import plots

HEAD = ["case", "load", "arm", "GPUs", "answered", "mean TTFT (s)", "p50", "p99",
        "mean TPOT (ms)", "p50", "p99", "mean time of an answer (s)", "p50", "p99", "requests/s",
        "encoders busy", "language busy: tower", "prefill", "decode", "overrun"]  # fmt: skip
RATIOS = ["case", "load", "arm", "mean TTFT, times lower", "p50", "TPOT, times lower",
          "requests/s, times higher", "requests/s a GPU, times higher"]  # fmt: skip
# Of a picture of a request, from the cheapest; its column's head.
SOURCES = {"kv": "KV cached", "language_cache": "embedding kept",
           "encoder_cache": "encoder's cache", "coalesced": "encoded for another",
           "store": "shared store", "computed": "encoded", "local": "own tower"}  # fmt: skip
PLOTS = {"ttft": "mean TTFT (s)", "rate": "requests answered a second"}


class Page:
    """Tables, plots and text.

    Args:
        told: for its words: the file may have got others since the results were measured.
        profiles: as published, by arm.
    """

    def __init__(
        self,
        results: Reproduced,
        told: Comparison,
        arms: list[Arm],
        profiles: dict[str, Profile],
    ) -> None:
        self._results, self._told, self._profiles = results, told, profiles
        self._arms = arms
        self._by = results.comparison.dilation

    def render(self, path: Path) -> None:
        """Write the page and its plots beside it."""
        for name, label in PLOTS.items():
            plots.bars(path.with_name(f"{path.stem}-{name}.svg"), self._bars(name), label)
        path.write_text(self._text(path.stem))

    def row(self, arm: Arm, case: Case, load: float) -> list[str]:
        """An arm's figures at a load."""
        found = self._results.of(arm.name, case.name, load)
        runs, have = [one.run for one in found], self._has(arm)
        seconds = sum(run.seconds for run in runs)
        ttfts, tpots = self._ttfts(runs), self._tpots(runs)
        sent = sum(len(run.outcomes) for run in runs)
        answered = sent - sum(len(run.failed) for run in runs)
        cells = [case.name, _load(case, load), arm.title, f"{have.gpus:g}", f"{answered} of {sent}"]
        shown = [mean(ttfts), percentile(ttfts, 0.5), percentile(ttfts, 0.99)]
        cells += [f"{value:.2f}" for value in shown]
        shown = [mean(tpots), percentile(tpots, 0.5), percentile(tpots, 0.99)]
        cells += [f"{value:.1f}" for value in shown]
        answers = self._answers(runs)
        shown = [mean(answers), percentile(answers, 0.5), percentile(answers, 0.99)]
        cells += [f"{value:.2f}" for value in shown]
        cells.append(f"{self._rate(runs):.3f}")
        encoder_s = sum(one.busy.encoder_s for one in found)
        kinds = [
            sum(one.busy.language_s.get(kind, 0.0) for one in found)
            for kind in ("tower", "prefill", "decode")
        ]
        cells.append(f"{encoder_s / seconds / have.encoders:.0%}" if have.encoders else "")
        cells += [f"{kind / seconds / have.language:.0%}" for kind in kinds]
        overrun_s = sum(one.busy.overrun_s for one in found)
        cells.append(f"{overrun_s / (encoder_s + sum(kinds)):.1%}")
        limits = self._told.limits
        if limits is not None:
            held = answered == sent and 1e3 * percentile(ttfts, 0.99) <= limits.ttft_ms
            held = held and not percentile(tpots, 0.99) > limits.tpot_ms
            cells.append("yes" if held else "no")
        return cells

    def ratios(self, case: Case, load: float) -> list[list[str]]:
        """Each arm beside the comparison's first one; none where that was not measured."""
        rows, first = [], list[float]()
        for arm in self._arms:
            runs = self._runs(arm, case, load)
            if not runs:
                if arm.name == self._told.arms[0]:
                    return []
                continue
            ttfts, rate = self._ttfts(runs), self._rate(runs)
            mine = [1 / mean(ttfts), 1 / percentile(ttfts, 0.5), 1 / mean(self._tpots(runs)),
                    rate, rate / self._has(arm).gpus]  # fmt: skip
            first = first or mine
            shown = [f"{ours / theirs:.2f}x" for ours, theirs in zip(mine, first, strict=True)]
            rows.append([case.name, _load(case, load), arm.title, *shown])
        return rows

    def _has(self, arm: Arm) -> Accelerators:
        return accelerators(arm, self._profiles[arm.name])

    def _runs(self, arm: Arm, case: Case, load: float) -> list[Run]:
        return [one.run for one in self._results.of(arm.name, case.name, load)]

    def _ttfts(self, runs: list[Run]) -> list[float]:
        """In seconds."""
        return [ms / self._by / 1e3 for run in runs for ms in run.ttfts_ms()]

    def _tpots(self, runs: list[Run]) -> list[float]:
        """In milliseconds a published token."""
        by = self._by * self._results.comparison.answer_shrink
        return [ms / by for run in runs for ms in run.tpots_ms()]

    def _answers(self, runs: list[Run]) -> list[float]:
        """Until the last token, in seconds."""
        return [ms / self._by / 1e3 for run in runs for ms in run.answers_ms()]

    def _rate(self, runs: list[Run]) -> float:
        answered = sum(len(run.outcomes) - len(run.failed) for run in runs)
        seconds = sum(run.seconds for run in runs)
        return self._by * answered / seconds if seconds else NAN

    def _loads(self) -> list[tuple[Case, float]]:
        return [(case, load) for case in self._results.comparison.cases for load in case.loads]

    def _bars(self, name: str) -> dict[str, dict[str, float]]:
        shown: dict[str, Callable[[list[Run]], float]] = {
            "ttft": lambda runs: mean(self._ttfts(runs)),
            "rate": self._rate,
        }
        ran = {one.run.arm for one in self._results.runs}
        return {
            f"{case.name}\n{_load(case, load)}": {
                # Not a number, and no bar, where it was not measured.
                arm.title: shown[name](self._runs(arm, case, load))
                for arm in self._arms
                if arm.name in ran
            }
            for case, load in self._loads()
        }

    def _sources(self) -> str:
        """Where what pictures are to the language model came from, in each run that counted it;
        empty where all of them were encoded.
        """
        counted = [(one.run, one.busy.items) for one in self._results.runs if one.busy.items]
        sources = [name for name in SOURCES if any(items.get(name) for _, items in counted)]
        if sources in ([], ["computed"]):
            return ""
        titles = {arm.name: arm.title for arm in self._arms}
        rows = [
            [run.workload, titles[run.arm], f"{sum(items.values())}"]
            + [f"{items.get(name, 0) / sum(items.values()):.0%}" for name in sources]
            for run, items in counted
        ]
        head = ["case", "arm", "pictures", *(SOURCES[name] for name in sources)]
        return f"\n## Where pictures came from\n\n{table([head, *rows])}\n"

    def _text(self, stem: str) -> str:
        told, results = self._told, self._results
        where = ", ".join(f"{name} {value}" for name, value in results.machine.items() if value)
        packages = ", ".join(f"{name} {value}" for name, value in results.versions.items())
        head = [*HEAD, *(["within limits"] if told.limits else [])]
        rows = [
            self.row(arm, case, load)
            for case, load in self._loads()
            for arm in self._arms
            if self._runs(arm, case, load)
        ]
        beside = [row for case, load in self._loads() for row in self.ratios(case, load)]
        sources = {
            profile.name: "\n".join(f"- {line}" for line in profile.source)
            for profile in self._profiles.values()
        }
        named = "\n\n".join(f"The profile `{name}`:\n\n{text}" for name, text in sources.items())
        plotted = "\n\n".join(f"![{label}]({stem}-{name}.svg)" for name, label in PLOTS.items())
        return f"""# {told.title}, on emulated machines

`.venv/bin/python benchmark/reproduce.py {told.name}`: {where}; {packages}; checkpoint
{told.checkpoint}. No GPU was used: [emulated machines](../../docs/emulated.md) says what is real
here. Passes and arrivals were stretched by a factor of {told.dilation:g}; times are divided by it.

**Published** ([source]({told.source})): {told.published.strip()}

**Chosen here**: {told.chosen.strip()}

## What it shows

{told.read.strip()}

## Sent

{_sent(results.comparison)}

## Times, and shares of the time in which accelerators were busy

{table([head, *rows])}

*Overrun*: by how much real passes took longer than their emulated time, of all emulated time. A
run of a few percent is faithful.

{plotted}
{self._sources()}
## How many times better than the first arm

{table([RATIOS, *beside])}

## Profiles

{named}
"""


def _load(case: Case, load: float) -> str:
    return f"{load:g} in flight" if case.closed else f"{load:g}/s"


def _sent(told: Comparison) -> str:
    """The requests, as they were sent and what they stand for."""
    rows = [["case", "requests a load", "pictures", "of", "tokens in", "tokens out", "turns"]]
    for case in told.cases:
        least, most = case.images.least, case.images.most
        pictures = f"{least}" if least == most else f"{least} to {most}"
        size = f"{case.size.width} x {case.size.height}"
        rows.append([case.name, f"{case.requests}", pictures, size, f"{case.text_tokens}",
                     f"{case.answer_tokens}", f"{case.turns}"])  # fmt: skip
    return f"""{table(rows)}

Each token and patch stands for {told.shrink:g} of the published machines', each token of an answer
for {told.answer_shrink:g}. All arms get the same requests, {told.together} of them at a time on the
same cores."""
