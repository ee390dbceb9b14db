"""Raw connections and signals to an encoder's HTTP server, without a model."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI, Response

from forking import fork
from sglang_epd.encoder import serving
from sglang_epd.encoder.serving import DrainingServer, PromptHeads, SeldomMalformed, run
from waiting import reached, until

PATIENCE_S = 10.0
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class FakeService:
    """One piece of work at a time; it ends when it is told to."""

    def __init__(self) -> None:
        self.admission = SimpleNamespace(live=0, draining=False)
        self.computations = SimpleNamespace(broken=asyncio.Event())
        self.done = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def drain(self) -> None:
        self.admission.draining = True

    async def wait_idle(self) -> None:
        await self.idle.wait()

    async def work(self) -> None:
        self.idle.clear()
        self.admission.live = 1
        try:
            await self.done.wait()
        finally:
            self.admission.live = 0
            self.idle.set()


class FakeRegistration:
    def __init__(self) -> None:
        self.steps: list[str] = []

    def start(self) -> None:
        self.steps.append("start")

    async def leave(self) -> None:
        self.steps.append("leave")


def serve(listening: socket.socket, told: Connection, hangs: bool) -> None:
    async def serving() -> None:
        service = FakeService()

        @asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            told.send("started")
            yield
            if hangs:
                await asyncio.Event().wait()
            told.send("stopped")

        app = FastAPI(lifespan=lifespan)

        @app.get("/work")
        async def work() -> Response:
            await service.work()
            return Response(b"done")

        @app.get("/live")
        async def live() -> int:
            return service.admission.live

        @app.get("/finish")
        async def finish() -> None:
            service.done.set()

        @app.get("/break")
        async def break_it() -> None:
            service.computations.broken.set()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=503 if service.admission.draining else 200)

        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
        await DrainingServer(config, service, FakeRegistration()).serve([listening])

    # It ends by the signal it was sent, as it would by itself.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run(serving())


class Server:
    def __init__(self, *, hangs: bool = False) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.told, telling = Pipe(duplex=False)
        self.process = fork(serve, listening, telling, hangs)
        listening.close()
        telling.close()
        assert self.told.poll(PATIENCE_S) and self.told.recv() == "started"

    def get(self, path: str) -> tuple[int, bytes]:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        ) as client:
            client.request("GET", path)
            response = client.getresponse()
            return response.status, response.read()

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Returns when the server drains."""
        os.kill(self.process.pid or 0, number)
        self.drains()

    def drains(self) -> None:
        reached(lambda: self.get("/health")[0] == 503)

    def ended(self) -> bool:
        """Whether it ended in good order."""
        self.process.join(PATIENCE_S)
        return not self.process.is_alive() and self.told.poll() and self.told.recv() == "stopped"

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.told.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def work(server) -> Iterator[list[tuple[int, bytes]]]:
    """A live request; its answer is here when there is one."""
    answers: list[tuple[int, bytes]] = []

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answers.append(server.get("/work"))

    asking = threading.Thread(target=ask)
    asking.start()
    reached(lambda: server.get("/live")[1] == b"1")
    yield answers
    asking.join(PATIENCE_S)


# Signals, and towers that break


def test_told_to_stop_with_nothing_in_work_it_stops(server):
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.ended()


@pytest.mark.parametrize(
    ("end", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 0), ("broken", 1)]
)
def test_told_to_stop_it_finishes_what_it_has(server, work, end, status):
    if end == "broken":
        server.get("/break")
        server.drains()
    else:
        server.signal(end)
    assert not work
    assert server.process.is_alive()
    server.get("/finish")
    assert server.ended()
    assert server.process.exitcode == status
    reached(lambda: work == [(200, b"done")])


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 0)]
)
def test_told_twice_it_does_not_wait(server, work, number, status):
    server.signal(number)
    os.kill(server.process.pid, number)
    assert server.ended()
    assert server.process.exitcode == status
    assert work != [(200, b"done")]


@pytest.mark.parametrize("cause", ["broken", "a signal"])
def test_it_ends_although_something_hangs(monkeypatch, cause):
    monkeypatch.setattr(serving, "DRAIN_S", 0.1)
    monkeypatch.setattr(serving, "CLOSE_S", 0.1)
    monkeypatch.setattr(serving, "END_S", 0.5)
    server = Server(hangs=True)  # has the bounds of this process, whose fork it is
    try:
        if cause == "broken":
            server.get("/break")
        else:
            os.kill(server.process.pid, signal.SIGTERM)
        server.process.join(PATIENCE_S)
        assert server.process.exitcode == 1
        with pytest.raises(EOFError):
            server.told.recv()  # it did not come to its usual end
    finally:
        server.close()


def draining(service: FakeService, registration: FakeRegistration) -> DrainingServer:
    config = uvicorn.Config(FastAPI(), log_config=None, lifespan="off", ws="none")
    config.load()
    server = DrainingServer(config, service, registration)
    server.lifespan = config.lifespan_class(config)
    return server


async def test_it_registers_when_it_listens_and_leaves_before_it_drains():
    service, registration = FakeService(), FakeRegistration()
    server = draining(service, registration)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        await server.startup([listening])
        assert registration.steps == ["start"]
        service.idle.clear()
        server.handle_exit(signal.SIGTERM, None)
        await until(lambda: registration.steps == ["start", "leave"])
        assert service.admission.draining
        assert not server.should_exit, "it has work"
        service.idle.set()
        await until(lambda: server.should_exit)
        await server.shutdown([listening])


async def test_told_to_stop_before_it_listens_it_does_not_register():
    registration = FakeRegistration()
    server = draining(FakeService(), registration)
    server.handle_exit(signal.SIGTERM, None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        await server.startup([listening])
        await server.shutdown([listening])
    assert "start" not in registration.steps


# Heads of requests


@pytest.fixture
async def connect(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    monkeypatch.setattr(serving, "_HEAD_S", 0.2)
    app = FastAPI()

    @app.get("/")
    async def slow() -> str:
        await asyncio.sleep(0.5)
        return "answer"

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(64 << 20))

    config = uvicorn.Config(app, http=PromptHeads, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    writers: list[asyncio.StreamWriter] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = asyncio.create_task(server.serve([listening]))

        async def open_one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            pair = await asyncio.open_connection(*listening.getsockname())
            writers.append(pair[1])
            return pair

        open_one.server = server  # type: ignore[attr-defined]
        yield open_one
        for writer in writers:
            writer.close()
        server.should_exit = True
        await running


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read() == b""
        except ConnectionResetError:  # with a byte on its way
            return True


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
    for pause_s in (0.0, 0.0, 0.3):  # idle, which uvicorn bounds by itself
        await asyncio.sleep(pause_s)
        writer.write(REQUEST)
        assert await answer(reader) == b'HTTP/1.1 200 OK"answer"'
    writer.write(REQUEST[:-2])
    assert await closed(reader)


async def test_an_answer_that_nobody_reads_keeps_no_connection(connect, monkeypatch):
    monkeypatch.setattr(serving, "_UNREAD_S", 0.3)
    reader, writer = await connect()
    writer.transport.pause_reading()
    writer.write(b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n")
    await until(lambda: connect.server.server_state.connections)
    await until(lambda: not connect.server.server_state.connections)
    writer.transport.resume_reading()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(64 << 20)


async def test_malformed_requests_are_logged_once_a_minute(connect, caplog, monkeypatch):
    seldom, logger = SeldomMalformed(), logging.getLogger("uvicorn.error")
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
