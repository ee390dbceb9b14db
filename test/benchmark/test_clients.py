"""What clients make of answers, and that nothing which failed is lost."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from comparison.clients import BenchServing, Load, converse, outcomes, question
from comparison.figures import Outcome
from comparison.workloads import Request

import sites

TALK = Request("media", [[{"type": "text", "text": f"turn {n}"}] for n in range(3)], 4)


def load(*kinds: str, tokens: int = 3) -> Load:
    return Load(Path("x"), list(kinds), [tokens] * len(kinds), "digest", 1.0, 0)


def result(**changes: Any) -> dict[str, Any]:
    """As `--output-details` has it, of two requests."""
    good = {
        "output_lens": [3, 3],
        "ttfts": [0.05, 0.1],
        "itls": [[0.01, 0.03], [0.02, 0.02]],
        "errors": ["", ""],
    }
    return {**good, **changes}


def test_times_of_each_request() -> None:
    found = outcomes(result(), load("text", "media"))
    assert found == [Outcome("text", 50.0, 20.0, 3), Outcome("media", 100.0, 20.0, 3)]
    (one,) = outcomes(
        {"output_lens": [1], "ttfts": [0.05], "itls": [[]], "errors": [""]}, load("text", tokens=1)
    )
    assert (one.ttft_ms, one.tpot_ms) == (50.0, None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"errors": ["", "Service Unavailable: no encoder"]}, "no encoder"),
        # HTTP 200, and then an error in the stream, or an early end.
        ({"ttfts": [0.05, 0.0]}, "no token"),
        ({"output_lens": [3, 2]}, "2 of 3 tokens"),
        ({"output_lens": [3, 0]}, "0 of 3 tokens"),
    ],
)
def test_what_bench_serving_takes_for_an_answer_may_be_none(
    changes: dict[str, Any], says: str
) -> None:
    good, bad = outcomes(result(**changes), load("text", "media"))
    assert not good.failure
    assert (bad.ttft_ms, bad.tpot_ms) == (None, None)
    assert says in bad.failure


class Site:
    """A chat server that streams `words`, and fails turns that hold `bad`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        said = body["messages"][-1]["content"][0]["text"]
        if "bad" in said:
            return web.json_response({"message": "no encoder"}, status=503)
        if not body.get("stream"):
            told = {"content": [{"token": "a", "logprob": -0.5}]} if "odd" not in said else None
            return web.json_response({"choices": [{"logprobs": told}]})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for word in ("", "one", " two"):
            await _event(stream, {"delta": {"content": word}, "finish_reason": None})
        await _event(stream, {"delta": {}, "finish_reason": "length"})
        await stream.write(b"data: [DONE]\n\n")
        return stream


async def _event(stream: web.StreamResponse, choice: dict[str, Any]) -> None:
    await stream.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


@pytest.fixture
async def site() -> Any:
    site = Site()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", site.answer)
    async with sites.up(app) as site.url:  # type: ignore[attr-defined]
        yield site


async def test_a_conversation_brings_its_answers_along(site: Any) -> None:
    found, seconds = await converse(site.url, [TALK], 0, seed=1)
    assert [one.kind for one in found] == ["first", "later", "later"]
    assert not any(one.failure for one in found)
    assert all(one.ttft_ms and one.tpot_ms is not None and one.tokens == 4 for one in found)
    assert seconds < 10
    last = site.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]
    assert last[1]["content"] == "one two"


async def test_turns_of_a_window_are_sent_alone(site: Any) -> None:
    talk = Request("media", TALK.turns, 4, sliding=True)
    found, _ = await converse(site.url, [talk, talk], math.inf, seed=1)
    assert [one.kind for one in found] == ["first", "later", "later"] * 2
    assert not any(one.failure for one in found)
    sent = [body["messages"] for body in site.bodies]
    assert len(sent) == 6 and all(len(messages) == 1 for messages in sent)
    # Both began before either went on.
    texts = [messages[0]["content"][0]["text"] for messages in sent]
    assert texts[0] == texts[1] == TALK.turns[0][0]["text"]


async def test_a_turn_may_take_so_long(site: Any) -> None:
    found, _ = await converse(site.url, [TALK], 0, seed=1, timeout_s=0.0)
    assert [one.failure for one in found] == ["no answer in 0 s"] * 3


def test_requests_in_flight_are_bounded_where_there_is_no_rate(tmp_path: Path) -> None:
    bench = BenchServing("model", tmp_path, [0])
    closed = Load(tmp_path / "sent", ["media"] * 3, [4] * 3, "", 0.0, 0, at_once=7)
    words = bench.command("http://here", closed)
    assert words[words.index("--max-concurrency") + 1] == "7" and "--request-rate" not in words
    words = bench.command("http://here", replace(closed, rate=0.5))
    assert words[words.index("--request-rate") + 1] == "0.5" and "--max-concurrency" not in words


async def test_turns_that_fail_are_counted(site: Any) -> None:
    turns = [[{"type": "text", "text": text}] for text in ("good", "bad", "good")]
    found, _ = await converse(site.url, [Request("media", turns, 4)], 50.0, seed=1)
    assert [bool(one.failure) for one in found] == [False, True, False]
    assert "HTTP 503" in found[1].failure
    nobody, _ = await converse("http://127.0.0.1:1", [TALK], 50.0, seed=1)
    assert [one.failure for one in nobody] == ["ClientConnectorError"] * 3


async def test_questions_have_answers_or_failures(site: Any) -> None:
    def asked(text: str, url: str = site.url) -> Any:
        request = Request("text", [[{"type": "text", "text": text}]], 4)
        return asyncio.to_thread(question, url, request, 2)

    assert await asked("good") == {"tokens": ["a"], "logprobs": [-0.5]}
    assert "HTTP 503" in (await asked("bad"))["failure"]
    assert "TypeError" in (await asked("odd"))["failure"]
    assert "ConnectionError" in (await asked("good", "http://127.0.0.1:1"))["failure"]
