"""One item as SGLang's processor leaves it: what the tower runs, and what became of its mark."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_epd.errors import EncodeError
from sglang_epd.families.expansion import IMAGE, VIDEO, Expansion, Part

# What the grids of a modality's items are called in SGLang's items.
GRIDS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}


class Seen(NamedTuple):
    """One item, prepared.

    Attributes:
        items: SGLang's, for the tower.
        part: of prompts; its grid is empty where the family has none.
        output: the processor's, of a prompt that is hardly more than the mark.
    """

    items: list[Any]
    part: Part
    output: Any


def seen_in(output: Any, modality: str, written: str, mark: str, tokenizer: Any) -> Seen:
    """What a processor has made of one item in a prompt of nothing else, but for the
    tokenizer's end of a text before it and behind it.

    Args:
        output: the processor's.
        written: the item, as it stood in that prompt.
        mark: the part of it that stands for the item.

    Raises:
        EncodeError: it cannot be told to a language server.
    """
    items = list(output.mm_items)
    if not items or any(item.modality.name != modality or not item.offsets for item in items):
        raise EncodeError(
            f"the model's processor does not say where the {modality.lower()}'s rows belong"
        )
    text, token, runs = _expanded(output, tokenizer)
    before, after = written.split(mark, 1)
    if not (text.startswith(before) and text.endswith(after)):
        raise EncodeError("the model's processor rewrites what stands round a mark")
    text = text[len(before) : len(text) - len(after)]
    grid = items[0].model_specific_data.get(GRIDS[modality])
    sizes = [] if grid is None else [int(size) for size in grid.flatten()]
    return Seen(items, Part(modality, Expansion(text, token, runs), sizes), output)


def _expanded(output: Any, tokenizer: Any) -> tuple[str, int, list[int]]:
    """The text between the two ends, one placeholder for each run; it, and their lengths."""
    ids = list(output.input_ids)
    runs = sorted((first, last) for item in output.mm_items for first, last in item.offsets)
    tokens = {ids[place] for first, last in runs for place in range(first, last + 1)}
    if len(tokens) != 1:
        raise EncodeError("the model's processor has more than one placeholder for an item")
    (token,) = tokens
    end = tokenizer.eos_token_id
    opened = ids.index(end) + 1
    closed = ids.index(end, runs[-1][1] + 1)
    single = ids[opened : runs[0][0]]
    for number, (_, last) in enumerate(runs):
        following = runs[number + 1][0] if number + 1 < len(runs) else closed
        single += [token, *ids[last + 1 : following]]
    text: str = tokenizer.decode(
        single, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text, token, [last - first + 1 for first, last in runs]
