"""The network between an encoder and a language server breaks at every kind of message.

The encoder is asked through a proxy that tells it another way to the payload port.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from functools import partial

import pytest
import requests

from integration.client import TOLERANCE, until
from integration.counters import samples, total
from integration.listener import QuietHandler, listening, url_of
from integration.topology import TOKEN, Machine, Topology
from sglang_epd.wire.http import EncodeRequest, ReplyTo, decode_body, encode_body
from transfer.links import Link

_ALLOWED = {"Authorization": f"Bearer {TOKEN}"}
_HOP_HEADERS = {"connection", "content-length", "host", "transfer-encoding", "accept-encoding"}
_MOST_BYTES = 64 << 20


class Detour:
    """An encoder whose payloads go through a link.

    Attributes:
        link: the link, from the first request on.
    """

    def __init__(self, encoder: str) -> None:
        self.encoder = encoder
        self.link: Link | None = None
        self.items = 0

    def told_otherwise(self, body: bytes) -> bytes:
        """An encode request whose items are to be delivered through the link."""
        asked = decode_body(body, EncodeRequest, _MOST_BYTES)
        if self.link is None:
            self.link = Link(asked.reply_to.endpoint)
        self.items += len(asked.items)
        reply_to = ReplyTo(self.link.endpoint, asked.reply_to.ticket)
        fields = {name: getattr(asked, name) for name in EncodeRequest.__struct_fields__}
        return encode_body(EncodeRequest(**{**fields, "reply_to": reply_to}))


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("two_encoders")


@pytest.fixture(scope="module")
def detour(topology: Topology) -> Iterator[Detour]:
    """One more encoder of the language server: the first one, by another way."""
    detour = Detour(topology.urls["encoder"])

    class Forward(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/v1/encode":
                body = detour.told_otherwise(body)
            kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_HEADERS}
            answer = requests.request(
                self.command, detour.encoder + self.path, data=body, headers=kept, timeout=120
            )
            self.send_response(answer.status_code)
            for name in ("Content-Type", "Retry-After"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_DELETE = do_POST

    registry = f"http://127.0.0.1:{topology.ports['language bootstrap']}"
    with listening(Forward) as server:
        joined = {"url": url_of(server)}
        requests.post(
            f"{registry}/register_encoder_url", json=joined, headers=_ALLOWED, timeout=20
        ).raise_for_status()
        try:
            yield detour
        finally:
            requests.delete(
                f"{registry}/unregister_encoder_url", json=joined, headers=_ALLOWED, timeout=20
            ).raise_for_status()
            if detour.link is not None:
                detour.link.close()


@pytest.mark.parametrize("after", [False, True], ids=["lost", "arrived"])
def test_a_cut_at_any_kind_of_message_costs_no_request(
    topology: Topology, detour: Detour, message: dict, after: bool
) -> None:
    language = topology.client()
    expected = language.generation(message)
    until(lambda: language.chat(message).ok and detour.link, why="it is registered but not used")
    link = detour.link
    assert link is not None

    def ask_until_cut(before: int) -> bool:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: language.generation(message), range(6)))
        assert max(answer.distance(expected) for answer in answers) < TOLERANCE
        return link.cuts > before

    for kind in ("offer", "grant", "payload", "ack"):
        items = detour.items
        link.cut_at(kind, after=after)
        # Requests may all go to the tokenizer process that does not know the detour yet: the one
        # that does not hold the registration port asks the other every second.
        until(partial(ask_until_cut, link.cuts), why=f"no {kind} came through the link")
        assert detour.items > items
    # Nobody reads any more, and nothing is in doubt.
    for gauge in ("receiver_held_bytes", "receiver_quarantined_blocks"):
        assert list(samples(language.url, gauge))
        until(lambda name=gauge: not total(language.url, name), 30, f"{gauge}: held for nobody")
