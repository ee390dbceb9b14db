"""Prefill-decode disaggregation through host memory over TCP."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

_RDMA_DEVICES = Path("/sys/class/infiniband")


def choose_transport() -> None:
    """Make Mooncake use TCP where this host has no RDMA device.

    SGLang and Mooncake read both variables from the environment, when an engine starts
    and in processes that inherit them; one set by the user stays. `MC_FORCE_TCP` is what
    `--disaggregation-transfer-backend mooncake_tcp` sets, so that name and the default,
    `mooncake`, mean the same here.
    """
    if not has_rdma_device():
        os.environ.setdefault("MC_FORCE_TCP", "1")
        os.environ.setdefault("MOONCAKE_PROTOCOL", "tcp")


def has_rdma_device() -> bool:
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


def choose_retraction_backup(server_args: Any) -> None:
    """Keep retracted KV in plain tensors: the default host pool is pinned memory."""
    if (
        server_args.disaggregation_mode == "decode"
        and server_args.disaggregation_decode_retraction_backup is None
    ):
        server_args.disaggregation_decode_retraction_backup = "cpu_tensor"


def install(conn: ModuleType) -> None:
    """Hand the sender its page indices as an array, not as a pinned copy with a CUDA event."""
    conn.MooncakeKVSender.supports_host_tensor_indices = False
