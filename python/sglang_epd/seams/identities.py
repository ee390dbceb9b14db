"""Items that SGLang's own processing makes, named by the content of their media.

SGLang names an item by a hash of its preprocessed pixels, without their grid: that is its
place in the prefix cache and in the cache of embeddings. What `seams/adaptive.py` keeps here
has the key that encoders would give it: then it is the same whichever server has encoded
it, and two pictures of equal blocks are two.

Leans on `MultimodalProcessorOutput`: `mm_items`, by modality in the order of the request's
media, and `padded_input_ids`, the prompt with the items' identities in it, which some
processors leave to the scheduler (None).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_epd.errors import MediaError
from sglang_epd.modality import VIDEO

if TYPE_CHECKING:
    from sglang_epd.families import Family
    from sglang_epd.wire.http import EncodeItem

# A request's options for the processing of all its media, which are in no key.
REQUEST_OPTIONS = (
    "use_audio_in_video",
    "video_config",
    "min_dynamic_patch",
    "max_dynamic_patch",
    "image_max_dynamic_patch",
    "video_max_dynamic_patch",
    "images_config",
    "mm_processor_kwargs",
)
# The `video_config` that SGLang itself puts into a chat, for the few models that read it.
_SGLANGS_OWN = "_"


def name_items(output: Any, keys: Mapping[str, Sequence[bytes]]) -> None:
    """Give a processor's items their keys, where it made one of each of the media.

    Args:
        output: SGLang's `MultimodalProcessorOutput`; changed.
        keys: by modality, in the request's order.
    """
    for modality, known in keys.items():
        found = [item for item in output.mm_items if item.modality.name == modality]
        if len(found) != len(known):
            continue
        for item, key in zip(found, known, strict=True):
            item.set_identity(key)
            # It holds the earlier names; the scheduler makes it anew.
            output.padded_input_ids = None


def plan_without_options(
    request: Any, family: Family, *, limits: Mapping[str, int] = {}
) -> list[EncodeItem]:
    """As `plan`, of a request that has no options for its media but those that the model's
    encoders follow.

    For models whose processors follow others too (InternVL: tiles of a picture; MiMo-V2: pixels
    of a video), where an encoder prepares every item as its processor does by itself: a request
    that asks for something else would be answered otherwise than by one server.

    Raises:
        MediaError: it has some, or an entry is unreadable.
    """
    from sglang_epd.language.planner import SALT, plan

    items = plan(request, limits=limits)
    given = _given((name, getattr(request, name, None)) for name in REQUEST_OPTIONS)
    for item in items:
        given |= _given(item.options.items())
    # No processor looks at them.
    given -= {"detail", SALT}
    given -= family.followed(sum(item.modality == VIDEO for item in items))
    if given:
        raise MediaError(
            "where its encoder is apart this model takes no such options for its media: "
            + ", ".join(sorted(given))
        )
    return items


def _given(options: Iterable[tuple[str, Any]]) -> set[str]:
    """The names of those that ask for something; of a collection, those in it."""
    names = set()
    for name, value in options:
        if isinstance(value, Mapping):
            names |= _given(value.items())
        elif value and not name.startswith(_SGLANGS_OWN):
            names.add(name)
    return names
