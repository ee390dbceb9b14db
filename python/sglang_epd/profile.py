"""A profile: the costs of a model on a machine, measured, or reckoned from published figures.

The planner (`sglang_epd_plan`) and emulated accelerators (`emulated`) reckon by it. Each cost is
a straight line, with a square term for attention. Other costs (kernels that change with the
batch, clocks that throttle) have to be near a line where the profile is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sglang_epd.errors import ConfigError
from sglang_epd.schema import Cost, Count, Data, Positive, Rate, Text, load

_SHIPPED = Path(__file__).parent / "profiles"


class Pixels(Data, frozen=True):
    """How pictures become patches and tokens.

    Attributes:
        patch_px: side of a patch.
        merge: patches that make up one token.
    """

    patch_px: Positive
    merge: Positive


class HostCosts(Data, frozen=True):
    """Fetching, decoding and preprocessing, in threads beside the accelerator.

    Attributes:
        workers: items that are preprocessed at a time.
    """

    workers: Positive = 1
    item_s: Cost = 0.0
    patch_s: Cost = 0.0

    def seconds(self, patches: float) -> float:
        """Time of one item."""
        return self.item_s + patches * self.patch_s


class TowerCosts(Data, frozen=True):
    """One forward pass of the vision tower: `launch_s + sum(p patch_s + p^2 / s patch2_s)` over
    its items of p patches in s equal steps each; a picture has one step.

    Attributes:
        least_s: of a pass, however small: the host takes so long to launch it.
        within_steps: a patch attends to the patches of its own step of a video (Qwen3-VL);
            otherwise to all of the video's (Qwen2.5-VL), and s is 1.
        batch_patches, batch_items: bounds on one pass (`SGLANG_EPD_ENCODER_BATCH_*`).
    """

    patch_s: Cost
    launch_s: Cost = 0.0
    least_s: Cost = 0.0
    patch2_s: Cost = 0.0
    within_steps: bool = True
    batch_patches: Positive = 16_384
    batch_items: Positive = 32

    def seconds(self, items: Iterable[tuple[float, int]]) -> float:
        """Time of one pass over items, given by their patches and steps."""
        seconds = 0.0
        for patches, steps in items:
            attended = patches / steps if self.within_steps else patches
            seconds += patches * (self.patch_s + attended * self.patch2_s)
        return max(self.least_s, self.launch_s + seconds)


class EncoderCosts(Data, frozen=True):
    """An encoder server.

    Attributes:
        gpus: accelerators of one server.
        hit_s: time until a cached embedding is sent.
        cache_mb: MiB of cached embeddings (`SGLANG_VLM_CACHE_SIZE_MB`); 0 for no cache.
        max_items: items in work at a time; more are refused (`SGLANG_EPD_ENCODER_MAX_ITEMS`).
    """

    tower: TowerCosts
    host: HostCosts = HostCosts()
    gpus: Rate = 1.0
    hit_s: Cost = 0.0
    cache_mb: Count = 0
    max_items: Positive = 1024


class LanguageCosts(Data, frozen=True):
    """A server that runs prefill, decode or both.

    Attributes:
        request_s: time from a request's arrival until its media are sent for; without media,
            until it may be scheduled.
        host: preprocessing, where the server encodes.
        tower: encoding, likewise; prefill and decode wait meanwhile.
        keeps_embeddings: they are kept from one chunk of a prompt to the next. Otherwise an item
            is encoded for each chunk that has tokens of it (Qwen3-VL on H100 and H20, unless
            `SGLANG_VLM_CACHE_SIZE_MB` is given).
        received_item_s: the scheduler's time for each embedding from an encoder.
        prefill_least_s: of a pass over prompts, as of a tower.
        prefill_token_s, prefill_context_s: time of each token, and of each token and token of
            context before it.
        decode_launch_s, decode_sequence_s, decode_context_s: time of a step, of each sequence
            in it, and of each token of their contexts.
        chunk_tokens: prompt tokens of one pass.
        mixed: a pass prefills and decodes (vLLM); otherwise prompts go first and decoding waits
            (SGLang).
        overlap: a pass is decided when the one before it begins (SGLang, unless
            `--disable-overlap-schedule`); otherwise when that one ends.
        running: sequences that decode at a time.
        kv_tokens: size of the KV cache.
        prefix_cache: the KV of earlier prompts stays, as far as there is room, for prompts that
            begin alike.
        receive_mb: MiB for received embeddings (`SGLANG_EPD_RECEIVE_BUDGET_MB`); the default is
            the least that a server takes by itself.
    """

    prefill_token_s: Cost
    decode_launch_s: Cost
    tower: TowerCosts
    host: HostCosts = HostCosts()
    keeps_embeddings: bool = True
    gpus: Rate = 1.0
    request_s: Cost = 0.0
    received_item_s: Cost = 0.0
    prefill_launch_s: Cost = 0.0
    prefill_least_s: Cost = 0.0
    prefill_context_s: Cost = 0.0
    decode_sequence_s: Cost = 0.0
    decode_context_s: Cost = 0.0
    chunk_tokens: Positive = 8192
    mixed: bool = False
    overlap: bool = True
    running: Positive = 256
    kv_tokens: Positive = 1_000_000
    prefix_cache: bool = True
    receive_mb: Positive = 2048

    def prefill_s(self, parts: Iterable[tuple[float, float]]) -> float:
        """Time of a pass over prompts, without the tower.

        Args:
            parts: the new tokens of each prompt, and its tokens before them.
        """
        seconds = sum(
            new * (self.prefill_token_s + (before + new / 2) * self.prefill_context_s)
            for new, before in parts
        )
        return max(self.prefill_least_s, self.prefill_launch_s + seconds)

    def step_s(self, sequences: int, context: float) -> float:
        """Time of one decode step; `context` is the tokens of all sequences together."""
        return (
            self.decode_launch_s
            + sequences * self.decode_sequence_s
            + context * self.decode_context_s
        )


class Links(Data, frozen=True):
    """Embeddings go from encoders to language servers, KV from prefill to decode. Each server
    sends and receives at the given rate, one transfer after the other.

    Attributes:
        kv_bytes_per_token: None where it is not known, so that prefill and decode cannot be
            apart.
    """

    bytes_per_token: Positive
    latency_s: Cost = 0.0
    bytes_per_s: Rate = 1e12
    kv_bytes_per_token: Count | None = None
    kv_latency_s: Cost = 0.0
    kv_bytes_per_s: Rate = 1e12


class Profile(Data, frozen=True):
    """The costs of one model on one machine.

    Attributes:
        source: where each figure comes from: the command that measured it, or the publication
            and the reckoning.
        gpu_hour_cost: of one accelerator, in any currency.
    """

    name: Text
    source: tuple[Text, ...]
    hardware: Text
    model: Text
    pixels: Pixels
    encoder: EncoderCosts
    language: LanguageCosts
    links: Links
    gpu_hour_cost: Cost = 1.0

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("a profile has to state its source")


def load_profile(name: str) -> Profile:
    """A profile by its path, or by the name of a profile that ships with the package.

    Raises:
        ConfigError: there is no such profile, or the file is none.
    """
    if Path(name).suffix:
        return load(Path(name), Profile)
    known = sorted(path.stem for path in _SHIPPED.glob("*.json"))
    if name not in known:
        raise ConfigError(
            f"no profile is called {name!r}: give a file, or one of {', '.join(known)}"
        )
    return load(_SHIPPED / f"{name}.json", Profile)
