"""Latent attention (DeepSeek's, Kimi's) by torch-native attention.

SGLang computes a prompt without a cached prefix with the keys and values of each head, and
takes it that an attention backend uses those that it is handed. The torch-native one reads the
cache, which holds latents: it fails where their widths differ from a head's, and where they
happen to be equal it answers something else. The absorbed method attends to latents.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def install(handlers: ModuleType) -> None:
    """Have every forward of `torch_native` absorb, in
    `sglang.srt.models.deepseek_common.attention_backend_handler`."""
    absorbed = handlers.AttnForwardMethod.MLA

    def absorb(_attention: Any, _forward_batch: Any) -> Any:
        return absorbed

    handlers.AttentionBackendRegistry.register("torch_native", absorb)
