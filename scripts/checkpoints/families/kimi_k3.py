"""Kimi-K3: linear attention in three of four layers, and a tower like Kimi-K2.5's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.family import IMAGE, text_config
from checkpoints.kimi import PROCESSORS, Kimi, write_image_processor
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted, latent_attention, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class KimiK3(Unweighted):
    name = "kimi_k3"
    title = "Kimi-K3"
    architecture = "KimiK3ForConditionalGeneration"
    specs = tiny("tiny-kimi-k3")
    special_tokens = Kimi.special_tokens
    # Its template writes no more; what stands round a picture is said with its size.
    marks = {IMAGE: "<|media_pad|>"}
    flags = f"{Unweighted.flags} --trust-remote-code"
    carried = (PROCESSORS,)
    stopped = (
        "torch.cuda.Stream()",
        "torch.AcceleratorError: CUDA error: CUDA driver version is insufficient for CUDA runtime "
        "version",
    )

    def settings(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        assert spec.vision is not None
        text = {
            "mla_use_nope": True,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 2,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
        }
        return {
            "text_config": text_config(spec, tokenizer) | latent_attention(spec) | text,
            "vision_config": {
                "vt_num_hidden_layers": spec.vision.depth,
                "vt_hidden_size": spec.vision.hidden_size,
                "vt_intermediate_size": spec.vision.intermediate_size,
                "vt_num_attention_heads": spec.vision.num_heads,
                "qkv_hidden_size": spec.vision.hidden_size,
                "text_hidden_size": spec.text.hidden_size,
            },
            "media_placeholder_token_id": tokenizer.convert_tokens_to_ids("<|media_pad|>"),
        }

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        write_image_processor(folder, "grid_thws")


FAMILY = KimiK3()
