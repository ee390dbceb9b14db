"""The contract of a family, the behaviour of most of them, and those that differ, each with
its reason.

Leans on `multimodal.processors.base_processor.BaseMultimodalProcessor`: `mm_tokens`
(`image_token`, `image_token_regex`, and so for videos), `_tokenizer` and
`_tokenizer_auto_adds_specials`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sglang_epd.errors import MediaError
from sglang_epd.families.expansion import Part
from sglang_epd.modality import IMAGE, VIDEO

# The architectures that SGLang's in-tree EPD knows. They say themselves what an encoder-only and
# a language-only server leave out (`encoder_only` and `language_only` of their configuration),
# and their processors lay a prompt out from grids (`get_validated_mm_data`). A contract test
# compares this with `arg_groups.pd_disaggregation_hook.handle_encoder_disaggregation`.
IN_TREE = frozenset(
    {
        "Dots3NoteForCausalLM",
        "Glm5NextForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "MiMoV2ForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "MuseSparkForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)

# Of them, those whose encoders follow options of an item as one server does: by the names that
# their preprocessing looks for.
FOLLOWED = {
    "MiniMaxM3SparseForConditionalGeneration": ("max_long_side_pixel", "fps", "preprocess_kwargs")
}
# Those of which one server follows some, and SGLang's preprocessing on an encoder none.
FOLLOWING_OPTIONS = frozenset({"MiMoV2ForCausalLM"})


class Family:
    """How SGLang's processor of a family reads a prompt, apart from what it makes of media.

    A subclass names its architectures, and says why it differs.
    """

    architectures: ClassVar[tuple[str, ...]] = ()

    def followed(self, videos: int) -> frozenset[str]:
        """The options of items that encoders follow as one server does, in a request of so many
        videos."""
        return frozenset()

    def asked(self, video: Any, options: Mapping[str, Any]) -> Any:
        """A video as the processor takes it, with its options."""
        return video

    def processor(self, registered: Any) -> Any:
        """The processor that lays prompts out, of the one that SGLang has registered."""
        return registered

    def mark(self, processor: Any, modality: str) -> str | None:
        """The expansion of an item in a prompt; None where the processor knows none of them."""
        mark: str | None = getattr(processor.mm_tokens, f"{modality.lower()}_token", None)
        return mark

    def written(self, processor: Any, modality: str) -> str:
        """An item as chat templates write it: the mark, and text that may stand round it."""
        return self.mark(processor, modality) or ""

    def marks(self, processor: Any) -> dict[str, re.Pattern[str]]:
        """By modality, everything that is read as the mark of an item."""
        patterns = {
            modality: getattr(processor.mm_tokens, f"{modality.lower()}_token_regex", None)
            for modality in (IMAGE, VIDEO)
        }
        return {modality: pattern for modality, pattern in patterns.items() if pattern is not None}

    def complete(self, processor: Any, prompt: str, parts: Sequence[Part]) -> str:
        """The prompt with the marks that the processor puts in where they are missing.

        Raises:
            MediaError: one server would prepare an item otherwise in this prompt.
        """
        return prompt

    def tokenize(self, processor: Any, text: str) -> list[int]:
        """Token ids, as the processor gets them of a prompt that it has expanded."""
        ids: list[int] = processor._tokenizer(text, **special_tokens(processor, text))["input_ids"]
        return ids


def special_tokens(processor: Any, text: str) -> dict[str, bool]:
    """The option with which a tokenizer makes token ids of a prompt as SGLang has them made: what
    a chat template has begun with BOS gets no other."""
    bos = processor._tokenizer_auto_adds_specials and processor._tokenizer.bos_token
    return {"add_special_tokens": False} if bos and text.startswith(bos) else {}


_UNFILLED = "<<<__IMG_PLACEHOLDER__>>>"


class Wrapped(Family):
    """Mistral 3 and LLaVA: SGLang registers a wrapper that holds the processor of the vision
    tower, without the attributes that every processor has."""

    architectures = ("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration")

    def processor(self, registered: Any) -> Any:
        return registered.inner


_RATES = frozenset({"fps", "max_frames"})
_BOUNDS = frozenset({"max_image_tokens", "max_tokens_per_frame"})


class Glm4v(Family):
    """GLM-4.1V: its rotary positions tell two pictures apart by the marks that chat templates
    put round each; side by side without them SGLang's own processor fails. Within a video
    pictures have the same placeholder, and are a video's because of the marks round that."""

    architectures: ClassVar[tuple[str, ...]] = (
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
    )

    def followed(self, videos: int) -> frozenset[str]:
        # One server gives each of several videos its part of one bound on tokens.
        return _RATES | _BOUNDS if videos == 1 else _RATES

    def asked(self, video: Any, options: Mapping[str, Any]) -> Any:
        names = (_RATES | _BOUNDS | {"preprocess_kwargs"}) & options.keys()
        return {"url": video, **{name: options[name] for name in names}} if names else video

    def written(self, processor: Any, modality: str) -> str:
        if modality == IMAGE:
            start, end = processor.IMAGE_START_TOKEN, processor.IMAGE_END_TOKEN
        else:
            start, end = processor.VIDEO_START_TOKEN, processor.VIDEO_END_TOKEN
        return f"{start}{self.mark(processor, modality)}{end}"


