"""SGLang on a machine without an accelerator.

The two entry points are `activate`, which offers `cpu.CpuPlatform` to SGLang where
no accelerator is found, and `register`, which asks for the seams that it needs.
This folder works without the rest of the package, of which it imports `deferred`, `entry` and what
an emulated accelerator needs; nothing here is imported by the rest. At module level only
`sglang.srt.platforms` may be imported: SGLang loads the platform half-way through its own
imports.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path

import torch

from sglang_epd.entry import names_role

logger = logging.getLogger(__name__)

# There on a host with the driver, in its containers too.
_DRIVER = Path("/proc/driver/nvidia/version")
PLATFORM_CLASS = "sglang_epd.platform.cpu:CpuPlatform"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's path, or None to step aside.

    None where an accelerator is present, so that the package changes nothing on such
    a machine, and where `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU engine.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or accelerator_present():
        return None
    return PLATFORM_CLASS


def register() -> None:
    """Entry point of `sglang.srt.plugins`: ask for this platform's seams in this process.

    Raises:
        SystemExit: an accelerator is to be emulated, and cannot be; or a server with an EPD role
            has no GPU where there should be one.
    """
    emulated = bool(os.environ.get("SGLANG_EPD_EMULATE"))
    if activate() is None:
        if emulated:
            raise SystemExit(
                "SGLANG_EPD_EMULATE: nothing is emulated beside an accelerator, or with "
                "SGLANG_USE_CPU_ENGINE=1"
            )
        return
    meant = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or emulated
    if _DRIVER.exists() and not meant:
        # On the CPU an encoder that lost its GPU would keep its place among the others.
        if names_role(sys.argv[1:]):
            raise SystemExit(_no_gpu())
        logger.warning("%s", _no_gpu())
    from sglang_epd.platform.seams import install

    install()


def _no_gpu() -> str:
    return (
        f"This host has an NVIDIA driver, but torch {torch.__version__} sees no GPU: servers would "
        "run on the CPU. Give its container the GPUs, or install a torch for this "
        'driver. CUDA_VISIBLE_DEVICES="" says that it is meant'
    )


def accelerator_present() -> bool:
    """True if any device that SGLang would choose before the CPU is usable.

    `torch.accelerator` answers for every backend built into torch or loaded into it
    (CUDA, ROCm, XPU, MPS, and NPU or another through PrivateUse1); MUSA and HPU are
    reached through packages of their own.
    """
    if torch.accelerator.is_available():
        return True
    for name in ("cuda", "xpu", "npu", "mps", "musa", "hpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return True
    return any(importlib.util.find_spec(name) for name in ("torchada", "habana_frameworks"))
