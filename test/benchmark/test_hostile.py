"""Attackers send what they say, at the rate that they say, and end by themselves; and what
they did to honest requests is judged by all of the aims."""

from __future__ import annotations

import argparse
import asyncio
import io
import socket
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

import hostile_media as media
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import ClientError, ClientSession, web
from hostile_attacks import ATTACKS, REQUESTS_PER_S, STRANGERS, USERS, Attacker, attack
from hostile_report import Row, attack_rows, missed
from PIL import Image

import sites
from sglang_epd.errors import ProtocolError
from sglang_epd.wire.messages import UnreadOffer, decode_from_encoder

SECONDS = 0.3
LONGEST_S = 60.0
URLS = ("chunks", "drips", "large-urls")


@pytest.mark.parametrize("count", [0, 1, 1 << 24, (1 << 25) + 7])
def test_zeros_are_as_many(count: int) -> None:
    assert zlib.decompress(media.zeros(count)) == bytes(count)


def opened(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Image.Image:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    return Image.open(io.BytesIO(media.fresh(data)))


def test_pictures_claim_100_megapixels_in_a_kilobyte(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ((media.jpeg2000(), "JPEG2000"), (media.webp(), "WEBP"), (media.webp_still(), "WEBP"))
    for data, kind in kinds:
        picture = opened(data, monkeypatch)
        assert (len(data) < 1024, picture.format, picture.size) == (True, kind, (10_000, 10_000))


@pytest.mark.parametrize(
    ("make", "mode"),
    [(media.jpeg2000, "RGBA"), (media.webp, "RGB"), (media.webp_still, "RGB")],
)
def test_smaller_ones_of_these_are_decoded(
    make: object, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = opened(make(300), monkeypatch)  # type: ignore[operator]
    picture.load()
    assert (picture.size, picture.mode) == ((300, 300), mode)


def test_a_tiff_has_a_tile_that_is_larger_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = opened(media.tiff(), monkeypatch)
    tags = picture.tag_v2  # type: ignore[attr-defined]
    assert (picture.size, tags[322], tags[323]) == ((16, 16), 26_720, 26_720)
    small = opened(media.tiff(tile=64), monkeypatch)
    small.load()
    assert small.getextrema() == ((0, 0),) * 3


@pytest.mark.parametrize("samples", [7, 60_000_000])
def test_a_video_hides_its_claim_in_another_name(samples: int) -> None:
    data = media.video(samples)
    at = data.index(b"stsz")
    assert data[at - 2 : at + 2] == b"elst"
    assert struct.unpack_from(">II", data, at + 8) == (1, samples)


def test_a_video_of_many_packets_holds_what_it_claims() -> None:
    data = media.video_of_many_packets(20_000)
    size, packets = struct.unpack_from(">II", data, data.index(b"stsz") + 8)
    assert size * packets <= len(data) < 25_000


class Site:
    """A language server, as far as attackers can tell."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.read: list[int] = []

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.bodies.append(body)
        if b"http://127" in body:
            await self._fetch(body)
        return web.json_response({}, status=400)

    async def _fetch(self, body: bytes) -> None:
        """A second of the first of its URLs."""
        (message,) = msgspec.json.decode(body)["messages"]
        url = message["content"][0]["image_url"]["url"]
        read = 0
        with suppress(TimeoutError, ClientError):  # it never ends by itself
            async with (
                asyncio.timeout(1.0),
                ClientSession() as http,
                http.get(url) as response,
            ):
                async for piece, _ in response.content.iter_chunks():
                    read += len(piece)
        self.read.append(read)


def target(**urls: str) -> Attacker:
    empty = dict.fromkeys(("language", "encoder", "payload"), "")
    return Attacker(argparse.Namespace(**{**empty, **urls}))


# An attacker is a process as a rule, whose end closes what hosts of its have open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", USERS)
async def test_users_attack_a_language_server(name: str) -> None:
    site = Site()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", site.chat)
    async with sites.up(app) as url:
        attacker = target(language=url)
        attacking = asyncio.create_task(attack(ATTACKS[name](attacker), LONGEST_S))
        begin = time.monotonic()
        try:
            while not attacking.done() and not (site.read if name in URLS else site.bodies):
                await asyncio.sleep(0.1)
            await asyncio.sleep(SECONDS)
        finally:
            attacking.cancel()
            with suppress(asyncio.CancelledError):
                await attacking
    assert 0 < len(site.bodies) <= REQUESTS_PER_S * (time.monotonic() - begin) + 2
    assert len(set(site.bodies)) == len(site.bodies) or name == "escapes"
    assert attacker.sent_bytes >= max(map(len, site.bodies))
    assert bool(site.read) == (name in URLS)
    if name in URLS:
        assert max(site.read) > (1 << 20 if name == "large-urls" else 1)


async def test_clients_that_leave_go_on_where_their_server_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    attacker = target(language=f"http://127.0.0.1:{port}")
    attacking = asyncio.create_task(attack(ATTACKS["leaving"](attacker), LONGEST_S))
    async with asyncio.timeout(LONGEST_S):
        while attacker.answers["ConnectionRefusedError"] < 2 and not attacking.done():
            await asyncio.sleep(0.05)
    attacking.cancel()
    with suppress(asyncio.CancelledError):
        await attacking
    assert attacker.answers.keys() == {"ConnectionRefusedError"}


async def test_strangers_offer_and_send_frames() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        attacker = target(payload=f"127.0.0.1:{port}")
        attacking = asyncio.create_task(attack(STRANGERS["offers"](attacker), SECONDS))
        _, frame = await asyncio.wait_for(router.recv_multipart(), 10)
        await attacking
        offer = decode_from_encoder(frame)
        assert isinstance(offer, UnreadOffer)
        assert len(frame) > 261_000
        with pytest.raises(ProtocolError, match="grid"):
            offer.read()
        # A message without an end never comes out of the socket.
        while await router.poll(200):
            await router.recv_multipart()
        await attack(STRANGERS["frames"](target(payload=f"127.0.0.1:{port}")), SECONDS)
        assert not await router.poll(200)
    assert 1 < attacker.answers["frames"] <= 45


async def test_strangers_hold_the_encoders_port() -> None:
    heard: list[bytes] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1000))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    url = "http://{}:{}".format(*server.sockets[0].getsockname())
    assert urlsplit(url).port
    attacker = target(encoder=url)
    attacking = asyncio.create_task(attack(STRANGERS["encoder-port"](attacker), LONGEST_S))
    begin = time.monotonic()
    while len(heard) < 10:
        await asyncio.sleep(0.1)
    taken = time.monotonic() - begin
    assert len(heard) <= attacker.answers["connections"] <= REQUESTS_PER_S * taken + 2
    attacking.cancel()
    with suppress(asyncio.CancelledError):
        await attacking
    server.close()
    assert any(one.endswith(b"X-Slow: ") for one in heard)


GOOD = Row(
    arm="sglang-epd",
    attack="tiff",
    calm_s=[0.1, 0.2],
    calm_failed={},
    seconds=[0.1, 0.4],
    failed={},
    moves={"suspect": 1, "ready": 1},
    health_s={"encoder": 0.01, "language": 0.02},
    memory_before_mb={"encoder": 1000.0, "language": 1000.0},
    memory_mb={"encoder": 3000.0, "language": 1000.0},
    ended="",
    recovered_s=0.5,
    answers={"400": 7},
    sent_bytes=1,
)


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"seconds": [0.1, 0.41]}, ["p99"]),
        ({"seconds": [], "failed": {"TimeoutError": 2}}, ["failures", "p99"]),
        ({"failed": {"another answer than at peace": 1}}, ["failures"]),
        ({"moves": {"open": 1}}, ["eviction"]),
        ({"memory_mb": {"encoder": 3001.0, "language": 1000.0}}, ["memory"]),
        ({"recovered_s": None}, ["no recovery"]),
        ({"recovered_s": None, "ended": "the encoder server ended"}, ["servers ended"]),
    ],
)
def test_every_aim_is_judged(changes: dict[str, object], broken: list[str]) -> None:
    row = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert missed(row, [GOOD, row]) == broken
    assert attack_rows([row])[1][-1] == (", ".join(broken) or "met")
