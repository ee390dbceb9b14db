"""Runs a comparison: rounds, and in each the arms that are up together, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import report, schedule
from comparison.arms import Place, Running
from comparison.clients import BenchServing, ClientError, Load, converse, question, write_load
from comparison.figures import Bisection, Outcome, Run
from comparison.results import Question, Results, Search, Start
from comparison.workloads import Count, Request, Workload, requests
from sglang_epd.cli.processes import ServerError

# Questions of each workload whose answers are compared, and their tokens.
QUESTIONS, QUESTION_TOKENS = 2, 8


@dataclass(frozen=True)
class Effort:
    """What a comparison may take.

    Attributes:
        minutes: for all of it; no round and no load is begun after them.
        searches: for goodput, of each arm.
    """

    minutes: float
    searches: int = 1


class Made:
    """What is sent, made once for all arms.

    Args:
        folder: for the files of loads.
        count: the checkpoint's tokens of a text.
    """

    def __init__(self, results: Results, folder: Path, count: Count) -> None:
        self._results, self._folder, self._count = results, folder, count
        self._loads: dict[tuple[str, float, bool], Load] = {}
        self._talks: dict[tuple[str, float], list[Request]] = {}
        self._questions: dict[str, list[Request]] = {}

    def forget_loads(self) -> None:
        """Another round has others."""
        for load in self._loads.values():
            load.path.unlink()
        self._loads, self._talks = {}, {}

    def load(self, workload: Workload, number: int, rate: float, *, probe: bool) -> Load:
        """Of a round; pictures of one are in no other."""
        key = (workload.name, rate, probe)
        if key not in self._loads:
            path = self._folder / f"{workload.name}-{rate:g}-{probe}.jsonl"
            chosen = self._requests(workload, (number, rate, probe))
            count = workload.scale(self._results.scale).count(rate)
            seed = self._results.seed + number
            self._loads[key] = write_load(path, chosen, count, rate, seed)
        return self._loads[key]

    def talks(self, workload: Workload, number: int, rate: float) -> list[Request]:
        """The conversations of the load of the same arguments, which is no probe."""
        key = (workload.name, rate)
        if key not in self._talks:
            count = workload.scale(self._results.scale).count(rate)
            chosen = self._requests(workload, (number, rate, False))
            self._talks[key] = list(itertools.islice(chosen, count))
        return self._talks[key]

    def questions(self, workload: Workload) -> list[Request]:
        if workload.name not in self._questions:
            chosen = self._requests(workload, ("questions",))
            self._questions[workload.name] = list(itertools.islice(chosen, QUESTIONS))
        return self._questions[workload.name]

    def _requests(self, workload: Workload, of: tuple[object, ...]) -> Iterator[Request]:
        scale = self._results.scale
        return requests(workload, scale, (self._results.seed, *of), self._count)


class Runner:
    """Runs what its plan says, and keeps what was measured in its results.

    Args:
        results: to be added to; what is there already is not run again.
        model: the checkpoint's folder or name.
        made: what is sent.
        folder: for logs.
        keep: called with the results after each round.
    """

    def __init__(
        self,
        results: Results,
        plan: schedule.Plan,
        effort: Effort,
        *,
        model: str,
        made: Made,
        folder: Path,
        keep: Callable[[Results], None],
    ) -> None:
        self._results, self._plan, self._effort = results, plan, effort
        self._model, self._made, self._folder = model, made, folder
        self._keep = keep
        self._place = Place(cores=results.cores, gpus=results.gpus)
        for arm in results.arms:
            self._place.deal(arm)  # before anything is started
        self._up: dict[str, Running] = {}
        self._shift = 0
        self._begin = time.monotonic() - 60 * results.minutes

    @property
    def _left_s(self) -> float:
        return 60 * self._effort.minutes - (time.monotonic() - self._begin)

    def run(self) -> None:
        """All rounds that there is time for."""
        results, cores = self._results, self._results.client_cores
        results.finished = False
        with BenchServing(self._model, self._folder, cores) as bench:
            try:
                for number in itertools.count():
                    planned = self._planned(number)
                    if planned is None:
                        break
                    self._made.forget_loads()
                    self._round(planned, number, bench)
            finally:
                self._stop()
        results.finished = True
        self._write()

    def _planned(self, number: int) -> schedule.Round | None:
        planned = self._results.planned
        if number == len(planned):
            cost = schedule.measured(self._results.spent)
            before = planned[-1] if planned else None
            found = self._plan.round(number, before, cost, self._left_s)
            if found is None:
                return None
            planned.append(found)
        return planned[number]

    def _write(self) -> None:
        self._results.minutes = (time.monotonic() - self._begin) / 60
        self._keep(self._results)

    def _round(self, planned: schedule.Round, number: int, bench: BenchServing) -> None:
        done = self._results.done
        left = [name for name in planned.arms if (name, number) not in done]
        groups = [left] if planned.together and left else [[name] for name in left]
        for names in groups:
            if self._left_s > 0:
                self._bring_up(names, number)
                self._session(planned, number, bench)
            else:
                self._note(f"round {number + 1}: no time for {', '.join(names)}")
            if not planned.together:
                self._stop()
            done += [(name, number) for name in names]
            self._write()

    def _session(self, planned: schedule.Round, number: int, bench: BenchServing) -> None:
        """Everything of a round that those do which are up now."""
        asked = {one.arm for one in self._results.questions}
        for running in self._turns():
            if running.arm.name not in asked:
                with self._work(running, number, schedule.QUESTIONS):
                    for workload in self._results.workloads:
                        self._ask(workload, running, number)
        for workload in self._results.workloads:
            if workload.name not in planned.workloads:
                continue
            if self._left_s <= 0:
                self._note(f"round {number + 1}: no time for {workload.name}")
                continue
            for rate in workload.scale(self._results.scale).rates:
                for running in self._turns():
                    with self._work(running, number, workload.name):
                        self._run(workload, running, number, rate, bench)
            self._search(workload, number, bench)

    # Servers

    def _turns(self) -> Iterator[Running]:
        """Those that are up, each time from another one on."""
        names = list(self._up)
        self._shift += 1
        for place in range(len(names)):
            name = names[(self._shift + place) % len(names)]
            if name in self._up:
                yield self._up[name]

    @contextlib.contextmanager
    def _work(self, running: Running, number: int, what: str) -> Iterator[None]:
        """Notes how long it takes; an arm that cannot do it is stopped, and the others go on."""
        name, begin = running.arm.name, time.monotonic()
        try:
            yield
        except (ServerError, ClientError) as error:
            self._note(f"{name} in round {number + 1}: {str(error).splitlines()[0]}")
            self._up.pop(name, None)
            running.stop()
        spent = schedule.Spent(name, number, what, time.monotonic() - begin)
        self._results.spent.append(spent)

    def _bring_up(self, names: Sequence[str], number: int) -> None:
        """Start these, unless it is they who are up."""
        if set(names) == set(self._up):
            return
        self._stop()
        for name in names:
            arm = self._results.arm(name)
            running = Running(arm, self._model, self._results.flags, self._place, self._folder)
            self._up[name] = running
            with self._work(running, number, schedule.START):
                self._start(running, number)

    def _start(self, running: Running, number: int) -> None:
        load_average = round(os.getloadavg()[0], 1)
        seconds = running.start()
        name = running.arm.name
        start = Start(name, number, seconds, list(running.commands), load_average)
        self._results.starts.append(start)
        # A new server's first request takes longer than others.
        question(running.url, self._made.questions(self._results.workloads[0])[0], QUESTION_TOKENS)
        say(f"round {number + 1}: {name} is up after {seconds:.0f} s")

    def _stop(self) -> None:
        while self._up:
            _, running = self._up.popitem()
            running.stop()

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

    def _note(self, text: str) -> None:
        self._results.notes.append(text)
        say(text)

    # Clients

    def _ask(self, workload: Workload, running: Running, number: int) -> None:
        for which, one in enumerate(self._made.questions(workload)):
            told = question(running.url, one, QUESTION_TOKENS)
            asked = Question(running.arm.name, workload.name, number, which, **told)
            self._results.questions.append(asked)
            if asked.failure:
                say(f"{running.arm.name}, {workload.name}: {asked.failure}")

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
        """One load."""
        self._revive(running, number, workload)
        sent = self._made.load(workload, number, rate, probe=probe)
        told: list[Outcome]
        if workload.turns > 1:
            command = f"open loop of conversations, {rate:g}/s"
            talks = self._made.talks(workload, number, rate)
            told, seconds = asyncio.run(converse(running.url, talks, rate, sent.seed))
        else:
            command = shlex.join(["sglang.bench_serving", *bench.command(running.url, sent)])
            limit_s = workload.scale(self._results.scale).seconds
            told, seconds = bench.run(running.url, sent, limit_s)
        run = Run(
            running.arm.name,
            *(workload.name, number, rate, seconds),
            sent.digest,
            command,
            told,
            probe,
        )
        self._results.runs.append(run)
        say(report.line(run))
        return run

    def _search(self, workload: Workload, number: int, bench: BenchServing) -> None:
        """Look for the goodput of those that are up, if one's has not been looked for enough.

        All of them, then: it is compared within the round.
        """
        looked_for = workload.scale(self._results.scale).goodput
        if looked_for is None or not any(
            self._searches(name, workload) < self._effort.searches for name in self._up
        ):
            return
        limits = self._results.limits(workload, number)
        if limits is None:
            say(f"{workload.name}: the baseline answered nothing without load; no goodput")
            return
        searches = {
            name: Bisection(looked_for.low, looked_for.high, looked_for.probes) for name in self._up
        }
        while any(searches[name].rate is not None for name in self._up):
            for running in self._turns():
                search = searches[running.arm.name]
                if search.rate is not None:
                    with self._work(running, number, schedule.GOODPUT):
                        run = self._run(workload, running, number, search.rate, bench, probe=True)
                        search.tell(limits.hold(run))
        for name in self._up:
            found = searches[name].found
            self._results.searches.append(Search(name, workload.name, number, limits, found))
            say(f"{name}, {workload.name}: goodput {found.rate:g} requests/s")

    def _searches(self, name: str, workload: Workload) -> int:
        return sum((s.arm, s.workload) == (name, workload.name) for s in self._results.searches)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)
