"""One trace through encoders, prefill and decode servers behind the mini load balancer, which
hands on no header of the client's; and what it says of an encoder that is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, until, user
from integration.topology import Machine, Topology
from observing.collector import Collector, Seen, collecting

pytestmark = pytest.mark.extended
ROLES = ("encoder", "encoder@2", "prefill", "decode", "router")
# From a freeze until the death: less than an encoder that is silent is waited for.
FROZEN_S = 0.3
SOON_S = 30.0


@dataclass
class Traced:
    """Servers, and who is told of their spans."""

    topology: Topology
    collector: Collector

    def trace_of(self, ask: Callable[[], object]) -> list[Seen]:
        """The spans of the one request with media that this sends."""
        before = self.collector.traces("epd_media")
        ask()
        (trace,) = until(lambda: self.collector.traces("epd_media") - before, SOON_S)
        return self.collector.wait(trace)


@pytest.fixture(scope="module")
def traced(machine: Machine) -> Iterator[Traced]:
    with collecting() as (collector, endpoint):
        flag = f"--enable-trace --otlp-traces-endpoint {endpoint} --otlp-service-name"
        flags = {role: f"{flag} {role}" for role in ("encoder", "prefill", "decode")}
        flags["encoder@2"] = "--otlp-service-name encoder@2"
        # Two pictures go to two encoders.
        env = {"SGLANG_EPD_DISPATCH_POLICY": "round_robin", "SGLANG_EPD_EMBEDDING_CACHE_MB": "0"}
        topology = Topology("tiny-qwen2_5-vl", ROLES, env, flags)
        with machine.lend(topology):
            yield Traced(topology, collector)


@pytest.fixture(scope="module")
def client(traced: Traced) -> Client:
    return traced.topology.client("router")


def message(photographs: list[Image.Image], side: int) -> dict:
    parts = [image_part(data_url(one.resize((side, side)))) for one in photographs]
    return user(*parts, text_part("What are these?"))


def named(spans: list[Seen], name: str) -> list[Seen]:
    return [span for span in spans if span.name == name]


def said(span: Seen, name: str) -> object:
    return span.attributes[f"sglang.epd.{name}"]


def check_whole(spans: list[Seen]) -> None:
    """One root a server that was asked, and everything else below one of them."""
    ids = {span.id for span in spans}
    roots = {span.service: span for span in spans if span.parent not in ids}
    assert set(roots) == {"prefill", "decode"}
    assert all(not root.parent for root in roots.values())
    assert len({root.attributes["bootstrap_room"] for root in roots.values()}) == 1
    assert len([span for span in spans if span.parent not in ids]) == 2


def test_prefill_and_decode_apart_are_one_trace(
    traced: Traced, client: Client, photographs: list[Image.Image]
) -> None:
    asked = message(photographs, 224)
    spans = traced.trace_of(lambda: client.answer(asked))
    check_whole(spans)
    assert {span.service for span in spans} == {"encoder", "encoder@2", "prefill", "decode"}
    assert len(named(spans, "epd_dispatch")) == len(named(spans, "epd_encode")) == 2
    items = named(spans, "epd_item")
    assert {said(span, "outcome") for span in items} == {"delivered"}
    assert len(items) == 2
    (assembled,) = named(spans, "epd_assemble")
    (laid_out,) = named(spans, "epd_lay_out")
    assert (assembled.service, laid_out.service) == ("prefill", "decode")
    assert said(laid_out, "layout") == "known"
    # SGLang's own, behind ours.
    assert {span.service for span in named(spans, "prefill_forward")} == {"prefill"}
    assert not [span.name for span in spans if span.error is not None]


def test_the_trace_of_a_request_whose_encoder_was_killed_has_both_attempts(
    traced: Traced, client: Client, photographs: list[Image.Image]
) -> None:
    victim = traced.topology.servers["encoder@2"]
    url = traced.topology.urls["encoder@2"]
    asked = message(photographs, 280)

    def ask() -> None:
        os.killpg(victim.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.answer, asked)
            time.sleep(FROZEN_S)
            victim.kill()
            assert answer.result(SOON_S)

    spans = traced.trace_of(ask)
    check_whole(spans)
    (lost,) = [span for span in named(spans, "epd_dispatch") if span.error is not None]
    assert said(lost, "encoder") == url
    assert said(lost, "attempt") == 1
    assert lost.attributes["error.type"] in ("EncoderLostError", "UnavailableError")
    (again,) = [span for span in named(spans, "epd_dispatch") if said(span, "attempt") == 2]
    assert again.error is None
    assert said(again, "items") == said(lost, "items") == said(lost, "elsewhere")
    assert again.began_ns >= lost.ended_ns
    items = named(spans, "epd_item")
    assert {span.service for span in items} == {"encoder"}
    assert {said(span, "outcome") for span in items} == {"delivered"}
    assert sorted(said(span, "item") for span in items) == [0, 1]
