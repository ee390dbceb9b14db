"""Drives SGLang's own processor of a family: on an encoder to prepare media and to find their
expansions, on a language server to lay out prompts without media.

Leans on `multimodal.processors.base_processor.BaseMultimodalProcessor`
(`process_mm_data_async`, `compute_mrope_positions`, `prefer_tokenized_input`,
`smart_rgb_conversion`, `gpu_image_decode`), on `utils.common.is_jpeg_with_cuda`, on
`managers.schedule_batch` (`MultimodalProcessorOutput`, `MultimodalDataItem`, `Modality`)
and on the in-tree `MMReceiverBase._init_mm_processor`, which loads a processor.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from sglang_epd.device import device_of
from sglang_epd.errors import EncodeError, MediaError, MediaTypeError
from sglang_epd.families.expansion import (
    Expansion,
    LaidOut,
    Part,
    Seen,
    insert,
    read,
    seen_in,
    spread,
)
from sglang_epd.families.family import Family
from sglang_epd.modality import IMAGE, MODALITIES, VIDEO

# Fields of a processor's output that differ by prompt; all others are the same for all of them.
_OF_THE_PROMPT = {
    "mm_items",
    "input_ids",
    "padded_input_ids",
    "mrope_positions",
    "mrope_position_delta",
}
_LONGEST_PROMPT = 1 << 30


class Adapter:
    """SGLang's registered processor of a family's model; safe to call from several threads at
    once."""

    def __init__(self, registered: Any, family: Family) -> None:
        self.family = family
        self.processor = family.processor(registered)
        # The part of an output that is the same for every prompt; `proof` finds it.
        self.constants: dict[str, Any] = {}
        # Whether positions of the language model follow the grids of media.
        self.positions_follow_grids = False
        # Whether SGLang's processor takes prompts that are token ids already, by modality.
        self.takes_token_ids: dict[str, bool] = {}
        # Whether it leaves them as they are where all items are pictures, or makes text of them.
        self.keeps_token_ids = False
        # Why a modality is refused, of those that are.
        self.refused: dict[str, str] = {}

    @property
    def prefer_tokenized_input(self) -> bool:
        prefers: bool = self.processor.prefer_tokenized_input
        return prefers

    def process(self, prompt: str | list[int], media: Mapping[str, Sequence[Any]]) -> Any:
        """SGLang's own output of a prompt and its media. Not to be called on a loop.

        Args:
            media: by modality; pictures as `PIL.Image.Image`, RGB, videos as decoders (`films`).

        Raises:
            Exception: any error of the processor.
        """
        given = {
            row.request_field: list(media.get(row.name, ())) or None for row in MODALITIES.values()
        }
        return asyncio.run(
            self.processor.process_mm_data_async(
                image_data=given["image_data"],
                audio_data=None,
                input_text=prompt,
                request_obj=SimpleNamespace(rid="", modalities=None, **given),
                max_req_input_len=_LONGEST_PROMPT,
            )
        )

    def turns(self, data: bytes) -> bool:
        """Whether the processor has a picture turned by its EXIF orientation, and laid over a
        background: not those that nvJPEG decodes.

        Args:
            data: the encoded picture.
        """
        if not getattr(self.processor, "smart_rgb_conversion", False):
            return False
        from sglang.srt.utils.common import is_jpeg_with_cuda

        return not is_jpeg_with_cuda(data, self.processor.gpu_image_decode)

    def see(self, medium: Any, modality: str = IMAGE) -> Seen:
        """Prepare one picture, or a video by its decoder.

        Args:
            medium: an RGB picture, or a decoder of `families.films`.

        Raises:
            EncodeError: the processor's result cannot be sent to a language server.
            MediaTypeError: the processor knows nothing of that kind.
            Exception: any error of the processor.
        """
        mark = self.family.mark(self.processor, modality)
        if not mark:
            raise MediaTypeError(f"the model's processor knows no {modality.lower()}s")
        # Between special tokens, with which no text merges; SGLang finds no placeholders in
        # a prompt of nothing else.
        tokenizer = self.processor._tokenizer
        written = self.family.written(self.processor, modality)
        prompt = f"{tokenizer.eos_token}{written}{tokenizer.eos_token}"
        output = self.process(prompt, {modality: [medium]})
        return seen_in(output, modality, written, mark, tokenizer)

    def lay_out(self, prompt: str | list[int], parts: Sequence[Part]) -> LaidOut:
        """A prompt with the placeholders of its items, those of a modality in the order of its
        marks.

        Args:
            prompt: text, or token ids.
            parts: what its items are replaced by, in their order.

        Raises:
            MediaError: the prompt and the items do not match.
        """
        if isinstance(prompt, str):
            text = prompt
        elif not all(self.takes_token_ids.get(part.modality, True) for part in parts):
            raise MediaError("this model takes prompts with media as text only")
        elif self._keeps(prompt, parts):
            return self.keep(prompt, parts)
        else:
            text = self.processor._tokenizer.decode(prompt)
        text = self.family.complete(self.processor, text, parts)
        text, order = insert(text, self.family.marks(self.processor), parts)
        ids = self.family.tokenize(self.processor, text)
        laid = spread(ids, [parts[number].expansion for number in order])
        offsets = [laid.offsets[order.index(number)] for number in range(len(parts))]
        return LaidOut(laid.input_ids, offsets)

    def keep(self, prompt: list[int], parts: Sequence[Part]) -> LaidOut:
        """Token ids that are left as they are, with the placeholders of pictures; `MediaError` as
        of `spread`."""
        return spread(prompt, [part.expansion for part in map(self._bare, parts)])

    def positions(self, input_ids: list[int], parts: Sequence[Part]) -> dict[str, Any]:
        """The rotary positions of a prompt, by their names in a processor's output.

        Args:
            input_ids: of the prompt with all placeholders.
            parts: its items, in the order in which they stand there.
        """
        if not self.positions_follow_grids:
            return {}
        # One item with all grids: processors read one item's, and it has to be of them all.
        grids = {
            row.item_grid: torch.tensor([part.grid for part in parts if part.modality == row.name])
            for row in MODALITIES.values()
            if any(part.modality == row.name for part in parts)
        }
        every = SimpleNamespace(model_specific_data=grids)
        positions, delta = self.processor.compute_mrope_positions(input_ids, [every])
        return {"mrope_positions": positions, "mrope_position_delta": delta}

    def get_validated_mm_data(
        self,
        prompt: str | list[int],
        embeddings: dict[Any, torch.Tensor],
        *,
        expansion: Sequence[Any] = (),
        **metadata: Any,
    ) -> Any:
        """In place of SGLang's method of this name; `language.assembly` calls it.

        Args:
            expansion: those of the pictures and then of the videos, as layouts carry them.
            metadata: among them the grids of each modality, a row an item.

        Raises:
            MediaError: the prompt and the items do not match.
            MediaTypeError: it has something that this model is not served with.
            EncodeError: the encoder sent an impossible expansion.
        """
        from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalProcessorOutput

        for modality in embeddings:
            self._check_modality(modality.name)
        grids = [
            (row.name, grid)
            for row in MODALITIES.values()
            if row.grids in metadata
            for grid in metadata[row.grids].tolist()
        ]
        if len(grids) != len(expansion):
            raise EncodeError("the encoder told of other expansions than items")
        parts = [
            Part(modality, read(plain), grid)
            for (modality, grid), plain in zip(grids, expansion, strict=True)
        ]
        slices = {}
        for modality, found in embeddings.items():
            counts = [part.expansion.rows for part in parts if part.modality == modality.name]
            if sum(counts) != len(found):
                raise EncodeError("the encoder told of other expansions than embeddings")
            slices[modality.name] = iter(found.split(counts))
        laid = self.lay_out(prompt, parts)
        if self._keeps(prompt, parts):
            parts = [*map(self._bare, parts)]
        items = []
        for part, offsets, apart in zip(
            parts, laid.offsets, self._bracketed(laid.input_ids, parts), strict=True
        ):
            embedding = next(slices[part.modality])
            counts = part.expansion.runs if apart else [part.expansion.rows]
            places = [[place] for place in offsets] if apart else [offsets]
            items += [
                MultimodalDataItem(
                    modality=MODALITIES[part.modality].sglang,
                    offsets=where,
                    precomputed_embeddings=some,
                )
                for where, some in zip(places, embedding.split(counts), strict=True)
            ]
        # SGLang names bracketed runs in the order of the items.
        items.sort(key=lambda item: item.offsets)
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=laid.input_ids,
            **self.constants,
            **self.positions(laid.input_ids, parts),
        )

    def _check_modality(self, modality: str) -> None:
        why = self.refused.get(modality)
        if why or modality not in (IMAGE, VIDEO):
            raise MediaTypeError(
                f"this model takes no {modality.lower()} input where its encoder is apart"
                + (f": {why}" if why else "")
            )

    def _bracketed(self, input_ids: list[int], parts: Sequence[Part]) -> list[bool]:
        """Of each item, whether each of its runs is in brackets.

        SGLang finds such runs by counting brackets, one item of its own a pair: one that a
        user wrote would give a picture's place in the prefix cache to another.
        """
        written = [self.family.tokenize(self.processor, part.expansion.text) for part in parts]
        brackets = [
            int(self.constants[name])
            for name in ("im_start_id", "im_end_id")
            if name in self.constants
        ]
        for bracket in brackets:
            expected = sum(ids.count(bracket) for ids in written)
            if expected and input_ids.count(bracket) != expected:
                raise MediaError("the prompt has media marks of its own")
        return [
            bool(brackets)
            and all(ids.count(bracket) == len(part.expansion.runs) for bracket in brackets)
            for ids, part in zip(written, parts, strict=True)
        ]

    def _keeps(self, prompt: str | list[int], parts: Sequence[Part]) -> bool:
        """Whether one server leaves a prompt's token ids as they are."""
        tokens = {part.expansion.token for part in parts}
        return (
            self.keeps_token_ids
            and not isinstance(prompt, str)
            and all(part.modality == IMAGE for part in parts)
            and sum(map(prompt.count, tokens)) == len(parts)
        )

    def _bare(self, part: Part) -> Part:
        """A picture as it stands among token ids that are kept: placeholders alone."""
        token, rows = part.expansion.token, part.expansion.rows
        text = self.processor._tokenizer.decode([token])
        return part._replace(expansion=Expansion(text, token, [rows]))


