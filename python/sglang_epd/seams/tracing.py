"""Our spans in SGLang's trace of a request, and one trace id on prefill and decode servers.

Leans on `managers.tokenizer_manager.TokenizerManager.convert_to_span_attrs(state, ...)`,
which is called with `--enable-trace` alone, when a request has ended and before its root
span has, and returns that span's attributes; on `observability.trace.process_tracing_init`,
which SGLang's processes call by themselves; and on the `trace_ctx` of a request's
`time_stats`, whose `tracing_enable` says whether that request is traced and whose
`root_span_context` is OpenTelemetry's context of its root span. A root span is begun in
`req_time_stats.APIServerReqTimeStats.set_created_time`, and where no client's is above it, it
draws its trace's id from `observability.trace.TraceCustomIdGenerator.generate_trace_id`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from sglang_epd import spans
from sglang_epd.spans import OFF, Span

_PREFIX = "sglang.epd.media_sources"
_TRACE_ID_BYTES = 16
_next = threading.local()


def add_sources(attributes: dict[str, Any], manager: Any, state: Any, *_rest: Any) -> None:
    """After `convert_to_span_attrs`: the counts of `meta_info.media_sources`, each by name."""
    receiver = getattr(manager, "mm_receiver", None)
    if receiver is None:  # no language server
        return
    for source, items in (receiver.frontend.account(state.obj.rid) or {}).items():
        attributes[f"{_PREFIX}.{source}"] = items


def span_of(request: Any) -> Span:
    """SGLang's span of a request, to make parts of; `OFF` where it is not traced.

    Args:
        request: has `time_stats`, unwrapped; of a scheduler's or the tokenizer's. None has none.
    """
    context = getattr(getattr(request, "time_stats", None), "trace_ctx", None)
    if context is None or not context.tracing_enable or context.root_span_context is None:
        return OFF
    return spans.under(context.root_span_context)


def resume(traceparent: str) -> Span:
    """The span that a process of the same server has sent; `OFF` if it sent none."""
    return spans.resume({"traceparent": traceparent}) if traceparent else OFF


def begin_root(original: Callable[..., None], time_stats: Any, *args: Any, **options: Any) -> None:
    """Around `set_created_time`: one trace for a request on its prefill and its decode server.

    The mini load balancer passes no header on, so that both would begin a trace of their own.
    Both know the bootstrap room, a number drawn for this request.
    """
    _next.trace_id = _trace_of_room(time_stats.trace_ctx)
    try:
        original(time_stats, *args, **options)
    finally:
        _next.trace_id = None


def trace_id(original: Callable[..., int], generator: Any) -> int:
    """Around `generate_trace_id`."""
    return getattr(_next, "trace_id", None) or original(generator)


def _trace_of_room(context: Any) -> int | None:
    """The id of a trace that begins here; None for any."""
    if not context.tracing_enable:
        return None
    # The names that the asynchronous exporter, or the context itself, reads.
    told = getattr(context, "_init_args", None) or vars(context)
    room = told.get("bootstrap_room")
    if not room or told["role"] not in ("prefill", "decode"):
        return None
    # Not the room itself: samplers by id want ids that are spread evenly.
    return int.from_bytes(blake3(b"sglang-epd trace %d" % room).digest(_TRACE_ID_BYTES))
