"""InternVL: its processor puts marks that are missing before the assistant's turn, takes its
placeholder in a prompt for a mark, and always has the tokenizer add its special tokens.

Placeholders do not count as marks when it looks for missing ones, so that after SGLang's own
chat template (`internvl-2-5`, taken by the checkpoint's name), which writes placeholders,
there are twice as many marks as pictures. What it leaves of those that no picture fills is
a name of its own in the prompt. It is left here too: one server's answers are the measure.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from sglang_epd.families.family import Family

_UNFILLED = "<<<__IMG_PLACEHOLDER__>>>"


class InternVL(Family):
    architectures = ("InternVLChatModel", "InternS1ForConditionalGeneration")

    def marks(self, processor: Any) -> re.Pattern[str]:
        names = (processor.IMAGE_PLACEHOLDER_TOKEN, processor.IMG_CONTEXT)
        return re.compile("|".join(map(re.escape, names)))

    def complete(self, processor: Any, prompt: str, pictures: int) -> str:
        completed: str = processor._ensure_placeholders_before_assistant(
            prompt, processor.IMAGE_PLACEHOLDER_TOKEN, pictures
        )
        if completed.count(processor.IMAGE_PLACEHOLDER_TOKEN) > pictures:
            return completed  # with more marks than pictures, which is an error
        number = itertools.count()
        return self.marks(processor).sub(
            lambda mark: mark.group() if next(number) < pictures else _UNFILLED, completed
        )

    def tokenize(self, processor: Any, text: str) -> list[int]:
        ids: list[int] = processor.tokenizer(text)["input_ids"]
        return ids


FAMILY = InternVL()
