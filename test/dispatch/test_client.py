from __future__ import annotations

import asyncio
import os
import socket
from functools import partial

import msgspec
import pytest
from aiohttp import web

import certificates
from dispatch.conftest import served
from sglang_epd.dispatch import client as client_module
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.errors import (
    EpdError,
    NamespaceError,
    OverloadedError,
    UnavailableError,
)
from sglang_epd.media import resolver
from sglang_epd.trust import Trust
from sglang_epd.wire.envelope import MAJOR
from sglang_epd.wire.http import (
    CONTENT_TYPE,
    EncodeItem,
    EncodeReply,
    EncodeRequest,
    ItemOutcome,
    ReplyTo,
    encode_body,
    open_session,
)


def asking(ttl_s: float = 5.0, items: int = 1) -> EncodeRequest:
    return EncodeRequest(
        "r",
        "ns",
        ttl_s,
        ReplyTo("tcp://127.0.0.1:1", "ticket"),
        [EncodeItem(n, "IMAGE", f"image {n}", data=b"\x00\xff") for n in range(items)],
    )


async def test_large_media_their_size_and_the_token_arrive_as_they_were(start, client):
    encoder = await start()
    items = [EncodeItem(n, "IMAGE", "a", data=os.urandom(700_000)) for n in range(3)]
    request = msgspec.structs.replace(asking(), items=items)
    answer = await client.encode(encoder.url, request)
    assert [outcome.state for outcome in answer.outcomes] == ["delivered"] * 3
    assert encoder.requests == [request]
    assert encoder.headers[0]["Authorization"] == "Bearer secret"
    assert encoder.headers[0]["Content-Type"] == CONTENT_TYPE
    assert encoder.headers[0]["Content-Length"] == str(len(encode_body(request)))
    assert "Transfer-Encoding" not in encoder.headers[0]


async def test_without_a_token_no_credentials_are_sent(start):
    encoder = await start()
    async with EncoderClient() as client:
        await client.encode(encoder.url, asking())
    assert "Authorization" not in encoder.headers[0]


async def test_an_encoder_by_name_is_reached_while_name_servers_fail(start, monkeypatch):
    encoder = await start()
    place = ("127.0.0.1", int(encoder.url.rpartition(":")[2]))
    answers = [[(socket.AF_INET, socket.SOCK_STREAM, 6, "", place)]]

    def look_up(host: str, *_: object) -> list:
        if not answers:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        assert host == "encoder.example"
        return answers.pop()

    monkeypatch.setattr(resolver, "_look_up", look_up)
    # Each request has a connection, and each connection a look-up.
    monkeypatch.setattr(
        client_module, "open_session", partial(open_session, force_close=True, use_dns_cache=False)
    )
    async with EncoderClient() as client:
        for _ in range(2):
            await client.encode(f"http://encoder.example:{place[1]}", asking())
    assert len(encoder.requests) == 2


async def test_a_reply_that_comes_in_pieces_is_read_to_its_end(start, client):
    encoder = await start()
    outcomes = [ItemOutcome(n, "delivered", message="x" * 100) for n in range(2000)]
    body = encode_body(EncodeReply("r", "it", outcomes))

    class Dripping(web.StreamResponse):
        async def write_eof(self, data=b""):
            for begin in range(0, len(body), 60_000):
                await self.write(body[begin : begin + 60_000])
                await asyncio.sleep(0.005)  # so that they are separate reads
            await super().write_eof(data)

    encoder.answers(Dripping)
    answer = await client.encode(encoder.url, asking())
    assert answer.outcomes == outcomes


async def test_an_endless_reply_is_not_read_to_its_end(start, client, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_REPLY_BYTES", 1000)
    encoder = await start()

    class Endless(web.StreamResponse):
        async def write_eof(self, data=b""):
            while True:
                await self.write(bytes(1000))

    encoder.answers(Endless)
    with pytest.raises(UnavailableError, match="limit 1000"):
        await client.encode(encoder.url, asking())


@pytest.mark.parametrize(
    "response",
    [
        lambda: web.Response(text="It works!"),
        lambda: web.Response(text="not found", status=404),
        lambda: web.Response(status=500),
        lambda: web.Response(status=401),
        lambda: web.Response(body=b"EPD" + bytes([MAJOR + 1, 0])),
        lambda: web.Response(body=b"EPD" + bytes([MAJOR, 0]) + b"\xa1\xff"),
    ],
)
async def test_an_answer_that_is_not_ours_may_be_better_elsewhere(start, client, response):
    encoder = await start()
    encoder.answers(response)
    with pytest.raises(UnavailableError, match=encoder.url):
        await client.encode(encoder.url, asking())


async def test_a_redirect_is_not_followed(start, client):
    encoder, asked = await start(), []

    async def handle(http: web.Request) -> web.Response:
        asked.append(http.method)
        return web.Response()

    async with served("*", "/", handle) as other:
        encoder.answers(lambda: web.Response(status=302, headers={"Location": f"{other}/"}))
        with pytest.raises(UnavailableError, match=encoder.url):
            await client.encode(encoder.url, asking())
    assert not asked


@pytest.mark.parametrize("error", [OverloadedError("full"), NamespaceError("differs")])
async def test_a_refusal_keeps_its_class_and_names_the_encoder(start, client, error):
    encoder = await start()
    encoder.refuses(error)
    with pytest.raises(type(error), match=f"{encoder.url}: {error}"):
        await client.encode(encoder.url, asking())


async def test_a_refusal_of_an_unknown_class_is_not_tried_elsewhere(start, client):
    class AddedLaterError(EpdError):
        status = 418

    encoder = await start()
    encoder.refuses(AddedLaterError("x"))
    with pytest.raises(EpdError) as raised:
        await client.encode(encoder.url, asking())
    assert type(raised.value) is EpdError
    assert not raised.value.retry_elsewhere


async def test_connections_are_used_again(start, client):
    encoder = await start()
    for _ in range(3):
        await client.encode(encoder.url, asking())
    assert len(set(encoder.peers)) == 1


async def test_no_error_holds_the_token(start, dead_url):
    encoder = await start()
    encoder.answers(lambda: web.Response(status=401))
    async with EncoderClient("top-secret") as client:
        for url in (encoder.url, dead_url):
            with pytest.raises(UnavailableError, match=url) as raised:
                await client.encode(url, asking())
            assert "top-secret" not in str(raised.value)


async def test_an_encoders_certificate_has_to_be_believed(tmp_path):
    made = certificates.make(tmp_path)
    trust = Trust("api-key", made.certfile, made.keyfile, ca_certs=made.certfile)
    seen: list[str | None] = []

    async def handle(http: web.Request) -> web.Response:
        seen.append(http.headers.get("Authorization"))
        return web.Response(body=encode_body(EncodeReply("r", "it", [ItemOutcome(0, "delivered")])))

    tls = trust.server_ssl()
    async with served("POST", "/v1/encode", handle, tls) as place:
        url = place.replace("127.0.0.1", "localhost")
        async with EncoderClient(trust.token) as stranger:
            with pytest.raises(UnavailableError, match="out of reach"):
                await stranger.encode(url, asking())
        assert not seen, "the token is shown to nobody who is not believed"
        async with EncoderClient(trust.token, trust.client_ssl()) as client:
            await client.encode(url, asking())
    assert seen == ["Bearer api-key"]
