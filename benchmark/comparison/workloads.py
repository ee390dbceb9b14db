"""Workloads: what is asked, how often and for how long, at a small machine's scale and at
that of the papers.

A request is a function of the workload, the scale, the seed and its number alone, so that
every arm gets the same bytes.
"""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from pictures import jpeg

from sglang_epd.schema import Data

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Pixels = Annotated[int, msgspec.Meta(ge=28, le=8192)]
ScaleName = Literal["small", "paper"]

# Common words, each a token or few; what they say is nobody's concern.
_COMMON = (
    "the of and a to in is you that it he was for on are as with his they at be this have "
    "from or one had by word but not what all were we when your can said there use an each "
    "which she do how their if will up other about out many then them these so some her "
    "would make like him into time has look two more write go see number no way could people"
)
_WORDS = _COMMON.split()
_QUESTION = "What is on it?"


class Size(Data, frozen=True):
    """A picture's, and how often it is drawn next to the others of a workload."""

    width: Pixels
    height: Pixels
    weight: Positive = 1.0


class Images(Data, frozen=True):
    """How many a request has: `least` to `most`, all alike likely, or, with a `mean`,
    `least` and a binomial draw.
    """

    least: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    most: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    mean: float | None = None

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least {self.least} images are more than most {self.most}")
        if self.mean is not None and not self.least <= self.mean <= self.most:
            raise ValueError(f"a mean of {self.mean} is not in {self.least} to {self.most}")

    def draw(self, rng: random.Random) -> int:
        span = self.most - self.least
        if self.mean is None or not span:
            return rng.randint(self.least, self.most)
        share = (self.mean - self.least) / span
        return self.least + sum(rng.random() < share for _ in range(span))


class Repeats(Data, frozen=True):
    """Pictures come again and again, the i-th of `pool` with weight i**-exponent."""

    pool: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    exponent: Annotated[float, msgspec.Meta(ge=0, le=4)] = 1.0


class Clip(Data, frozen=True):
    """A video of so many frames, at so many a second."""

    frames: Annotated[int, msgspec.Meta(ge=2, le=10_000)]
    rate: Positive
    width: Pixels
    height: Pixels


class Search(Data, frozen=True):
    """Where goodput is looked for, and what has to hold.

    Attributes:
        low, high: requests a second.
        probes: rates that are tried between the two.
        ttft, tpot: p99 at most, as multiples of the p50 of the baseline without load.
    """

    low: Positive
    high: Positive
    probes: Annotated[int, msgspec.Meta(ge=0, le=20)] = 3
    ttft: Positive = 5.0
    tpot: Positive = 3.0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")


class Scale(Data, frozen=True):
    """One scale of a workload.

    Attributes:
        text_tokens, answer_tokens: of each request, or turn.
        sizes: of pictures.
        rates: requests (conversations) a second, each a run; 0 is one at a time.
        seconds: how long a run sends.
        requests: of a run at rate 0.
    """

    text_tokens: Tokens
    answer_tokens: Tokens
    rates: Annotated[list[Annotated[float, msgspec.Meta(ge=0, le=1e4)]], msgspec.Meta(min_length=1)]
    sizes: list[Size] = []
    clip: Clip | None = None
    repeats: Repeats | None = None
    seconds: Positive = 8.0
    requests: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 6
    goodput: Search | None = None

    def count(self, rate: float) -> int:
        """Requests of a run at that rate."""
        return max(2, round(rate * self.seconds)) if rate else self.requests


class Workload(Data, frozen=True):
    """What clients ask.

    Attributes:
        name: the file's.
        title: what pages call it.
        images: of each request that has media; none where it has a clip.
        every: each so many-th request has media, the others are text alone.
        turns: of a conversation, whose pictures are in its first turn and are sent again
            with each of the others.
        sliding: of turns that are sent alone: each without the first picture of the one before
            it, and with another at the end.
    """

    name: str
    title: str
    small: Scale
    paper: Scale
    images: Images | None = None
    every: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    turns: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    sliding: bool = False

    def __post_init__(self) -> None:
        if self.sliding and self.images is None:
            raise ValueError("a window slides over images, and there are none")
        for scale in (self.small, self.paper):
            if (self.images is None) != (scale.clip is not None):
                raise ValueError("a workload has images or, in each scale, a clip")
            if self.images is not None and not scale.sizes:
                raise ValueError("images have no sizes")
            if self.images is None and (scale.sizes or scale.repeats):
                raise ValueError("sizes and repeats are of images, and there are none")
            if scale.goodput is not None and 0 not in scale.rates:
                raise ValueError("goodput is relative to a run at rate 0, and there is none")
            if scale.goodput is not None and self.turns > 1:
                raise ValueError("goodput is of requests, not of conversations")

    def scale(self, name: ScaleName) -> Scale:
        return self.small if name == "small" else self.paper


