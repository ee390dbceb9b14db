"""A prompt's placeholders, found and expanded whatever stands next to them.

Leans on `multimodal.processors.base_processor.BaseMultimodalProcessor.build_input_ids`,
which replaces each media placeholder token by as many as the item has embedding rows.
The in-tree method fails on a placeholder that directly follows another one and misses
one at the very start (sglang#35799); it also does not know the `<image>` mark and
already expanded runs that the colocated path accepts in text.
"""

from __future__ import annotations

from typing import Any

from sglang_epd.errors import MediaError


def robust_placeholders(processor: Any) -> Any:
    """Replace `build_input_ids` of this processor instance; returns the processor."""

    def build_input_ids(
        prompt: str | list[int],
        img_grid_thw: Any = None,
        video_grid_thw: Any = None,
        audio_seq_lens: Any = None,
    ) -> tuple[list[int], list[tuple[int, int]], list[Any]]:
        items = _items(processor, img_grid_thw, video_grid_thw, audio_seq_lens)
        return _expand(_token_ids(processor, prompt, items), items)

    processor.build_input_ids = build_input_ids
    return processor


def _token_ids(
    processor: Any, prompt: str | list[int], items: dict[int, tuple[Any, list[int]]]
) -> list[int]:
    """The prompt's token ids, with one placeholder an item if it can be read that way.

    A run of image placeholders is as many images side by side if that is how many there
    are, else one image that was expanded already.
    """
    if not isinstance(prompt, str):
        return list(prompt)
    ids: list[int] = processor._tokenizer.encode(prompt)
    tokens = processor.mm_tokens
    image_id: Any = getattr(processor, "IM_TOKEN_ID", None)
    images = items.get(image_id, (None, []))[1]
    if (
        ids.count(image_id) != len(images)
        and tokens.image_token_regex is not None
        and isinstance(tokens.image_token, str)
    ):
        marked = tokens.image_token_regex.sub(lambda _match: tokens.image_token, prompt)
        ids = processor._tokenizer.encode(marked)
    return ids


def _items(
    processor: Any, images: Any, videos: Any, audios: Any
) -> dict[int, tuple[Any, list[int]]]:
    """Placeholder token id -> modality and the number of rows of each of its items."""
    from sglang.srt.managers.schedule_batch import Modality

    merged = getattr(processor, "spatial_merge_size", 1) ** 2
    found: dict[int, tuple[Any, list[int]]] = {}
    for token_id, modality, counts in (
        (
            getattr(processor, "IM_TOKEN_ID", None),
            Modality.IMAGE,
            [] if images is None else [int(grid.prod()) // merged for grid in images],
        ),
        (
            getattr(processor, "VIDEO_TOKEN_ID", None),
            Modality.VIDEO,
            [] if videos is None else [int(grid.prod()) // merged for grid in videos],
        ),
        (
            getattr(processor, "audio_token_id", None),
            Modality.AUDIO,
            [] if audios is None else [int(length) for length in audios],
        ),
    ):
        if token_id is not None:
            found[token_id] = (modality, counts)
    return found


def _expand(
    prompt: list[int], items: dict[int, tuple[Any, list[int]]]
) -> tuple[list[int], list[tuple[int, int]], list[Any]]:
    """Token ids with each placeholder repeated, the (first, last) position of each
    item, and the items' modalities in prompt order.

    Raises:
        MediaError: a modality has more or fewer placeholders than items.
    """
    remaining = {token: iter(counts) for token, (_, counts) in items.items()}
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
        start = len(input_ids)
        input_ids.extend([token] * next(remaining[token]))
        offsets.append((start, len(input_ids) - 1))
        modalities.append(items[token][0])
    return input_ids, offsets, modalities
