"""What stands in a prompt in place of a picture's mark.

An encoder has SGLang's processor lay out a prompt of hardly more than the mark, and tells
what became of it with the picture's layout. A language server puts that into its own prompt
and tokenizes the whole, because text next to a picture may merge with what the processor
writes around it. A run of placeholders is written as one of them until that is done: it
is a special token, which parts the text in the same way however often it stands there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from sglang_epd.errors import EncodeError, MediaError

# The name that it travels under, in `Layout.extra`.
EXPANSION = "expansion"


class Expansion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a processor makes of one picture's mark.

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


class LaidOut(NamedTuple):
    """A prompt with every picture in it.

    Attributes:
        input_ids: the token ids.
        offsets: of each picture, the first and last position of each of its runs.
    """

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


def insert(prompt: str, marks: re.Pattern[str], expansions: Sequence[Expansion]) -> str:
    """The prompt with each mark replaced by the next picture's text.

    Raises:
        MediaError: there are more marks than pictures, or fewer.
    """
    places = list(marks.finditer(prompt))
    if len(places) != len(expansions):
        raise MediaError(
            f"the prompt has {len(places)} image placeholders for {len(expansions)} image items"
        )
    pieces, end = [], 0
    for place, expansion in zip(places, expansions, strict=True):
        pieces += [prompt[end : place.start()], expansion.text]
        end = place.end()
    return "".join([*pieces, prompt[end:]])


def spread(input_ids: Sequence[int], expansions: Sequence[Expansion]) -> LaidOut:
    """Token ids with each single placeholder repeated as often as its run has it.

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
            raise MediaError("the prompt has image placeholders of its own")
        start = len(spread_ids)
        spread_ids += [token] * count
        offsets[number].append((start, start + count - 1))
    if next(runs, None) is not None:
        raise MediaError("the tokenizer does not keep the image placeholders of the prompt")
    return LaidOut(spread_ids, offsets)


def runs_of(input_ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """The first and last position of each run of a token."""
    runs: list[tuple[int, int]] = []
    for position, found in enumerate(input_ids):
        if found != token:
            continue
        if runs and runs[-1][1] == position - 1:
            runs[-1] = (runs[-1][0], position)
        else:
            runs.append((position, position))
    return runs
