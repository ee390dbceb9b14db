"""Variables and flags of SGLang's own EPD that this package does not read.

Those that are set are named in one line of the log, with their replacements. Those that
would be missed are refused in `seams/server_args.py`, some are honoured: docs/migration.md has
all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_PROBES = "nothing: encoders are probed every second, and hold leases of 15 s"

# By the kind of server that would read it in-tree: the name, and what to use instead.
UNREAD: dict[str, dict[str, str]] = {
    "encoder": {
        "SGLANG_ENCODER_MAX_BATCH_SIZE": (
            "SGLANG_EPD_ENCODER_BATCH_ITEMS and SGLANG_EPD_ENCODER_BATCH_PATCHES"
        ),
        "SGLANG_ENCODER_DP_WORKER_MAX_INFLIGHT": "SGLANG_EPD_ENCODER_MAX_ITEMS, of all towers",
        "SGLANG_ENCODER_REQ_TIMEOUT": "SGLANG_EPD_ENCODER_TIMEOUT_S on language servers",
        "SGLANG_ENCODER_SEND_TIMEOUT": "SGLANG_EPD_GRANT_TIMEOUT_S on language servers",
        "REQUEST_TIMEOUT": "SGLANG_EPD_MEDIA_TIMEOUT_S",
        "--extra-metric-labels": "nothing: encoders' series have their own labels only",
    },
    "language": {
        "SGLANG_ENCODER_HTTP_TIMEOUT": "SGLANG_EPD_ENCODER_TIMEOUT_S",
        "SGLANG_ENCODER_GRPC_TIMEOUT_SECS": "nothing: encoders are asked over HTTP",
        "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL": _PROBES,
        "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT": _PROBES,
        "SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL": _PROBES,
        "SGLANG_EMBEDDING_POOL_SIZE_MB": "SGLANG_EPD_RECEIVE_BUDGET_MB, of the host's memory",
        "--trust-mm-content-hashes": "nothing: a content hash is always compared",
    },
}


def announce(server: str, flags: Mapping[str, Any]) -> None:
    """Log one line that names the set variables and flags that are not read. Once a server.

    Args:
        server: "encoder" or "language".
        flags: those of `UNREAD`, with their values.
    """
    if told := "; ".join(_set(server, flags)):
        logger.warning("Set, but not read by sglang-epd: %s", told)


def _set(server: str, flags: Mapping[str, Any]) -> Iterator[str]:
    for name, instead in UNREAD[server].items():
        if flags.get(name) or name in os.environ:
            yield f"{name} (instead: {instead})"
