"""What a language server holds of its model, in the server's own `/metrics`."""

from __future__ import annotations

from prometheus_client import Gauge

WEIGHTS_BYTES = Gauge(
    "sglang:epd_language_weights_bytes",
    "Bytes of the language model's parameters and buffers, of all ranks of this server",
    multiprocess_mode="livesum",
)
