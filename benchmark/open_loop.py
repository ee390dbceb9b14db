"""Streamed chat completions about one picture each, sent at moments drawn beforehand.

An open loop: a request is sent when its moment has come, whether those before it have been
answered or not, and its times count from that moment. So a server that stands still is
charged with all that would have arrived meanwhile, and a slow sender hides nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from pictures import jpeg

ANSWER_TIMEOUT_S = 60.0
_HEADERS = {"Content-Type": "application/json"}
# What differs between failures of one kind.
_NAMES = re.compile(r"https?://[^\s,'\"\]]+|\b[0-9a-f]{8,}\b|\d+(\.\d+)?")
_SHOWN = 90


@dataclass(frozen=True)
class Answer:
    """What became of one request.

    Attributes:
        arrival_s: the moment it was to be sent at, from the beginning of the load.
        ttft_s: from then to its first token; None where there was none.
        seconds: from then to its end.
        failure: why it did not get all of its tokens; empty where it did.
        text: the answer.
    """

    arrival_s: float
    ttft_s: float | None
    seconds: float
    failure: str = ""
    text: str = ""


class Bodies:
    """Request bodies by number: no picture comes twice.

    Args:
        size: of `pictures.SIZES`.
        tokens: how many each request asks for, and gets.
        seed: another one, other pictures.
    """

    def __init__(self, size: str, tokens: int, seed: object) -> None:
        self._size, self._tokens, self._seed = size, tokens, seed
        self._made: dict[int, bytes] = {}

    def prepare(self, count: int) -> None:
        """Make the first `count` now: making them takes time that a load has not."""
        for number in range(count):
            if number not in self._made:
                self._made[number] = self._make(number)

    def take(self, number: int) -> bytes:
        """Each can be taken once without being made again."""
        return self._made.pop(number, None) or self._make(number)

    def _make(self, number: int) -> bytes:
        picture = base64.b64encode(jpeg(self._size, (self._seed, number))).decode()
        return chat(f"data:image/jpeg;base64,{picture}", self._tokens)


def chat(url: str, tokens: int) -> bytes:
    """The body of a request about the picture at `url`, for so many tokens."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is on this picture?"},
    ]
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(body).encode()


def session() -> aiohttp.ClientSession:
    # A connection each: a kept one may be closed by the server as it is used again, which
    # would look like a failure.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), headers=_HEADERS
    )


async def closed_loop(url: str, bodies: Bodies, clients: int, seconds: float) -> float:
    """Requests a second that a server answers to so many clients.

    Raises:
        RuntimeError: one was not answered.
    """
    answered, begin = 0, time.monotonic()
    async with session() as http:

        async def client(first: int) -> None:
            nonlocal answered
            number = first
            while time.monotonic() - begin < seconds:
                answer = await ask(http, url, bodies.take(number), begin, time.monotonic())
                if answer.failure:
                    raise RuntimeError(f"a request failed before any fault: {answer.failure}")
                answered += 1
                number += clients

        await asyncio.gather(*(client(first) for first in range(clients)))
    return answered / (time.monotonic() - begin)


async def open_loop(
    url: str,
    bodies: Bodies,
    *,
    rate: float,
    seed: object,
    begin: float,
    more: Callable[[], bool],
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> list[Answer]:
    """Send requests at random (Poisson) until `more` says no; return when all have ended.

    Args:
        rate: requests a second, on average.
        seed: of the moments.
        begin: when the load begins, on the clock of `time.monotonic`.
        timeout_s: after so long a request has failed.
    """
    draw = random.Random(repr(seed))
    due = begin
    tasks: list[asyncio.Task[Answer]] = []
    async with session() as http:
        while True:
            due += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not more():
                break
            body = bodies.take(len(tasks))
            asking = ask(http, url, body, begin, due, timeout_s=timeout_s)
            tasks.append(asyncio.create_task(asking))
        return await asyncio.gather(*tasks)


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes,
    begin: float,
    due: float,
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Answer:
    """Send a request that was due at `due`, and read its answer to the end."""
    first: float | None = None
    failure, text = "", ""
    try:
        async with asyncio.timeout(due + timeout_s - time.monotonic()):
            async with http.post(f"{url}/v1/chat/completions", data=body) as response:
                if response.status != 200:
                    failure = _kind(f"HTTP {response.status}", await response.text())
                else:
                    ended = False
                    async for line in response.content:
                        event = _event(line)
                        if event is None:
                            continue
                        first = first or time.monotonic()
                        failure, ended = _judge(event)
                        text += _said(event)
                        if failure or ended:
                            break
                    if not failure and not ended:
                        failure = "the stream ended early"
    except TimeoutError:
        failure = f"no answer in {timeout_s:.0f} s"
    except aiohttp.ClientError as error:
        failure = type(error).__name__
    ttft_s = None if first is None or failure else first - due
    return Answer(due - begin, ttft_s, time.monotonic() - due, failure, text)


def _event(line: bytes) -> dict[str, Any] | None:
    """The JSON of a line of a stream, if it has one."""
    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
    return json.loads(data) if data.startswith(b"{") else None


def _judge(event: dict[str, Any]) -> tuple[str, bool]:
    """What an event says: the failure if it tells one, and whether it is the last."""
    if "error" in event:
        return _kind(f"HTTP 200, then {event['error'].get('code')}", json.dumps(event)), True
    reasons = [choice.get("finish_reason") for choice in event["choices"]]
    ended = any(reasons)
    bad = [reason for reason in reasons if reason not in (None, "length", "stop")]
    return (f"HTTP 200, then finish_reason {bad[0]}" if bad else ""), ended


def _said(event: dict[str, Any]) -> str:
    """The piece of the answer that an event brings."""
    deltas = [choice.get("delta") or {} for choice in event.get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


def _kind(status: str, text: str) -> str:
    """A failure without what is of this one request only."""
    try:
        told = json.loads(text)
        error = told.get("error", told)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass  # not JSON: shown as it is
    text = _NAMES.sub("#", " ".join(text.split()))
    return f"{status}: {text[:_SHOWN]}" if text else status
