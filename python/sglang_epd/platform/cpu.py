"""The platform that SGLang loads: torch on the CPU, without SGLang's own kernels.

SGLang's in-tree CPU engine needs a build of `sglang-kernel` without CUDA; this platform
runs on the wheels as they are, through the torch-native paths.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_epd.platform.defaults import apply_defaults, wait_passively
from sglang_epd.platform.seams import install


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU as an out-of-tree platform, so that SGLang asks it instead of its own tables."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        wait_passively()
        run_eagerly()
        install()

    def get_device(self, device_id: int = 0) -> str:
        """A string: without `--device` SGLang splits it at the colon."""
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes that this process may use: the machine's, or its control group's limit."""
        from sglang.srt.utils.common import get_instance_memory_status

        total = super().get_device_total_memory(device_id)
        limit = get_instance_memory_status("/sys/fs/cgroup/memory.max")
        return total if limit is None else min(total, limit)

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        apply_defaults(server_args)


def run_eagerly() -> None:
    """Turn the `torch.compile` decorators in SGLang's layers into no-ops.

    They fuse a few element-wise operations, which a CPU does not notice, and compile
    them with a C++ compiler at the first request and again for new shapes: 15 s of
    start-up on two cores, and a failure where no compiler is installed. Read when a
    module is decorated, so it has to be set before SGLang's layers are imported. A
    value set by the user stays.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
