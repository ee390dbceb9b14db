"""The contract of a family, and what most of them do.

Leans on `multimodal.processors.base_processor.BaseMultimodalProcessor`: `mm_tokens`
(`image_token`, `image_token_regex`, and so for videos), `_tokenizer` and
`_tokenizer_auto_adds_specials`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

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


class Family:
    """How SGLang's processor of a family reads a prompt, apart from what it makes of media.

    A subclass (`differing`) names its architectures, and says why it differs.
    """

    architectures: ClassVar[tuple[str, ...]] = ()

    def processor(self, registered: Any) -> Any:
        """The processor that lays prompts out, of the one that SGLang has registered."""
        return registered

    def mark(self, processor: Any, modality: str) -> str | None:
        """What stands for an item in a prompt; None where the processor knows none of them."""
        mark: str | None = getattr(processor.mm_tokens, f"{modality.lower()}_token", None)
        return mark

    def written(self, processor: Any, modality: str) -> str:
        """An item as chat templates write it: the mark, and what may stand round it."""
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
        tokenizer = processor._tokenizer
        options = {}
        # SGLang's rule: what a chat template has begun with BOS gets no other.
        bos = processor._tokenizer_auto_adds_specials and tokenizer.bos_token
        if bos and text.startswith(bos):
            options["add_special_tokens"] = False
        ids: list[int] = tokenizer(text, **options)["input_ids"]
        return ids
