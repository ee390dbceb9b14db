"""SIGTERM and Ctrl-C to an encoder's HTTP server, in a process of its own without a model."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI, Response

from sglang_epd.encoder import server as server_module
from sglang_epd.encoder.server import _DrainingServer, _run, _serve

PATIENCE_S = 10.0


class FakeService:
    """One piece of work at a time; it ends when it is told to."""

    def __init__(self) -> None:
        self.admission = SimpleNamespace(live=0, draining=False)
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


def serve(listening: socket.socket, told: Connection, hangs: bool) -> None:
    async def run() -> None:
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

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=503 if service.admission.draining else 200)

        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
        # As a server's own: `_serve` has no sockets to hand on.
        config.fd = listening.fileno()
        broken = asyncio.Event()

        @app.get("/break")
        async def break_it() -> None:
            broken.set()

        await _serve(_DrainingServer(config, service), broken)

    # It ends by the signal it was sent, as it would by itself.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _run(run())


class Server:
    def __init__(self, *, hangs: bool = False) -> None:
        context = multiprocessing.get_context("fork")  # all that it needs is imported
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.told, telling = context.Pipe(duplex=False)
        self.process = context.Process(target=serve, args=(listening, telling, hangs))
        self.process.start()
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
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

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
    until(lambda: server.get("/live")[1] == b"1")
    yield answers
    asking.join(PATIENCE_S)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_told_to_stop_with_nothing_in_work_it_stops(server):
    server.signal()
    assert server.ended()


def test_told_to_stop_it_finishes_what_it_has(server, work):
    server.signal()
    until(lambda: server.get("/health")[0] == 503)
    assert not work
    assert server.process.is_alive()
    server.get("/finish")
    assert server.ended()
    until(lambda: work == [(200, b"done")])


def test_told_twice_it_does_not_wait(server, work):
    server.signal()
    until(lambda: server.get("/health")[0] == 503)
    server.signal()
    assert server.ended()
    assert work != [(200, b"done")]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_is_an_end_and_no_error(server, work, times):
    server.signal(signal.SIGINT)
    until(lambda: server.get("/health")[0] == 503)
    if times == 1:
        server.get("/finish")
    else:
        server.signal(signal.SIGINT)
    assert server.ended()
    assert server.process.exitcode == 0


def test_with_a_broken_tower_it_finishes_what_it_has_and_ends_with_an_error(server, work):
    server.get("/break")
    until(lambda: server.get("/health")[0] == 503)
    assert not work
    server.get("/finish")
    assert server.ended()
    assert server.process.exitcode == 1
    until(lambda: work == [(200, b"done")])


def test_with_a_broken_tower_it_ends_although_something_hangs(monkeypatch):
    monkeypatch.setattr(server_module, "_DRAIN_S", 0.1)
    monkeypatch.setattr(server_module, "_CLOSE_S", 0.1)
    server = Server(hangs=True)  # has the bounds of this process, whose fork it is
    try:
        server.get("/break")
        server.process.join(PATIENCE_S)
        assert server.process.exitcode == 1
        with pytest.raises(EOFError):
            server.told.recv()  # it did not come to its usual end
    finally:
        server.close()


class FakeRegistration:
    def __init__(self) -> None:
        self.steps: list[str] = []

    def start(self) -> None:
        self.steps.append("start")

    async def leave(self) -> None:
        self.steps.append("leave")


async def test_it_registers_when_it_listens_and_leaves_before_it_drains():
    service, registration = FakeService(), FakeRegistration()
    config = uvicorn.Config(FastAPI(), log_config=None, lifespan="off", ws="none")
    config.load()
    server = _DrainingServer(config, service, registration)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        await server.startup([listening])
        assert registration.steps == ["start"]
        service.idle.clear()
        server.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(PATIENCE_S):
            while registration.steps != ["start", "leave"]:
                await asyncio.sleep(0.005)
        assert service.admission.draining
        assert not server.should_exit, "it has work"
        service.idle.set()
        async with asyncio.timeout(PATIENCE_S):
            while not server.should_exit:
                await asyncio.sleep(0.005)
        await server.shutdown([listening])


async def test_told_to_stop_before_it_listens_it_does_not_register():
    registration = FakeRegistration()
    config = uvicorn.Config(FastAPI(), log_config=None, lifespan="off", ws="none")
    config.load()
    server = _DrainingServer(config, FakeService(), registration)
    server.lifespan = config.lifespan_class(config)
    server.handle_exit(signal.SIGTERM, None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        await server.startup([listening])
        await server.shutdown([listening])
    assert "start" not in registration.steps
