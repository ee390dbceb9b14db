"""Media that come as embeddings, for which no encoder is needed.

A caller of `Engine` may hand SGLang what a processor or a tower has made elsewhere, as Dynamo's
encode workers do: `{"format": "processor_output", "precomputed_embeddings": rows, ...}` in place
of a picture. A language server takes it as one server does. It has no tower for pixels that are
preprocessed only, and SGLang's scheduler would end at lists of numbers in place of tensors.
SGLang's HTTP server takes neither.

Leans on `multimodal.processors.base_processor.BaseMultimodalProcessor`, which names the formats
and makes items of such entries, one of a kind in each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_epd.errors import MediaError
from sglang_epd.language.planner import entries

_ROWS = "precomputed_embeddings"


def have_embeddings(prompts: Sequence[Any]) -> bool:
    """Whether the media of a request's prompts are embeddings, all of them.

    Raises:
        MediaError: they are pixels or numbers that only one server takes; or some are media.
    """
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    found = [entry for prompt in prompts for entry in entries(prompt)]
    formats = [BaseMultimodalProcessor._get_preprocessed_input_format(entry) for entry in found]
    if not any(formats):
        return False
    if not all(formats):
        raise MediaError("a request has media to be encoded, or embeddings, and not both")
    for entry in found:
        rows = entry.get(_ROWS)
        if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
            raise MediaError(
                "a --language-only server holds no tower for media that are preprocessed only: "
                f"send the media, or {_ROWS!r}, a tensor [tokens, width], from within its process"
            )
    return True
