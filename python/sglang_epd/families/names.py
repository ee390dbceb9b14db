"""Finds out, at start-up, whether a model puts the names of pictures into a prompt where their
rows belong, knowing of them what a language server does.

SGLang's scheduler has the model do so for each request (`pad_input_ids`). Some models ask
there for what only the preprocessing of pixels can tell, and the scheduler, with all its
requests, ends of it.

Leans on `managers.schedule_batch.MultimodalInputs.from_processor_output` and
`MultimodalDataItem.set_identity`.
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

_SIZES = ((260, 120), (56, 200))


def prove_names(model: Any, adapter: Adapter, architecture: str) -> None:
    """Have the model fill in the prompt of two pictures.

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
        filled = _filled_in(fill_in, ours)
    except Exception as error:
        raise ConfigError(
            f"{architecture} cannot have its encoder apart: it names the pictures of a prompt by "
            f"more than their places ({type(error).__name__}: {error})"
        ) from error
    if filled != _filled_in(fill_in, theirs):
        raise ConfigError(
            f"{architecture} cannot have its encoder apart: it puts the names of a prompt's "
            "pictures elsewhere than one server does"
        )


def _filled_in(fill_in: Any, output: Any) -> list[int | None]:
    """The prompt with None for every name, whichever: one server has fewer, or other ones."""
    from sglang.srt.managers.schedule_batch import MultimodalInputs

    for number, item in enumerate(output.mm_items):
        item.set_identity(hashlib.sha256(bytes([number])).digest())
    inputs = MultimodalInputs.from_processor_output(output)
    names = {item.pad_value for item in inputs.mm_items}
    filled = fill_in(array("q", output.input_ids), inputs)
    return [None if token in names else token for token in filled]


def _prompts(adapter: Adapter) -> tuple[Any, Any]:
    """Two SGLang's `MultimodalProcessorOutput` of a prompt with two pictures: as a language
    server makes it, and as one server does."""
    from sglang.srt.managers.schedule_batch import Modality

    pictures = [Image.new("RGB", size, (200, 80, 40)) for size in _SIZES]
    seen = [adapter.see(picture) for picture in pictures]
    written = adapter.family.written(adapter.processor)
    prompt = f"Here is {written} and there is {written}."
    ours = adapter.get_validated_mm_data(
        prompt,
        {Modality.IMAGE: torch.zeros(sum(one.expansion.rows for one in seen), 1)},
        expansion=[msgspec.to_builtins(one.expansion) for one in seen],
        img_grid_thw=torch.tensor([one.grid for one in seen]) if seen[0].grid else None,
    )
    return ours, adapter.process(prompt, pictures)
