"""InternS2-Preview: a Qwen3.5-MoE by another name, which `transformers` does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.families.qwen3_5_moe import Qwen35Moe
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class InternS2Preview(Qwen35Moe):
    name = "intern_s2_preview"
    title = "InternS2-Preview"
    architecture = "InternS2PreviewForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-intern-s2-preview",
            TextSpec(4, 128, 256, 4, 2),
            VisionSpec(4, 64, 128, 2),
            seed=1,
        ),
    )

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        super().write_processors(spec, tokenizer, folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": self.name, "architectures": [self.architecture]}
        write_json(folder / "config.json", config)


FAMILY = InternS2Preview()
