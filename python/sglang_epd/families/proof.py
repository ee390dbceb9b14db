"""Finds out, at start-up, whether a model's prompts can be laid out without its media.

SGLang's processor is given prompts with pictures, and with videos, and what it makes of them
is compared with what `adapter` makes of them from the items' expansions alone. Where the two
differ an item's part of a prompt depends on its surroundings, and the model cannot be
split: better a server that does not start than one that answers something else. A model that
cannot be split for its videos alone is served without them.

On a language server the model then puts the names of items into a prompt, as SGLang's scheduler
has it do for each request (`pad_input_ids`). Some models ask there for facts that only the
preprocessing of pixels can tell, and the scheduler, with all its requests, ends of it. Others go
by the order of items, and would give one's place in the prefix cache to another.

Leans on `managers.schedule_batch.MultimodalInputs.from_processor_output` and
`MultimodalDataItem` (`set_identity`, `padding_values`, `padding_sequence`).
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from PIL import Image

from sglang_epd.device import device_of
from sglang_epd.device.cuda import available
from sglang_epd.errors import ConfigError, EpdError, MediaError
from sglang_epd.families.adapter import Adapter, constants_of
from sglang_epd.families.expansion import Seen
from sglang_epd.families.family import Family
from sglang_epd.families.films import drawn
from sglang_epd.modality import IMAGE, MODALITIES, VIDEO

logger = logging.getLogger(__name__)

# Of several sizes and shapes, so that processors that cut pictures into tiles, or fill
# up those of one request to a common size, show it.
_SIZES = ((96, 96), (260, 120), (56, 200), (700, 500))
# Frames, width, height, frames a second: of several lengths and rates, too.
_FILMS = ((23, 120, 84, 8.0), (4, 56, 140, 1.5))
# Text on both sides, none between, and text that merges with an item's surroundings.
# None both begins and ends with an item: SGLang finds no run that goes round.
_PROMPTS = (
    "Here is {i0} and there is {i1}.",
    "{i0}{i1}!",
    " {i1}\n{i0}\n\n{i1} \n",
    "One: {i2}, the first again: {i2}; a large one {i3}!",
)
# Fewer: some processors take half a second of a core for a video.
_VIDEO_PROMPTS = ("{v0}{v1}!", " {v1}12{i0}\n\n{v1}34{i1}\n")

Seens = Mapping[str, Sequence[Seen]]
Media = Mapping[str, Sequence[Any]]


def adapt(registered: Any, architecture: str, family: Family) -> Adapter:
    """The adapter, of SGLang's registered processor, of a model that is proven to be split
    rightly.

    Raises:
        ConfigError: it cannot be split, and why.
    """
    with _thread() as thread:
        adapter = Adapter(registered, family)
        reason = thread.submit(_reason_against, adapter, _prove_pictures).result()
        if reason is not None:
            raise ConfigError(f"{architecture} cannot have its encoder apart: {reason}")
        reason = thread.submit(_reason_against, adapter, _prove_videos).result()
    if reason is not None:
        logger.warning("%s is served without videos: %s", architecture, reason)
        adapter.refused[VIDEO] = reason
    return adapter


def _thread() -> ThreadPoolExecutor:
    """Where SGLang's processors run, which want an event loop of their own; on this process's
    device, because they keep tensors of their first run."""
    return ThreadPoolExecutor(1, initializer=device_of("cuda").bind if available() else None)


class _CannotBeSplitError(Exception):
    """Why."""


def _reason_against(adapter: Adapter, prove: Any) -> str | None:
    try:
        prove(adapter)
    except (_CannotBeSplitError, EpdError) as error:
        return str(error)
    except Exception as error:
        logger.info("SGLang's processor fails", exc_info=True)
        return (
            "its processor does not lay out items that stand alone "
            f"({type(error).__name__}: {error})"
        )
    return None


def _prove_pictures(adapter: Adapter) -> None:
    pictures = _pictures(_SIZES)
    seen = [adapter.see(picture) for picture in pictures]
    adapter.constants = constants_of(seen[0].output)
    adapter.positions_follow_grids = seen[0].output.mrope_positions is not None
    bos = getattr(adapter.processor._tokenizer, "bos_token", None)
    prompts = (*_PROMPTS, bos + _PROMPTS[0]) if bos else _PROMPTS
    _prove(adapter, IMAGE, prompts, {IMAGE: pictures}, {IMAGE: seen})


def _prove_videos(adapter: Adapter) -> None:
    pictures = _pictures(_SIZES[:2])
    films = [drawn(*film) for film in _FILMS]
    seen = {
        IMAGE: [adapter.see(picture) for picture in pictures],
        VIDEO: [adapter.see(film, VIDEO) for film in films],
    }
    _prove(adapter, VIDEO, _VIDEO_PROMPTS, {IMAGE: pictures, VIDEO: films}, seen)


def _pictures(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    return [Image.new("RGB", size, (200, 80, 40)) for size in sizes]


def _prove(
    adapter: Adapter, modality: str, prompts: Sequence[str], media: Media, seen: Seens
) -> None:
    """Every prompt as text, and the first as token ids, too, which may be refused alone."""
    names = {"i": IMAGE, "v": VIDEO}
    written = {
        f"{letter}{number}": adapter.family.written(adapter.processor, name)
        for letter, name in names.items()
        for number in range(len(media.get(name, ())))
    }
    for prompt in prompts:
        fields = [part.split("}")[0] for part in prompt.split("{")[1:]]
        shown = {
            name: [int(field[1:]) for field in fields if field[0] == letter]
            for letter, name in names.items()
        }
        given = {name: [media[name][place] for place in places] for name, places in shown.items()}
        parts = [seen[name][place] for name, places in shown.items() for place in places]
        text = prompt.format(**written)
        _compare(adapter, text, parts, adapter.process(text, given))
        if prompt is not prompts[0]:
            continue
        ids = adapter.family.tokenize(adapter.processor, text)
        if modality == IMAGE:
            adapter.keeps_token_ids = _are_kept(adapter, ids, parts, given)
        try:
            _compare(adapter, ids, parts, adapter.process(ids, given))
        except Exception as error:
            # As a rule one server does not take them either.
            logger.info("Prompts of token ids with %ss are refused: %s", modality.lower(), error)
            adapter.takes_token_ids[modality] = False


def _otherwise(adapter: Adapter, ids: list[int]) -> list[int]:
    """Token ids of the same text that the tokenizer does not make, with one word in two; the same
    ids where it knows no other."""
    tokenizer = adapter.processor._tokenizer
    text = tokenizer.decode(ids)
    for place, token in enumerate(ids):
        word = tokenizer.decode([token])
        for cut in range(1, len(word)) if word.strip().isalpha() else ():
            halves = [word[:cut], word[cut:]]
            made = [tokenizer(half, add_special_tokens=False)["input_ids"] for half in halves]
            other = [*ids[:place], *made[0], *made[1], *ids[place + 1 :]]
            if other != ids and tokenizer.decode(other) == text:
                return other
    return ids


def _are_kept(adapter: Adapter, ids: list[int], seen: Sequence[Seen], given: Media) -> bool:
    """Whether one server leaves token ids as they are, of which another tokenizer would have made
    the text."""
    others = _otherwise(adapter, ids)
    try:
        kept = adapter.keep(others, [one.part for one in seen])
    except MediaError:  # a mark is no placeholder
        return False
    try:
        theirs = adapter.process(others, given)
    except Exception as error:
        logger.info("SGLang's processor fails on token ids of another tokenizer: %s", error)
        return False
    return list(theirs.input_ids) == kept.input_ids


def _compare(adapter: Adapter, prompt: str | list[int], seen: Sequence[Seen], theirs: Any) -> None:
    parts = [one.part for one in seen]
    ours = adapter.lay_out(prompt, parts)
    if ours.input_ids != list(theirs.input_ids):
        raise _CannotBeSplitError(
            "its processor writes an item's part of a prompt in a way that depends on what "
            f"is around it ({prompt!r})"
        )
    if constants_of(theirs) != adapter.constants:
        raise _CannotBeSplitError("its processor marks the items of each prompt in another way")
    for modality in {part.modality for part in parts}:
        # Items side by side may be one run to SGLang, and all of them one item.
        expected = _places(
            item.offsets for item in theirs.mm_items if item.modality.name == modality
        )
        found = _places(
            offsets
            for part, offsets in zip(parts, ours.offsets, strict=True)
            if part.modality == modality
        )
        if found != expected:
            raise _CannotBeSplitError("its processor puts rows of items elsewhere in a prompt")
    for name, value in adapter.positions(ours.input_ids, parts).items():
        if not torch.equal(torch.as_tensor(value), torch.as_tensor(getattr(theirs, name))):
            raise _CannotBeSplitError(f"its {name} depend on more than the items' grids")


def _places(offsets: Any) -> list[int]:
    """All positions of these runs."""
    return sorted(
        place for runs in offsets for first, last in runs for place in range(first, last + 1)
    )


def prove_names(model: Any, adapter: Adapter, architecture: str) -> None:
    """Have a language server's model fill in the prompt of two pictures, and of a video before
    them.

    Raises:
        ConfigError: it fails, or fills in something else.
    """
    fill_in = getattr(model, "pad_input_ids", None)
    if fill_in is None:
        return
    refused = f"{architecture} cannot have its encoder apart"
    with _thread() as thread:
        ours, theirs = thread.submit(_prompts, adapter).result()
    try:
        filled, inputs = _filled_in(fill_in, ours)
    except Exception as error:
        raise ConfigError(
            f"{refused}: it names the items of a prompt by more than their places "
            f"({type(error).__name__}: {error})"
        ) from error
    if _without_names(filled, inputs) != _without_names(*_filled_in(fill_in, theirs)):
        raise ConfigError(f"{refused}: it puts the names of items elsewhere than one server does")
    for item in inputs.mm_items:
        for first, last in item.offsets:
            if filled[first : last + 1] != item.padding_sequence(last - first + 1):
                raise ConfigError(f"{refused}: it gives an item of a prompt the name of another")


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
    pictures = _pictures(_SIZES[1:3])
    films = [] if VIDEO in adapter.refused else [drawn(*_FILMS[1])]
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
