"""GLM-5-Next: linear attention in three of four layers, and an index over the fourth's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkpoints.family import text_config
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted, latent_attention, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Glm5Next(Unweighted):
    name = "glm5_next"
    title = "GLM-5-Next"
    architecture = "Glm5NextForConditionalGeneration"
    specs = tiny("tiny-glm5-next")
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
        }


FAMILY = Glm5Next()
