"""A processor like SGLang's, of a small vocabulary, and what it makes of pictures and videos."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

BOS, EOS, MARK, PAD, BREAK = "<s>", "</s>", "<img>", "<pad>", "<break>"
FILM, FRAME, OPEN, SHUT = "<film>", "<frame>", "<open>", "<shut>"
_SPECIAL = (BOS, EOS, MARK, PAD, BREAK, FILM, FRAME, OPEN, SHUT)
_TOKEN = re.compile("|".join(map(re.escape, _SPECIAL)) + r"|\n+|th|[^\n<]|<")


class Tokenizer:
    """One token a character, "th", or run of newlines, and the special ones; BOS in front."""

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
    im_start_id: int | None = None
    im_end_id: int | None = None
    mrope_positions: Any = None
    mrope_position_delta: Any = None
    token_type_ids: Any = None


class Processor:
    """Writes a picture as rows of placeholders, 28 pixels each, between blank lines, and a
    video as one picture a second, in brackets, each after its time."""

    prefer_tokenized_input = False
    video_preprocessing_device = "cpu"
    _tokenizer_auto_adds_specials = True
    # Rows of a picture are filled up to those of its request's widest.
    fills_up = False
    # The last picture of a prompt is written with a closing mark.
    closes_last = False
    follows_grids = False
    refuses_token_ids = False
    # Frames of a video are fewer the more videos there are.
    shares_frames = False
    # Brackets are told of.
    brackets = False

    def __init__(self) -> None:
        self._tokenizer = Tokenizer()
        self.mm_tokens = SimpleNamespace(
            image_token=MARK,
            image_token_regex=re.compile(re.escape(MARK)),
            video_token=FILM,
            video_token_regex=re.compile(re.escape(FILM)),
        )

    async def process_mm_data_async(
        self, *, image_data: Any, input_text: str | list[int], request_obj: Any, **_others: Any
    ) -> Output:
        if isinstance(input_text, list):
            if self.refuses_token_ids:
                raise ValueError("provide a text prompt instead")
            input_text = self._tokenizer.decode(input_text)
        pictures, films = image_data or [], request_obj.video_data or []
        sizes = [(picture.width // 28, picture.height // 28) for picture in pictures]
        if self.fills_up:
            sizes = [(max(width for width, _ in sizes), height) for _, height in sizes]
        text, shown, told = "", iter(sizes), iter(films)
        written = 0
        for piece in re.split(f"({MARK}|{FILM})", input_text):
            if piece == MARK:
                width, height = next(shown)
                written += 1
                closing = EOS if self.closes_last and written == len(sizes) else ""
                text += "\n\n" + (PAD * width + BREAK) * height + "\n\n" + closing
            elif piece == FILM:
                text += self._film(next(told), len(films))
            else:
                text += piece
        ids = self._tokenizer(text, add_special_tokens=not text.startswith(BOS))["input_ids"]
        id_of = self._tokenizer.id
        runs = iter(_runs(ids, id_of(PAD)))
        items = []
        for picture, (width, height) in zip(pictures, sizes, strict=True):
            items.append(
                SimpleNamespace(
                    modality=SimpleNamespace(name="IMAGE"),
                    offsets=[next(runs) for _ in range(height)],
                    feature=torch.zeros(1, 3, picture.height, picture.width),
                    model_specific_data={"image_grid_thw": torch.tensor([[1, height, width]])},
                )
            )
        if films:
            # All of them are one item, as some of SGLang's processors have it.
            places = _runs(ids, id_of(FRAME))
            grid = torch.tensor([[len(places), 1, places[0][1] - places[0][0] + 1]])
            items.append(
                SimpleNamespace(
                    modality=SimpleNamespace(name="VIDEO"),
                    offsets=places,
                    feature=torch.zeros(len(places), 3, 28, 28),
                    model_specific_data={"video_grid_thw": grid},
                )
            )
        output = Output(items, ids, im_token_id=id_of(PAD))
        if self.brackets:
            output.im_start_id, output.im_end_id = id_of(OPEN), id_of(SHUT)
        if self.follows_grids:
            every = torch.cat([item.model_specific_data["image_grid_thw"] for item in items])
            holder = SimpleNamespace(model_specific_data={"image_grid_thw": every})
            positions = self.compute_mrope_positions(ids, [holder])
            output.mrope_positions, output.mrope_position_delta = positions
        return output

    def _film(self, film: Any, films: int) -> str:
        step = max(1, round(film.avg_fps))
        frames = film.get_frames_at(list(range(0, len(film), step)))
        if self.shares_frames:
            frames = frames[: max(1, 4 // films)]
        width = film.frame_shape[1] // 28
        return "".join(f"{second}s{OPEN}{FRAME * width}{SHUT}\n" for second in range(len(frames)))

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
