"""Drives SGLang's own processor of a family: on an encoder to prepare pictures and to see
what becomes of their marks, on a language server to lay out prompts without pictures.

Leans on `multimodal.processors.base_processor.BaseMultimodalProcessor`
(`process_mm_data_async`, `compute_mrope_positions`, `prefer_tokenized_input`), on
`managers.schedule_batch` (`MultimodalProcessorOutput`, `MultimodalDataItem`, `Modality`)
and on the in-tree `MMReceiverBase._init_mm_processor`, which loads a processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from PIL import Image

from sglang_epd.errors import EncodeError, MediaError, MediaTypeError
from sglang_epd.families.expansion import Expansion, LaidOut, insert, read, spread
from sglang_epd.families.family import Family

# What a processor's output has of each prompt; all else is the same for all of them.
_OF_THE_PROMPT = {
    "mm_items",
    "input_ids",
    "padded_input_ids",
    "mrope_positions",
    "mrope_position_delta",
}
_GRID = "image_grid_thw"
_LONGEST_PROMPT = 1 << 30


class Seen(NamedTuple):
    """One picture as SGLang's processor leaves it.

    Attributes:
        items: SGLang's, for the tower.
        expansion: of the picture's mark.
        grid: [t, h, w] in patches; empty where the family has none.
        output: the processor's, of a prompt that is hardly more than the mark.
    """

    items: list[Any]
    expansion: Expansion
    grid: list[int]
    output: Any


class Adapter:
    """A family's processor; safe to call from several threads at once.

    Args:
        registered: SGLang's processor of the model.
        family: how it is driven.
    """

    def __init__(self, registered: Any, family: Family) -> None:
        self.family = family
        self.processor = family.processor(registered)
        # Of an output, what is the same for every prompt; `proof` finds it.
        self.constants: dict[str, Any] = {}
        # Whether positions of the language model follow the grids of pictures.
        self.positions_follow_grids = False
        # Whether SGLang's processor takes prompts that are token ids already.
        self.takes_token_ids = True

    @property
    def prefer_tokenized_input(self) -> bool:
        prefers: bool = self.processor.prefer_tokenized_input
        return prefers

    def process(self, prompt: str | list[int], pictures: Sequence[Image.Image]) -> Any:
        """SGLang's own output of a prompt and its pictures. Not to be called on a loop.

        Raises:
            Exception: whatever the processor raises.
        """
        request = SimpleNamespace(
            rid="", image_data=list(pictures), video_data=None, audio_data=None, modalities=None
        )
        return asyncio.run(
            self.processor.process_mm_data_async(
                image_data=list(pictures),
                audio_data=None,
                input_text=prompt,
                request_obj=request,
                max_req_input_len=_LONGEST_PROMPT,
            )
        )

    def see(self, picture: Image.Image) -> Seen:
        """Prepare one picture.

        Raises:
            EncodeError: what the processor made of it cannot be told to a language server.
            Exception: whatever the processor raises.
        """
        # Between special tokens, with which no text merges; SGLang finds no placeholders in
        # a prompt of nothing else.
        end = self.processor._tokenizer.eos_token
        output = self.process(f"{end}{self.family.mark(self.processor)}{end}", [picture])
        items = list(output.mm_items)
        if not items or any(item.modality.name != "IMAGE" or not item.offsets for item in items):
            raise EncodeError("the model's processor does not say where the picture's rows belong")
        expansion = self._expansion(output)
        grids = [item.model_specific_data.get(_GRID) for item in items]
        grid = [] if grids[0] is None else [int(size) for size in grids[0].flatten()]
        return Seen(items, expansion, grid, output)

    def lay_out(self, prompt: str | list[int], expansions: Sequence[Expansion]) -> LaidOut:
        """A prompt with its pictures' placeholders.

        Raises:
            MediaError: the prompt and the pictures do not match.
        """
        if isinstance(prompt, str):
            text = prompt
        elif not self.takes_token_ids:
            raise MediaError("this model takes prompts with images as text only")
        elif self._spread_as_it_is(prompt, expansions):
            return spread(prompt, expansions)
        else:
            text = self.processor._tokenizer.decode(prompt)
        text = self.family.complete(self.processor, text, len(expansions))
        text = insert(text, self.family.marks(self.processor), expansions)
        return spread(self.family.tokenize(self.processor, text), expansions)

    def positions(self, input_ids: list[int], grids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The rotary positions of a prompt, by their names in a processor's output."""
        if not self.positions_follow_grids:
            return {}
        # One item with all grids: processors read one item's, and it has to be of them all.
        every = SimpleNamespace(model_specific_data={_GRID: torch.tensor(grids)})
        positions, delta = self.processor.compute_mrope_positions(input_ids, [every])
        return {"mrope_positions": positions, "mrope_position_delta": delta}

    def get_validated_mm_data(
        self,
        prompt: str | list[int],
        embeddings: dict[Any, torch.Tensor],
        *,
        expansion: Sequence[Any] = (),
        img_grid_thw: torch.Tensor | None = None,
        **_others: Any,
    ) -> Any:
        """In place of SGLang's method of this name; `language.assembly` calls it.

        Args:
            expansion: the pictures', as their layouts carry them.

        Raises:
            MediaError: the prompt and the pictures do not match.
            MediaTypeError: it has something else than pictures.
            EncodeError: the encoder told what cannot be.
        """
        from sglang.srt.managers.schedule_batch import (
            Modality,
            MultimodalDataItem,
            MultimodalProcessorOutput,
        )

        if set(embeddings) != {Modality.IMAGE}:
            raise MediaTypeError("this model takes images only where its encoder is apart")
        expansions = [read(plain) for plain in expansion]
        rows = embeddings[Modality.IMAGE]
        if sum(one.rows for one in expansions) != len(rows):
            raise EncodeError("the encoder told of other expansions than embeddings")
        laid = self.lay_out(prompt, expansions)
        self._check_brackets(laid.input_ids, expansions)
        items = [
            MultimodalDataItem(
                modality=Modality.IMAGE, offsets=offsets, precomputed_embeddings=part
            )
            for offsets, part in zip(
                laid.offsets, rows.split([one.rows for one in expansions]), strict=True
            )
        ]
        grids = [] if img_grid_thw is None else img_grid_thw.tolist()
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=laid.input_ids,
            **self.constants,
            **self.positions(laid.input_ids, grids),
        )

    def _check_brackets(self, input_ids: list[int], expansions: Sequence[Expansion]) -> None:
        """Where a processor brackets pictures, SGLang finds them by counting brackets: one
        that a user wrote would give a picture's place in the prefix cache to another.

        Raises:
            MediaError: the prompt has some of its own.
        """
        written = [self.family.tokenize(self.processor, one.text) for one in expansions]
        brackets = {"im_start_id", "im_end_id"} & self.constants.keys()
        for bracket in [int(self.constants[name]) for name in brackets]:
            expected = sum(ids.count(bracket) for ids in written)
            if expected and input_ids.count(bracket) != expected:
                raise MediaError("the prompt has image marks of its own")

    def _spread_as_it_is(self, prompt: list[int], expansions: Sequence[Expansion]) -> bool:
        """SGLang's rule: token ids stay as they are where pictures are placeholders alone."""
        decode = self.processor._tokenizer.decode
        alone = all(len(one.runs) == 1 and one.text == decode([one.token]) for one in expansions)
        return alone and sum(map(prompt.count, {one.token for one in expansions})) == len(
            expansions
        )

    def _expansion(self, output: Any) -> Expansion:
        tokenizer = self.processor._tokenizer
        ids = list(output.input_ids)
        runs = sorted((first, last) for item in output.mm_items for first, last in item.offsets)
        tokens = {ids[place] for first, last in runs for place in range(first, last + 1)}
        if len(tokens) != 1:
            raise EncodeError("the model's processor has more than one placeholder for pictures")
        (token,) = tokens
        end = tokenizer.eos_token_id
        opened = ids.index(end) + 1
        closed = ids.index(end, runs[-1][1] + 1)
        single = ids[opened : runs[0][0]]
        for number, (_, last) in enumerate(runs):
            following = runs[number + 1][0] if number + 1 < len(runs) else closed
            single += [token, *ids[last + 1 : following]]
        text = tokenizer.decode(
            single, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return Expansion(text, token, [last - first + 1 for first, last in runs])


def constants_of(output: Any) -> dict[str, Any]:
    """What a processor's output says of the model rather than of its prompt.

    Raises:
        MediaError: it says something of the prompt that nobody here can make.
    """
    constants = {}
    for name in output.__struct_fields__:
        value = getattr(output, name)
        if name in _OF_THE_PROMPT or value is None:
            continue
        if not isinstance(value, int):
            raise MediaError(f"its processor makes {name} of the pictures")
        constants[name] = value
    return constants
