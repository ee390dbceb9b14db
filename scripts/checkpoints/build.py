"""Writes the files of one checkpoint: configuration, weights, tokenizer, processors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen3VLConfig,
    WhisperFeatureExtractor,
)
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from checkpoints import tokenizer as tok
from checkpoints.spec import AudioSpec, CheckpointSpec, VisionSpec
from checkpoints.weights import randomise

_MEL_BINS = 128  # as Qwen2-Audio's


def build(spec: CheckpointSpec, folder: Path) -> None:
    """Write the checkpoint that `spec` describes into the empty folder `folder`."""
    tokenizer = tok.build_tokenizer(audio=isinstance(spec.tower, AudioSpec))
    with no_init_weights():
        model = _model(spec, tokenizer)
    randomise(model, seed=spec.seed, sayable=tok.word_ids(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    disable_progress_bar()
    model.save_pretrained(folder)
    if isinstance(spec.tower, AudioSpec):
        _rename_as_published(folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    _write_processors(spec, folder)


def _model(spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    text = _text_config(spec, tokenizer)
    if isinstance(spec.tower, VisionSpec):
        config = _vision_language_config(spec, spec.tower, text, tokenizer)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    audio = {
        "encoder_layers": spec.tower.num_layers,
        "d_model": spec.tower.hidden_size,
        "encoder_ffn_dim": spec.tower.intermediate_size,
        "encoder_attention_heads": spec.tower.num_heads,
        "num_mel_bins": _MEL_BINS,
    }
    config = Qwen2AudioConfig(
        audio_config=audio,
        text_config=text | {"tie_word_embeddings": False},
        audio_token_index=tokenizer.convert_tokens_to_ids(tok.AUDIO),
        tie_word_embeddings=False,
    )
    return Qwen2AudioForConditionalGeneration(config)


def _text_config(spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        # A multiple of 64, so that it splits over tensor-parallel ranks unpadded.
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": spec.text.hidden_size,
        "intermediate_size": spec.text.intermediate_size,
        "num_hidden_layers": spec.text.num_layers,
        "num_attention_heads": spec.text.num_heads,
        "num_key_value_heads": spec.text.num_kv_heads,
        "max_position_embeddings": spec.text.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _vision_language_config(
    spec: CheckpointSpec,
    tower: VisionSpec,
    text: dict[str, object],
    tokenizer: PreTrainedTokenizerFast,
) -> PreTrainedConfig:
    """The model's configuration, with token ids from `tokenizer`."""
    ids = tokenizer.convert_tokens_to_ids
    vision = {
        "depth": tower.depth,
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_heads": tower.num_heads,
        "out_hidden_size": spec.text.hidden_size,
        "patch_size": spec.patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    top = {
        "image_token_id": ids(tok.IMAGE_PAD),
        "video_token_id": ids(tok.VIDEO_PAD),
        "vision_start_token_id": ids(tok.VISION_START),
        "vision_end_token_id": ids(tok.VISION_END),
        "tie_word_embeddings": False,
    }
    rope = {"rope_type": "default", "mrope_section": list(spec.mrope_section)}
    if spec.family == "qwen2_5_vl":
        return Qwen2_5_VLConfig(
            vision_config=vision | {"fullatt_block_indexes": list(tower.taps)},
            text_config=text | {"rope_scaling": rope | {"type": "mrope"}, "rope_theta": 1e6},
            **top,
        )
    return Qwen3VLConfig(
        vision_config=vision
        | {"deepstack_visual_indexes": list(tower.taps), "num_position_embeddings": 2304},
        text_config=text
        | {
            "head_dim": spec.text.head_dim,
            "rope_scaling": rope | {"mrope_interleaved": True},
            "rope_theta": 5e6,
        },
        **top,
    )


def _write_processors(spec: CheckpointSpec, folder: Path) -> None:
    """The preprocessing files, under the names that Qwen's repositories use."""
    if isinstance(spec.tower, AudioSpec):
        WhisperFeatureExtractor(
            feature_size=_MEL_BINS,
            processor_class="Qwen2AudioProcessor",
            return_attention_mask=True,
        ).save_pretrained(folder)
        return
    qwen3 = spec.family == "qwen3_vl"
    mean, std = (
        ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
        if qwen3
        else (
            [0.48145466, 0.4578275, 0.40821073],
            [0.26862954, 0.26130258, 0.27577711],
        )
    )
    common = {
        "processor_class": "Qwen3VLProcessor" if qwen3 else "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": spec.min_pixels, "longest_edge": spec.max_pixels},
        "patch_size": spec.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": mean,
        "image_std": std,
        "do_convert_rgb": True,
    }
    image = common | {"image_processor_type": "Qwen2VLImageProcessor"}
    video = common | {
        "video_processor_type": "Qwen3VLVideoProcessor" if qwen3 else "Qwen2VLVideoProcessor",
        # Qwen3-VL samples frames by their timestamps; Qwen2.5-VL takes them as they come.
        "do_sample_frames": qwen3,
        "min_frames": 4,
        "max_frames": 64,
    }
    if qwen3:
        video["fps"] = 2
    _write_json(folder / "preprocessor_config.json", image)
    _write_json(folder / "video_preprocessor_config.json", video)


def _rename_as_published(file: Path) -> None:
    """Give a Qwen2-Audio's language model the names of Qwen's own repository.

    What `transformers` 5 writes has one "model" too many, which only it reads.
    """
    weights = load_file(file)
    doubled, published = "language_model.model.model.", "language_model.model."
    renamed = {name.replace(doubled, published): weight for name, weight in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
