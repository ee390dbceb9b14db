from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sglang_epd.seams import decode, identities, requests
from sglang_epd.seams.tokenizer import TokenizerSeam

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

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)
        self.answered.set()

    async def answers(self, _obj: Any, _http: Request) -> AsyncIterator[dict[str, Any]]:
        self.entered.set()
        await self.answered.wait()
        yield {"meta_info": {}}


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    # Looks that are far apart come too late for these tests.
    monkeypatch.setattr(requests, "_LOOK_S", 60.0)
    return Manager()


@pytest.fixture
async def url(manager: Manager, obj: SimpleNamespace) -> AsyncIterator[str]:
    frontend: Any = SimpleNamespace(account=lambda _rid: {"computed": 1})
    seam = TokenizerSeam(frontend, SimpleNamespace(), 60.0)  # type: ignore[arg-type]

    async def chat(http: Request) -> JSONResponse:
        await http.body()
        try:
            answers = seam.tell_sources(Manager.answers, manager, obj, http)
            return JSONResponse([answer async for answer in answers])
        finally:
            manager.ended.set()

    app = Starlette(routes=[Route("/", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        manager.answered.set()
        server.should_exit = True
        await serving


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


async def test_a_client_that_stays_has_its_answer(asking, manager):
    await asyncio.sleep(0.1)  # three looks
    manager.answered.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await asking == [{"meta_info": {"media_sources": {"computed": 1}}}]
    await asyncio.sleep(0.1)
    assert manager.aborted == []


async def test_what_runs_in_the_background_needs_no_client(obj, manager):
    obj.background = True
    async with requests.aborted_when_left(manager, obj, Gone()):
        await asyncio.sleep(0.1)
    assert manager.aborted == []


class Gone:
    async def is_disconnected(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("language_only", "mode", "told"),
    [
        (False, "null", ["identities"]),
        (True, "null", ["identities", "receiver"]),
        (True, "prefill", ["identities", "receiver"]),
        (False, "prefill", ["identities"]),
        (False, "decode", ["identities", "decode"]),
    ],
)
def test_who_is_told(sglang, monkeypatch, language_only, mode, told):
    disagg = SimpleNamespace(language_only=language_only, disaggregation_mode=mode)
    context = sglang("runtime_context")
    monkeypatch.setattr(context, "get_disagg", lambda: disagg)
    seen = []
    manager = SimpleNamespace(
        mm_receiver=SimpleNamespace(attach=lambda _manager: seen.append("receiver"))
    )
    monkeypatch.setattr(identities, "set_up", lambda _manager: seen.append("identities"))
    monkeypatch.setattr(decode, "set_up", lambda _manager: seen.append("decode"))
    requests.made(None, manager, start_pd_bootstrap_service=True)
    assert seen == told
