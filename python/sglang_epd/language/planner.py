"""A request's media as a list of items to encode.

Items are numbered over all modalities in the order that SGLang's processors consume
them: images, then videos, then audio, each in the order of the prompt.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from blake3 import blake3

from sglang_epd.errors import MediaError, ProtocolError
from sglang_epd.language import reading
from sglang_epd.media import EscapeBudget, check_content_hash, parse_content_hash, parse_source
from sglang_epd.modality import IMAGE, MODALITIES
from sglang_epd.namespace import embedding_key
from sglang_epd.wire.http import EncodeItem
from sglang_epd.wire.messages import MAX_ITEMS

# An item's option that keeps its request apart in the prefix cache. No entry may set it.
SALT = "cache_salt"
_SALTS = ("cache_salt", "extra_key")
# Fields of SGLang's media objects that say where the media is, not how to read it.
_ENVELOPE = frozenset({"type", "format", "url", "content_hash", SALT, *map(str.lower, MODALITIES)})
# A batch has a list a prompt.
_MOST_NESTED = 8
# A value that asks for nothing unusual, and must not make two equal images differ.
_NEUTRAL = {"detail": "auto"}


def plan(request: Any, *, limits: Mapping[str, int] = {}) -> list[EncodeItem]:
    """List the request's items; inline media are decoded from base64 here, unless that was
    done beforehand (`reading`), and compared with the content hashes that the request has of
    them.

    The salt of a request (`cache_salt`, `extra_key`) keeps it apart in the prefix cache. It is
    an option of each of its items, and so a part of its key: in every cache, in stores and on
    encoders of any version the request shares embeddings with its like only.

    Args:
        request: one prompt's `GenerateReqInput`.
        limits: how many "image", "video" and "audio" items it may have. SGLang counts a list
            within the list of media as one.

    Raises:
        MediaError: an entry is unreadable, or another than its hash says; the message names it.
            Or there are too many.
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
    for modality, count in totals.items():
        most = limits.get(modality.lower(), count)
        if count > most:
            raise MediaError(
                f"{modality.capitalize()} count {count} exceeds limit {most} per request"
            )
    hashes = _content_hashes(request, totals.get(IMAGE, 0))
    seen = dict.fromkeys(totals, 0)
    salt = _salt(request)
    escapes = EscapeBudget()
    items = []
    for index, (modality, entry) in enumerate(entries):
        seen[modality] += 1
        label = f"{modality.lower()} {seen[modality]} of {totals[modality]}"
        # Images come first, and only they have hashes.
        told = hashes[index] if index < len(hashes) else None
        items.append(_item(index, modality, label, entry, told, salt=salt, escapes=escapes))
    return items


def modalities(request: Any) -> list[str]:
    """Each item's modality, in the order of `plan`; `MediaError` as there."""
    return [modality for modality, _ in _entries(request)]


def content_key(item: EncodeItem, identity: str) -> bytes:
    """The key that an encoder of that identity will give an item.

    Empty where the media have to be fetched first, or the item's options have no key. Hashes
    inline bytes that have no digest yet.
    """
    if item.data is None:
        return b""
    try:
        return embedding_key(identity, item.digest, item.modality, item.options)
    except ProtocolError:
        return b""


def entries(request: Any) -> list[Any]:
    """The request's media, as it has them, in the order of `plan`; `MediaError` as there."""
    return [entry for _, entry in _entries(request)]


def has_content_hashes(request: Any) -> bool:
    """Whether there may be content hashes to compare its images with."""
    beside = getattr(request, "mm_content_hashes", None)
    return beside is not None or any(_within(entry) for entry in entries(request))


def _entries(request: Any) -> list[tuple[str, Any]]:
    return [
        (row.name, entry)
        for row in MODALITIES.values()
        for entry in _flatten(getattr(request, row.request_field))
    ]


def _content_hashes(request: Any, images: int) -> list[Any]:
    """The hashes that stand beside the request's images, one an image."""
    told = getattr(request, "mm_content_hashes", None)
    if told is None:
        return [None] * images
    if not isinstance(told, list) or len(told) != images:
        count = len(told) if isinstance(told, list) else 1
        raise MediaError(f"mm_content_hashes has {count} entries for {images} images")
    return told


def _content_hash(entry: Any, told: Any) -> str:
    """The hash that a request has of one image: in it, or beside it."""
    found = {parse_content_hash(one) for one in (told, _within(entry))} - {""}
    if len(found) > 1:
        raise MediaError("it has two content hashes")
    return found.pop() if found else ""


def _within(entry: Any) -> Any:
    within = entry.get("content_hash") if isinstance(entry, Mapping) else None
    return getattr(entry, "content_hash", within)


def _item(
    index: int,
    modality: str,
    label: str,
    entry: Any,
    told: Any,
    *,
    salt: str,
    escapes: EscapeBudget,
) -> EncodeItem:
    read = reading.find(entry)
    try:
        source = parse_source(entry, escapes) if read is None else read.source
        if isinstance(source, MediaError):
            raise source
        content_hash = _content_hash(entry, told) if modality == IMAGE else ""
        if source.data is not None:
            # Here, because an item that is known already is sent to no encoder.
            check_content_hash(source.data, content_hash, read.sha256 if read else "")
            content_hash = ""
    except MediaError as error:
        raise type(error)(f"{label}: {error.message}") from None
    item = EncodeItem(
        item=index,
        modality=modality,
        label=label,
        data=source.data,
        url=source.url,
        options=_options(entry) | ({SALT: salt} if salt else {}),
        content_hash=content_hash,
    )
    if read is not None and read.digest:
        vars(item)["digest"] = read.digest
    return item


def _salt(request: Any) -> str:
    """A digest of the request's salts in the prefix cache; empty without any."""
    told = [getattr(request, name, None) or "" for name in _SALTS]
    if not any(told):
        return ""
    return blake3(json.dumps(told).encode(errors="surrogatepass")).hexdigest()


def _flatten(data: Any, depth: int = 0) -> Iterator[Any]:
    if data is None:
        return
    if depth > _MOST_NESTED:
        raise MediaError("the request's lists of media are nested too deeply")
    if isinstance(data, list | tuple):
        for part in data:
            yield from _flatten(part, depth + 1)
        return
    yield data


def _options(entry: Any) -> dict[str, Any]:
    """Per-item options that change the embedding."""
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
