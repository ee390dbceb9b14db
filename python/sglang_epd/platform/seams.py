"""Which SGLang modules this platform changes, and with what."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

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

logger = logging.getLogger(__name__)

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
