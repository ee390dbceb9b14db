"""Embeddings and layouts into the inputs of SGLang's models.

SGLang's processors lay a prompt out from grids and from the number of embedding
rows; they slice the embeddings they are given but never look inside. So they are
given row numbers instead, and each slice that comes back says which rows of which
item belong there: no concatenation, no copy, for any layout of the model.

A server that only decodes needs the layout alone: its KV comes from the prefill.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from blake3 import blake3

from sglang_epd.errors import EncodeError, MediaError
from sglang_epd.modality import MODALITIES
from sglang_epd.transfer.arena import ReceivedItem
from sglang_epd.wire.messages import Layout

logger = logging.getLogger(__name__)


class Processor(Protocol):
    """The part of SGLang's multimodal processors that is used here."""

    def get_validated_mm_data(
        self, prompt: str | list[int], embeddings: dict[Any, torch.Tensor], **metadata: Any
    ) -> Any: ...


class HasLayout(Protocol):
    """An item as far as the prompt's layout is concerned."""

    @property
    def key(self) -> bytes: ...

    @property
    def layout(self) -> Layout: ...


@dataclass(frozen=True)
class Rows:
    """Where an item of SGLang's has its embedding from.

    Attributes:
        item: number of the request's item.
        first, count: which of its rows.
    """

    item: int
    first: int
    count: int


# A context that every prompt fits.
_ANY = sys.maxsize
# Arguments that processors take as a tensor, beside grids.
_SECONDS_PER_GRID = "second_per_grid_ts"


def assemble(
    processor: Processor,
    prompt: str | list[int],
    items: Sequence[ReceivedItem],
    context_tokens: int = _ANY,
) -> Any:
    """A request's `MultimodalProcessorOutput`.

    Each of its items holds its embedding and its identity: the key, or a digest of key and rows
    where one item became several, as a video's frames do.

    Args:
        processor: SGLang's processor of the model.
        prompt: text or token ids with one placeholder an item.
        items: in the planner's order.
        context_tokens: the model's context length. Prompts of more are not laid out: SGLang would
            refuse them afterwards, and millions of tokens take seconds, in which a scheduler
            does nothing else.

    Raises:
        MediaError: the prompt and the items do not match, or are too long.
    """
    output, rows = _lay_out(processor, prompt, items, context_tokens)
    for mm_item, its in zip(output.mm_items, rows, strict=True):
        whole = items[its.item].embedding
        mm_item.precomputed_embeddings = whole[its.first : its.first + its.count]
    return output


def lay_out(
    processor: Processor,
    prompt: str | list[int],
    items: Sequence[HasLayout],
    context_tokens: int = _ANY,
) -> Any:
    """As `assemble`, of items whose embeddings are not needed: none is attached.

    SGLang's scheduler takes such items as long as it never extends over their rows; a
    decode server does not, because it receives the whole prompt's KV.
    """
    output, _ = _lay_out(processor, prompt, items, context_tokens)
    for mm_item in output.mm_items:
        mm_item.precomputed_embeddings = None
    return output


def lay_out_some(
    processor: Processor,
    prompt: str | list[int],
    items: Sequence[HasLayout],
    context_tokens: int = _ANY,
) -> tuple[Any, list[Rows]]:
    """As `assemble`, with the rows of those items that are `ReceivedItem`.

    Each other item holds an embedding without rows. That is enough where the item's KV is in the
    prefix cache: SGLang takes no row of items before the part of the prompt that it computes, as
    long as every item of the request has some tensor. The prompt ends where the first row is
    missing of an item that has some of its rows.

    Returns:
        The output, and where each of its items has its rows from, or would have.
    """
    output, rows = _lay_out(processor, prompt, items, context_tokens)
    ends = []
    for mm_item, its in zip(output.mm_items, rows, strict=True):
        item = items[its.item]
        if isinstance(item, ReceivedItem):
            there = item.embedding[its.first : its.first + its.count]
            if len(there) < its.count:
                ends.append(mm_item.offsets[0][0] + len(there))
        else:
            spec = item.layout.embedding
            there = torch.empty((0, spec.shape[1]), dtype=getattr(torch, spec.dtype))
        mm_item.precomputed_embeddings = there
    return (output, rows) if not ends else _cut(output, rows, min(ends))


