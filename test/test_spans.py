"""What a trace context is, and what becomes of one that is none."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sglang_epd import spans
from sglang_epd.errors import DeadlineError, EpdError, MediaError, UnavailableError
from sglang_epd.spans import OFF
from spans import Recorded, is_part_of, said

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_a_span_continues_the_trace_of_another_process(recorded):
    with spans.begin("epd_encode", {"traceparent": PARENT}, items=2):
        pass
    span = recorded.only("epd_encode")
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert span.attributes == {"sglang.epd.items": 2}
    assert span.kind.name == "SERVER"


def test_its_headers_are_what_the_next_process_continues_by(recorded):
    with recorded.root.child("epd_dispatch") as sent:
        with spans.begin("epd_encode", sent.headers):
            pass
        with spans.resume(sent.headers).child("epd_wait_for_items"):
            pass
    for name in ("epd_encode", "epd_wait_for_items"):
        assert is_part_of(recorded.only(name), recorded.only("epd_dispatch"))


@pytest.mark.parametrize(
    "told",
    [
        "",
        "garbage",
        PARENT + "-more",
        PARENT.replace("00-", "ff-"),
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        PARENT[:-3],
        PARENT * 2000,
        f"01-{TRACE}-00f067aa0ba902b7-01-{'x' * 100_000}",
    ],
    ids=lambda told: told[:20],
)
def test_what_is_no_context_is_as_if_it_was_not_there(recorded, told):
    span = spans.begin("epd_encode", {"traceparent": told})
    assert span
    span.end()
    assert recorded.only("epd_encode").parent is None


@given(st.dictionaries(st.sampled_from(["traceparent", "tracestate"]), st.text()))
def test_no_header_is_an_error(told):
    spans.resume(told)
    assert set(spans.begin("epd_encode", told).headers) <= {"traceparent", "tracestate"}


@given(st.from_regex(re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.{0,20}")))
def test_nor_what_nearly_is_one(told):
    assert not spans.begin("epd_encode", {"traceparent": told}).headers.keys() - {"traceparent"}


def test_a_state_is_carried_on_up_to_what_has_to_be(recorded):
    for state, carried in (("a=1,b=2", True), (f"a={'x' * 200}," * 4, False)):
        span = spans.begin("epd_encode", {"traceparent": PARENT, "tracestate": state})
        assert (span.headers.get("tracestate") == state) is carried
        assert TRACE in span.headers["traceparent"]


def test_a_trace_that_nobody_wants_stays_so(recorded):
    span = spans.begin("epd_encode", {"traceparent": PARENT[:-1] + "0"})
    assert not span
    assert not span.child("epd_item")
    assert span.headers["traceparent"].endswith("-00"), "the next process is told"
    span.end()
    assert not recorded.ended


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MediaError("image 1: cut off"), "MediaError"),
        (asyncio.CancelledError(), "RequestCancelledError"),
        (RuntimeError("a secret"), "RuntimeError"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_an_error_is_told_by_its_class(recorded, error, kind):
    with pytest.raises(type(error)), recorded.root.child("epd_item"):
        raise error
    span = recorded.only("epd_item")
    assert said(span)["error.type"] == kind
    assert span.status.status_code.name == "ERROR"
    assert "secret" not in (span.status.description or "")


def test_a_part_may_be_told_of_afterwards(recorded):
    now, began = time.time(), time.perf_counter() - 2.0
    part = recorded.root.child("epd_forward", began=began, source=None)
    part.end(began + 1.5)
    part.end()
    span = recorded.only("epd_forward")
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(1.5, abs=0.01)
    assert now - span.end_time / 1e9 == pytest.approx(0.5, abs=0.2)
    assert not span.attributes


def test_a_collector_that_does_not_answer_keeps_nobody_from_ending(monkeypatch):
    answer = threading.Event()

    class Silent(InMemorySpanExporter):
        def export(self, spans):
            answer.wait(20)
            return super().export(spans)

    exporter = Silent()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    monkeypatch.setattr(spans.trace, "get_tracer_provider", lambda: provider)
    spans.begin("epd_encode", {}).end()
    began = time.monotonic()
    spans.close(0.1)
    provider.shutdown()  # as its own handler does at the end of a process
    assert time.monotonic() - began < 5
    answer.set()


def test_what_is_left_is_exported_at_the_end(recorded):
    spans.begin("epd_encode", {}).end()
    spans.close(5.0)
    assert recorded.only("epd_encode")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MediaError("https://host/secret.jpg is empty"), ""),
        (DeadlineError("the deadline passed while reading https://host/secret.jpg"), ""),
        (UnavailableError("the encoder is gone"), "the encoder is gone"),
    ],
)
def test_a_span_tells_of_no_users_media(recorded, error, said):
    with contextlib.suppress(EpdError), recorded.root.child("epd_item"):
        raise error
    (span,) = recorded.named("epd_item")
    assert (span.status.description or "") == said
    assert span.attributes["error.type"] == error.code


def test_where_nobody_traces_nothing_is_made(recorded):
    assert not OFF
    with OFF.child("epd_media", items=1) as span:
        assert span is OFF
        span.note(more=1)
        span.event("delivered")
        span.fail("MediaError")
    assert not OFF.headers
    with pytest.raises(MediaError), OFF.child("epd_item"):
        raise MediaError("it is raised all the same")
    spans.resume({}).child("epd_wait_for_items").end()
    assert not recorded.ended


def test_a_parent_that_is_anothers_is_not_ended():
    recorded = Recorded()
    context = spans.trace.set_span_in_context(recorded.root._span)
    parent = spans.under(context)
    assert parent
    parent.end()
    assert recorded.root._span.is_recording()
