"""Published comparisons as data, and the results of repeating one."""

from __future__ import annotations

from typing import Annotated

import msgspec

from comparison.arms import Arm
from comparison.figures import Limits, Run
from comparison.workloads import Images, Positive, Scale, Size, Tokens, Workload
from sglang_epd.cli.places import devices_of
from sglang_epd.profile import Profile, TowerCosts
from sglang_epd.schema import Data

replace = msgspec.structs.replace


class Case(Data, frozen=True):
    """One workload of a comparison.

    Attributes:
        loads: each a run: requests a second of the published machines, or, where `closed`,
            requests (conversations) in flight.
        requests: of each run; conversations where there are turns.
        turns: of a conversation. Each drops the first picture of the turn before it, adds one
            at the end, and is sent alone.
    """

    name: str
    loads: Annotated[list[Positive], msgspec.Meta(min_length=1)]
    requests: Annotated[int, msgspec.Meta(ge=2, le=10_000)]
    text_tokens: Tokens
    answer_tokens: Tokens
    images: Images
    size: Size
    closed: bool = False
    turns: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1

    def __post_init__(self) -> None:
        if self.turns > 1 and (not self.closed or self.loads != [self.requests]):
            raise ValueError("conversations are held all at once")

    def workload(self) -> Workload:
        scale = Scale(
            text_tokens=self.text_tokens,
            answer_tokens=self.answer_tokens,
            rates=self.loads,
            sizes=[self.size],
        )
        return Workload(
            name=self.name,
            title=self.name,
            images=self.images,
            turns=self.turns,
            sliding=self.turns > 1,
            small=scale,
            paper=scale,
        )


class Comparison(Data, frozen=True):
    """A published comparison.

    Attributes:
        name: the file's.
        published: what it says, and of what; Markdown.
        chosen: what it does not say, and was chosen here; Markdown.
        profile: of the accelerators: a file of `profiles/` beside this one, or one that ships
            with the package.
        profiles: by arm, where an arm has another.
        shrink: by what factor pictures, texts and chunks are smaller than published.
        answer_shrink: by what factor answers are shorter; each step costs as much more.
        dilation: `SGLANG_EPD_EMULATE_DILATE`.
        together: how many arms are under load at a time; each has accelerators of its own, and
            they share the machine's cores.
        arms: files of `arms/` beside this one. The others stand beside the first.
        limits: what p99 may be at most.
        read: what a person sees in the results; Markdown.
    """

    name: str
    title: str
    source: str
    published: str
    chosen: str
    profile: str
    checkpoint: str
    shrink: Positive
    dilation: Positive
    arms: Annotated[list[str], msgspec.Meta(min_length=1)]
    cases: Annotated[list[Case], msgspec.Meta(min_length=1)]
    profiles: dict[str, str] = {}
    answer_shrink: Positive = 1.0
    together: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    limits: Limits | None = None
    read: str = ""

    def __post_init__(self) -> None:
        if strange := self.profiles.keys() - set(self.arms):
            raise ValueError(f"profiles of {', '.join(sorted(strange))}, which are no arms")

    @property
    def measured(self) -> Comparison:
        """What results depend on, without the words of the page."""
        return replace(self, title="", published="", chosen="", read="")

    def shrunk(self, profile: Profile) -> Profile:
        """The costs of tokens, patches and steps of which each stands for several."""
        return shrunk(profile, self.shrink, self.answer_shrink)


def shrunk(profile: Profile, by: float, steps: float = 1.0) -> Profile:
    """A profile whose tokens and patches stand for `by` each, and whose steps for `steps`."""
    language = profile.language
    return replace(
        profile,
        name=f"{profile.name}, each token for {by:g}",
        encoder=replace(profile.encoder, tower=_tower(profile.encoder.tower, by)),
        language=replace(
            language,
            tower=_tower(language.tower, by),
            prefill_token_s=language.prefill_token_s * by,
            prefill_context_s=language.prefill_context_s * by**2,
            decode_launch_s=language.decode_launch_s * steps,
            decode_sequence_s=language.decode_sequence_s * steps,
            decode_context_s=language.decode_context_s * steps * by,
            chunk_tokens=round(language.chunk_tokens / by),
            kv_tokens=round(language.kv_tokens / by),
        ),
    )


def _tower(tower: TowerCosts, by: float) -> TowerCosts:
    return replace(
        tower,
        patch_s=tower.patch_s * by,
        patch2_s=tower.patch2_s * by**2,
        batch_patches=round(tower.batch_patches / by),
    )


class Accelerators(msgspec.Struct, frozen=True):
    """How many emulated ones an arm has, each a process, and what they stand for.

    Attributes:
        gpus: of the published machines.
    """

    encoders: int
    language: int
    gpus: float


def accelerators(arm: Arm, profile: Profile) -> Accelerators:
    ranks = {"encoder": 0, "language": 0}
    for server in arm.servers:
        if server.role != "router":
            role = "encoder" if server.role == "encoder" else "language"
            ranks[role] += server.count * devices_of(server.flags.split())
    gpus = ranks["encoder"] * profile.encoder.gpus + ranks["language"] * profile.language.gpus
    return Accelerators(ranks["encoder"], ranks["language"], gpus)


class Busy(msgspec.Struct, frozen=True):
    """What the accelerators of an arm did in a run, in dilated seconds.

    Attributes:
        encoder_s: of all encoders.
        language_s: of all others, by kind of pass.
        overrun_s: by how much real passes took longer than their emulated time.
        items: media by where their KV or embedding came from, of this package's servers.
    """

    encoder_s: float
    language_s: dict[str, float]
    overrun_s: float
    items: dict[str, int] = {}


class Measured(msgspec.Struct, frozen=True):
    """One run, whose times are not divided by the dilation yet; `run.rate` is the case's load."""

    run: Run
    busy: Busy


class Reproduced(msgspec.Struct):
    """Everything that was measured."""

    comparison: Comparison
    machine: dict[str, object]
    versions: dict[str, str]
    runs: list[Measured] = []

    def of(self, arm: str, case: str, load: float) -> list[Measured]:
        return [
            one
            for one in self.runs
            if (one.run.arm, one.run.workload, one.run.rate) == (arm, case, load)
        ]
