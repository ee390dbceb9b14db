"""A prompt's placeholders, found and expanded in any surroundings.

Leans on `multimodal.processors.base_processor.BaseMultimodalProcessor.build_input_ids`,
which replaces each media placeholder token by as many as the item has embedding rows, and
on `multimodal.processors.qwen_vl.QwenVLImageProcessor.build_input_ids_with_timestamps`,
which models with time stamps for the frames of a video use in its place. On
`multimodal.processors.qwen_audio.Qwen2AudioMultimodalProcessor._build_transcription_prompt`, which
SGLang's EPD does not call.
The in-tree methods fail on a placeholder that directly follows another one and miss
one at the very start (sglang#35799); they also do not know the `<image>` mark and
already expanded runs that the colocated path accepts in text, and give a prompt that a chat
template has begun with BOS another one. On
`multimodal.processors.minimax_m3_vl.MiniMaxM3VLProcessor.get_mm_data`, which tokenizes the times
of a video's frames apart from the text before them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from sglang_epd.errors import MediaError
from sglang_epd.families import family_of
from sglang_epd.families.family import special_tokens
from sglang_epd.families.proof import adapt
from sglang_epd.modality import IMAGE, MODALITIES, VIDEO

# Writes the prompt of `/v1/audio/transcriptions`, which has none.
_TRANSCRIPTION = "_build_transcription_prompt"
# Writes a video of MiniMax-M3 as text.
_VIDEO_TEXT = "_video_placeholder_text"


class Piece(NamedTuple):
    """A part of an item as it stands in the prompt: text, rows of the embedding, text."""

    before: list[int]
    rows: int
    after: list[int]


def lays_out(processor: Any, architecture: str) -> Any:
    """The object that lays out a model's prompts, made of SGLang's registered processor:
    that processor, mended, or the adapter of a family that SGLang's own EPD does not know.

    Raises:
        ConfigError: the model cannot have its encoder apart, and why.
    """
    family = family_of(architecture)
    return (
        robust_placeholders(processor) if family is None else adapt(processor, architecture, family)
    )


def robust_placeholders(processor: Any) -> Any:
    """Replace `build_input_ids` of this processor, and its method of the same purpose for videos
    with timestamps; returns the processor."""

    def build_input_ids(
        prompt: str | list[int],
        img_grid_thw: Any = None,
        video_grid_thw: Any = None,
        audio_seq_lens: Any = None,
    ) -> tuple[list[int], list[tuple[int, int]], list[Any]]:
        items = _items(processor, img_grid_thw, video_grid_thw, audio_seq_lens)
        return _expand(_token_ids(processor, prompt, items), items)

    def build_input_ids_with_timestamps(
        prompt: str | list[int],
        embeddings: Any,
        img_grid_thw: Any,
        video_grid_thw: Any,
        video_timestamps: Any,
    ) -> tuple[list[int], list[tuple[int, int]], list[Any]]:
        items = _items(processor, img_grid_thw, video_grid_thw, None)
        frames = [
            _frames(processor, grid, times)
            for grid, times in zip(video_grid_thw, video_timestamps, strict=True)
        ]
        spelt = {processor.VIDEO_TOKEN_ID: frames}
        return _expand(_token_ids(processor, prompt, items), items, spelt)

    processor.build_input_ids = build_input_ids
    if hasattr(processor, "build_input_ids_with_timestamps"):
        processor.build_input_ids_with_timestamps = build_input_ids_with_timestamps
    if hasattr(processor, _VIDEO_TEXT):
        processor.get_mm_data = partial(_written_out, processor, processor.get_mm_data)
    return processor


def _written_out(
    processor: Any,
    original: Callable[..., Any],
    prompt: str | list[int],
    embeddings: Any,
    **told: Any,
) -> Any:
    """Around MiniMax-M3's `get_mm_data`: one server puts all of a video into the text, and the
    first time in it may merge with what stands before."""
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    images, videos = (
        () if (grids := told.get(MODALITIES[name].grids)) is None else grids
        for name in (IMAGE, VIDEO)
    )
    written = {
        processor.IMAGE_TOKEN: [processor._image_placeholder_text(grid) for grid in images],
        processor.VIDEO_TOKEN: [
            processor._video_placeholder_text(grid, times)
            for grid, times in zip(
                videos, told.get("video_timestamps") or [None] * len(videos), strict=True
            )
        ],
    }
    if (
        not isinstance(prompt, str)
        or processor.IMAGE_START_TOKEN in prompt  # expanded already
        or any(prompt.count(mark) != len(texts) for mark, texts in written.items())
    ):
        return original(prompt, embeddings, **told)
    left = {mark: iter(texts) for mark, texts in written.items()}
    marks = re.compile("|".join(map(re.escape, written)))
    ids = _encode(processor, marks.sub(lambda mark: next(left[mark.group()]), prompt))
    return MultimodalProcessorOutput(
        input_ids=ids,
        mm_items=processor._precomputed_media_items(
            input_ids=ids,
            embeddings=embeddings,
            frames_per_video=[int(grid[0]) for grid in videos],
        ),
        im_start_id=processor.IM_START_TOKEN_ID,
        im_end_id=processor.IM_END_TOKEN_ID,
        im_token_id=processor.IM_TOKEN_ID,
        video_token_id=processor.VIDEO_TOKEN_ID,
    )


def _encode(processor: Any, text: str) -> list[int]:
    ids: list[int] = processor._tokenizer.encode(text, **special_tokens(processor, text))
    return ids


@lru_cache(maxsize=1 << 13)
def _plain(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text without special tokens. Videos have the same few thousand times, and to
    encode one takes 0.1 ms."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _frames(processor: Any, grid: Any, times: Sequence[float]) -> list[Piece]:
    """A video as the model reads it: each step of time after its second, and bracketed."""
    steps, height, width = (int(extent) for extent in grid)
    rows = height * width // processor.spatial_merge_size**2
    start, end = processor.vision_start_token_id, processor.vision_end_token_id
    after = [] if end is None else [end]
    pieces = []
    for _, time in zip(range(steps), times, strict=True):
        text = _plain(processor._processor.tokenizer, f"<{time:.1f} seconds>")
        pieces.append(Piece(text if start is None else [*text, start], rows, after))
    return pieces


def _token_ids(
    processor: Any, prompt: str | list[int], items: dict[int, tuple[Any, list[int]]]
) -> list[int]:
    """The prompt's token ids, with one placeholder an item if it can be read that way.

    A run of image placeholders is as many images side by side if that is how many there
    are, else one image that was expanded already. In token ids, a run of any placeholder.
    """
    if not prompt and hasattr(processor, _TRANSCRIPTION):
        prompt = getattr(processor, _TRANSCRIPTION)(prompt)
    if not isinstance(prompt, str):
        expanded = {
            token for token, (_, counts) in items.items() if prompt.count(token) > len(counts)
        }
        pairs = zip(prompt, [None, *prompt], strict=False)
        return [token for token, before in pairs if token != before or token not in expanded]
    ids = _encode(processor, prompt)
    tokens = processor.mm_tokens
    image_id: Any = getattr(processor, MODALITIES[IMAGE].placeholder, None)
    images = items.get(image_id, (None, []))[1]
    if (
        ids.count(image_id) != len(images)
        and tokens.image_token_regex is not None
        and isinstance(tokens.image_token, str)
    ):
        marked = tokens.image_token_regex.sub(lambda _match: tokens.image_token, prompt)
        ids = _encode(processor, marked)
    return ids


def as_tokenized(
    processor: Any, input_ids: Sequence[int] | None, modalities: Sequence[str]
) -> list[int] | None:
    """What the tokenizer process made of a prompt's text, where nothing else would be made of
    it here; else None.

    Of a long conversation a scheduler would tokenize the text for tens of milliseconds, in
    which no request gets a token.

    Args:
        modalities: of the prompt's items.
    """
    if input_ids is None or processor._tokenizer_auto_adds_specials:
        return None  # or a prompt that a chat template has begun with BOS would have two
    if VIDEO in modalities and hasattr(processor, _VIDEO_TEXT):
        return None
    ids = list(input_ids)
    for row in MODALITIES.values():
        token = getattr(processor, row.placeholder, None)
        if token is not None and ids.count(token) != modalities.count(row.name):
            # Written otherwise than by the model's own mark, or expanded already.
            return None
    return ids


def _items(processor: Any, *grids: Any) -> dict[int, tuple[Any, list[int]]]:
    """Placeholder token id -> modality and the number of rows of each of its items.

    Args:
        grids: of each modality, in the order of the table; None where there is no item.
    """
    merged = getattr(processor, "spatial_merge_size", 1) ** 2
    found: dict[int, tuple[Any, list[int]]] = {}
    for row, given in zip(MODALITIES.values(), grids, strict=True):
        token_id = getattr(processor, row.placeholder, None)
        if token_id is not None:
            unit = 1 if row.lengths else merged
            counts = [] if given is None else [int(grid.prod()) // unit for grid in given]
            found[token_id] = (row.sglang, counts)
    return found


def _expand(
    prompt: list[int],
    items: dict[int, tuple[Any, list[int]]],
    spelt: dict[int, list[list[Piece]]] | None = None,
) -> tuple[list[int], list[tuple[int, int]], list[Any]]:
    """Token ids with each placeholder repeated, the (first, last) position of each
    item, and the items' modalities in prompt order.

    Args:
        spelt: the pieces of each item of a placeholder; an item that is missing is of one
            piece without text. A piece has a position and a modality of its own.

    Raises:
        MediaError: a modality has more or fewer placeholders than items.
    """
    remaining = {
        token: iter([[Piece([], count, [])] for count in counts])
        for token, (_, counts) in items.items()
    }
    remaining |= {token: iter(pieces) for token, pieces in (spelt or {}).items()}
    for token, (modality, counts) in items.items():
        placeholders = prompt.count(token)
        if placeholders != len(counts):
            raise MediaError(
                f"the prompt has {placeholders} {modality.name.lower()} placeholders "
                f"for {len(counts)} {modality.name.lower()} items"
            )
    input_ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    modalities: list[Any] = []
    for token in prompt:
        if token not in items:
            input_ids.append(token)
            continue
        for piece in next(remaining[token]):
            input_ids.extend(piece.before)
            start = len(input_ids)
            input_ids.extend([token] * piece.rows)
            offsets.append((start, len(input_ids) - 1))
            modalities.append(items[token][0])
            input_ids.extend(piece.after)
    return input_ids, offsets, modalities
