"""Which requests arrive, and when: plain data, and how values are drawn from it."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from sglang_epd.errors import ConfigError
from sglang_epd.profile import Pixels
from sglang_epd.schema import Cost, Count, Data, Positive, Rate, Text


class Uniform(Data, frozen=True, tag="uniform", tag_field="kind"):
    """A whole number from `low` to `high`, both included."""

    low: Count
    high: Count

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")


class Exponential(Data, frozen=True, tag="exponential", tag_field="kind"):
    """An exponential distribution, rounded, at least 1."""

    mean: Rate


class Lognormal(Data, frozen=True, tag="lognormal", tag_field="kind"):
    """A lognormal distribution with a coefficient of variation `cv`, rounded, within bounds."""

    mean: Rate
    cv: Rate
    low: Count = 1
    high: Positive = 1 << 20


Number = int | Uniform | Exponential | Lognormal


class Picture(Data, frozen=True):
    """An image, or a video of `frames` pairs of frames: the steps of the tower."""

    width: Positive
    height: Positive
    frames: Positive = 1

    def patches(self, pixels: Pixels) -> float:
        """Patches that the tower encodes: sides are rounded to whole tokens."""
        side = pixels.patch_px * round(pixels.merge**0.5)
        tokens = max(1, round(self.width / side)) * max(1, round(self.height / side))
        return float(tokens * pixels.merge * self.frames)


class Kind(Data, frozen=True):
    """Requests of one kind.

    Attributes:
        weight: the kind's share of all requests, relative to the other weights.
        items: media in a request.
        pictures: their sizes, each as likely; or
        patches: their patches, for any modality.
        catalogue: number of different items; 0 if none comes twice.
        zipf: exponent of their popularity.
        turns: of a conversation, each a request, which repeats the media and earlier turns and
            adds a text of `text_tokens`.
        think_s: time from an answer to the next turn.
    """

    text_tokens: Number
    output_tokens: Number
    weight: Rate = 1.0
    items: Number = 0
    pictures: tuple[Picture, ...] = ()
    patches: Number | None = None
    catalogue: Count = 0
    zipf: Cost = 1.1
    turns: Number = 1
    think_s: Cost = 0.0

    def __post_init__(self) -> None:
        for name in ("text_tokens", "output_tokens", "items", "turns"):
            value = getattr(self, name)
            if isinstance(value, int) and value < (name != "items"):
                raise ValueError(f"{name} is {value}")
        if isinstance(self.patches, int) and self.patches < 1:
            raise ValueError(f"patches is {self.patches}")
        if self.items != 0 and bool(self.pictures) == (self.patches is not None):
            raise ValueError("items are given by pictures or by patches")


class Poisson(Data, frozen=True, tag="poisson", tag_field="kind"):
    """Requests of independent clients."""


class Constant(Data, frozen=True, tag="constant", tag_field="kind"):
    """Requests at equal intervals."""


class Gamma(Data, frozen=True, tag="gamma", tag_field="kind"):
    """Intervals with a coefficient of variation `cv`: above 1 requests arrive in bursts."""

    cv: Rate


class Closed(Data, frozen=True, tag="closed", tag_field="kind"):
    """Users who wait for an answer, and think, before they ask again. The rate follows: none may
    be given."""

    users: Positive
    think_s: Cost = 0.0


Arrival = Poisson | Constant | Gamma | Closed


class Workload(Data, frozen=True):
    """The requests of all clients.

    Attributes:
        source: where the figures come from.
        deadline_s: time until all embeddings of a request have to arrive
            (`SGLANG_EPD_REQUEST_TIMEOUT_S`); a request without them fails.
    """

    name: Text
    kinds: tuple[Kind, ...]
    arrival: Arrival = Poisson()
    source: str = ""
    deadline_s: Rate = 120.0

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ValueError("a workload has at least one kind of request")


@dataclass(frozen=True)
class Traffic:
    """How much of a workload a run has.

    Attributes:
        rate: requests a second, all turns of conversations counted; 0 for closed loops.
        requests, seconds: bounds on arrivals, whichever is reached first; requests that have
            arrived are served to their end.

    Raises:
        ConfigError: a number is out of range, or there is no bound.
    """

    rate: float = 0.0
    requests: float = math.inf
    seconds: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"{self.rate} is no rate: requests a second, or 0 for closed loops")
        if min(self.requests, self.seconds) <= 0:
            raise ConfigError("requests and seconds have to be positive")
        if self.requests == self.seconds == math.inf:
            raise ConfigError("say how many requests, or for how many seconds")


def drawn(number: Number, rng: random.Random) -> int:
    """One random value."""
    match number:
        case int():
            return number
        case Uniform():
            return rng.randint(number.low, number.high)
        case Exponential():
            return max(1, round(rng.expovariate(1 / number.mean)))
        case Lognormal():
            sigma2 = math.log(1 + number.cv**2)
            drawn = rng.lognormvariate(math.log(number.mean) - sigma2 / 2, sigma2**0.5)
            return max(number.low, min(number.high, round(drawn)))


def mean(number: Number) -> float:
    """The mean of `drawn`, but for the bounds of a lognormal."""
    match number:
        case int():
            return float(number)
        case Uniform():
            return (number.low + number.high) / 2
        case Exponential() | Lognormal():
            return number.mean


def turns(workload: Workload) -> float:
    """Requests of a mean conversation; 1 where there are none."""
    weights = sum(kind.weight for kind in workload.kinds)
    return sum(kind.weight * max(1.0, mean(kind.turns)) for kind in workload.kinds) / weights


def intervals(arrival: Arrival, rate: float, rng: random.Random) -> Iterator[float]:
    """Seconds from one request to the next; closed loops have none."""
    draw: Callable[[], float]
    match arrival:
        case Poisson():
            draw = lambda: rng.expovariate(rate)  # noqa: E731
        case Constant():
            draw = lambda: 1 / rate  # noqa: E731
        case Gamma():
            shape = arrival.cv**-2
            draw = lambda: rng.gammavariate(shape, 1 / (rate * shape))  # noqa: E731
        case Closed():
            raise ValueError("users of a closed loop ask when they have been answered")
    while True:
        yield draw()


class Popularity:
    """Numbers below `count` by Zipf's law; 0 is the most popular."""

    def __init__(self, count: int, exponent: float) -> None:
        self._sums = list(accumulate((rank + 1) ** -exponent for rank in range(count)))

    def draw(self, rng: random.Random) -> int:
        return bisect(self._sums, rng.random() * self._sums[-1], hi=len(self._sums) - 1)
