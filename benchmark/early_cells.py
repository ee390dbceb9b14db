"""What `early.py` sends, what its servers could do at best, and what it has measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from comparison.published import shrunk
from comparison.workloads import Clip, Images, Scale, Size, Workload

from sglang_epd.profile import Profile, TowerCosts, load_profile

PROFILES = Path(__file__).with_name("reproduce") / "profiles"
# Tokens of a request's text, of an answer whose first token is waited for, and of a text beside.
TEXT_TOKENS, ANSWER_TOKENS = 24, 2
SIDE = 448
# As large as the checkpoints' processors leave it: they bound the pixels of all frames.
CLIP = Clip(frames=64, rate=2.0, width=160, height=96)
# Two frames of a video are one step of its patches.
_FRAMES_A_STEP = 2
LOADS = {
    "alone": "one request at a time",
    "beside": "one at a time, each beside a text that is being answered",
    "half": "half of what the busiest accelerator could do, Poisson, beside texts",
}
OFF = "early prefill off"
ON = "early prefill auto"


class Machine(msgspec.Struct, frozen=True):
    """An emulated machine with a model.

    Attributes:
        profile: a file of `reproduce/profiles/`, or one that ships with the package.
        checkpoint: a tiny one of the model's family.
        shrink: how many patches of a 1080p picture one of a `SIDE` px picture stands for.
        in_passes: whether its tower takes a long video in several passes.
    """

    title: str
    profile: str
    checkpoint: str
    shrink: float
    in_passes: bool = False


MACHINES = {
    "h100": Machine("H100, Qwen2.5-VL-7B", "h100-qwen2_5-vl-7b", "tiny-qwen2_5-vl", 10764 / 1024),
    "h20": Machine("H20, Qwen3-VL-8B", "h20-qwen3-vl-8b", "tiny-qwen3-vl", 8160 / 784, True),
    "h20x4": Machine(
        "H20, Qwen3-VL-235B of TP 4", "h20-qwen3-vl-235b", "tiny-qwen3-vl", 8160 / 784, True
    ),
}
# The arms of `reproduce/arms/` for each topology: this package, and those beside it.
TOPOLOGIES = {
    "1E1PD": ("epd-1e1p", "in-tree-1e1p", "one"),
    "2E1PD": ("epd-2e1p", "in-tree-2e1p", "one"),
    "1E1P1D": ("epd-e-p-d", "in-tree-e-p-d", "p-d"),
    "1E1PD2S": ("epd-1e1p", "in-tree-1e1p", "one"),
    "1E1PDA": ("epd-1e1p", "in-tree-1e1p", "one"),
}
# Pipeline stages of the servers that prefill.
STAGES = {"1E1PD2S": 2}
# Flags of the servers that prefill.
FLAGS = {"1E1PD2S": "--pp-size 2", "1E1PDA": "--enable-adaptive-dispatch-to-encoder"}
SENT = ("2", "4", "8", "16", "video")


class Cell(msgspec.Struct, frozen=True):
    """One thing that is measured; its name has all of it, as `h100-1E1PD-4-alone`.

    Attributes:
        sent: pictures of a request, or `video`.
    """

    machine: str
    topology: str
    sent: str
    load: str

    @property
    def name(self) -> str:
        return "-".join((self.machine, self.topology, self.sent, self.load))

    @property
    def encoders(self) -> int:
        return int(self.topology[0])

    @property
    def stages(self) -> int:
        return STAGES.get(self.topology, 1)

    @property
    def profile(self) -> Profile:
        """That of the machine, for the smaller pictures that are sent."""
        machine = MACHINES[self.machine]
        return shrunk(load_profile(profile_path(machine)), machine.shrink)

    def workload(self) -> Workload:
        """The requests with media."""
        clip = CLIP if self.sent == "video" else None
        sizes = [] if clip else [Size(width=SIDE, height=SIDE)]
        scale = Scale(
            text_tokens=TEXT_TOKENS,
            answer_tokens=ANSWER_TOKENS,
            rates=[1.0],
            sizes=sizes,
            clip=clip,
        )
        images = None if clip else Images(least=int(self.sent), most=int(self.sent))
        name = f"{self.machine} {self.sent}"
        return Workload(name=name, title=name, small=scale, paper=scale, images=images)

    def items(self) -> list[list[int]]:
        """Patches of each item, by what the tower attends within: a picture, or a video or each
        step of it. Of a video that takes several passes, each of these is an item."""
        patch = self.profile.pixels.patch_px
        if self.sent == "video":
            step, steps = (
                CLIP.width // patch * (CLIP.height // patch),
                CLIP.frames // _FRAMES_A_STEP,
            )
            tower = self.profile.encoder.tower
            if not tower.within_steps:
                return [[step * steps]]
            fit = max(1, tower.batch_patches // step)
            least = math.ceil(steps / fit) if MACHINES[self.machine].in_passes else 1
            each = math.ceil(steps / least)
            return [[step] * min(each, steps - first) for first in range(0, steps, each)]
        return [[(SIDE // patch) ** 2]] * int(self.sent)


def cell(name: str) -> Cell:
    """A cell by its name.

    Raises:
        ValueError: there is none of that name.
    """
    for one in cells():
        if one.name == name:
            return one
    raise ValueError(f"{name!r} is no cell, as h100-1E1PD-4-alone is")


def cells() -> Iterator[Cell]:
    for machine in MACHINES:
        for topology in TOPOLOGIES:
            for load in LOADS:
                for sent in SENT:
                    yield Cell(machine, topology, sent, load)


def profile_path(machine: Machine) -> str:
    path = PROFILES / f"{machine.profile}.json"
    return str(path) if path.exists() else machine.profile


class Passes(msgspec.Struct, frozen=True):
    """Seconds of a request's passes on idle accelerators, by its profile.

    Attributes:
        encode: until the last item is encoded; items go to encoders in turns.
        first: until the first one is.
        prefill: of the whole prompt.
        last: of the last item and what follows it, once all before is prefilled.
    """

    encode: float
    first: float
    prefill: float
    last: float

    @property
    def serial(self) -> float:
        """Until the first token, where prefill waits for the last item."""
        return self.encode + self.prefill

    @property
    def bound(self) -> float:
        """The same at best, with prefill beside encoding. Either the last item comes when all
        before it is prefilled, or prefill begins with the first item and never waits."""
        return max(self.encode + self.last, self.first + self.prefill)


def passes(one: Cell, prompt: int) -> Passes:
    """What a cell's request costs.

    Args:
        prompt: its tokens.
    """
    profile, items = one.profile, one.items()
    tower, merge = profile.encoder.tower, profile.pixels.merge
    encoders = 1 if one.sent == "video" else one.encoders
    shares = [items[first::encoders] for first in range(encoders)]

    def seconds(spans: Sequence[float]) -> float:
        return tower.seconds((patches, 1) for patches in spans)

    encode = max(sum(map(seconds, _batches(tower, share))) for share in shares)
    before = prompt - sum(items[-1]) // merge - TEXT_TOKENS
    return Passes(
        encode,
        seconds(items[0]),
        prefill_s(profile, prompt, stages=one.stages),
        prefill_s(profile, prompt, before, stages=one.stages),
    )


def _batches(tower: TowerCosts, items: Sequence[list[int]]) -> Iterator[list[float]]:
    """The passes over items that are all ready; the first of several goes alone, as nothing
    else is ready yet."""
    batch: list[float] = []
    count = 0
    for number, item in enumerate(items):
        full = count == tower.batch_items or sum(batch) + sum(item) > tower.batch_patches
        if batch and (number == 1 or full):
            yield batch
            batch, count = [], 0
        batch += item
        count += 1
    if batch:
        yield batch


def prefill_s(profile: Profile, prompt: int, done: int = 0, *, stages: int = 1) -> float:
    """Time of a prompt from a token on, chunk by chunk, each stage with the next chunk."""
    costs, free_at = profile.language, [0.0] * (stages + 1)
    while done < prompt:
        new = min(costs.chunk_tokens, prompt - done)
        share = costs.prefill_s([(new, done)]) / stages
        for stage in range(1, stages + 1):
            free_at[stage] = max(free_at[stage], free_at[stage - 1]) + share
        free_at[0] = free_at[1]
        done += new
    return free_at[-1]


def half_rate(one: Cell, prompt: int) -> float:
    """Requests a second that keep the busiest accelerator busy for half of the time."""
    cost = passes(one, prompt)
    return 0.5 / max(cost.encode, cost.prefill)


class Measured(msgspec.Struct, frozen=True):
    """A cell of one arm, in the emulated machine's time.

    Attributes:
        prompt: tokens of a request with media.
        ttfts_ms: of requests with media.
        tpots_ms: of the texts beside.
        failures: requests of either kind that did not get all of their tokens, and why.
        early_tokens: prompt tokens that were prefilled before their request's last item landed.
        accelerator_s, overrun_s: of all passes, and by how much the real ones took longer.
    """

    cell: str
    arm: str
    dilation: float
    prompt: int
    ttfts_ms: list[float]
    tpots_ms: list[float]
    failures: list[str]
    early_tokens: float
    accelerator_s: float
    overrun_s: float


class Results(msgspec.Struct):
    """Everything that was measured.

    Attributes:
        read: what a person sees in it, written into the JSON by hand; Markdown.
    """

    machine: dict[str, object]
    versions: dict[str, str]
    commands: list[str] = []
    read: str = ""
    measured: list[Measured] = []

    def of(self, name: str) -> list[Measured]:
        """The arms of a cell, in the order in which they had their turns."""
        return [one for one in self.measured if one.cell == name]

    def put(self, name: str, found: list[Measured]) -> None:
        """Take a cell's figures, in place of those that there were."""
        order = [one.name for one in cells()]
        others = [one for one in self.measured if one.cell != name]
        self.measured = sorted([*others, *found], key=lambda one: order.index(one.cell))
