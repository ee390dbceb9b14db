"""What SGLang's Triton kernels ask about the device.

A machine without an accelerator has no Triton driver, but Triton's own interpreter, which
`TRITON_INTERPRET=1` chooses before it is imported, runs kernels as Python: slow, and enough
for the tests of models that are quantised to float8 in blocks. SGLang looks the tuned sizes
of these kernels up by the device's name, which is None here, and fails on that.
"""

from __future__ import annotations

from types import ModuleType

NAME = "cpu"


def install(fp8_kernel: ModuleType) -> None:
    """Give the device a name in `sglang.kernels.ops.gemm.fp8_kernel`."""
    fp8_kernel.get_device_name = lambda _device_id=0: NAME  # type: ignore[attr-defined]
