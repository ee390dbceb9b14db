"""The contract of a family, and what most of them do.

Leans on `multimodal.processors.base_processor.BaseMultimodalProcessor`: `mm_tokens`
(`image_token`, `image_token_regex`), `_tokenizer` and `_tokenizer_auto_adds_specials`.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar


class Family:
    """How SGLang's processor of a family reads a prompt, apart from what it makes of pictures.

    A subclass names its architectures, says why it differs, and is its module's `FAMILY`.
    """

    architectures: ClassVar[tuple[str, ...]] = ()

    def processor(self, registered: Any) -> Any:
        """The processor that lays prompts out, of the one that SGLang has registered."""
        return registered

    def mark(self, processor: Any) -> str:
        """What stands for a picture in a prompt."""
        mark: str = processor.mm_tokens.image_token
        return mark

    def written(self, processor: Any) -> str:
        """A picture as chat templates write it."""
        return self.mark(processor)

    def marks(self, processor: Any) -> re.Pattern[str]:
        """Everything that is read as the mark of a picture."""
        pattern: re.Pattern[str] = processor.mm_tokens.image_token_regex
        return pattern

    def complete(self, processor: Any, prompt: str, pictures: int) -> str:
        """The prompt with the marks that the processor puts in where they are missing."""
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
