"""GLM-4.1V: its rotary positions tell two pictures apart by the marks that chat templates put
round each; side by side without them SGLang's own processor fails. Within a video pictures
have the same placeholder, and are a video's because of the marks round that."""

from __future__ import annotations

from typing import Any

from sglang_epd.families.expansion import IMAGE
from sglang_epd.families.family import Family


class Glm4v(Family):
    architectures = ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration")

    def written(self, processor: Any, modality: str) -> str:
        if modality == IMAGE:
            start, end = processor.IMAGE_START_TOKEN, processor.IMAGE_END_TOKEN
        else:
            start, end = processor.VIDEO_START_TOKEN, processor.VIDEO_END_TOKEN
        return f"{start}{self.mark(processor, modality)}{end}"


FAMILY = Glm4v()
