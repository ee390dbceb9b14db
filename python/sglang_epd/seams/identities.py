"""Items that SGLang's own processing makes, named by the content of their media.

SGLang names an item by a hash of its preprocessed pixels, without their grid: that is its
place in the prefix cache and in the cache of embeddings. A server that encodes itself
can give it the key that encoders would (`SGLANG_EPD_CONTENT_IDENTITY`, and always what
`seams/adaptive.py` keeps here): then it is the same on every server, whichever has encoded
it, and two pictures of equal blocks are two.

Leans on `TokenizerManager.mm_processor.process_mm_data_async(request_obj=)`, which returns
a `MultimodalProcessorOutput`: `mm_items`, by modality in the order of the request's media,
and `padded_input_ids`, the prompt with the items' identities in it, which some processors
leave to the scheduler (None). A caller's own `mm_hashes` are set after it, and stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_epd.config import Settings, environment
from sglang_epd.errors import ConfigError, MediaError
from sglang_epd.modality import VIDEO

if TYPE_CHECKING:
    from sglang_epd.families import Family
    from sglang_epd.wire.http import EncodeItem

logger = logging.getLogger(__name__)

_SETTING = "SGLANG_EPD_CONTENT_IDENTITY"
# Of these one item is one picture, video or clip, and no more enters into it than its bytes
# and options.
_FAMILIES = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
    }
)
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


def asked() -> bool:
    """Whether the setting is on; others are not looked at where it is not there at all."""
    return _SETTING in environment() and Settings.from_env().content_identity


def set_up(manager: Any) -> None:
    """When SGLang's multimodal processor is there: name what it makes, if that is asked for
    and this server encodes all of its media itself.

    Raises:
        ConfigError: not for this model.
    """
    from sglang.srt.runtime_context import get_disagg

    from sglang_epd.checkpoint import processing, served
    from sglang_epd.namespace import namespace

    disagg = get_disagg()
    apart = disagg.language_only or disagg.encoder_only
    if apart or manager.mm_processor is None or not asked():
        return
    config = manager.model_config
    family = (config.hf_config.architectures or ["?"])[0]
    if family not in _FAMILIES:
        raise ConfigError(f"{_SETTING} serves {', '.join(sorted(_FAMILIES))}; not {family}")
    checkpoint = served(whole=Settings.from_env().fingerprint == "full")
    dtype = str(config.dtype).removeprefix("torch.")
    identity = namespace(config.hf_config, checkpoint, dtype, processing())
    naming = ByContent(manager.mm_processor.process_mm_data_async, identity)
    manager.mm_processor.process_mm_data_async = naming.process
    logger.info("Media are named by their content: namespace %s", identity)


class ByContent:
    """Replaces `mm_processor.process_mm_data_async`, which is `original`, on a server that names
    by content; `identity` is its namespace."""

    def __init__(self, original: Callable[..., Awaitable[Any]], identity: str) -> None:
        self._original = original
        self._identity = identity

    async def process(self, *args: Any, request_obj: Any, **options: Any) -> Any:
        """The prompt's `MultimodalProcessorOutput`."""
        keys = await asyncio.to_thread(self._keys, request_obj)
        output = await self._original(*args, request_obj=request_obj, **options)
        if output is not None:
            name_items(output, keys)
        return output

    def _keys(self, request: Any) -> dict[str, list[bytes]]:
        from sglang_epd.language.planner import content_key, plan

        if any(getattr(request, option, None) for option in REQUEST_OPTIONS):
            return {}
        try:
            items = plan(request)
        except MediaError:
            # Embeddings, say, or media that SGLang's own processing will refuse.
            return {}
        keys: dict[str, list[bytes]] = {}
        for item in items:
            keys.setdefault(item.modality, []).append(content_key(item, self._identity))
        return keys


def name_items(output: Any, keys: Mapping[str, Sequence[bytes]]) -> None:
    """Give a processor's items their keys, where it made one of each of the media.

    Args:
        output: SGLang's `MultimodalProcessorOutput`; changed.
        keys: by modality, in the request's order; empty where one is not known, as of what
            SGLang itself has fetched.
    """
    for modality, known in keys.items():
        found = [item for item in output.mm_items if item.modality.name == modality]
        if len(found) != len(known):
            continue
        for item, key in zip(found, known, strict=True):
            if key:
                item.set_identity(key)
                # It holds the earlier names; the scheduler makes it anew.
                output.padded_input_ids = None


def plan_without_options(request: Any, family: Family) -> list[EncodeItem]:
    """As `plan`, of a request that has no options for its media but those that the model's
    encoders follow.

    For models whose processors follow others too (InternVL: tiles of a picture; MiMo-V2: pixels
    of a video), where an encoder prepares every item as its processor does by itself: a request
    that asks for something else would be answered otherwise than by one server.

    Raises:
        MediaError: it has some, or an entry is unreadable.
    """
    from sglang_epd.language.planner import SALT, plan

    items = plan(request)
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
