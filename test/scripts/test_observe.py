"""The parts of scripts/observe that need no server."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from prometheus_client import CollectorRegistry, Gauge, start_http_server

import observe
from observing import prometheus
from observing.collector import Seen, collecting
from observing.picture import draw, ordered
from sglang_epd import spans
from sglang_epd.spans import Span

NEEDS_PROMETHEUS = pytest.mark.skipif(
    not prometheus.installed(), reason="prometheus and promtool are not in PATH"
)


def seen(name: str, own: str, parent: str = "", began_ms: int = 0, **attributes) -> Seen:
    began = began_ms * 1_000_000
    return Seen("t", own, parent, name, "encoder", began, began + 5_000_000, attributes, None)


def test_what_a_server_exports_arrives_as_it_was(monkeypatch):
    with collecting() as (collector, endpoint):
        provider = TracerProvider(
            resource=Resource.create({"service.name": "encoder"}), shutdown_on_exit=False
        )
        monkeypatch.setattr(spans.trace, "get_tracer_provider", lambda: provider)
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        root = provider.get_tracer("ours").start_span("Req")
        with (
            Span(root) as span,
            span.child("epd_item", items=[0, 1], source="cached") as item,
        ):
            item.fail("EncodeError", "cut off")
        trace = f"{root.get_span_context().trace_id:032x}"
        whole, part = collector.wait(trace, quiet_s=0.05)
        provider.shutdown()
    assert (whole.name, whole.service, whole.parent) == ("Req", "encoder", "")
    assert (part.name, part.parent, part.error) == ("epd_item", whole.id, "cut off")
    assert part.attributes["sglang.epd.items"] == [0, 1]
    assert whole.began_ns <= part.began_ns <= part.ended_ns <= whole.ended_ns


def test_a_picture_has_each_span_below_its_parent():
    spans = [
        seen("Req", "a", "client's"),
        seen("epd_media", "b", "a", 1),
        seen("epd_dispatch", "c", "b", 2),
        seen("prefill_forward", "e", "a", 3),
        seen("<epd_item>", "d", "c", 4, **{"sglang.epd.source": "cached"}),
    ]
    names = [(depth, span.name) for depth, span in ordered(spans)]
    assert names == [
        (0, "Req"),
        (1, "epd_media"),
        (2, "epd_dispatch"),
        (3, "<epd_item>"),
        (1, "prefill_forward"),
    ]
    root = ET.fromstring(draw(spans, "a & b"))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert texts[0] == "a & b"
    assert "5.0 ms source cached" in texts


@pytest.mark.parametrize(
    "written",
    [
        "\x1b[?25lold\r\nframe\r\n\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Knew\r\nframe\r\n\x1b[?25h",
        "new\r\nframe\r\n",
    ],
)
def test_the_last_frame_is_what_was_shown_last(written):
    assert observe.last_frame(written) == "new\nframe"


def test_a_command_is_captured_as_a_terminal_shows_it(tmp_path):
    shown = observe.capture({"PATH": "/usr/bin"}, "--help", 60.0)
    assert "doctor" in shown
    observe.to_svg(shown, "help", tmp_path / "help.svg")
    assert "doctor" in (tmp_path / "help.svg").read_text()


def test_what_is_rightly_empty_is_a_panel():
    titles = {query.where for query in prometheus.dashboard_queries()}
    assert set(observe.RIGHTLY_EMPTY) <= titles
    assert all("$" not in query.text for query in prometheus.dashboard_queries())


def test_the_kept_page_has_every_query_and_alert():
    """Or `scripts/observe` has to run again."""
    page = (observe.DOCS / "prometheus.md").read_text().replace("\\|", "|")
    for query in prometheus.dashboard_queries():
        assert f"`{query.text}` |" in page
    (group,) = yaml.safe_load((prometheus.OBSERVABILITY / "alerts.yaml").read_text())["groups"]
    assert page.count("| ok |") == len(group["rules"])
    for rule in group["rules"]:
        assert f"| {rule['alert']} | ok |" in page


@NEEDS_PROMETHEUS
def test_names_are_the_same_whatever_prometheus_asks_for(tmp_path, unused_tcp_port_factory):
    """Versions before 3 accept no colon but in text, and are written `sglang_` instead."""
    registry = CollectorRegistry()
    Gauge("sglang:epd_receiver_held_bytes", "as on a server", registry=registry).set(7)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    own = {"language": [f"127.0.0.1:{server.server_port}"]}
    end = time.monotonic() + 20
    with prometheus.running(tmp_path, unused_tcp_port_factory(), own) as asked:
        while not (found := asked.ask("sglang:epd_receiver_held_bytes")):
            assert time.monotonic() < end, asked.targets()
            time.sleep(0.1)
    server.shutdown()
    server.server_close()
    thread.join()
    assert found[0]["value"][1] == "7"
    assert found[0]["metric"]["role"] == "language"


@NEEDS_PROMETHEUS
def test_prometheus_takes_every_query_and_rule(tmp_path, unused_tcp_port):
    """Asked of one that scrapes itself, so there is no data of ours."""
    assert "rules found" in prometheus.check_rules()
    own = {"encoder": [f"127.0.0.1:{unused_tcp_port}"]}
    with prometheus.running(tmp_path, unused_tcp_port, own) as asked:
        assert asked.ask("vector(2)")[0]["value"][1] == "2"
        for query in prometheus.dashboard_queries():
            assert asked.ask(query.text) == []
        assert len(asked.rules()) >= 14
