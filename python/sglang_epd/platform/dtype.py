"""Which dtype a checkpoint runs in on this CPU."""

from __future__ import annotations

from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


def choose_dtype(checkpoint: torch.dtype, *, native_bfloat16: bool) -> torch.dtype:
    """bfloat16 if the checkpoint has it and the CPU multiplies in it, else float32.

    Emulated bfloat16 is about twice as slow as float32, native up to five times as
    fast. float16 has no fast kernels on a CPU, and float32 loses nothing.
    """
    if checkpoint == torch.bfloat16 and native_bfloat16:
        return torch.bfloat16
    return torch.float32


def cpu_has_bfloat16() -> bool:
    """AVX512-BF16 or AMX on x86, the BF16 extension on Arm."""
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return True
    try:
        cpuinfo = _CPUINFO.read_text(errors="replace")
    except OSError:
        return False
    return any(
        line.startswith("Features") and "bf16" in line.split() for line in cpuinfo.splitlines()
    )