def constants_of(output: Any) -> dict[str, Any]:
    """The parts of a processor's output that describe the model rather than its prompt.

    Raises:
        MediaError: it says something else of the prompt, which is not made without media.
    """
    constants = {}
    for name in output.__struct_fields__:
        value = getattr(output, name)
        if name in _OF_THE_PROMPT or value is None:
            continue
        if not isinstance(value, int):
            raise MediaError(f"its processor makes {name} of the media")
        constants[name] = value
    return constants


def load_processor(server_args: Any, model_config: Any) -> Any:
    """The processor that SGLang has registered for the model, in a process that has none.

    It lays prompts out, and makes no features: it needs no memory for them on an accelerator, which
    SGLang takes for it on an adaptive server. SGLang's processors have their tensors on the
    server's first accelerator; this one has them on this process's. SGLang makes features
    in a memory pool of each call's own. While one is in use, torch frees no cached memory,
    and other threads run out of it. This one makes them in torch's ordinary pool.
    """
    from sglang.srt.disaggregation.encoder.receiver import MMReceiverBase
    from sglang.srt.runtime_context import get_device, get_disagg

    host, here = SimpleNamespace(mm_processor=None), server_args
    device = device_of(get_device().device).name
    if device.type == "cuda":
        here = copy.copy(server_args)
        here.base_gpu_id = device.index
        # SGLang keeps its notes beside the fields, and the seal that forbids writing to these.
        vars(here).update(vars(server_args))
    with get_disagg().override(enable_adaptive_dispatch_to_encoder=False):
        MMReceiverBase._init_mm_processor(
            host, here, model_config.hf_config, model_config=model_config
        )
    processor: Any = host.mm_processor
    one: Any
    for one in (processor, getattr(processor, "inner", None)):
        if hasattr(one, "_temporary_fast_processor_cuda_pool"):
            one._temporary_fast_processor_cuda_pool = nullcontext
    return processor
