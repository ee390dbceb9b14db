"""Random weights whose output depends on what they are shown.

The usual initialisation (every weight N(0, 0.02²)) gives a model that says nearly the
same after any image, so that a test which compares two servers on it proves nothing.
Here every layer keeps its signal at about unit size, attention is sharp enough to pick
tokens out of a picture instead of averaging it away, and embeddings of images are as
large as embeddings of words.

One channel of the language model's residual stream is kept constant: every token and
every image embedding holds `CONSTANT` in it and no layer writes to it. Its column of
the output layer is therefore a bias for each token, which Qwen's output layer lacks;
it keeps the end of the turn, special tokens and word fragments from being said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

CONSTANT = 3.0
# Gains: the size of a layer's output for an input of size one.
_ATTENTION_SCORE = 1.6
_ATTENTION_OUTPUT = 2.0
_VISION_ATTENTION = 1.3
_AUDIO_CONVOLUTION = 2.0
_MERGER = 1.5
_DEEPSTACK = 1.0
_LOGIT = 2.0
# How far some words are likelier than others whatever the input, in logits: without it
# the answers to two photographs have hardly a token in common to be compared.
_PRIOR = 0.5
# How much less likely a token is right after itself, in logits: random models stutter.
_STUTTER = 3.0
_BIAS = 0.1


def randomise(model: nn.Module, *, seed: int, sayable: Iterable[int]) -> None:
    """Fill `model` in place; a parameter that no rule knows raises KeyError.

    Args:
        model: a Qwen2.5-VL, Qwen3-VL or Qwen2-Audio of `transformers`, float32, on the CPU.
        seed: of the one generator that all weights come from, in order of their names.
        sayable: ids of the tokens that generation should choose from.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.normal_(generator=generator)
            _scale(name, weight)
        weights = dict(model.named_parameters())
        _hold_channel_constant(weights)
        _shape_output(weights, list(sayable), generator)


def _scale(name: str, weight: torch.Tensor) -> None:
    """Turn standard normal numbers into the weight called `name`."""
    leaf = name.removeprefix("model.")
    if "norm" in leaf or "ln_q" in leaf:
        gain = _ATTENTION_SCORE if leaf.endswith(("q_norm.weight", "k_norm.weight")) else 1
        weight.mul_(_BIAS).add_(0.0 if leaf.endswith(".bias") else gain)
    elif leaf.endswith(".bias"):
        weight.mul_(_BIAS)
    elif leaf == "language_model.embed_tokens.weight":
        pass
    elif leaf in ("visual.pos_embed.weight", "audio_tower.embed_positions.weight"):
        weight.mul_(0.5)
    else:
        weight.mul_(_gain(leaf) / math.sqrt(weight[0].numel()))


def _gain(leaf: str) -> float:
    """The gain of one linear layer or convolution."""
    if leaf.startswith(("audio_tower.", "visual.")) and "merger" not in leaf:
        within = (".attn.", ".self_attn.")
        plain = _AUDIO_CONVOLUTION if ".conv" in leaf else 1.0
        return _VISION_ATTENTION if any(part in leaf for part in within) else plain
    if leaf.startswith("visual.deepstack_merger_list"):
        return _DEEPSTACK if ".linear_fc2." in leaf else _MERGER
    if leaf.startswith(("visual.merger", "multi_modal_projector.")):
        return _MERGER
    if leaf == "lm_head.weight":
        return _LOGIT
    layer = leaf.split(".")[-2]
    return {
        # Qwen3 normalises queries and keys after these two; its norms hold the same gain.
        "q_proj": _ATTENTION_SCORE,
        "k_proj": _ATTENTION_SCORE,
        "v_proj": 1.0,
        "o_proj": _ATTENTION_OUTPUT,
        "gate_proj": 1.0,
        "up_proj": 1.0,
        "down_proj": 1.0,
    }[layer]


def _hold_channel_constant(weights: dict[str, nn.Parameter]) -> None:
    """Let every embedding hold `CONSTANT` in channel 0, and no layer write to it."""
    for name, weight in weights.items():
        if name.endswith(".embed_tokens.weight"):
            weight[:, 0] = CONSTANT
        elif name.startswith("model.language_model."):
            if name.endswith((".o_proj.weight", ".down_proj.weight")):
                weight[0] = 0.0
        elif name == "model.multi_modal_projector.linear.weight":
            weight[0] = 0.0
        elif name == "model.multi_modal_projector.linear.bias":
            weight[0] = CONSTANT
        elif name.startswith(("model.visual.merger", "model.visual.deepstack_merger_list")):
            last = ".mlp.2." in name or ".linear_fc2." in name
            if last and name.endswith(".weight"):
                weight[0] = 0.0
            elif last:
                weight[0] = CONSTANT if ".merger." in name else 0.0


def _shape_output(
    weights: dict[str, nn.Parameter], sayable: list[int], generator: torch.Generator
) -> None:
    """Steer what is said: words only, some oftener than others, none twice in a row."""
    head = weights["lm_head.weight"]
    embeddings = weights["model.language_model.embed_tokens.weight"]
    # After the last norm the constant channel is CONSTANT over the size of the stream,
    # which is about CONSTANT too, so that its weight is the bias in logits; the last
    # token's own embedding is there too, shrunk by the same factor.
    head.sub_(embeddings * (_STUTTER * CONSTANT / embeddings.shape[1]))
    head[:, 0] = -8.0
    head[sayable, 0] = _PRIOR * torch.randn(len(sayable), generator=generator)