class Dots3Note(Family):
    """Dots3-Note: the in-tree EPD lists it, and can neither prepare its pictures (it looks for
    an image processor of `transformers`) nor lay out a prompt (its processor has no
    `IM_START_TOKEN_ID`)."""

    architectures = ("Dots3NoteForCausalLM",)

    def mark(self, processor: Any, modality: str) -> str | None:
        # It writes videos as pictures and sounds.
        if modality == VIDEO:
            return None
        start, end = processor.image_start_token, processor.image_end_token
        return f"{start}{processor.image_token}{end}"


class Glm5Next(Glm4v):
    """GLM-5-Next: the in-tree EPD lists it, and writes a video without its frames' times and
    marks, where one server writes GLM-4.1V's."""

    architectures = ("Glm5NextForConditionalGeneration",)

    def complete(self, processor: Any, prompt: str, parts: Sequence[Part]) -> str:
        # One server gives each video its part of what one alone may have.
        videos = [part.expansion.rows for part in parts if part.modality == VIDEO]
        most = processor._processor.video_processor.max_image_tokens
        if len(videos) > 1 and max(videos) > most // len(videos):
            raise MediaError(
                f"one server would make the prompt's {len(videos)} videos smaller than an encoder "
                "does, which sees each alone: send fewer or smaller videos"
            )
        return prompt


class InternVL(Family):
    """Its processor puts marks that are missing before the assistant's turn, takes its placeholder
    for pictures in a prompt for a mark, always has the tokenizer add its special tokens, and
    takes fewer frames of videos where the rest of the prompt leaves too little room.

    Placeholders do not count as marks when it looks for missing ones, so that after SGLang's own
    chat template (`internvl-2-5`, taken by the checkpoint's name), which writes placeholders,
    there are twice as many marks as pictures. What it leaves of those that no picture fills is
    a name of its own in the prompt. It is left here too: one server's answers are the measure.

    With InternLM2 the placeholder is the mark, and there are no videos.

    An encoder sees a video alone, and takes the number of frames that there is room for then
    (32, mostly). A request of which one server would show the model fewer is refused.
    """

    architectures = ("InternVLChatModel", "InternS1ForConditionalGeneration")

    def mark(self, processor: Any, modality: str) -> str | None:
        # Its prompts with videos are laid out for some language models only.
        if modality == VIDEO and processor.video_token_id is None:
            return None
        return super().mark(processor, modality)

    def marks(self, processor: Any) -> dict[str, re.Pattern[str]]:
        names = (processor.IMAGE_PLACEHOLDER_TOKEN, processor.IMG_CONTEXT)
        return super().marks(processor) | {IMAGE: re.compile("|".join(map(re.escape, names)))}

    def complete(self, processor: Any, prompt: str, parts: Sequence[Part]) -> str:
        if processor.llm_arch == "InternLM2ForCausalLM":
            mark = processor.IMG_CONTEXT
            prompt = prompt.replace(processor.IMAGE_PLACEHOLDER_TOKEN, mark)
            completed: str = processor._ensure_placeholders_before_assistant(
                prompt, mark, len(parts)
            )
            return completed
        for modality, mark in (
            (IMAGE, processor.IMAGE_PLACEHOLDER_TOKEN),
            (VIDEO, processor.VIDEO_PLACEHOLDER_TOKEN),
        ):
            count = sum(part.modality == modality for part in parts)
            prompt = processor._ensure_placeholders_before_assistant(prompt, mark, count)
            if prompt.count(mark) > count:
                return prompt  # with more marks than items, which is an error
        _check_frames(processor, prompt, parts)
        pictures = sum(part.modality == IMAGE for part in parts)
        number = itertools.count()
        return self.marks(processor)[IMAGE].sub(
            lambda mark: mark.group() if next(number) < pictures else _UNFILLED, prompt
        )

    def tokenize(self, processor: Any, text: str) -> list[int]:
        ids: list[int] = processor.tokenizer(text)["input_ids"]
        return ids


def _check_frames(processor: Any, prompt: str, parts: Sequence[Part]) -> None:
    """Raises:
    MediaError: one server would take another number of frames of each video.
    """
    videos = [len(part.expansion.runs) for part in parts if part.modality == VIDEO]
    if not videos:
        return
    rows = sum(part.expansion.rows for part in parts if part.modality == IMAGE)
    frames = processor._resolve_video_num_frames(
        requested=processor.DEFAULT_VIDEO_NUM_FRAMES,
        num_videos=len(videos),
        text_len=processor._token_len(prompt),
        image_tile_cnt=rows // processor.num_image_token,
    )
    if set(videos) != {frames}:
        raise MediaError(
            f"the prompt leaves room for {frames} frames of each of its videos, and the encoder "
            f"takes {max(videos)}: shorten it, or send fewer videos or images"
        )


DIFFERING = (Wrapped(), Glm4v(), Dots3Note(), Glm5Next(), InternVL())
