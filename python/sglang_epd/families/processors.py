"""SGLang's own processor of a model, in a process that has none.

Leans on the in-tree `disaggregation.encoder.receiver.MMReceiverBase._init_mm_processor`,
which the schedulers of a language server use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def load_processor(server_args: Any, model_config: Any) -> Any:
    """The processor that SGLang has registered for the model."""
    from sglang.srt.disaggregation.encoder.receiver import MMReceiverBase

    host = SimpleNamespace(mm_processor=None)
    MMReceiverBase._init_mm_processor(
        host, server_args, model_config.hf_config, model_config=model_config
    )
    return host.mm_processor
