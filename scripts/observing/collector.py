"""The end of OTLP: what servers export over gRPC, kept in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


@dataclass(frozen=True)
class Seen:
    """One span, as a server exported it.

    Attributes:
        began_ns, ended_ns: since 1970.
        error: its message, of one that failed.
    """

    trace: str
    id: str
    parent: str
    name: str
    service: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    error: str | None


class Collector(service.TraceServiceServicer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[Seen] = []

    def Export(self, request: Any, context: Any) -> Any:
        found = [
            _read(span, resource.resource.attributes)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._seen += found
        return messages.ExportTraceServiceResponse()

    def traces(self, name: str) -> set[str]:
        """Those with a span of this name so far."""
        with self._lock:
            return {span.trace for span in self._seen if span.name == name}

    def of(self, trace: str) -> list[Seen]:
        """The spans of one trace so far, in the order that they began in."""
        with self._lock:
            found = [span for span in self._seen if span.trace == trace]
        return sorted(found, key=lambda span: span.began_ns)

    def wait(self, trace: str, quiet_s: float = 3.0, timeout_s: float = 30.0) -> list[Seen]:
        """The spans of one trace, when no more have come for a while."""
        end = time.monotonic() + timeout_s
        known, since = 0, time.monotonic()
        while time.monotonic() < end:
            found = self.of(trace)
            if len(found) != known:
                known, since = len(found), time.monotonic()
            if found and time.monotonic() - since > quiet_s:
                break
            time.sleep(0.1)
        return self.of(trace)


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its endpoint (host:port)."""
    server = grpc.server(ThreadPoolExecutor(4))
    collector = Collector()
    service.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(5)


def _read(span: Any, resource: Any) -> Seen:
    told = _attributes(resource)
    failed = span.status.code == 2
    return Seen(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        str(told.get("service.name", "")),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        span.status.message if failed else None,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
