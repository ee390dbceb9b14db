"""Qwen3-Omni: sees and hears; of what it can say only the text, the thinker's, is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.family import AUDIO, text_config
from checkpoints.qwen import Qwen3Vision, experts, rope, write_json
from checkpoints.spec import AudioSpec, CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_START, _PAD, _END = "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"
_MEL_BINS = 128


class Qwen3OmniMoe(Qwen3Vision):
    name = "qwen3_omni_moe"
    title = "Qwen3-Omni-MoE"
    architecture = "Qwen3OmniMoeForConditionalGeneration"
    processor = "Qwen3OmniMoeProcessor"
    video_processor = "Qwen2VLVideoProcessor"
    samples_frames = False
    specs = (
        CheckpointSpec(
            "tiny-qwen3-omni-moe",
            TextSpec(3, 128, 256, 2, 2),
            VisionSpec(4, 64, 128, 2, taps=(0, 1, 2)),
            AudioSpec(2, 64, 128, 2),
            seed=4,
        ),
    )
    special_tokens = (*Qwen3Vision.special_tokens, _START, _PAD, _END)
    marks = Qwen3Vision.marks | {AUDIO: _START + _PAD + _END}
    named_tokens = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "audio_token": _PAD,
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": _START,
        "audio_eos_token": _END,
    }

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Qwen3OmniMoeConfig

        assert spec.audio is not None
        ids = tokenizer.convert_tokens_to_ids
        thinker = {
            "vision_config": self.vision_config(spec),
            "audio_config": {
                "encoder_layers": spec.audio.num_layers,
                "d_model": spec.audio.hidden_size,
                "encoder_ffn_dim": spec.audio.intermediate_size,
                "encoder_attention_heads": spec.audio.num_heads,
                "num_mel_bins": _MEL_BINS,
                "output_dim": spec.text.hidden_size,
                "downsample_hidden_size": 16,
            },
            "text_config": text_config(spec, tokenizer)
            | experts(spec)
            | {
                "head_dim": spec.text.head_dim,
                "rope_scaling": rope(spec, interleaved=True),
                "rope_theta": 1e6,
                "tie_word_embeddings": False,
            },
            **self.token_ids(tokenizer),
            "audio_token_id": ids(_PAD),
            "audio_start_token_id": ids(_START),
            "audio_end_token_id": ids(_END),
        }
        return Qwen3OmniMoeConfig(
            thinker_config=thinker,
            enable_audio_output=False,
            im_start_token_id=ids("<|im_start|>"),
            im_end_token_id=tokenizer.eos_token_id,
        )

    def speaker(self, model: PreTrainedModel) -> PreTrainedModel:
        return model.thinker

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        """One file says how pictures and how sounds are preprocessed."""
        from transformers import WhisperFeatureExtractor

        super().write_processors(spec, tokenizer, folder)
        hears = WhisperFeatureExtractor(feature_size=_MEL_BINS, return_attention_mask=True)
        file = folder / "preprocessor_config.json"
        write_json(file, hears.to_dict() | json.loads(file.read_text()))


FAMILY = Qwen3OmniMoe()
