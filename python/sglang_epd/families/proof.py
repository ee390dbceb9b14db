"""Finds out, at start-up, whether a model's prompts can be laid out without its pictures.

SGLang's processor is given prompts with pictures, and what it makes of them is compared
with what `adapter` makes of them from the pictures' expansions alone. Where the two
differ an item's part of a prompt depends on what is around it, and the model cannot be
split: better a server that does not start than one that answers something else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from PIL import Image

from sglang_epd.errors import ConfigError, EpdError
from sglang_epd.families.adapter import Adapter, Seen, constants_of
from sglang_epd.families.expansion import runs_of
from sglang_epd.families.family import Family

logger = logging.getLogger(__name__)

# Of several sizes and shapes, so that processors that cut pictures into tiles, or fill
# up those of one request to a common size, show it.
_SIZES = ((96, 96), (260, 120), (56, 200), (700, 500))
# Text on both sides, none between, and such as merges with what stands round a picture.
# None both begins and ends with a picture: SGLang finds no run that goes round.
_PROMPTS = (
    "Here is {0} and there is {1}.",
    "{0}{1}!",
    " {1}\n{0}\n\n{1} \n",
    "One: {2}, the first again: {2}; a large one {3}!",
)


def adapt(registered: Any, architecture: str, family: Family) -> Adapter:
    """The adapter of a model that is proven to be split rightly.

    Args:
        registered: SGLang's processor of the model.

    Raises:
        ConfigError: it cannot be split, and why.
    """
    try:
        # In a thread, because SGLang's processors want an event loop of their own.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_prove, registered, family).result()
    except _CannotBeSplitError as error:
        raise ConfigError(f"{architecture} cannot have its encoder apart: {error}") from None
    except EpdError as error:
        raise ConfigError(f"{architecture} cannot have its encoder apart: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{architecture} cannot have its encoder apart: its processor does not lay out "
            f"pictures that stand alone ({type(error).__name__}: {error})"
        ) from error


class _CannotBeSplitError(Exception):
    """Why."""


def _prove(registered: Any, family: Family) -> Adapter:
    adapter = Adapter(registered, family)
    pictures = [Image.new("RGB", size, (200, 80, 40)) for size in _SIZES]
    seen = [adapter.see(picture) for picture in pictures]
    adapter.constants = constants_of(seen[0].output)
    adapter.positions_follow_grids = seen[0].output.mrope_positions is not None
    written = family.written(adapter.processor)
    for prompt in _prompts(adapter):
        order = [int(part[0]) for part in prompt.split("{")[1:]]
        text = prompt.format(*[written] * len(pictures))
        theirs = adapter.process(text, [pictures[number] for number in order])
        _compare(adapter, text, [seen[number] for number in order], theirs)
    ids = family.tokenize(adapter.processor, _PROMPTS[0].format(written, written))
    try:
        theirs = adapter.process(ids, pictures[:2])
    except Exception as error:
        # As one server does not take them either.
        logger.info("Prompts of token ids with images are refused: %s", error)
        adapter.takes_token_ids = False
    else:
        _compare(adapter, ids, seen[:2], theirs)
    return adapter


def _prompts(adapter: Adapter) -> Sequence[str]:
    bos = getattr(adapter.processor._tokenizer, "bos_token", None)
    return (*_PROMPTS, bos + _PROMPTS[0]) if bos else _PROMPTS


def _compare(
    adapter: Adapter, prompt: str | list[int], pictures: Sequence[Seen], theirs: Any
) -> None:
    ours = adapter.lay_out(prompt, [seen.expansion for seen in pictures])
    if ours.input_ids != list(theirs.input_ids):
        raise _CannotBeSplitError(
            "its processor writes a picture's part of a prompt in a way that depends on what "
            f"is around it ({prompt!r})"
        )
    if constants_of(theirs) != adapter.constants:
        raise _CannotBeSplitError("its processor marks the pictures of each prompt in another way")
    token = pictures[0].expansion.token
    places = sorted(place for item in theirs.mm_items for place in item.offsets)
    # Pictures side by side may be one run to SGLang.
    if places != sorted(place for runs in ours.offsets for place in runs) and places != runs_of(
        ours.input_ids, token
    ):
        raise _CannotBeSplitError("its processor puts rows of pictures elsewhere in a prompt")
    positions = adapter.positions(ours.input_ids, [seen.grid for seen in pictures])
    for name, value in positions.items():
        if not torch.equal(torch.as_tensor(value), torch.as_tensor(getattr(theirs, name))):
            raise _CannotBeSplitError(f"its {name} depend on more than the pictures' grids")
