"""The modules of SGLang that this platform changes, and the changes: here, or in `adapters`,
`attention_dp`, `host_cache`, `idle`, `prefix_attention`, `vision_attention` and, where it is asked
for, `emulation`, which changes uvicorn's too."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_epd.deferred import when_imported
from sglang_epd.platform import (
    adapters,
    attention_dp,
    emulation,
    host_cache,
    idle,
    prefix_attention,
    vision_attention,
)

logger = logging.getLogger(__name__)


def send_page_indices(conn: Any) -> None:
    """Hand Mooncake's sender its page indices as an array, not as a pinned copy with an event."""
    conn.MooncakeKVSender.supports_host_tensor_indices = False


def decode_on_cpu(decoder: Any) -> None:
    """Decode videos on the CPU, into ordinary memory.

    SGLang tries a GPU's decoder first, and pins the frames for the way to a GPU unless it runs
    on its own CPU engine; without a driver that is an error.
    """
    decoder._is_cpu_engine = lambda: True
    decoder._cuda_backend_enabled = False


def leave_frames(qwen_vl: Any) -> None:
    """Leave resized frames where they are, for the same reason.

    The name in this module only: elsewhere it stands for kernels that are not here.
    """
    qwen_vl.is_cpu = lambda: True


def name_device(fp8_kernel: Any) -> None:
    """Give the device a name.

    A machine without an accelerator has no Triton driver, but Triton's own interpreter, which
    `TRITON_INTERPRET=1` chooses before it is imported, runs kernels as Python: slow, and enough
    for the tests of models that are quantised to float8 in blocks. SGLang looks the tuned sizes
    of these kernels up by the device's name, which is None here, and fails on that.
    """
    fp8_kernel.get_device_name = lambda _device_id=0: "cpu"


def absorb_latents(handlers: ModuleType) -> None:
    """Have every forward of `torch_native` attend to latents (DeepSeek's, Kimi's).

    SGLang computes a prompt without a cached prefix with the keys and values of each head, and
    takes it that an attention backend uses those that it is handed. The torch-native one reads
    the cache, which holds latents: it fails where their widths differ from a head's, and where
    they happen to be equal it answers something else. The absorbed method attends to latents.
    """
    absorbed = handlers.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register("torch_native", lambda *_: absorbed)


_CHANGES = {
    "sglang.srt.distributed.parallel_state": attention_dp.gather,
    "sglang.srt.layers.attention.base_attn_backend": attention_dp.say_length,
    "sglang.srt.layers.attention.vision": vision_attention.install,
    "sglang.srt.layers.dp_attention": attention_dp.copy_rows,
    "sglang.srt.managers.scheduler": idle.install,
    "sglang.srt.lora.lora_manager": adapters.install,
    "sglang.srt.disaggregation.mooncake.conn": send_page_indices,
    "sglang.srt.mem_cache.pool_host.common": host_cache.leave_unpinned,
    "sglang.srt.mem_cache.pool_host.mha": host_cache.copy_rows,
    "sglang.srt.mem_cache.pool_host.mla": host_cache.copy_rows,
    "sglang.srt.utils.video_decoder": decode_on_cpu,
    "sglang.kernels.ops.gemm.fp8_kernel": name_device,
    "sglang.srt.models.deepseek_common.attention_backend_handler": absorb_latents,
    "sglang.srt.layers.attention.torch_native_backend": prefix_attention.install,
    "sglang.srt.model_executor.forward_batch_info": attention_dp.fill_up,
    "sglang.srt.multimodal.processors.qwen_vl": leave_frames,
}
_asked = False


def install() -> None:
    """Ask for every change in this process; asking again does nothing.

    Both `register` and the platform's constructor ask: plug-ins are not loaded in
    the encoder's data-parallel children, the platform is resolved in every process.

    Raises:
        SystemExit: an accelerator is to be emulated, and cannot be.
    """
    global _asked  # noqa: PLW0603
    if _asked:
        return
    _asked = True
    for name, change in (*_CHANGES.items(), *emulation.changes().items()):
        if not _exists(name):
            logger.warning("The CPU platform changes %s, which this SGLang does not have", name)
        when_imported(name, change)


def _exists(name: str) -> bool:
    """Whether SGLang has a module, which is not imported for that, nor are its parents."""
    top, *below = name.split(".")
    package = importlib.util.find_spec(top)
    if package is None or not package.submodule_search_locations:
        return False
    place = Path(package.submodule_search_locations[0], *below)
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
