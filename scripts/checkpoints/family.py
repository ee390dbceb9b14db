"""What a family of models says of itself, so that its checkpoints can be made and tested.

A family is one file in `families/` with one object, `FAMILY`; nothing else lists it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from checkpoints.spec import CheckpointSpec, Rule

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

IMAGE, VIDEO, AUDIO = "image", "video", "audio"


class Family:
    """A family of vision or audio language models that `transformers` can build.

    Nothing of `transformers` is imported before a method is called: whoever only asks for
    names waits for nothing.
    """

    # `model_type` of its configuration.
    name: ClassVar[str]
    # As its makers write it, and the class that SGLang serves it with.
    title: ClassVar[str]
    architecture: ClassVar[str]
    # Seeds were tried in order until `make_checkpoint.py NAME --check` passed with room.
    # The first is the one that is served to compare answers.
    specs: ClassVar[tuple[CheckpointSpec, ...]]
    # Beside the three that mark turns and the end of a text.
    special_tokens: ClassVar[tuple[str, ...]]
    # Attributes of the tokenizer, as `image_token`, that its processor asks for.
    named_tokens: ClassVar[Mapping[str, str]] = {}
    # That its tokenizer is trained on beside words, for merges of punctuation.
    prose: ClassVar[Sequence[str]] = ()
    # What stands for one item in a prompt, by the modalities that the family takes.
    marks: ClassVar[Mapping[str, str]]
    # Where random weights have to be drawn otherwise; the first rule that matches counts.
    rules: ClassVar[tuple[Rule, ...]] = ()
    # Its norms scale by one plus their weight.
    norms_add_one: ClassVar[bool] = False
    # What the language model multiplies embeddings of words by, before its first layer.
    embedding_multiplier: ClassVar[float] = 1.0
    # Flags that servers of it need.
    flags: ClassVar[str] = ""
    # Files that its checkpoints have a copy of: code that is published with the weights.
    carried: ClassVar[tuple[Path, ...]] = ()
    # Cases of the family tests in which one server cannot be the reference: case -> why.
    without: ClassVar[Mapping[str, str]] = {}
    # Where SGLang cannot serve it on a CPU: the call that stops it, and what that raises, as
    # its log has them.
    stopped: ClassVar[tuple[str, ...]] = ()

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        """The configuration of the model, with token ids from `tokenizer`."""
        raise NotImplementedError

    def model(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        """The model that is saved, float32, its weights not yet written."""
        import torch
        from transformers import AutoModelForMultimodalLM

        return AutoModelForMultimodalLM.from_config(
            self.config(spec, tokenizer), dtype=torch.float32
        )

    def load(self, folder: Path) -> PreTrainedModel:
        """The model of a checkpoint, float32, to be asked for answers."""
        import torch
        from transformers import AutoModelForMultimodalLM

        return self.speaker(AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32))

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        """Write the files that say how media are preprocessed."""
        raise NotImplementedError

    def speaker(self, model: PreTrainedModel) -> PreTrainedModel:
        """The part of the whole model that takes media and text and gives text."""
        return model

    def published(self, name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        """A weight as it is in the family's own repositories, where `transformers` writes
        it otherwise."""
        return name, weight


def text_config(spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What most language models are configured with."""
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
