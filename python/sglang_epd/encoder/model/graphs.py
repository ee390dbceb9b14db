"""The CUDA graphs that `SGLANG_VIT_ENABLE_CUDA_GRAPH` has SGLang's towers capture.

SGLang captures a graph for each layout of a batch that it has not seen, and keeps it with
its memory. Here a tower keeps no more than some, and forgets all when it has as many, or
has no memory left.

Leans on the attributes under which `multimodal.vit_cuda_graph_runner.ViTCudaGraphRunner` and
`multimodal.internvl_vit_cuda_graph_runner.InternViTCudaGraphRunner` lie in their towers, on
their being made of the tower alone, and on the names of their graphs; on `capacity` of
`multimodal.kimi_k3_vit_cuda_graph_runner.KimiK3ViTCudaGraphRunner`.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from sglang_epd.device import Device

logger = logging.getLogger(__name__)

_RUNNERS = ("graph_runners", "cuda_graph_runner")
_GRAPHS = ("block_graphs", "graphs")
# Batches of one to 32 items of one size, and as many again.
_MOST = 64


def forget(model: nn.Module, device: Device, most: int = _MOST) -> None:
    """Drop the graphs of towers that have as many as they may; call it while no pass is made.

    Args:
        model: the towers are modules of it.
        most: graphs that one tower may keep.
    """
    for tower in model.modules():
        for name in _RUNNERS:
            runner: Any = getattr(tower, name, None)
            if runner is None or hasattr(runner, "capacity"):  # Kimi-K3's has a bound of its own
                continue
            held = max((len(getattr(runner, graphs, ())) for graphs in _GRAPHS), default=0)
            if held >= most:
                logger.warning(
                    "SGLANG_VIT_ENABLE_CUDA_GRAPH: %d layouts of batches have a graph each; all "
                    "are dropped%s. It is of use where media have few sizes",
                    held,
                    "" if most else " for their memory",
                )
                device.synchronize()  # one may be in work
                setattr(tower, name, type(runner)(tower))
