"""What is run when, and how long that takes: reckoned beforehand, then as it was measured.

A machine's speed drifts over minutes, so arms that are to be compared are up together and
take turns, load by load. As not all of them fit, each of the first rounds has as many as do,
always with the baseline. Those after it repeat, for some of the arms, as many workloads as
there is time for, the first named first: ratios that several rounds have in common have a
spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from comparison.arms import MAX_SERVERS, Arm
from comparison.workloads import Scale, ScaleName, Workload

START, QUESTIONS, GOODPUT = "start", "questions", "goodput"
# Of a machine with two cores, in seconds: a server's start, and that of another beside it; the
# client's, before each run; an image's way through a server, an answer's token.
_START_S, _NEXT_START_S, _RUN_S, _IMAGE_S, _TOKEN_S = 35.0, 10.0, 0.5, 0.3, 0.01


class Round(msgspec.Struct, frozen=True):
    """Names of the arms of one round, in their order, and of its workloads.

    Attributes:
        together: they are up at the same time and take turns; otherwise one after the other.
    """

    arms: list[str]
    workloads: list[str]
    together: bool = False


class Spent(msgspec.Struct, frozen=True):
    """Seconds that one thing took.

    Attributes:
        what: "start", "questions", "goodput", or the workload whose runs they were.
    """

    arm: str
    round: int
    what: str
    seconds: float


# Seconds that something of an arm takes.
Cost = Callable[[Arm, str], float]


def reckoned(workloads: Sequence[Workload], scale: ScaleName, questions: int) -> Cost:
    """What things are likely to take, before anything has run.

    Args:
        questions: of each workload.
    """
    by_name = {one.name: one for one in workloads}

    def cost(arm: Arm, what: str) -> float:
        if what == START:
            routers = sum(one.role == "router" for one in arm.servers)
            return _START_S + _NEXT_START_S * (arm.size - routers - 1)
        if what == QUESTIONS:
            return sum(questions * _alone_s(one, one.scale(scale)) for one in workloads)
        if what == GOODPUT:
            return sum(_search_s(one.scale(scale)) for one in workloads)
        return _runs_s(by_name[what], by_name[what].scale(scale))

    return cost


def measured(spent: Sequence[Spent]) -> Cost:
    """What they took in the last round that had them; 0 for what none had."""
    by_round: dict[tuple[str, str], dict[int, float]] = {}
    for one in spent:
        seconds = by_round.setdefault((one.arm, one.what), {})
        seconds[one.round] = seconds.get(one.round, 0.0) + one.seconds

    def cost(arm: Arm, what: str) -> float:
        seconds = by_round.get((arm.name, what))
        return seconds[max(seconds)] if seconds else 0.0

    return cost


class Plan:
    """The rounds of a comparison.

    Args:
        arms: the baseline first.
        repeated: those of the rounds after the first ones.
        together: as many arms are up at a time as fit; otherwise one.
        most: rounds of each arm that is repeated.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        workloads: Sequence[Workload],
        repeated: Sequence[Arm],
        *,
        together: bool,
        most: int,
    ) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._workloads = workloads
        self._again = _groups(repeated, together)
        firsts = _groups(arms, together)
        # Those that are repeated last: they are up already when that begins.
        firsts.sort(key=self._again.__contains__)
        self._firsts, self._together = firsts, together
        self._most = len(firsts) + (most - 1) * len(self._again)

    def round(self, number: int, before: Round | None, cost: Cost, left_s: float) -> Round | None:
        """A round; None if there is none of this number, or no time for any workload.

        Args:
            before: the one before it, whose arms may be up.
            left_s: the time for it; the first rounds are run whatever there is.
        """
        if number < len(self._firsts):
            names = [one.name for one in self._workloads]
            return Round(self._firsts[number], names, self._together)
        if number >= self._most:
            return None
        later = number - len(self._firsts)
        names = self._again[later % len(self._again)]
        arms = [self._arms[name] for name in names]
        if not self._stay(before, names):
            left_s -= sum(cost(arm, START) for arm in arms)
        chosen = []
        for workload in self._workloads:
            seconds = sum(cost(arm, workload.name) for arm in arms)
            if seconds <= left_s:
                chosen.append(workload.name)
                left_s -= seconds
        if not chosen:
            return None
        shift = 0 if self._together else (1 + later) % len(names)
        return Round(names[shift:] + names[:shift], chosen, self._together)

    def seconds(self, planned: Round, before: Round | None, cost: Cost) -> dict[str, float]:
        """What each arm of a round is likely to take, without questions and goodput."""
        stay = self._stay(before, planned.arms)
        things = [*([] if stay else [START]), *planned.workloads]
        return {name: sum(cost(self._arms[name], one) for one in things) for name in planned.arms}

    def _stay(self, before: Round | None, names: Sequence[str]) -> bool:
        return self._together and before is not None and set(before.arms) == set(names)


def _groups(arms: Sequence[Arm], together: bool) -> list[list[str]]:
    """Arms of a round each: with the baseline, which is the first, as many as may be up.

    Raises:
        ValueError: one is too large to be up beside the baseline.
    """
    if not arms:
        return []
    if not together:
        return [[arm.name for arm in arms]]
    baseline, *others = arms
    groups, room = [[baseline.name]], MAX_SERVERS - baseline.size
    for arm in others:
        if arm.size + baseline.size > MAX_SERVERS:
            raise ValueError(f"{arm.name} and {baseline.name} are more than {MAX_SERVERS} servers")
        if arm.size > room:
            groups.append([baseline.name])
            room = MAX_SERVERS - baseline.size
        groups[-1].append(arm.name)
        room -= arm.size
    return groups


def _runs_s(workload: Workload, scale: Scale) -> float:
    """The runs of a workload that are no search."""
    total = 0.0
    for rate in scale.rates:
        alone = _alone_s(workload, scale) * workload.turns
        total += _RUN_S + (scale.seconds + alone if rate else scale.requests * alone)
    return total


def _search_s(scale: Scale) -> float:
    """Its highest rate, and others that do not hold, leave a queue behind."""
    return 0.0 if scale.goodput is None else (2 + scale.goodput.probes) * (_RUN_S + scale.seconds)


def _alone_s(workload: Workload, scale: Scale) -> float:
    """One request."""
    images = 0.0
    if workload.images is not None:
        images = (workload.images.least + workload.images.most) / 2 / workload.every
    elif scale.clip is not None:
        images = scale.clip.frames / 8
    return images * _IMAGE_S + scale.answer_tokens * _TOKEN_S
