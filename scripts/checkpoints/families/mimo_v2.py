"""MiMo-V2: pictures, videos and sounds, attention in windows and in full by turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.family import AUDIO, IMAGE, VIDEO, text_config
from checkpoints.qwen import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONFIGURATION = Path(__file__).parents[1] / "remote" / "configuration_mimo_v2.py"
_OTHERS = {
    "audio": "<|audio_pad|>",
    "audio_start": "<|mimo_audio_start|>",
    "audio_end": "<|mimo_audio_end|>",
    "video_start": "<|mimo_video_start|>",
    "video_end": "<|mimo_video_end|>",
}


class MiMoV2(Unweighted):
    name = "mimo_v2"
    title = "MiMo-V2"
    architecture = "MiMoV2ForCausalLM"
    specs = tiny("tiny-mimo-v2")
    special_tokens = (
        VISION_START,
        VISION_END,
        IMAGE_PAD,
        VIDEO_PAD,
        *_OTHERS.values(),
    )
    marks = {
        IMAGE: VISION_START + IMAGE_PAD + VISION_END,
        VIDEO: VISION_START + VIDEO_PAD + VISION_END,
        AUDIO: _OTHERS["audio_start"] + _OTHERS["audio"] + _OTHERS["audio_end"],
    }
    flags = f"{Unweighted.flags} --trust-remote-code"
    carried = (_CONFIGURATION,)
    stopped = (
        "torch.cuda.current_device()",
        "RuntimeError: Found no NVIDIA driver on your system.",
    )

    def settings(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        assert spec.vision is not None
        heads = {
            "num_attention_heads": spec.text.num_heads,
            "num_key_value_heads": spec.text.num_kv_heads,
            "head_dim": spec.text.head_dim,
            "v_head_dim": spec.text.head_dim,
        }
        text = {
            "auto_map": {"AutoConfig": f"{_CONFIGURATION.stem}.MiMoV2Config"},
            "hidden_act": "silu",
            "attention_bias": False,
            "layernorm_epsilon": 1e-5,
            "sliding_window_size": 128,
            "hybrid_layer_pattern": [0, 1, 0, 1],
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_intermediate_size": 96,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        }
        return {
            **text_config(spec, tokenizer),
            **heads,
            **{f"swa_{name}": value for name, value in heads.items()},
            **text,
            "vision_config": {
                "depth": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_heads": spec.vision.num_heads,
                "num_key_value_heads": spec.vision.num_heads,
                "out_hidden_size": spec.text.hidden_size,
                "fullatt_block_indexes": [1],
            },
            "audio_config": {
                "input_local_layers": 1,
                "input_local_dim": 64,
                "input_local_attn_heads": 4,
                "input_local_head_dim": 16,
                "input_local_intermediate_size": 128,
                "out_hidden_size": spec.text.hidden_size,
            },
            "processor_config": _processor(tokenizer),
        }


def _processor(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ids = tokenizer.convert_tokens_to_ids
    return {
        "audio_sampling_rate": 24000,
        "use_video_timestamps": True,
        "image_token_id": ids(IMAGE_PAD),
        "video_token_id": ids(VIDEO_PAD),
        "vision_start_token_id": ids(VISION_START),
        "vision_end_token_id": ids(VISION_END),
        **{f"{name}_token_id": ids(token) for name, token in _OTHERS.items()},
    }


FAMILY = MiMoV2()
