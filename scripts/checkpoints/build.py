"""Writes the files of one checkpoint: configuration, weights, tokenizer, processors."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from checkpoints import tokenizer as tok
from checkpoints.family import Family
from checkpoints.spec import CheckpointSpec
from checkpoints.weights import randomise


def build(family: Family, spec: CheckpointSpec, folder: Path) -> None:
    """Write the checkpoint that `spec` describes into the empty folder `folder`."""
    tokenizer = tok.build_tokenizer(family.special_tokens, family.marks, family.named_tokens)
    with no_init_weights():
        model = family.model(spec, tokenizer)
    randomise(model, family, seed=spec.seed, sayable=tok.word_ids(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    disable_progress_bar()
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        _rename_as_published(family, file)
    tokenizer.save_pretrained(folder)
    family.write_processors(spec, tokenizer, folder)


def _rename_as_published(family: Family, file: Path) -> None:
    weights = load_file(file)
    renamed = {family.published(name): weight for name, weight in weights.items()}
    if renamed.keys() != weights.keys():
        save_file(renamed, file, metadata={"format": "pt"})