def _cut(output: Any, rows: list[Rows], end: int) -> tuple[Any, list[Rows]]:
    """The beginning of a laid out prompt: its first `end` tokens. Identities, and with them what
    the radix tree goes by, stay those of whole items, and positions those of the whole prompt."""
    kept = []
    for mm_item, its in zip(output.mm_items, rows, strict=True):
        ((begin, last),) = mm_item.offsets
        if begin < end:
            mm_item.offsets = [(begin, min(last, end - 1))]
            kept.append((mm_item, its))
    output.mm_items = [mm_item for mm_item, _ in kept]
    output.input_ids = output.input_ids[:end]
    output.mrope_positions = output.mrope_positions[:, :end]
    return output, [its for _, its in kept]


def _lay_out(
    processor: Processor, prompt: str | list[int], items: Sequence[HasLayout], context_tokens: int
) -> tuple[Any, list[Rows]]:
    """The output with identities set, and where each of its items has its rows from."""
    tokens = sum(item.layout.tokens for item in items)
    if tokens >= context_tokens:
        raise MediaError(
            f"the request's media take {tokens} tokens, which is no less than the model's "
            f"context length ({context_tokens} tokens)"
        )
    by_modality: dict[str, list[tuple[int, HasLayout]]] = {}
    for number, item in enumerate(items):
        by_modality.setdefault(item.layout.modality, []).append((number, item))
    row_numbers = {}
    ends: dict[str, list[int]] = {}
    metadata: dict[str, Any] = {}
    for name, members in by_modality.items():
        modality = MODALITIES[name]
        layouts = [item.layout for _, item in members]
        ends[name] = list(accumulate(layout.tokens for layout in layouts))
        row_numbers[modality.sglang] = torch.arange(ends[name][-1]).unsqueeze(1)
        grid = torch.tensor([row for layout in layouts for row in layout.grid])
        metadata[modality.grids] = grid.flatten() if modality.lengths else grid
        for layout in layouts:
            for key, value in layout.extra.items():
                metadata.setdefault(key, []).extend(value)
    if _SECONDS_PER_GRID in metadata:
        metadata[_SECONDS_PER_GRID] = torch.tensor(metadata[_SECONDS_PER_GRID])
    try:
        output = processor.get_validated_mm_data(prompt, row_numbers, **metadata)
    except (IndexError, RuntimeError, ValueError) as error:
        # Too few items for the prompt's placeholders, or too many.
        logger.info("A prompt does not match its %d media items: %s", len(items), error)
        raise MediaError(
            f"the prompt's placeholders do not match the request's {len(items)} media items"
        ) from error
    rows = []
    for mm_item in output.mm_items:
        numbers = mm_item.precomputed_embeddings.flatten()
        name = mm_item.modality.name
        its = _locate(by_modality[name], ends[name], int(numbers[0]), len(numbers))
        mm_item.set_identity(_identity(items[its.item], its))
        rows.append(its)
    return output, rows


def _locate(
    members: Sequence[tuple[int, HasLayout]], ends: Sequence[int], first: int, count: int
) -> Rows:
    """Whose rows these are of all rows of a modality, in which each member's end there."""
    place = bisect_right(ends, first)
    if place == len(ends):
        raise EncodeError("the model's processor asked for a row that no item has")
    if first + count > ends[place]:
        raise EncodeError("the model's processor put two media items into one")
    number, item = members[place]
    return Rows(number, first - ends[place] + item.layout.tokens, count)


def _identity(item: HasLayout, rows: Rows) -> bytes:
    if rows.count == item.layout.tokens:
        return item.key
    digest = blake3(item.key)
    digest.update(f"{rows.first}:{rows.count}".encode())
    return digest.digest()
