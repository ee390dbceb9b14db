"""Dots3-Note: latent attention, some of it in windows, for pictures, videos and sounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkpoints.family import text_config
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted, latent_attention, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Dots3Note(Unweighted):
    name = "dots3_note"
    title = "Dots3-Note"
    architecture = "Dots3NoteForCausalLM"
    specs = tiny("tiny-dots3-note")
    stopped = ("_require_cuda()", "RuntimeError: Dots3 model only supports CUDA backend.")

    def settings(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        attention = latent_attention(spec)
        in_windows = {f"swa_{k}": v for k, v in attention.items() if "lora" in k or "head" in k}
        heads = {
            "swa_num_attention_heads": spec.text.num_heads,
            "swa_num_key_value_heads": spec.text.num_kv_heads,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        }
        return text_config(spec, tokenizer) | attention | in_windows | heads


FAMILY = Dots3Note()
