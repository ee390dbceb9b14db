"""GLM-5-Next: linear attention in three of four layers, and an index over the fourth's keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.families.glm4v import Glm4v
from checkpoints.family import text_config
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted, latent_attention, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Glm5Next(Unweighted):
    name = "glm5_next"
    title = "GLM-5-Next"
    architecture = "Glm5NextForConditionalGeneration"
    specs = tiny("tiny-glm5-next")
    special_tokens = Glm4v.special_tokens
    marks = Glm4v.marks
    stopped = (
        "torch.cuda.get_device_capability",
        "RuntimeError: Found no NVIDIA driver on your system.",
    )

    def settings(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        assert spec.vision is not None
        attention = {
            "qk_rope_head_dim": 0,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "index_head_dim": 64,
            "index_topk": 64,
            "index_n_heads": 2,
            "index_kpool": 16,
            "swiglu_limit": 10.0,
        }
        return {
            "text_config": text_config(spec, tokenizer) | latent_attention(spec) | attention,
            "vision_config": {
                "depth": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_heads": spec.vision.num_heads,
                "out_hidden_size": spec.text.hidden_size,
                "swiglu_limit": 10.0,
            },
            **Glm4v.token_ids(tokenizer),
        }

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        processor = {"processor_class": "Glm5NextProcessor"}
        image = processor | {"image_processor_type": "Glm5NextImageProcessor"}
        write_json(folder / "preprocessor_config.json", image)
        video = processor | {"video_processor_type": "Glm5NextVideoProcessor"}
        write_json(folder / "video_preprocessor_config.json", video)


FAMILY = Glm5Next()
