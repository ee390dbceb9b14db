"""Log-probabilities of this package beside those of one server.

On a GPU the kernels of a batch may round otherwise than those of one request, and one server
decodes JPEGs and resizes pictures on the GPU, where encoders do so on the CPU unless they are
told otherwise. So two right servers may differ. The yardstick is what one server differs from
itself, when a request is computed alone and beside others, and what in-tree EPD differs from
it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpu.serve_fleet import Fleet
from gpu.serve_pictures import data_url, picture
from integration.client import Client, Generation, image_part, text_part, user

_TOKENS = 8
# Requests that a batch is made of beside the one that is looked at.
_BESIDE = 3
# Differences of roundings: one unit in the last place of a logit of 4 to 8 in bfloat16.
FLOORS = {"bfloat16": 0.04, "float32": 1e-3}
_ALLOWED = 2.0
# A wrong picture is one of another round.
_LEAST_ROUNDS = 2
# A wrong picture has to differ by so many times what is allowed, on average.
_WRONG = 4.0

ALONE, BATCHED, IN_TREE, WRONG = (
    "one server again",
    "one server, in a batch",
    "in-tree EPD",
    "wrong",
)
YARDS = (ALONE, BATCHED, IN_TREE)
BESIDE_IN_TREE = "sglang-epd beside in-tree EPD"
OURS = ("sglang-epd", "sglang-epd, kept", "sglang-epd, zmq_to_tokenizer")
Messages = list[dict[str, Any]]
Ask = Callable[[], Generation]


def _part(size: tuple[int, int], kind: str, seed: object) -> dict[str, Any]:
    return image_part(data_url(picture(size, seed, kind), kind))


def one(seed: object, kind: str) -> Messages:
    return [user(_part((448, 448), kind, (seed, "one")), text_part("What is in this picture?"))]


def four_of_mixed_sizes(seed: object, kind: str) -> Messages:
    sizes = [(448, 448), (640, 352), (224, 168), (1280, 720)]
    parts = [_part(size, kind, (seed, number)) for number, size in enumerate(sizes)]
    return [user(text_part("First"), parts[0], text_part("then"), *parts[1:], text_part("Why?"))]


def side_by_side(seed: object, kind: str) -> Messages:
    left, right = _part((320, 224), kind, (seed, "left")), _part((224, 320), kind, (seed, "right"))
    return [user(left, right)]


CASES = (one, four_of_mixed_sizes, side_by_side)


@dataclass
class Gaps:
    """Absolute differences of log-probabilities from one server's.

    Attributes:
        first: at the first token of an answer, which prefill alone decides.
        all: at every position up to the first token in which two answers differ.
        failures: what went wrong with other requests.
    """

    first: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, mine: Generation, reference: Generation) -> None:
        if mine.prompt_tokens != reference.prompt_tokens:
            self.failures.append(
                f"{mine.prompt_tokens} tokens of prompt, not {reference.prompt_tokens}"
            )
            return
        for position, (top, wanted) in enumerate(zip(mine.top, reference.top, strict=False)):
            found = differences(top, wanted)
            self.all += found
            if position == 0:
                self.first += found
            if mine.tokens[position] != reference.tokens[position]:
                break

    @property
    def figures(self) -> dict[str, Any]:
        if not self.all:
            return {"compared": 0, "failures": self.failures}
        return {
            "compared": len(self.all),
            "first_max": max(self.first),
            "first_mean": statistics.fmean(self.first),
            "max": max(self.all),
            "mean": statistics.fmean(self.all),
            "failures": self.failures,
        }


def differences(mine: dict[str, float], reference: dict[str, float]) -> list[float]:
    """How far log-probabilities of the reference's likeliest tokens are off.

    Of a token that is not among `mine` it is known that it is no likelier than the least
    of them: the difference is at least that.

    >>> differences({"a": -1.0, "b": -3.0}, {"a": -1.5, "c": -2.0})
    [0.5, 1.0]
    """
    least = min(mine.values())
    return [
        abs(mine[token] - value) if token in mine else max(0.0, value - least)
        for token, value in reference.items()
    ]


def compare(fleet: Fleet, rounds: int, kind: str, left_s: Callable[[], float]) -> dict[str, Gaps]:
    """Differences of every arm that started, by its title.

    Args:
        kind: of the pictures' files. PNG leaves a decoder no choice.
        rounds: how often every case is asked, each time with new pictures; at least two.
        left_s: seconds that are left; after two rounds no other is begun without.
    """
    reference = Client(fleet.running["one"].url)
    arms = _arms(fleet)
    gaps = {name: Gaps() for name in (ALONE, BATCHED, *arms, BESIDE_IN_TREE, WRONG)}
    _warm_up([reference, *arms.values()])
    before: dict[str, Generation] = {}
    for number in range(rounds):
        if number >= _LEAST_ROUNDS and left_s() <= 0:
            break
        for case in CASES:
            messages = case(number, kind)
            wanted = _generation(reference, messages)
            _add(gaps[ALONE], partial(_generation, reference, messages), wanted)
            _add(gaps[BATCHED], partial(_in_a_batch, reference, messages, number, kind), wanted)
            answers = {
                name: _add(gaps[name], partial(_generation, client, messages), wanted)
                for name, client in arms.items()
            }
            theirs, mine = answers.get(IN_TREE), answers.get(OURS[0])
            if theirs is not None and mine is not None:
                gaps[BESIDE_IN_TREE].add(mine, theirs)
            if (other := before.get(case.__name__)) is not None:
                gaps[WRONG].add(other, wanted)
            before[case.__name__] = wanted
        print(f"parity: round {number + 1} of {rounds}", flush=True)
    return gaps


def verdict(gaps: dict[str, Gaps], dtype: str) -> list[str]:
    """What is wrong; nothing where all is as it should be."""
    figures = {name: one_arms.figures for name, one_arms in gaps.items()}
    wrong = [] if OURS[0] in gaps else [f"{OURS[0]} was not up"]
    mine = {name: figures[name] for name in OURS if name in gaps}
    for name, found in mine.items():
        wrong += [f"{name}: {failure}" for failure in found["failures"]]
        if not found["compared"]:
            wrong.append(f"{name} answered nothing that could be compared")
    for figure in ("max", "mean"):
        yards = [figures[name].get(figure, 0.0) for name in YARDS if name in figures]
        allowed = max(FLOORS[dtype], _ALLOWED * max(yards))
        for name, found in mine.items():
            if found.get(figure, 0.0) > allowed:
                wrong.append(f"{name}: {figure} {found[figure]:.4f}, {allowed:.4f} is allowed")
        other = figures[WRONG].get("mean", 0.0)
        if figure == "mean" and other < _WRONG * allowed:
            wrong.append(
                f"a wrong picture differs by {other:.4f} on average, which is less than "
                f"{_WRONG:.0f} times the allowed {allowed:.4f}: the comparison shows nothing"
            )
    return wrong


def rows(gaps: dict[str, Gaps]) -> list[list[str]]:
    """A table of the differences."""
    found = [
        [
            "log-probabilities beside one server's",
            "compared",
            "first token, max",
            "mean",
            "all, max",
            "mean",
        ]
    ]
    for name, one_arms in gaps.items():
        told = one_arms.figures
        cells = [f"{told[key]:.5f}" if key in told else "-" for key in _SHOWN]
        found.append([name, str(told["compared"]), *cells])
    return found


_SHOWN = ("first_max", "first_mean", "max", "mean")


def _arms(fleet: Fleet) -> dict[str, Client]:
    """Clients by what is compared, in the order in which a case is sent to them."""
    arms = {}
    if "in-tree" in fleet.running:
        arms[IN_TREE] = Client(fleet.running["in-tree"].url)
    if "sglang-epd" in fleet.running:
        *others, to_scheduler = fleet.running["sglang-epd"].urls("language")
        # The second time its prefix cache has it, and the third server has it from the
        # encoder's cache.
        arms[OURS[0]] = arms[OURS[1]] = Client(to_scheduler)
        if others:
            arms[OURS[2]] = Client(others[0])
    return arms


def _warm_up(clients: Sequence[Client]) -> None:
    """Have all servers compile at once what they compile at their first request."""
    with ThreadPoolExecutor(len(clients)) as pool:
        asking = [pool.submit(_generation, client, one("warm-up", "JPEG")) for client in clients]
    for failure in filter(None, (answer.exception() for answer in asking)):
        print(f"warm-up: {failure}", flush=True)


def _add(gaps: Gaps, ask: Ask, wanted: Generation) -> Generation | None:
    """Ask, and take the differences down; None where there is no answer."""
    try:
        answer = ask()
    except (AssertionError, OSError) as error:
        gaps.failures.append(f"{type(error).__name__}: {error}"[:300])
        return None
    gaps.add(answer, wanted)
    return answer


def _generation(client: Client, messages: Messages) -> Generation:
    return client.generation(*messages, tokens=_TOKENS)


def _in_a_batch(client: Client, messages: Messages, number: int, kind: str) -> Generation:
    """The same request, while others are computed."""
    others: Sequence[Messages] = [one((number, "beside", at), kind) for at in range(_BESIDE)]
    with ThreadPoolExecutor(_BESIDE + 1) as pool:
        beside = [pool.submit(_generation, client, other) for other in others]
        looked_at = pool.submit(_generation, client, messages)
        for answer in beside:
            answer.result()
        return looked_at.result()
