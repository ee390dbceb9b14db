"""Keep the tower out of a language server's memory.

SGLang's models build their tower and read its weights even with `--language-only`;
nothing calls it there, because every image arrives as an embedding. So it is built of one
block, none of its tensors is read from the checkpoint, files without any other are not
opened, and its few built layers are released, before SGLang sizes the KV cache. A loader that
asks for each parameter has it whole until then. It is kept where
`--enable-adaptive-dispatch-to-encoder` may run it. Later updates of the weights leave its tensors
out, at which some models would fail.

Leans on `model_executor.model_runner.ModelRunner.load_model`, on `families.reading`, and, of
updates, on `model_executor.model_runner_components.weight_updater`: each way of them ends in the
model's `load_weights`, but for `_model_load_weights_direct(model, named_tensors)`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from sglang_epd.device.cuda import empty_cache
from sglang_epd.families import family_of
from sglang_epd.families.adapter import load_processor
from sglang_epd.families.proof import adapt, prove_names
from sglang_epd.families.reading import BY_PARAMETER, changed, held_bytes, tensors_other_than
from sglang_epd.namespace import TOWER_CONFIGS, of_tower

logger = logging.getLogger(__name__)

# Attribute names of modules that only an encoder runs, in the models that SGLang serves.
_TOWERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "audio_tower",
    "vpm",
    "apm",
    "vision_encoder",
    "embed_tokens_extend",
    # Modules that fit a tower's output to the language model.
    "multi_modal_projector",
    "mlp1",
    "resampler",
)
_KEPT = "_sglang_epd_kept"
Weights = Iterable[tuple[str, torch.Tensor]]
# Configurations' names for a tower's number of blocks.
_BLOCKS = ("depth", "num_hidden_layers", "encoder_layers")


class ReleasedTower(nn.Module):
    """Stands where the tower was; a call raises an error that says so.

    The tower's methods for prompts stay (Pixtral's puts the names of pictures into them): they
    need none of its memory.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        pad = getattr(type(tower), "pad_input_ids", None)
        if pad is not None:
            self.pad_input_ids = MethodType(pad, self)

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise RuntimeError(
            "this server runs with --language-only and holds no vision tower; "
            "images reach it as embeddings"
        )


def load(original: Callable[[Any], None], model_runner: Any) -> None:
    """Around `ModelRunner.load_model`: a language-only server loads no tower."""
    from sglang.srt.runtime_context import get_disagg, get_model, get_observability

    disagg = get_disagg()
    # A draft model is of another architecture, and has no tower.
    keeps = not disagg.language_only or disagg.enable_adaptive_dispatch_to_encoder
    if keeps or model_runner.is_draft_worker:
        original(model_runner)
        return
    hf_config = model_runner.model_config.hf_config
    whole = get_model().load_format == BY_PARAMETER or get_model().weight_cache_mode != "off"
    with nullcontext() if whole else one_block(hf_config), tensors_other_than(of_tower):
        original(model_runner)
    leave_out(model_runner.model, release(model_runner.model))
    config = model_runner.model_config
    architecture = config.hf_config.architectures[0]
    if (family := family_of(architecture)) is not None:
        processor = load_processor(model_runner.server_args, config)
        prove_names(model_runner.model, adapt(processor, architecture, family), architecture)
    held = held_bytes(model_runner.model)
    logger.info("Holds the language model alone: %.1f MiB", held / 2**20)
    if get_observability().enable_metrics:
        from sglang_epd.observability.language import weights_bytes

        weights_bytes().set(held)


def release(model: nn.Module) -> set[str]:
    """Drop the towers' modules; returns their names."""
    model = getattr(model, "thinker", model)
    released = set()
    for name in _TOWERS:
        tower = getattr(model, name, None)
        if isinstance(tower, nn.Module):
            setattr(model, name, ReleasedTower(tower))
            released.add(name)
    gc.collect()
    empty_cache()
    return released


def leave_out(model: Any, released: set[str]) -> None:
    """Have a model's weights updated without those of modules that it has no more.

    Args:
        released: the modules' names.
    """
    load_weights, kept = model.load_weights, _Kept(released)

    def load_kept(weights: Weights, *args: Any, **options: Any) -> Any:
        return load_weights(kept.of(weights), *args, **options)

    model.load_weights = load_kept
    vars(model)[_KEPT] = kept


def load_direct(original: Callable[..., None], model: Any, named_tensors: Weights) -> None:
    """Around `_model_load_weights_direct`, which looks up each name among the parameters."""
    kept: _Kept | None = vars(model).get(_KEPT)
    original(model, named_tensors if kept is None else kept.of(named_tensors))


class _Kept:
    """Which tensors a model has a place for."""

    def __init__(self, released: set[str]) -> None:
        self._released = released
        self._said = False

    def of(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if not (of_tower(name) or self._released.intersection(name.split("."))):
                yield name, tensor
            elif not self._said:
                self._said = True
                logger.warning(
                    "This server holds no tower: an update leaves out %s and its like. If they "
                    "have changed, restart encoders and language servers with the new weights",
                    name,
                )


def one_block(hf_config: Any) -> AbstractContextManager[None]:
    """The towers' configurations with one block, at which some look as they are built."""
    hf_config = getattr(hf_config, "thinker_config", hf_config)
    configs = [getattr(hf_config, name, None) for name in TOWER_CONFIGS]
    return changed(
        (config, field, 1)
        for config in configs
        for field in _BLOCKS
        if isinstance(getattr(config, field, None), int)
    )
