"""Where a request's media came from, on the span of the request.

Leans on `managers.tokenizer_manager.TokenizerManager.convert_to_span_attrs(state, ...)`,
which is called with `--enable-trace` alone, when a request has ended and before its root
span has, and returns that span's attributes.
"""

from __future__ import annotations

from typing import Any

_PREFIX = "sglang.epd.media_sources"


def add_sources(attributes: dict[str, Any], manager: Any, state: Any, *_rest: Any) -> None:
    """After `convert_to_span_attrs`: the counts of `meta_info.media_sources`, each by name."""
    receiver = getattr(manager, "mm_receiver", None)
    if receiver is None:  # no language server
        return
    for source, items in (receiver.frontend.account(state.obj.rid) or {}).items():
        attributes[f"{_PREFIX}.{source}"] = items
