"""What a request asks to have encoded: its media as a list of items.

Items are numbered over all modalities in the order that SGLang's processors consume
them: images, then videos, then audio, each in the order of the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from sglang_epd.errors import MediaError, ProtocolError
from sglang_epd.media import digest, parse_source
from sglang_epd.namespace import embedding_key
from sglang_epd.wire import EncodeItem
from sglang_epd.wire.messages import MAX_ITEMS

# Fields of SGLang's media objects that say where the media is, not how to read it.
_ENVELOPE = frozenset({"type", "format", "url", "image", "video", "audio", "content_hash"})
# A value that asks for nothing unusual, and must not make two equal images differ.
_NEUTRAL = {"detail": "auto"}


class MultimodalRequest(Protocol):
    """The media of one prompt, as SGLang's `GenerateReqInput` carries it."""

    image_data: Any
    video_data: Any
    audio_data: Any


def plan(request: MultimodalRequest) -> list[EncodeItem]:
    """List the request's items; inline media are decoded from base64 here.

    Raises:
        MediaError: an entry is unreadable; the message names it.
    """
    entries = _entries(request)
    if not entries:
        raise MediaError("the request's list of media is empty")
    if len(entries) > MAX_ITEMS:
        raise MediaError(
            f"a request has at most {MAX_ITEMS} media items, {len(entries)} were given"
        )
    totals = {modality: 0 for modality, _ in entries}
    for modality, _ in entries:
        totals[modality] += 1
    seen = dict.fromkeys(totals, 0)
    items = []
    for index, (modality, entry) in enumerate(entries):
        seen[modality] += 1
        label = f"{modality.lower()} {seen[modality]} of {totals[modality]}"
        items.append(_item(index, modality, label, entry))
    return items


def modalities(request: MultimodalRequest) -> list[str]:
    """The modality of each of the request's items, in the order of `plan`."""
    return [modality for modality, _ in _entries(request)]


def content_key(item: EncodeItem, identity: str) -> bytes:
    """The key that an encoder of that identity will give an item.

    Empty where only who fetches it can tell, or the item's options have no key. Hashes
    inline bytes.
    """
    if item.data is None:
        return b""
    try:
        return embedding_key(identity, digest(item.data), item.modality, item.options)
    except ProtocolError:
        return b""


def _entries(request: MultimodalRequest) -> list[tuple[str, Any]]:
    return [
        (modality, entry)
        for modality, data in (
            ("IMAGE", request.image_data),
            ("VIDEO", request.video_data),
            ("AUDIO", request.audio_data),
        )
        for entry in _flatten(data)
    ]


def _item(index: int, modality: str, label: str, entry: Any) -> EncodeItem:
    try:
        source = parse_source(entry)
    except MediaError as error:
        raise type(error)(f"{label}: {error.message}") from None
    return EncodeItem(
        item=index,
        modality=modality,
        label=label,
        data=source.data,
        url=source.url,
        options=_options(entry),
    )


def _flatten(data: Any) -> Iterator[Any]:
    if data is None:
        return
    if isinstance(data, list | tuple):
        for part in data:
            yield from _flatten(part)
        return
    yield data


def _options(entry: Any) -> dict[str, Any]:
    """Per-item options that change what the encoder makes of the media."""
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        values: Mapping[str, Any] = {
            field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)
        }
    elif isinstance(entry, Mapping):
        values = entry
    else:
        return {}
    return {
        name: value
        for name, value in values.items()
        if name not in _ENVELOPE and value not in (None, {}) and _NEUTRAL.get(name) != value
    }
