from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from seams.conftest import listening
from sglang_epd.seams import decode, requests
from sglang_epd.seams.tokenizer import TokenizerSeam
from sglang_epd.tally import LoopLag
from waiting import until

PATIENCE_S = 10.0
# More than uvicorn reads before somebody asks for it.
BODY = b"x" * (256 << 10)


class Manager:
    """As SGLang's: its answers wait for the scheduler, and look after nobody meanwhile."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.answered = asyncio.Event()
        self.ended = asyncio.Event()
        self.aborted: list[str] = []
        self.rid_to_state: dict[str, object] = {"rid": object()}

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)
        self.answered.set()

    async def answers(self, _obj: Any, _http: Request) -> AsyncIterator[dict[str, Any]]:
        self.entered.set()
        await self.answered.wait()
        yield {"meta_info": {}}


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture(params=[True, False])
def tells(request: pytest.FixtureRequest) -> bool:
    """Whether answers say where media came from."""
    told: bool = request.param
    return told


@pytest.fixture
async def url(manager: Manager, obj: SimpleNamespace, tells: bool) -> AsyncIterator[str]:
    frontend: Any = SimpleNamespace(account=lambda _rid: {"computed": 1})
    control: Any = SimpleNamespace()
    seam = TokenizerSeam(frontend, control, 60.0, tells_sources=tells)

    async def chat(http: Request) -> JSONResponse:
        await http.body()
        try:
            answers = seam.attend(Manager.answers, manager, obj, http)
            return JSONResponse([answer async for answer in answers])
        finally:
            manager.ended.set()

    async with listening(Starlette(routes=[Route("/", chat, methods=["POST"])])) as url:
        yield url
        manager.answered.set()


@pytest.fixture
def obj() -> SimpleNamespace:
    return SimpleNamespace(rid="rid", background=False, contains_mm_input=lambda: True)


@pytest.fixture
async def asking(url: str, manager: Manager) -> AsyncIterator[asyncio.Task[list[dict[str, Any]]]]:
    async with aiohttp.ClientSession() as http:

        async def ask() -> list[dict[str, Any]]:
            async with http.post(url, data=BODY) as response:
                told: list[dict[str, Any]] = await response.json()
                return told

        asked = asyncio.create_task(ask())
        async with asyncio.timeout(PATIENCE_S):
            await manager.entered.wait()
        yield asked
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_request_is_aborted_when_its_client_leaves(asking, manager):
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(PATIENCE_S):
        await manager.ended.wait()
    assert manager.aborted == ["rid"]


async def test_a_client_that_stays_has_its_answer(asking, manager, tells):
    await asyncio.sleep(0.1)
    manager.answered.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await asking == [{"meta_info": {"media_sources": {"computed": 1}} if tells else {}}]
    await asyncio.sleep(0.1)
    assert manager.aborted == []


class Stays:
    async def receive(self) -> dict[str, str]:
        return await asyncio.get_running_loop().create_future()


async def test_a_request_is_gone_with_its_answers(manager):
    """Without waiting for a collection of cycles: it holds its media."""

    class Asked(SimpleNamespace):
        pass

    gc.disable()
    try:
        obj = Asked(rid="r")
        asked = weakref.ref(obj)
        async with requests.aborted_when_left(manager, obj, Stays()):
            await asyncio.sleep(0)
        del obj
        assert asked() is None
    finally:
        gc.enable()


class Gone:
    async def receive(self) -> dict[str, str]:
        return {"type": "http.disconnect"}


class GoneByGrpc:
    """As SGLang's gRPC server beside HTTP has clients."""

    async def is_disconnected(self) -> bool:
        return True


@pytest.mark.parametrize("gone", [Gone, GoneByGrpc])
async def test_a_request_that_is_over_is_not_aborted_when_its_connection_ends(obj, manager, gone):
    """Its id may be the beginning of another's."""
    async with requests.aborted_when_left(manager, obj, gone()):
        await asyncio.sleep(0.1)
    assert manager.aborted == ["rid"]
    manager.rid_to_state.clear()
    async with requests.aborted_when_left(manager, obj, gone()):
        await asyncio.sleep(0.1)
    assert manager.aborted == ["rid"]


async def test_what_runs_in_the_background_needs_no_client(obj, manager):
    obj.background = True
    async with requests.aborted_when_left(manager, obj, Gone()):
        await asyncio.sleep(0.1)
    assert manager.aborted == []


@pytest.mark.parametrize(
    ("language_only", "mode", "told"),
    [
        (False, "null", []),
        (True, "null", ["receiver"]),
        (True, "prefill", ["receiver"]),
        (False, "prefill", []),
        (False, "decode", ["decode"]),
    ],
)
def test_who_is_told(flags, monkeypatch, language_only, mode, told):
    flags(disagg={"language_only": language_only, "disaggregation_mode": mode})
    seen = []
    receiver = SimpleNamespace(attach=lambda _manager: seen.append("receiver"))
    monkeypatch.setattr(decode, "set_up", lambda _manager: seen.append("decode"))
    made = SimpleNamespace(mm_receiver=receiver)
    requests.made(None, made, start_pd_bootstrap_service=True)
    assert seen == told


async def test_the_loop_of_a_decode_server_is_watched_from_its_first_request_on(monkeypatch):
    late: list[float] = []
    lag = LoopLag(late.append)
    monkeypatch.setattr(requests.Watched, "lag", lag)
    for _ in range(2):
        requests.begun(None, SimpleNamespace())
    await until(lambda: late)
    lag.stop()
