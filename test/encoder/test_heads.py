"""Raw connections to a real uvicorn."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from fastapi import FastAPI

from sglang_epd.encoder import heads

PATIENCE_S = 10.0
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture
async def connect(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    monkeypatch.setattr(heads, "_HEAD_S", 0.2)
    app = FastAPI()

    @app.get("/")
    async def slow() -> str:
        await asyncio.sleep(0.5)
        return "answer"

    config = uvicorn.Config(app, http=heads.PromptHeads, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    writers: list[asyncio.StreamWriter] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))

        async def open_one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            pair = await asyncio.open_connection(*listening.getsockname())
            writers.append(pair[1])
            return pair

        yield open_one
        for writer in writers:
            writer.close()
        server.should_exit = True
        await serving


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        return await reader.read() == b""


async def answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        return head.partition(b"\r\n")[0] + await reader.readexactly(len(b'"answer"'))


@pytest.mark.parametrize("begun", [b"", REQUEST[:-10], b"GE"])
async def test_a_connection_without_a_whole_head_is_closed(connect, begun):
    reader, writer = await connect()
    writer.write(begun)
    assert await closed(reader)


async def test_a_head_that_drips_is_no_better(connect):
    reader, writer = await connect()
    ending = asyncio.create_task(closed(reader))
    while not ending.done():
        writer.write(b"G")
        await asyncio.sleep(0.02)
    assert await ending


async def test_an_answer_may_take_longer_and_the_next_head_may_not(connect):
    reader, writer = await connect()
    for _ in range(2):
        writer.write(REQUEST)
        assert await answer(reader) == b'HTTP/1.1 200 OK"answer"'
    await asyncio.sleep(0.3)  # idle, which uvicorn bounds by itself
    writer.write(REQUEST)
    assert await answer(reader) == b'HTTP/1.1 200 OK"answer"'
    writer.write(REQUEST[:-2])
    assert await closed(reader)


async def test_malformed_requests_are_logged_once_a_minute(connect, caplog, monkeypatch):
    seldom, logger = heads.SeldomMalformed(), logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "filters", [seldom])

    async def ask() -> None:
        reader, writer = await connect()
        writer.write(b"no request\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b" 400 " in await reader.readline()

    def logged() -> list[str]:
        return [text for text in caplog.messages if text.startswith("Invalid HTTP request")]

    for _ in range(5):
        await ask()
    assert len(logged()) == 1
    seldom._next = 0.0
    await ask()
    assert logged()[1:] == ["Invalid HTTP request received. 4 others were not logged."]
    logger.warning("Something else.")
    assert "Something else." in caplog.messages
