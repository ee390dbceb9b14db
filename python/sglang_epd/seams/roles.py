"""What a server with a language model is called in its logs."""

from __future__ import annotations

from sglang_epd import logs
from sglang_epd.config import Settings


def install_logs(settings: Settings) -> None:
    """Lines of this process are of its server, by SGLang's `--disaggregation-mode`."""
    from sglang.srt.runtime_context import get_disagg

    mode = get_disagg().disaggregation_mode
    logs.install(settings.log_format, mode if mode in ("prefill", "decode") else "language")
