"""Whether this machine has an accelerator that SGLang can serve on."""

from __future__ import annotations

import importlib.util

import torch


def accelerator_present() -> bool:
    """True if any device that SGLang would choose before the CPU is usable.

    `torch.accelerator` answers for every backend built into torch or loaded into it
    (CUDA, ROCm, XPU, MPS, and NPU or another through PrivateUse1); MUSA and HPU are
    reached through packages of their own.
    """
    if torch.accelerator.is_available() or torch.cuda.is_available():
        return True
    for name in ("xpu", "npu", "mps", "musa", "hpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return True
    return any(importlib.util.find_spec(name) for name in ("torchada", "habana_frameworks"))
