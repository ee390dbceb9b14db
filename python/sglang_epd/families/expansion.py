"""The expansion of an item: the text and placeholders in a prompt in place of its mark.

An encoder has SGLang's processor lay out a prompt of hardly more than the mark, and sends
the result with the item's layout. A language server puts that into its own prompt
and tokenizes the whole, because text next to an item may merge with what the processor
writes around it. A run of placeholders is written as one of them until that is done: it
is a special token, which parts the text in the same way however often it stands there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from sglang_epd.errors import EncodeError, MediaError
from sglang_epd.modality import MODALITIES

# The name that it travels under, in `Layout.extra`.
EXPANSION = "expansion"


class Expansion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a prompt that a processor makes of one item's mark.

    Attributes:
        text: with one placeholder for each run of them.
        token: id of the placeholder.
        runs: how many placeholders each run has; together the rows of the embedding.
    """

    text: str
    token: int
    runs: list[int]

    @property
    def rows(self) -> int:
        return sum(self.runs)


class Part(NamedTuple):
    """An item, as far as a prompt is concerned.

    Attributes:
        grid: [t, h, w] in patches; of no meaning where the family has none.
    """

    modality: str
    expansion: Expansion
    grid: Sequence[int] = ()


class LaidOut(NamedTuple):
    """A prompt with every item in it; `offsets` are of each item the first and last position of
    each of its runs."""

    input_ids: list[int]
    offsets: list[list[tuple[int, int]]]


def read(plain: Any) -> Expansion:
    """An expansion as a layout carries it.

    Raises:
        EncodeError: it is none.
    """
    try:
        expansion = msgspec.convert(plain, Expansion)
    except msgspec.ValidationError as error:
        raise EncodeError(f"the encoder told of no expansion: {error}") from None
    if not expansion.runs or min(expansion.runs) < 1:
        raise EncodeError("the encoder told of an expansion without placeholders")
    return expansion


def insert(
    prompt: str, marks: Mapping[str, re.Pattern[str]], parts: Sequence[Part]
) -> tuple[str, list[int]]:
    """The prompt with each mark of a modality replaced by the text of its next item, and the
    items' numbers in the order in which they stand there.

    Args:
        marks: by modality, everything that is read as the mark of an item.
        parts: in the order of each modality's marks.

    Raises:
        MediaError: a modality has more marks than items, or fewer.
    """
    places = []
    for modality, pattern in marks.items():
        numbers = [number for number, part in enumerate(parts) if part.modality == modality]
        found = list(pattern.finditer(prompt))
        if len(found) != len(numbers):
            name = modality.lower()
            raise MediaError(
                f"the prompt has {len(found)} {name} placeholders for {len(numbers)} {name} items"
            )
        places += [(*mark.span(), number) for mark, number in zip(found, numbers, strict=True)]
    pieces, end = [], 0
    for start, following, number in sorted(places):
        pieces += [prompt[end:start], parts[number].expansion.text]
        end = following
    return "".join([*pieces, prompt[end:]]), [number for *_, number in sorted(places)]


def spread(input_ids: Sequence[int], expansions: Sequence[Expansion]) -> LaidOut:
    """Token ids with each single placeholder repeated as often as its run has it.

    Args:
        expansions: in the order of the prompt, which that of the offsets is, too.

    Raises:
        MediaError: the prompt itself has placeholders.
    """
    offsets: list[list[tuple[int, int]]] = [[] for _ in expansions]
    runs = chain.from_iterable(
        ((number, count) for count in expansion.runs) for number, expansion in enumerate(expansions)
    )
    placeholders = {expansion.token for expansion in expansions}
    spread_ids: list[int] = []
    for token in input_ids:
        if token not in placeholders:
            spread_ids.append(token)
            continue
        number, count = next(runs, (None, 0))
        if number is None or expansions[number].token != token:
            raise MediaError("the prompt has media placeholders of its own")
        start = len(spread_ids)
        spread_ids += [token] * count
        offsets[number].append((start, start + count - 1))
    if next(runs, None) is not None:
        raise MediaError("the tokenizer does not keep the media placeholders of the prompt")
    return LaidOut(spread_ids, offsets)


class Seen(NamedTuple):
    """One item, prepared: SGLang's items for the tower, its part of prompts, and the processor's
    output of a prompt that is hardly more than the mark."""

    items: list[Any]
    part: Part
    output: Any


def seen_in(output: Any, modality: str, written: str, mark: str, tokenizer: Any) -> Seen:
    """What a processor has made of one item in a prompt of nothing else, but for the
    tokenizer's end of a text before it and behind it.

    Args:
        written: the item, as it stood in that prompt.
        mark: the part of it that stands for the item.

    Raises:
        EncodeError: it cannot be sent to a language server.
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
    grid = items[0].model_specific_data.get(MODALITIES[modality].item_grid)
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
