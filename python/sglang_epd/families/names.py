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
        output = thread.submit(_prompt, adapter).result()
    from sglang.srt.managers.schedule_batch import MultimodalInputs

    wanted = list(output.input_ids)
    inputs = MultimodalInputs.from_processor_output(output)
    for item in inputs.mm_items:
        for first, last in item.offsets:
            wanted[first : last + 1] = [item.pad_value] * (last - first + 1)
    try:
        filled = list(fill_in(array("q", output.input_ids), inputs))
    except Exception as error:
        raise ConfigError(
            f"{architecture} cannot have its encoder apart: it names the pictures of a prompt by "
            f"more than their places ({type(error).__name__}: {error})"
        ) from error
    if filled != wanted:
        raise ConfigError(
            f"{architecture} cannot have its encoder apart: it puts the names of a prompt's "
            "pictures elsewhere than their rows"
        )


def _prompt(adapter: Adapter) -> Any:
    """SGLang's `MultimodalProcessorOutput` of two pictures, as a request's is made."""
    from sglang.srt.managers.schedule_batch import Modality

    seen = [adapter.see(Image.new("RGB", size, (200, 80, 40))) for size in _SIZES]
    written = adapter.family.written(adapter.processor)
    output = adapter.get_validated_mm_data(
        f"Here is {written} and there is {written}.",
        {Modality.IMAGE: torch.zeros(sum(one.expansion.rows for one in seen), 1)},
        expansion=[msgspec.to_builtins(one.expansion) for one in seen],
        img_grid_thw=torch.tensor([one.grid for one in seen]) if seen[0].grid else None,
    )
    for number, item in enumerate(output.mm_items):
        item.set_identity(hashlib.sha256(bytes([number])).digest())
    return output
