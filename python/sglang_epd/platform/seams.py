"""Which SGLang modules this platform changes, and with what."""

from __future__ import annotations

from sglang_epd.deferred import when_imported
from sglang_epd.platform import (
    disaggregation,
    idle,
    kernels,
    latent_attention,
    prefix_attention,
    video,
    vision_attention,
)

_CHANGES = {
    "sglang.srt.layers.attention.vision": vision_attention.install,
    "sglang.srt.managers.scheduler": idle.install,
    "sglang.srt.disaggregation.mooncake.conn": disaggregation.install,
    "sglang.srt.utils.video_decoder": video.install_decoder,
    "sglang.kernels.ops.gemm.fp8_kernel": kernels.install,
    "sglang.srt.models.deepseek_common.attention_backend_handler": latent_attention.install,
    "sglang.srt.layers.attention.torch_native_backend": prefix_attention.install,
    "sglang.srt.multimodal.processors.qwen_vl": video.install_preprocessing,
}
_asked: set[str] = set()


def install() -> None:
    """Ask for every change in this process; asking again does nothing.

    Both `register` and the platform's constructor ask: plug-ins are not loaded in
    the encoder's data-parallel children, the platform is resolved in every process.
    """
    for name, change in _CHANGES.items():
        if name not in _asked:
            _asked.add(name)
            when_imported(name, change)
