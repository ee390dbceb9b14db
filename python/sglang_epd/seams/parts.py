"""Tells those who lean on a tokenizer manager's parts when it has them.

Leans on `managers.tokenizer_manager.TokenizerManager.init_disaggregation`, which makes the
last of them: the multimodal processor is there before it, it makes the bootstrap server of
a prefill server and then the multimodal receiver.
"""

from __future__ import annotations

from typing import Any

from sglang_epd.seams import decode, identities


def made(_result: None, manager: Any, **_options: Any) -> None:
    """After `init_disaggregation`.

    Raises:
        ConfigError: the model cannot have its encoder apart, and why.
    """
    from sglang.srt.runtime_context import get_disagg

    disagg = get_disagg()
    # First: what a prefill server does not know SGLang lays out, names included.
    identities.set_up(manager)
    if disagg.language_only:
        manager.mm_receiver.attach(manager)
    elif disagg.disaggregation_mode == "decode":
        decode.set_up(manager)
