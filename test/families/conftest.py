"""A processor like SGLang's, of a small vocabulary, and what it makes of pictures."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

BOS, EOS, MARK, PAD, BREAK = "<s>", "</s>", "<img>", "<pad>", "<break>"
_SPECIAL = (BOS, EOS, MARK, PAD, BREAK)
_TOKEN = re.compile("|".join(map(re.escape, _SPECIAL)) + r"|\n+|[^\n<]|<")


class Tokenizer:
    """One token a character, one a run of newlines, and the special ones; BOS in front."""

    bos_token, eos_token = BOS, EOS

    def __init__(self) -> None:
        self._ids = {token: number for number, token in enumerate(_SPECIAL)}

    @property
    def eos_token_id(self) -> int:
        return self.id(EOS)

    def id(self, token: str) -> int:
        return self._ids.setdefault(token, len(self._ids))

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [self.id(token) for token in _TOKEN.findall(text)]
        return {"input_ids": [self.id(BOS), *ids] if add_special_tokens else ids}

    def decode(self, ids: list[int], **_options: Any) -> str:
        names = {number: token for token, number in self._ids.items()}
        return "".join(names[number] for number in ids)


class Output(msgspec.Struct):
    mm_items: list[Any]
    input_ids: list[int]
    im_token_id: int | None = None
    mrope_positions: Any = None
    mrope_position_delta: Any = None
    token_type_ids: Any = None


class Processor:
    """Writes a picture as rows of placeholders, 28 pixels each, between blank lines."""

    prefer_tokenized_input = False
    _tokenizer_auto_adds_specials = True
    # Rows of a picture are filled up to those of its request's widest.
    fills_up = False
    # The last picture of a prompt is written with a closing mark.
    closes_last = False
    follows_grids = False
    refuses_token_ids = False

    def __init__(self) -> None:
        self._tokenizer = Tokenizer()
        self.mm_tokens = SimpleNamespace(
            image_token=MARK, image_token_regex=re.compile(re.escape(MARK))
        )

    async def process_mm_data_async(
        self, *, image_data: list[Image.Image], input_text: str | list[int], **_others: Any
    ) -> Output:
        if isinstance(input_text, list):
            if self.refuses_token_ids:
                raise ValueError("provide a text prompt instead")
            input_text = self._tokenizer.decode(input_text)
        sizes = [(picture.width // 28, picture.height // 28) for picture in image_data]
        if self.fills_up:
            sizes = [(max(width for width, _ in sizes), height) for _, height in sizes]
        parts = input_text.split(MARK)
        text = parts[0]
        for number, ((width, height), after) in enumerate(zip(sizes, parts[1:], strict=True)):
            closing = EOS if self.closes_last and number == len(sizes) - 1 else ""
            text += "\n\n" + (PAD * width + BREAK) * height + "\n\n" + closing + after
        ids = self._tokenizer(text, add_special_tokens=not text.startswith(BOS))["input_ids"]
        runs = iter(_runs(ids, self._tokenizer.id(PAD)))
        items = []
        for picture, (width, height) in zip(image_data, sizes, strict=True):
            items.append(
                SimpleNamespace(
                    modality=SimpleNamespace(name="IMAGE"),
                    offsets=[next(runs) for _ in range(height)],
                    feature=torch.zeros(1, 3, picture.height, picture.width),
                    model_specific_data={"image_grid_thw": torch.tensor([[1, height, width]])},
                )
            )
        output = Output(items, ids, im_token_id=self._tokenizer.id(PAD))
        if self.follows_grids:
            every = torch.cat([item.model_specific_data["image_grid_thw"] for item in items])
            holder = SimpleNamespace(model_specific_data={"image_grid_thw": every})
            positions = self.compute_mrope_positions(ids, [holder])
            output.mrope_positions, output.mrope_position_delta = positions
        return output

    def compute_mrope_positions(self, input_ids: list[int], items: list[Any]) -> Any:
        grids = items[0].model_specific_data["image_grid_thw"]
        return torch.arange(len(input_ids)) + grids.sum(), torch.tensor(len(grids))


def _runs(ids: list[int], token: int) -> list[tuple[int, int]]:
    runs, start = [], None
    for place, found in enumerate([*ids, -1]):
        if found == token and start is None:
            start = place
        elif found != token and start is not None:
            runs.append((start, place - 1))
            start = None
    return runs


@pytest.fixture
def processor() -> Processor:
    return Processor()
