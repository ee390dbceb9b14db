"""MiniMax-M3: sparse attention over blocks of keys that an index picks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.family import IMAGE, VIDEO, text_config
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PAD, _VIDEO = "]<]image[>[", "]<]video[>["
_MERGING = {"spatial_merge_size": 2, "temporal_patch_size": 2}


class MiniMaxM3(Unweighted):
    name = "minimax_m3_vl"
    title = "MiniMax-M3"
    architecture = "MiniMaxM3SparseForConditionalGeneration"
    specs = tiny("tiny-minimax-m3")
    special_tokens = ("]<]start of image[>[", _PAD, "]<]end of image[>[", _VIDEO)
    # The time of a video's first frame begins with a bracket, which merges with a colon.
    prose = ("What:]<]" * 9,)
    marks = {IMAGE: _PAD, VIDEO: _VIDEO}
    stopped = (
        "reject_out_of_tree_path",
        "NotImplementedError: Out-of-tree platform CpuPlatform (device 'cpu') reached the "
        "MiniMax sparse-index KV pool, which has no platform seam yet",
    )

    def settings(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        assert spec.vision is not None
        sparse = {
            "use_sparse_attention": True,
            "sparse_attention_freq": [0, 1, 1, 1],
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 64,
            "sparse_block_size": 128,
            "sparse_topk_blocks": 4,
            "sparse_local_block": 1,
            "sparse_init_block": 0,
        }
        text = {
            "model_type": "minimax_m2",
            "sparse_attention_config": sparse,
            "head_dim": spec.text.head_dim,
            "rotary_dim": spec.text.head_dim // 2,
            "partial_rotary_factor": 0.5,
            "rope_theta": 5e6,
            "intermediate_size": 96,
            "dense_intermediate_size": spec.text.intermediate_size,
            "shared_intermediate_size": 96,
            "moe_layer_freq": [0, 1, 1, 1],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_gemma_norm": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "routed_scaling_factor": 2.0,
        }
        return {
            "text_config": text_config(spec, tokenizer) | text,
            "vision_config": {
                "model_type": "clip_vision_model",
                "num_hidden_layers": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_attention_heads": spec.vision.num_heads,
                "num_channels": 3,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-5,
                "patch_size": 14,
                "image_size": 336,
                "position_embedding_type": "rope",
                "rope_mode": "3d",
                "rope_theta": 1e4,
                "vision_segment_max_frames": 4,
                "img_token_compression_config": _MERGING,
            },
            "projector_hidden_size": spec.text.hidden_size,
            "img_token_compression_config": _MERGING,
        }

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        image = {
            "size": [672, 672],
            "patch_size": 14,
            "img_token_compression_config": _MERGING,
        }
        write_json(folder / "preprocessor_config.json", image)


FAMILY = MiniMaxM3()
