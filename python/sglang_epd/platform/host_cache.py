"""The hierarchical cache (`--enable-hierarchical-cache`): its host tier is ordinary memory.

SGLang pins that tier through CUDA's runtime, and copies pages by kernels of its own. Without an
accelerator there is nothing to pin for, and torch copies the rows.
"""

from __future__ import annotations

from typing import Any

import torch


def leave_unpinned(common: Any) -> None:
    """Register no buffer with CUDA."""
    common._cuda_host_register = lambda *_: None


def copy_rows(pool: Any) -> None:
    """Copy by torch, in a module of a kind of pools, where they are asked to copy directly."""
    pool.transfer_kv_direct = transfer


def transfer(
    *,
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    **_of_pages: Any,
) -> None:
    """Copy tokens' rows of each layer from one tier to the other.

    Args:
        src_layers, dst_layers: of a tier, `[tokens, ...]` each.
        src_indices, dst_indices: which rows.
    """
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
