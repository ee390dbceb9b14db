"""InternVL: its processor puts marks that are missing before the assistant's turn, takes its
placeholder in a prompt for a mark, and always has the tokenizer add its special tokens."""

from __future__ import annotations

import re
from typing import Any

from sglang_epd.families.family import Family


class InternVL(Family):
    architectures = ("InternVLChatModel", "InternS1ForConditionalGeneration")

    def marks(self, processor: Any) -> re.Pattern[str]:
        names = (processor.IMAGE_PLACEHOLDER_TOKEN, processor.IMG_CONTEXT)
        return re.compile("|".join(map(re.escape, names)))

    def complete(self, processor: Any, prompt: str, pictures: int) -> str:
        completed: str = processor._ensure_placeholders_before_assistant(
            prompt, processor.IMAGE_PLACEHOLDER_TOKEN, pictures
        )
        return completed

    def tokenize(self, processor: Any, text: str) -> list[int]:
        ids: list[int] = processor.tokenizer(text)["input_ids"]
        return ids


FAMILY = InternVL()
