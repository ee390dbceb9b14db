"""SGLang's own routes, with a serving layer that stays as long as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from seams.conftest import listening
from sglang_epd.language.layouts import Board
from sglang_epd.seams import large_bodies
from sglang_epd.seams.large_bodies import MANY_MEDIA, MOST_PARTS, count_parts
from sglang_epd.seams.tokenizer import TokenizerSeam
from sglang_epd.wire.http import LayoutReply, decode_body
from waiting import until

# SGLang's answers to errors are made with a class that FastAPI deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}
Post = Callable[[bytes], Awaitable[tuple[int, Any]]]


def chat(*parts: Any, name: str = "") -> bytes:
    message = {"role": "user", "content": list(parts)}
    return json.dumps({"model": name, "messages": [message]}).encode()


def many(name: str, part: Any = PICTURE, count: int = MANY_MEDIA + 1) -> bytes:
    return chat(*[part] * count, name=name)


class Serving:
    """Stands where SGLang lays requests out: each stays until `go`, is begun then, and answered
    with `answer`."""

    def __init__(self) -> None:
        self.seam = TokenizerSeam(SimpleNamespace(), SimpleNamespace(), 60.0)  # type: ignore[arg-type]
        self.inside: list[str] = []
        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.go = asyncio.Event()
        self.answer = asyncio.Event()
        self.answer.set()

    async def handle_request(self, request: Any, http: Any) -> dict[str, str]:
        clock = asyncio.get_running_loop().time
        self.inside.append(request.model)
        self.begun[request.model] = clock()
        await http.json()  # again, in the same request
        if request.model != "small":
            await self.go.wait()
        self.inside.remove(request.model)
        self.ended[request.model] = clock()
        self.seam.begun()
        await self.answer.wait()
        return {"served": request.model}


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    serving = Serving()
    yield serving
    serving.seam.lag.stop()


@pytest.fixture
async def post(sglang, hooked, serving, monkeypatch) -> AsyncIterator[Post]:
    hooked("ORJSONRequest.json")
    server = sglang("entrypoints.http_server")
    manager = SimpleNamespace(mm_receiver=serving.seam)
    monkeypatch.setattr(server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    monkeypatch.setattr(server.app.state, "openai_serving_chat", serving, raising=False)
    typed = {"Content-Type": "application/json"}
    async with listening(server.app) as url, aiohttp.ClientSession(url, headers=typed) as http:

        async def post(body: bytes) -> tuple[int, Any]:
            async with http.post("/v1/chat/completions", data=body) as response:
                return response.status, await response.json()

        yield post
        serving.go.set()
        serving.answer.set()


async def test_large_requests_are_laid_out_one_at_a_time_and_small_ones_at_once(post, serving):
    large = [asyncio.create_task(post(many(name))) for name in ("a", "b", "c")]
    await until(lambda: serving.inside)
    for _ in range(5):
        assert await post(chat(PICTURE, name="small")) == (200, {"served": "small"})
    assert len(serving.inside) == 1
    serving.go.set()
    answers = [await one for one in large]
    assert answers == [(200, {"served": name}) for name in ("a", "b", "c")]
    assert max(serving.begun.values()) > min(serving.ended.values())


async def test_a_long_conversation_without_media_does_not_wait_for_others(post, serving):
    large = asyncio.create_task(post(many("media")))
    await until(lambda: serving.inside)
    talk = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 1000
    talks = [
        asyncio.create_task(post(json.dumps({"model": name, "messages": talk}).encode()))
        for name in ("a", "b")
    ]
    await until(lambda: {"a", "b"} <= set(serving.inside))
    serving.go.set()
    assert [(await one)[0] for one in (large, *talks)] == [200] * 3


async def test_a_turn_ends_when_its_request_is_laid_out(post, serving):
    serving.go.set()
    serving.answer.clear()
    large = [asyncio.create_task(post(many(name))) for name in ("a", "b")]
    await until(lambda: len(serving.ended) == 2)
    assert not any(one.done() for one in large)
    serving.answer.set()
    assert [(await one)[0] for one in large] == [200, 200]


async def test_after_a_turn_others_have_as_much_time_as_it_took(post, serving):
    large = [asyncio.create_task(post(many(name))) for name in ("a", "b")]
    await until(lambda: serving.inside)
    (first,) = serving.inside
    await asyncio.sleep(0.3)
    serving.go.set()
    await asyncio.gather(*large)
    (second,) = {"a", "b"} - {first}
    assert serving.begun[second] - serving.ended[first] > 0.25


async def test_a_large_request_that_is_refused_gives_its_turn_back(post, serving, monkeypatch):
    # As long again as the refusal takes, of which a busy machine makes seconds.
    monkeypatch.setattr(large_bodies, "LONGEST_WAIT_S", 100.0)
    status, _ = await post(many("refused", {"type": "image_nothing"}))
    assert status == 400
    serving.go.set()
    assert await post(many("next")) == (200, {"served": "next"})


async def test_a_request_has_a_most_of_parts(post, serving):
    serving.go.set()
    text = {"type": "text", "text": "x"}
    # The message is one of them.
    assert (await post(many("most", text, MOST_PARTS - 1)))[0] == 200
    status, answer = await post(many("more", text, MOST_PARTS))
    assert (status, answer["message"]) == (
        413,
        f"a request has at most {MOST_PARTS} messages, parts and media",
    )
    assert list(serving.begun) == ["most"]


async def test_a_decode_server_hears_that_a_request_was_refused(post, serving, monkeypatch):
    """Or it would wait, and then fetch the media of a prompt that is never prefilled."""
    board = serving.seam.layouts = Board()
    first = asyncio.create_task(post(many("a")))
    await until(lambda: serving.inside)
    monkeypatch.setattr(large_bodies, "MOST_WAITING", 0)
    text = {"type": "text", "text": "x"}
    for room, body, code in (
        (5, many("b"), "UnavailableError"),
        ([6, "7"], many("c", text, MOST_PARTS), "MediaTooLargeError"),
        ("8", many("d"), ""),
    ):
        await post(json.dumps({**json.loads(body), "bootstrap_room": room}).encode())
        slot = board.look(room[0] if isinstance(room, list) else room)
        told = decode_body(slot.body, LayoutReply, 1 << 20).error.code if slot else ""
        assert told == code
    serving.go.set()
    assert (await first)[0] == 200


@pytest.mark.parametrize(("name", "value"), [("LONGEST_WAIT_S", 0.05), ("MOST_WAITING", 0)])
async def test_no_request_waits_for_ever_nor_in_an_endless_line(
    post, serving, monkeypatch, name, value
):
    first = asyncio.create_task(post(many("a")))
    await until(lambda: serving.inside)
    monkeypatch.setattr(large_bodies, name, value)
    status, answer = await post(many("b"))
    assert (status, "try again later" in answer["message"]) == (503, True)
    serving.go.set()
    assert (await first)[0] == 200
    monkeypatch.undo()


async def test_a_client_that_leaves_gives_up_its_place(post, serving):
    first = asyncio.create_task(post(many("a")))
    await until(lambda: serving.inside)
    # More than uvicorn reads before somebody asks for it.
    long = {"type": "image_url", "image_url": {"url": "data:," + "x" * 1000}}
    left = asyncio.create_task(post(many("left", long)))
    await until(lambda: serving.seam.turns._waiting == 1)
    left.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await left
    serving.go.set()
    assert (await first)[0] == 200
    assert await post(many("b")) == (200, {"served": "b"})
    assert list(serving.begun) == ["a", "b"]


async def test_a_server_without_our_receiver_takes_all_at_once(post, serving, sglang):
    sglang("entrypoints.http_server").get_global_state().tokenizer_manager.mm_receiver = None
    large = [asyncio.create_task(post(many(name))) for name in ("a", "b")]
    await until(lambda: len(serving.inside) == 2)
    serving.go.set()
    assert [(await one)[0] for one in large] == [200, 200]


@pytest.mark.parametrize(
    ("body", "path", "counts"),
    [
        ({"messages": [{"role": "user", "content": "image_url [{" * 10_000}]}, "/v1/chat", (1, 0)),
        ({"messages": [{"content": [PICTURE, PICTURE]}, {"content": "x"}]}, "/v1/chat", (4, 2)),
        ({"messages": [{"content": [{"content": [1, 2, 3]}]}]}, "/v1/messages", (5, 0)),
        ({"text": "x", "image_data": [["a", "b"], ["c"]], "video_data": "v"}, "/generate", (5, 3)),
        ({"input_ids": [1] * 100_000, "tools": [{}] * 100}, "/generate", (0, 0)),
        ({"input": [1] * 100_000}, "/v1/embeddings", (0, 0)),
        ({"input": [{"image": "a", "text": "b"}, {"text": "b"}]}, "/v1/embeddings", (2, 1)),
        ({"input": [{"content": [1, 2]}]}, "/v1/responses", (3, 0)),
        ({"images": ["a"] * 40, "questions": [{}] * 50}, "/v1/decisions", (2000, 2000)),
        ({"messages": [{}] * 9, "images": [], "questions": []}, "/v1/chat/completions", (9, 0)),
        ([1, 2, 3], "/v1/rerank", (0, 0)),
        ({"messages": {"messages": None}}, "/v1/chat", (0, 0)),
        ({"messages": [{"role": "assistant", "content": "x", "audio": None}]}, "/v1/chat", (1, 0)),
    ],
)
def test_what_counts_as_a_part_and_as_a_medium(body, path, counts):
    assert count_parts(body, path) == counts


def test_counting_stops_when_there_are_too_many():
    huge = [[[1] * 1000] * 1000] * 1000
    parts, _ = count_parts({"messages": huge}, "/v1/chat/completions")
    assert MOST_PARTS < parts < 2 * MOST_PARTS


def test_of_a_list_that_is_too_long_no_element_is_looked_at(monkeypatch):
    looked_at: list[Any] = []
    monkeypatch.setattr(large_bodies, "_is_medium", looked_at.append)
    parts, _ = count_parts({"messages": [{}] * 100_000}, "/v1/chat/completions")
    assert (parts, looked_at) == (100_000, [])


def test_no_spelling_of_a_key_hides_parts():
    text = '{"\\u006dessages": [{"cont\\u0065nt": [{"type": "x"}, {"t\\u0079pe": "im\\u0061ge"}]}]}'
    assert count_parts(json.loads(text), "/v1/chat/completions") == (3, 1)
