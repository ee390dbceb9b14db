"""The spans that a test's own OpenTelemetry provider has been given."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sglang_epd.spans import Span


class Recorded:
    """What has ended, and a root to put it under.

    Attributes:
        provider: the provider.
        root: a span as SGLang's of a request; nobody ends it.
    """

    def __init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.root = Span(self.provider.get_tracer("SGLang's").start_span("Req"))

    @property
    def ended(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        """In the order that they began in."""
        found = [span for span in self.ended if span.name == name]
        return sorted(found, key=lambda span: span.start_time or 0)

    def only(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def said(span: ReadableSpan) -> dict[str, Any]:
    """A span's own attributes, without their prefix."""
    told = span.attributes or {}
    return {name.removeprefix("sglang.epd."): value for name, value in told.items()}


def is_part_of(span: ReadableSpan, whole: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == whole.context.span_id
