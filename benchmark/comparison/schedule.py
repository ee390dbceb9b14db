"""What is run when, and how long that takes: reckoned beforehand, then as it was measured.

The first round has all arms and workloads. Those after it repeat, for some of the arms, as
many workloads as there is time for, the first named first: ratios that several rounds have
in common have a spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from comparison.arms import Arm
from comparison.workloads import Scale, ScaleName, Workload

START, QUESTIONS, GOODPUT = "start", "questions", "goodput"
# Of a machine with two cores, in seconds: a server's start, and that of another beside it; the
# client's, before each run; an image's way through a server, an answer's token.
_START_S, _NEXT_START_S, _RUN_S, _IMAGE_S, _TOKEN_S = 30.0, 20.0, 2.0, 0.3, 0.01


class Round(msgspec.Struct, frozen=True):
    """Names of the arms of one round, in their order, and of its workloads."""

    arms: list[str]
    workloads: list[str]


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
            servers = sum(one.count for one in arm.servers if one.role != "router")
            return _START_S + _NEXT_START_S * (servers - 1)
        if what == QUESTIONS:
            return sum(questions * _alone_s(one, one.scale(scale)) for one in workloads)
        if what == GOODPUT:
            return sum(_search_s(one.scale(scale)) for one in workloads)
        return _runs_s(by_name[what], by_name[what].scale(scale))

    return cost


def measured(spent: Sequence[Spent]) -> Cost:
    """What they took when they last were done; 0 for what was not."""
    last = {(one.arm, one.what): one.seconds for one in spent}
    return lambda arm, what: last.get((arm.name, what), 0.0)


def first(arms: Sequence[Arm], workloads: Sequence[Workload]) -> Round:
    return Round([arm.name for arm in arms], [one.name for one in workloads])


def again(
    number: int, arms: Sequence[Arm], workloads: Sequence[Workload], cost: Cost, left_s: float
) -> Round | None:
    """A later round of these arms; None if there is no time for any workload."""
    left_s -= sum(cost(arm, START) for arm in arms)
    chosen = []
    for workload in workloads:
        seconds = sum(cost(arm, workload.name) for arm in arms)
        if seconds <= left_s:
            chosen.append(workload.name)
            left_s -= seconds
    if not arms or not chosen:
        return None
    names = [arm.name for arm in arms]
    shift = number % len(names)
    return Round(names[shift:] + names[:shift], chosen)


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