class Request(msgspec.Struct, frozen=True):
    """One request, or conversation.

    Attributes:
        kind: "media" or "text".
        turns: the user's message of each turn, as the chat API takes it.
        sliding: each is sent without those before it.
    """

    kind: str
    turns: list[list[dict[str, Any]]]
    answer_tokens: int
    sliding: bool = False

    def body(self) -> dict[str, Any]:
        """Of the first turn, but for the name of the model and whether to stream."""
        return {
            "messages": [{"role": "user", "content": self.turns[0]}],
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


# Tokens of a text.
Count = Callable[[str], int]


def requests(workload: Workload, scale: ScaleName, seed: object, count: Count) -> Iterator[Request]:
    """The requests of a workload, without an end: number i is the same for a seed.

    Args:
        seed: anything whose `repr` tells it; another one, other texts and pictures.
        count: the checkpoint's tokens of a text.
    """
    for number in itertools.count():
        yield _request(workload, workload.scale(scale), (workload.name, seed), number, count)


def _request(workload: Workload, scale: Scale, seed: object, number: int, count: Count) -> Request:
    rng = random.Random(repr((seed, number)))
    # The middle one of each so many: a short run has some, too.
    media = number % workload.every == workload.every // 2
    parts = _media(workload, scale, seed, number, rng) if media else []
    window = len(parts) - _later(workload)
    turns = []
    for turn in range(workload.turns):
        said = text(scale.text_tokens, rng, count)
        shown = parts[turn : turn + window] if workload.sliding or turn == 0 else []
        turns.append([*shown, {"type": "text", "text": said}])
    kind = "media" if media else "text"
    return Request(kind, turns, scale.answer_tokens, workload.sliding)


def _later(workload: Workload) -> int:
    """Pictures that a conversation shows in its later turns only."""
    return workload.turns - 1 if workload.sliding else 0


def _media(
    workload: Workload, scale: Scale, seed: object, number: int, rng: random.Random
) -> list[dict[str, Any]]:
    if scale.clip is not None:
        return [_part("video_url", "video/mp4", video(scale.clip, (seed, number)))]
    assert workload.images is not None
    parts = []
    for place in range(workload.images.draw(rng) + _later(workload)):
        name: object = (seed, number, place)
        draw = rng
        if scale.repeats is not None:
            ranks = range(1, scale.repeats.pool + 1)
            weights = [rank**-scale.repeats.exponent for rank in ranks]
            name = (seed, "pool", rng.choices(ranks, weights)[0])
            draw = random.Random(repr(name))
        (size,) = draw.choices(scale.sizes, [one.weight for one in scale.sizes])
        parts.append(_part("image_url", "image/jpeg", jpeg((size.width, size.height), name)))
    return parts


def _part(kind: str, media_type: str, content: bytes) -> dict[str, Any]:
    url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
    return {"type": kind, kind: {"url": url}}


def text(tokens: int, rng: random.Random, count: Count) -> str:
    """About so many tokens of words, with a question at the end: never more than a word off."""
    left = tokens - count(_QUESTION)
    words = []
    while left > 0:
        words.append(rng.choice(_WORDS))
        left -= _weight(words[-1], count)
    return " ".join([*words, _QUESTION])


@lru_cache(maxsize=4 * len(_WORDS))
def _weight(word: str, count: Count) -> int:
    return max(1, count(f" {word}"))


def video(clip: Clip, seed: object) -> bytes:
    """A camera that pans over a photograph, as MP4; another way for another seed."""
    from clips import encode, moving_crop  # decodes and encodes with torch: seconds to import
    from photographs import NAMES

    rng = random.Random(repr(seed))
    frames = moving_crop(
        rng.choice(NAMES),
        frames=clip.frames,
        size=(clip.width, clip.height),
        step=rng.randint(2, 9),
    )
    return encode(frames.roll(rng.randrange(clip.width), dims=-1), clip.rate)
