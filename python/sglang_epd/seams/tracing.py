"""SGLang's trace of a request: our spans are parts of it, and its own says where media came
from.

Leans on `managers.tokenizer_manager.TokenizerManager.convert_to_span_attrs(state, ...)`,
which is called with `--enable-trace` alone, when a request has ended and before its root
span has, and returns that span's attributes; on `observability.trace.process_tracing_init`,
which SGLang's processes call by themselves; and on the `trace_ctx` of a request's
`time_stats`, whose `tracing_enable` says whether that request is traced and whose
`root_span_context` is OpenTelemetry's context of its root span.
"""

from __future__ import annotations

from typing import Any

from sglang_epd.spans import OFF, Span

_PREFIX = "sglang.epd.media_sources"


def add_sources(attributes: dict[str, Any], manager: Any, state: Any, *_rest: Any) -> None:
    """After `convert_to_span_attrs`: the counts of `meta_info.media_sources`, each by name."""
    receiver = getattr(manager, "mm_receiver", None)
    if receiver is None:  # no language server
        return
    for source, items in (receiver.frontend.account(state.obj.rid) or {}).items():
        attributes[f"{_PREFIX}.{source}"] = items


def span_of_state(state: Any) -> Span:
    """The span of a live request in the tokenizer process, by its `rid_to_state`."""
    return OFF if state is None else span_of(state)


def span_of(request: Any) -> Span:
    """SGLang's span of a request, to make parts of; `OFF` where it is not traced.

    Args:
        request: has `time_stats`, unwrapped; of a scheduler's or the tokenizer's.
    """
    context = getattr(getattr(request, "time_stats", None), "trace_ctx", None)
    if context is None or not context.tracing_enable or context.root_span_context is None:
        return OFF
    from sglang_epd.observability.tracing import under

    return under(context.root_span_context)


def resume(traceparent: str) -> Span:
    """The span that a process of the same server told of; `OFF` if it told of none."""
    if not traceparent:
        return OFF
    from sglang_epd.observability import tracing

    return tracing.resume({"traceparent": traceparent})
