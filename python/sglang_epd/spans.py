"""Parts of a request's trace, in OpenTelemetry: of the provider that SGLang sets up with
`--enable-trace`.

Each stage of a request is handed a span, and makes children of it. Where the request is not
traced that is `OFF`: false, without a child, on OpenTelemetry's own span that records nothing.
Names of spans begin with `epd_`, attributes with `sglang.epd.`; an error's class is
`error.type`, as OpenTelemetry's conventions have it.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sglang_epd.errors import EpdError

ATTRIBUTES = "sglang.epd."
_W3C = TraceContextTextMapPropagator()
# A traceparent of version 00 has 55 characters; a later one may have more. Of a tracestate
# W3C has 512 carried on at least.
_MOST_CHARS = {"traceparent": 128, "tracestate": 512}
_MOST_MESSAGE_CHARS = 400
# Codes of errors whose messages may name a URL.
_OF_MEDIA = ("Media", "DeadlineError")
# The two that cross to another server.
_KINDS = {"epd_dispatch": SpanKind.CLIENT, "epd_encode": SpanKind.SERVER}


class Span:
    """A part of a trace. Leaving it as a context ends it, with the error if any.

    Args:
        span: OpenTelemetry's; ended with this one.
    """

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def __bool__(self) -> bool:
        """Whether the span is recorded; code that serves a span alone runs only then."""
        return bool(self._span.get_span_context().trace_flags.sampled)

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers by which another process continues the trace (`traceparent`, `tracestate`)."""
        headers: dict[str, str] = {}
        _W3C.inject(headers, trace.set_span_in_context(self._span))
        return _bounded(headers)

    def child(self, name: str, *, began: float | None = None, **attributes: Any) -> Span:
        """A part of this span; itself where there is no trace.

        Args:
            began: seconds of `time.perf_counter`; now unless given.
            attributes: as of `note`.
        """
        if not self._span.get_span_context().is_valid:
            return self
        return _start(name, trace.set_span_in_context(self._span), began, attributes)

    def note(self, **attributes: Any) -> None:
        """Say something of it: texts, numbers, truths and lists of them. None is left out."""
        self._span.set_attributes(_named(attributes))

    def event(self, name: str) -> None:
        """Say that something happened now."""
        self._span.add_event(name)

    def fail(self, code: str, message: str = "") -> None:
        """Say that it failed.

        Args:
            code: of a bounded set, as the error classes of `errors`.
            message: left out of errors that may name a user's media.
        """
        said = "" if code.startswith(_OF_MEDIA) else message[:_MOST_MESSAGE_CHARS]
        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR, said))

    def end(self, at: float | None = None) -> None:
        """It is over; calls after the first do nothing.

        Args:
            at: seconds of `time.perf_counter`; now unless given.
        """
        if self._span.is_recording():
            self._span.end(None if at is None else _since_1970_ns(at))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, EpdError):
            self.fail(error.code, error.message)
        elif isinstance(error, asyncio.CancelledError):
            self.fail("RequestCancelledError", "cancelled")
        elif error is not None:
            # The message of an unknown error may hold a user's data.
            self.fail(type(error).__name__)
        self.end()


OFF = Span(trace.INVALID_SPAN)


def under(context: Context) -> Span:
    """A span that is another's to end, as a parent: the one in OpenTelemetry's `context`."""
    return Span(trace.NonRecordingSpan(trace.get_current_span(context).get_span_context()))


def resume(headers: Mapping[str, str]) -> Span:
    """The span of another process, as a parent; `OFF` in effect where the headers have none."""
    return under(_told(headers))


def begin(name: str, headers: Mapping[str, str], **attributes: Any) -> Span:
    """A span under that of another process.

    Args:
        headers: the client's, in small letters. A header that is no trace context, or longer
            than one, is ignored: a trace of its own begins.
    """
    return _start(name, _told(headers), None, attributes)


def close(timeout_s: float) -> None:
    """Export what is left, for so long at most, at the end of a process.

    By itself the provider waits for half a minute where the collector does not answer: longer
    than a process may take to end.
    """
    # The real one; where there is none there is nothing to export.
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    if shutdown is not None:
        closing = threading.Thread(target=shutdown, name="epd-close-tracing", daemon=True)
        closing.start()
        closing.join(timeout_s)


def _told(headers: Mapping[str, str]) -> Context:
    carrier = {name: headers[name] for name in _MOST_CHARS if name in headers}
    # An empty context, not the current one: nothing but the headers counts.
    return _W3C.extract(_bounded(carrier), Context())


def _bounded(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if len(value) <= _MOST_CHARS[name]}


def _start(name: str, context: Context, began: float | None, attributes: dict[str, Any]) -> Span:
    span = _tracer_of(trace.get_tracer_provider()).start_span(
        name,
        context,
        _KINDS.get(name, SpanKind.INTERNAL),
        attributes=_named(attributes),
        start_time=None if began is None else _since_1970_ns(began),
    )
    return Span(span)


@functools.cache
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    return provider.get_tracer("sglang-epd")


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {ATTRIBUTES + name: value for name, value in attributes.items() if value is not None}


def _since_1970_ns(at: float) -> int:
    """A time of `perf_counter` on the clock that spans have."""
    return time.time_ns() - int((time.perf_counter() - at) * 1e9)
