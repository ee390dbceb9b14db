"""Give back a language server's vision tower.

SGLang's Qwen models build and load it even with `--language-only`; nothing calls it
there, because every image arrives as an embedding. Released straight after loading,
its memory is there when SGLang sizes the KV cache. Kept, and its speed measured, where
`--enable-adaptive-dispatch-to-encoder` may run it.

Leans on `model_executor.model_runner.ModelRunner.load_model`.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import nn

from sglang_epd.seams import local_rate

logger = logging.getLogger(__name__)

# Attribute names of what only an encoder runs, in the models that SGLang serves.
_TOWERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "audio_tower",
    # What fits a tower's output to the language model.
    "multi_modal_projector",
    "mlp1",
)


class ReleasedTower(nn.Module):
    """Stands where the tower was, and says so to whoever calls it."""

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise RuntimeError(
            "this server runs with --language-only and holds no vision tower; "
            "images reach it as embeddings"
        )


def release(_result: None, model_runner: Any) -> None:
    """After `ModelRunner.load_model`: drop the towers of a language-only server."""
    from sglang.srt.runtime_context import get_disagg

    disagg = get_disagg()
    if not disagg.language_only:
        return
    model = getattr(model_runner.model, "thinker", model_runner.model)
    if disagg.enable_adaptive_dispatch_to_encoder:
        towers = [getattr(model, name, None) for name in _TOWERS]
        watch = local_rate.TowerWatch(local_rate.path())
        watch.watch(tower for tower in towers if isinstance(tower, nn.Module))
        return
    released = 0
    for name in _TOWERS:
        tower = getattr(model, name, None)
        if isinstance(tower, nn.Module) and not isinstance(tower, ReleasedTower):
            released += sum(p.numel() * p.element_size() for p in tower.parameters())
            setattr(model, name, ReleasedTower())
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    logger.info("Released the vision tower: %.1f MiB", released / 2**20)
