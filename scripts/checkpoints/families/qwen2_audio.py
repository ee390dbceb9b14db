"""Qwen2-Audio, which hears 30 s at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.family import AUDIO, Family, text_config
from checkpoints.qwen import SPECIAL_TOKENS
from checkpoints.spec import AudioSpec, CheckpointSpec, TextSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_START, _PAD, _END = "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"
_MEL_BINS = 128


class Qwen2Audio(Family):
    name = "qwen2_audio"
    title = "Qwen2-Audio"
    architecture = "Qwen2AudioForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-qwen2-audio",
            TextSpec(2, 128, 256, 2, 2),
            audio=AudioSpec(2, 64, 128, 2),
            seed=1,
        ),
    )
    special_tokens = (*SPECIAL_TOKENS, _START, _PAD, _END)
    marks = {AUDIO: _START + _PAD + _END}
    without = {
        "a sound twice": "two clips in one request end a colocated server's scheduler; compared "
        "with the model of `transformers` in test/integration/test_audio.py",
    }

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Qwen2AudioConfig

        assert spec.audio is not None
        return Qwen2AudioConfig(
            audio_config={
                "encoder_layers": spec.audio.num_layers,
                "d_model": spec.audio.hidden_size,
                "encoder_ffn_dim": spec.audio.intermediate_size,
                "encoder_attention_heads": spec.audio.num_heads,
                "num_mel_bins": _MEL_BINS,
            },
            text_config=text_config(spec, tokenizer) | {"tie_word_embeddings": False},
            audio_token_index=tokenizer.convert_tokens_to_ids(_PAD),
            tie_word_embeddings=False,
        )

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        from transformers import WhisperFeatureExtractor

        WhisperFeatureExtractor(
            feature_size=_MEL_BINS,
            processor_class="Qwen2AudioProcessor",
            return_attention_mask=True,
        ).save_pretrained(folder)

    def published(self, name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        """What `transformers` 5 writes has one "model" too many, which only it reads."""
        return name.replace("language_model.model.model.", "language_model.model."), weight


FAMILY = Qwen2Audio()
