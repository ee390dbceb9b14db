"""Random weights whose output depends on what they are shown.

The usual initialisation (every weight N(0, 0.02²)) gives a model that says nearly the
same after any image, so that a test which compares two servers on it proves nothing.
Here every layer keeps its signal at about unit size, attention is sharp enough to pick
tokens out of a picture instead of averaging it away, and embeddings of images are as
large as embeddings of words.

One channel of the language model's residual stream is kept constant: every token, and
every image embedding whose last layer has a bias, holds `CONSTANT` in it and no layer
writes to it. Its column of the output layer is therefore a bias for each token, which
Qwen's output layer lacks; it keeps the end of the turn, special tokens and word fragments
from being said.

What a parameter is, is told by its module and by the names that models use for the same
things; a family adds rules where that is not enough.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from checkpoints.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONSTANT = 3.0
# Gains: the size of a layer's output for an input of size one.
_ATTENTION_SCORE = 1.6
_ATTENTION_OUTPUT = 2.0
_TOWER_ATTENTION = 1.3
_AUDIO_CONVOLUTION = 2.0
_CONNECTOR = 1.5
_DEEPSTACK = 1.0
_LOGIT = 2.0
# How far some words are likelier than others whatever the input, in logits: without it
# the answers to two photographs have hardly a token in common to be compared.
_PRIOR = 0.5
# How much less likely a token is right after itself, in logits: random models stutter.
_STUTTER = 3.0
_BIAS = 0.1
_POSITION = 0.5

# Between the tower and the language model.
_CONNECTORS = re.compile(r"merger|projector|connector|aligner|patch_merge")
_TOWER_ATTENTIONS = re.compile(r"\.(attn|self_attn|attention)\.")
_QUERY_KEY_NORM = re.compile(r"\.(q|k|query|key)_(layer)?norm\.weight$")
# Layers of the language model, by what they make; the others' gain is one.
_SCORES = re.compile(r"\.(q|k|q_a|q_b)_proj\.")
_ATTENTION_OUTPUTS = re.compile(r"\.(o_proj|out_proj)\.")
# What the language model adds to its residual stream.
_WRITERS = re.compile(r"\.(o_proj|out_proj|down_proj)(\.weight)?$")


def randomise(model: PreTrainedModel, family: Family, *, seed: int, sayable: Iterable[int]) -> None:
    """Fill `model` in place.

    Args:
        model: its weights depend on its device and dtype too.
        family: whose rules come first.
        seed: of the one generator that all weights come from, in order of their names.
        sayable: ids of the tokens that generation should choose from.

    Raises:
        KeyError: no rule knows a parameter.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    scale = _Scale(model, family)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.normal_(generator=generator)
            scale(name, weight)
        _hold_channel_constant(model, family)
        _shape_output(model, family, list(sayable), generator)


