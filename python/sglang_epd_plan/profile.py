"""What work costs on a machine with a model: measured, or reckoned from published figures.

Every cost is a straight line, with a square term where attention has one: what is not
(kernels that change with the batch, clocks that throttle) has to be near enough to one in
the range that a profile is used for.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from sglang_epd.errors import ConfigError
from sglang_epd_plan.schema import Cost, Count, Data, Positive, Rate, Text, load


class Pixels(Data, frozen=True):
    """How pictures become patches and tokens.

    Attributes:
        patch_px: side of a patch.
        merge: patches that make up one token.
    """

    patch_px: Positive
    merge: Positive


class Host(Data, frozen=True):
    """Fetching, decoding and preprocessing, in threads beside the accelerator.

    Attributes:
        workers: items that are prepared at a time.
    """

    workers: Positive = 1
    item_s: Cost = 0.0
    patch_s: Cost = 0.0


class Tower(Data, frozen=True):
    """One forward pass of the vision tower: `launch_s + sum(p patch_s + p^2 patch2_s)` over
    its items of p patches each.

    Attributes:
        batch_patches, batch_items: what runs in one pass (`SGLANG_EPD_ENCODER_BATCH_*`).
    """

    patch_s: Cost
    launch_s: Cost = 0.0
    patch2_s: Cost = 0.0
    batch_patches: Positive = 16_384
    batch_items: Positive = 32

    def seconds(self, items: Iterable[float]) -> float:
        """Of one pass over items of so many patches."""
        return self.launch_s + sum(
            patches * (self.patch_s + patches * self.patch2_s) for patches in items
        )


class Encoder(Data, frozen=True):
    """An encoder server.

    Attributes:
        gpus: accelerators that one takes.
        hit_s: until an embedding that is kept is on its way.
        cache_mb: embeddings that it keeps (`SGLANG_VLM_CACHE_SIZE_MB`; 0: none).
        max_items: in work at a time; more are refused (`SGLANG_EPD_ENCODER_MAX_ITEMS`).
    """

    tower: Tower
    host: Host = Host()
    gpus: Rate = 1.0
    hit_s: Cost = 0.0
    cache_mb: Count = 0
    max_items: Positive = 1024


class Language(Data, frozen=True):
    """A server that runs prefill, decode or both.

    Attributes:
        request_s: from a request's arrival until its media are sent for, or, without any,
            until it may be scheduled.
        host: preparing media, where it encodes them itself.
        tower: encoding them, likewise; it stands still for it.
        received_item_s: of its scheduler's time, for each embedding that it did not encode.
        prefill_token_s, prefill_context_s: for each token, and for each token and token of
            context before it.
        decode_launch_s, decode_sequence_s, decode_context_s: of a step, for each sequence
            in it, and for each token of their contexts.
        chunk_tokens: prompt tokens that run in one pass.
        mixed: whether a pass prefills and decodes (vLLM); else prompts go first, and
            decoding waits (SGLang).
        shared_cores: whether requests are received, and media prepared, by the processor
            cores that the model runs on: one after the other, at half the speed while the
            model runs too, which takes that much longer.
        running: sequences that decode at a time.
        kv_tokens: what its KV cache holds.
        prefix_cache: what was prefilled stays, as far as there is room, for prompts that
            begin alike.
        receive_mb: embeddings that wait or are read there (`SGLANG_EPD_RECEIVE_BUDGET_MB`);
            unless given, the least that a server takes by itself.
    """

    prefill_token_s: Cost
    decode_launch_s: Cost
    tower: Tower
    host: Host = Host()
    gpus: Rate = 1.0
    request_s: Cost = 0.0
    received_item_s: Cost = 0.0
    prefill_launch_s: Cost = 0.0
    prefill_context_s: Cost = 0.0
    decode_sequence_s: Cost = 0.0
    decode_context_s: Cost = 0.0
    chunk_tokens: Positive = 8192
    mixed: bool = False
    shared_cores: bool = False
    running: Positive = 256
    kv_tokens: Positive = 1_000_000
    prefix_cache: bool = True
    receive_mb: Positive = 2048

    def step_s(self, sequences: int, context: float) -> float:
        """One decode step of so many sequences with so many tokens of context together."""
        return (
            self.decode_launch_s
            + sequences * self.decode_sequence_s
            + context * self.decode_context_s
        )


class Links(Data, frozen=True):
    """Embeddings from encoders to language servers, KV from prefill to decode. Each server
    sends and receives at the rate, one after the other."""

    bytes_per_token: Positive
    latency_s: Cost = 0.0
    bytes_per_s: Rate = 1e12
    kv_bytes_per_token: Count = 0
    kv_latency_s: Cost = 0.0
    kv_bytes_per_s: Rate = 1e12


class Profile(Data, frozen=True):
    """All of it.

    Attributes:
        source: where each figure is from: the command that measured it, or the publication
            and how it was reckoned.
        gpu_hour_cost: in any currency; of one accelerator.
    """

    name: Text
    source: tuple[Text, ...]
    hardware: Text
    model: Text
    pixels: Pixels
    encoder: Encoder
    language: Language
    links: Links
    gpu_hour_cost: Cost = 1.0

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("a profile has to state its source")


def load_profile(name: str) -> Profile:
    """A profile by its path, or by the name of one that comes with the package.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    path = Path(name)
    if path.suffix:
        return load(path, Profile)
    folder = Path(str(files("sglang_epd_plan") / "data"))
    shipped = {path.stem: path for path in sorted(folder.glob("profile-*.json"))}
    if f"profile-{name}" not in shipped:
        known = ", ".join(stem.removeprefix("profile-") for stem in shipped)
        raise ConfigError(f"no profile is called {name!r}: give a file, or one of {known}")
    return load(shipped[f"profile-{name}"], Profile)
