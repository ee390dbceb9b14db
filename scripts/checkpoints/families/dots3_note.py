"""Dots3-Note: latent attention, some of it in windows, for pictures, videos and sounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.family import IMAGE, text_config
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted, latent_attention, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Dots3Note(Unweighted):
    name = "dots3_note"
    title = "Dots3-Note"
    architecture = "Dots3NoteForCausalLM"
    specs = tiny("tiny-dots3-note")
    special_tokens = (
        *("<|img|>", "<|imgpad|>", "<|endofimg|>", "<|video_pad|>"),
        *("<|audio_comp_start|>", "<|audio_comp_pad|>", "<|audio_comp_end|>"),
    )
    marks = {IMAGE: "<|img|><|imgpad|><|endofimg|>"}
    stopped = ("_require_cuda()", "RuntimeError: Dots3 model only supports CUDA backend.")

    def settings(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        attention = latent_attention(spec)
        in_windows = {f"swa_{k}": v for k, v in attention.items() if "lora" in k or "head" in k}
        heads = {
            "swa_num_attention_heads": spec.text.num_heads,
            "swa_num_key_value_heads": spec.text.num_kv_heads,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        }
        towers: dict[str, Any] = {"vision_config": {}, "audio_config": {}}
        return text_config(spec, tokenizer) | attention | in_windows | heads | towers

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        image = {
            "min_pixels": 28**2,
            "max_pixels": 1280 * 28**2,
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        write_json(folder / "preprocessor_config.json", {"vision_config": image})


FAMILY = Dots3Note()
