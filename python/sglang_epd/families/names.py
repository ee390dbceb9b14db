"""Finds out, at start-up, whether a model can put the names of items into a prompt where their
rows belong, from the facts that a language server has.

SGLang's scheduler has the model do so for each request (`pad_input_ids`). Some models ask
there for facts that only the preprocessing of pixels can tell, and the scheduler, with all its
requests, ends of it. Others go by the order of items, and would give one's place in the
prefix cache to another.

Leans on `managers.schedule_batch.MultimodalInputs.from_processor_output` and
`MultimodalDataItem` (`set_identity`, `padding_values`, `padding_sequence`).
"""

from __future__ import annotations

import hashlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from PIL import Image

from sglang_epd.errors import ConfigError
from sglang_epd.families.adapter import Adapter
from sglang_epd.families.films import drawn
from sglang_epd.modality import IMAGE, MODALITIES, VIDEO

_SIZES = ((260, 120), (56, 200))
_FILM = (4, 56, 140, 1.5)


def prove_names(model: Any, adapter: Adapter, architecture: str) -> None:
    """Have the model fill in the prompt of two pictures, and of a video before them.

    Args:
        model: SGLang's, of a language server.
        adapter: proven.

    Raises:
        ConfigError: it fails, or fills in something else.
    """
    fill_in = getattr(model, "pad_input_ids", None)
    if fill_in is None:
        return
    # In a thread, because SGLang's processors want an event loop of their own.
    with ThreadPoolExecutor(1) as thread:
        ours, theirs = thread.submit(_prompts, adapter).result()
    try:
        filled, inputs = _filled_in(fill_in, ours)
    except Exception as error:
        raise ConfigError(
            f"{architecture} cannot have its encoder apart: it names the items of a prompt by "
            f"more than their places ({type(error).__name__}: {error})"
        ) from error
    if _without_names(filled, inputs) != _without_names(*_filled_in(fill_in, theirs)):
        raise ConfigError(
            f"{architecture} cannot have its encoder apart: it puts the names of a prompt's "
            "items elsewhere than one server does"
        )
    for item in inputs.mm_items:
        for first, last in item.offsets:
            if filled[first : last + 1] != item.padding_sequence(last - first + 1):
                raise ConfigError(
                    f"{architecture} cannot have its encoder apart: it gives an item of a "
                    "prompt the name of another"
                )


def _filled_in(fill_in: Any, output: Any) -> tuple[list[int], Any]:
    """The prompt with names in it, and SGLang's `MultimodalInputs`."""
    from sglang.srt.managers.schedule_batch import MultimodalInputs

    for number, item in enumerate(output.mm_items):
        item.set_identity(hashlib.sha256(bytes([number])).digest())
    inputs = MultimodalInputs.from_processor_output(output)
    return list(fill_in(array("q", output.input_ids), inputs)), inputs


def _without_names(filled: list[int], inputs: Any) -> list[int | None]:
    """With None for every name, whichever: one server has fewer, or other ones."""
    names = {value for item in inputs.mm_items for value in item.padding_values()}
    return [None if token in names else token for token in filled]


def _prompts(adapter: Adapter) -> tuple[Any, Any]:
    """Two SGLang's `MultimodalProcessorOutput` of one prompt: as a language server makes it,
    and as one server does."""
    pictures = [Image.new("RGB", size, (200, 80, 40)) for size in _SIZES]
    films = [] if VIDEO in adapter.refused else [drawn(*_FILM)]
    seen = [adapter.see(picture) for picture in pictures]
    seen += [adapter.see(film, VIDEO) for film in films]
    written = {name: adapter.family.written(adapter.processor, name) for name in (IMAGE, VIDEO)}
    film = f"First {written[VIDEO]}. " if films else ""
    prompt = f"{film}Here is {written[IMAGE]} and there is {written[IMAGE]}."
    embeddings, grids = {}, {}
    for row in MODALITIES.values():
        parts = [one.part for one in seen if one.part.modality == row.name]
        if parts:
            rows = sum(part.expansion.rows for part in parts)
            embeddings[row.sglang] = torch.zeros(rows, 1)
            grids[row.grids] = torch.tensor([part.grid or [1, 1, 1] for part in parts])
    ours = adapter.get_validated_mm_data(
        prompt,
        embeddings,
        expansion=[msgspec.to_builtins(one.part.expansion) for one in seen],
        **grids,
    )
    return ours, adapter.process(prompt, {IMAGE: pictures, VIDEO: films})