class _Scale:
    """Turns standard normal numbers into the weights of one model."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self._model = model
        self._family = family
        self._language = language_prefix(model)
        self._heads = _names_of(model, model.get_output_embeddings())
        self._words = _names_of(model, model.get_input_embeddings())

    def __call__(self, name: str, weight: torch.Tensor) -> None:
        for rule in self._family.rules:
            if re.search(rule.pattern, name):
                deviation = rule.deviation
                if deviation is None:
                    deviation = rule.gain / math.sqrt(_inputs(weight))
                weight.mul_(deviation).add_(rule.offset)
                return
        owner = self._model.get_submodule(name.rpartition(".")[0])
        if _is_norm(name, owner):
            gain = _ATTENTION_SCORE if _QUERY_KEY_NORM.search(name) else 1
            weight.mul_(_BIAS).add_(
                0.0 if name.endswith("bias") else gain - self._family.norms_add_one
            )
        elif name.endswith("bias"):
            weight.mul_(_BIAS)
        elif name in self._words:
            if self._family.embedding_multiplier != 1:
                weight.div_(self._family.embedding_multiplier)
        elif isinstance(owner, nn.Embedding):
            weight.mul_(_POSITION)
        elif weight.ndim > 1:
            weight.mul_(self._gain(name) / math.sqrt(_inputs(weight)))
        else:
            raise KeyError(f"no rule for {name}, {list(weight.shape)}, of {type(owner).__name__}")

    def _gain(self, name: str) -> float:
        """The gain of one linear layer or convolution."""
        if name in self._heads:
            return _LOGIT
        if name.startswith(self._language):
            if _SCORES.search(name):
                # Where queries and keys are normalised after these, norms hold the same gain.
                return _ATTENTION_SCORE
            return _ATTENTION_OUTPUT if _ATTENTION_OUTPUTS.search(name) else 1.0
        if _CONNECTORS.search(name):
            return _DEEPSTACK if re.search(r"deepstack.*\.linear_fc2\.", name) else _CONNECTOR
        if _TOWER_ATTENTIONS.search(name):
            return _TOWER_ATTENTION
        return _AUDIO_CONVOLUTION if ".conv" in name else 1.0


def language_prefix(model: PreTrainedModel) -> str:
    """What the names of the language model's own parameters begin with.

    Raises:
        KeyError: its input embeddings are no module of `model`.
    """
    words = model.get_input_embeddings()
    for name, module in model.named_modules():
        if module is words:
            return name.rpartition(".")[0] + "."
    raise KeyError("the model has no input embeddings")


def _names_of(model: PreTrainedModel, part: nn.Module | None) -> frozenset[str]:
    if part is None:
        return frozenset()
    names = (name for name, module in model.named_modules() if module is part)
    return frozenset(f"{name}.weight" for name in names)


def _is_norm(name: str, owner: nn.Module) -> bool:
    return "norm" in name or "ln_q" in name or "Norm" in type(owner).__name__


def _inputs(weight: torch.Tensor) -> int:
    """Of how many numbers one output is a sum; experts are stacked in front."""
    stacked = weight.ndim == 3 and weight.shape[2] > 16
    return weight.shape[2] if stacked else weight[0].numel()


def _hold_channel_constant(model: PreTrainedModel, family: Family) -> None:
    """Let every embedding hold `CONSTANT` in channel 0, and no layer write to it."""
    model.get_input_embeddings().weight[:, 0] = CONSTANT / family.embedding_multiplier
    language = language_prefix(model)
    for name, weight in model.named_parameters():
        if name.startswith(language) and _WRITERS.search(name):
            _outputs(weight, 0).zero_()
    width = model.get_input_embeddings().weight.shape[1]
    last: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        connector = None if name.startswith(language) else _CONNECTORS.search(name)
        if connector and isinstance(module, nn.Linear) and module.out_features == width:
            last[_connector(name, connector)] = module
    for within, linear in last.items():
        linear.weight[0] = 0.0
        if linear.bias is not None:
            linear.bias[0] = 0.0 if "deepstack" in within else CONSTANT


def _outputs(weight: torch.Tensor, channel: int) -> torch.Tensor:
    """The weights, a view, that make one output of a layer or of each stacked expert."""
    return weight[:, channel] if weight.ndim == 3 else weight[channel]


def _connector(name: str, found: re.Match[str]) -> str:
    """The one of several connectors that a module belongs to: with its number, in a list."""
    rest = name[found.end() :].partition(".")
    number = re.match(r"\d+", rest[2])
    return name[: found.end()] + rest[0] + (number.group() if number and "list" in rest[0] else "")


def _shape_output(
    model: PreTrainedModel, family: Family, sayable: list[int], generator: torch.Generator
) -> None:
    """Steer what is said: words only, some oftener than others, none twice in a row."""
    words = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    if head is words:
        return
    # After the last norm the constant channel is CONSTANT over the size of the stream,
    # which is about CONSTANT too, so that its weight is the bias in logits; the last
    # token's own embedding is there too, shrunk by the same factor.
    scale = family.embedding_multiplier * _STUTTER * CONSTANT / words.shape[1]
    head.sub_(words * scale)
    head[:, 0] = -8.0
    head[sayable, 0] = _PRIOR * torch.randn(
        len(sayable), generator=generator, device=head.device, dtype=head.dtype
    )
