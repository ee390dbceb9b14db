"""Data-parallel attention (`--attn-dp-size`): batches of ranks are filled up to one size,
and their rows gathered and scattered.

SGLang does so on its own CPU engine and on accelerators. An out-of-tree CPU platform is neither:
it gets pinned memory, a Triton kernel, and operators that are registered for another device.
"""

from __future__ import annotations

from types import ModuleType


def copy_rows(dp_attention: ModuleType) -> None:
    """Copy the rows that are gathered and scattered by torch."""
    dp_attention.memcpy_func = dp_attention.memcpy_cpu  # type: ignore[attr-defined]


def gather(parallel_state: ModuleType) -> None:
    """Call a group's collectives as for a CPU: not as operators.

    Beside those, the name decides whether an accelerator's memory is freed at the end.
    """
    parallel_state._is_cpu = True  # type: ignore[attr-defined]


def fill_up(forward_batch_info: ModuleType) -> None:
    """Fill batches up as for a CPU: without pinned memory.

    The name in this module has no other use.
    """
    forward_batch_info._is_cpu = True  # type: ignore[attr-defined]


def say_length(base_attn_backend: ModuleType) -> None:
    """Have a row that fills a batch up attend to one token, whatever the backend."""
    base_attn_backend.AttentionBackend.get_cpu_graph_seq_len_fill_value = lambda _self: 1
