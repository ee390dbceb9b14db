"""Writes the files of one checkpoint: configuration, weights, tokenizer, processors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from checkpoints import tokenizer as tok
from checkpoints.family import Family
from checkpoints.quantised import quantise
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted
from checkpoints.weights import randomise


def build(family: Family, spec: CheckpointSpec, folder: Path) -> None:
    """Write the checkpoint that `spec` describes into the empty folder `folder`."""
    tokenizer = tok.build_tokenizer(
        family.special_tokens, family.marks, family.named_tokens, family.prose
    )
    if isinstance(family, Unweighted):
        write_json(folder / "config.json", family.configuration(spec, tokenizer))
    else:
        _write_model(family, spec, tokenizer, folder)
    tokenizer.save_pretrained(folder)
    family.write_processors(spec, tokenizer, folder)
    for file in family.carried:
        shutil.copyfile(file, folder / file.name)


def _write_model(
    family: Family, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Configuration and weights."""
    with no_init_weights():
        model = family.model(spec, tokenizer)
    randomise(family.speaker(model), family, seed=spec.seed, sayable=tok.word_ids(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    disable_progress_bar()
    sharded = {} if spec.shard_mb is None else {"max_shard_size": f"{spec.shard_mb}MB"}
    model.save_pretrained(folder, **sharded)
    for file in folder.glob("*.safetensors"):
        _as_published(family, file)
    if spec.fp8:
        quantise(folder)
    for index in folder.glob("*.safetensors.index.json"):
        _index_anew(index)


def _as_published(family: Family, file: Path) -> None:
    if type(family).published is Family.published:
        return
    weights = load_file(file)
    published = dict(family.published(name, weight) for name, weight in weights.items())
    if any(weights.get(name) is not weight for name, weight in published.items()):
        save_file(published, file, metadata={"format": "pt"})


def _index_anew(index: Path) -> None:
    """Say which shard has which weight, under the names that they have now."""
    shards: dict[str, str] = {}
    for file in sorted(index.parent.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            shards |= dict.fromkeys(weights.keys(), file.name)
    content = json.loads(index.read_text()) | {"weight_map": shards}
    index.write_text(json.dumps(content, indent=2) + "\n")
