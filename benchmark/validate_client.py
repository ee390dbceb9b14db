"""Sends the loads of `validate_emulated.py` to real servers."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from pictures import jpeg
from validate_loads import Case

from sglang_epd.profile import Profile
from sglang_epd_plan.clients import Demand, generators
from sglang_epd_plan.records import Request
from sglang_epd_plan.workload import Closed, intervals

ANSWER_TIMEOUT_S = 300.0
# Patches of the pictures that are used, by their names in `pictures`.
SIZES = {256.0: "224", 1024.0: "448"}


@dataclass(frozen=True)
class Seen:
    """One answered request, seconds from when it was to be sent; the prompt's tokens without the
    cached ones, which are those of the chat template's beginning."""

    ttft_s: float
    total_s: float
    tokens: int
    prompt: int

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / (self.tokens - 1)


class Sender:
    """Streams chat completions.

    Args:
        seed: another one makes other texts and pictures, which no server has seen.

    Attributes:
        fixed, each: prompt tokens without text, and of a word.
        sent: pictures by server.
    """

    def __init__(self, session: aiohttp.ClientSession, seed: str) -> None:
        self._session, self._seed = session, seed
        self._pictures = 0
        self._rng = random.Random(seed)
        self.fixed, self.each = 0.0, 1.0
        self.sent: Counter[str] = Counter()

    async def learn(self, url: str) -> None:
        """How many tokens a word is."""
        _, few, many = [await self.ask(url, self.body(words, [], 2)) for words in (9, 20, 120)]
        self.each = (many.prompt - few.prompt) / 100
        self.fixed = few.prompt - 20 * self.each

    async def level(self, urls: Sequence[str], encoders: int) -> None:
        """Send pictures until each server has sent as many to one encoder as to another: the
        next goes to the first of them again."""
        for url in urls:
            if more := -self.sent[url] % encoders:
                await self.ask(url, self.body(9, ["224"] * more, 2))

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.each))

    def body(self, words: int, sizes: Iterable[str], output: int) -> bytes:
        """A request that nothing is known of: no two begin alike."""
        parts: list[dict[str, Any]] = []
        for size in sizes:
            self._pictures += 1
            data = base64.b64encode(jpeg(size, (self._seed, self._pictures))).decode()
            url = {"url": f"data:image/jpeg;base64,{data}"}
            parts.append({"type": "image_url", "image_url": url})
        letters = "abcdefghijklmnopqrstuvwxyz"
        text = " ".join(self._rng.choice(letters) for _ in range(words))
        parts.append({"type": "text", "text": text})
        return json.dumps(
            {
                "model": "default",
                "messages": [{"role": "user", "content": parts}],
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    def body_of(self, request: Request) -> bytes:
        """A simulated request, of the tokens and pictures that it has."""
        text = request.prompt - sum(item.tokens for item in request.items)
        sizes = [SIZES[item.patches] for item in request.items]
        return self.body(self.words(text), sizes, request.output)

    async def ask(self, url: str, body: bytes, due: float | None = None) -> Seen:
        """Send and read to the end.

        Raises:
            RuntimeError: it was not answered as asked.
        """
        due = time.perf_counter() if due is None else due
        first, usage = 0.0, None
        self.sent[url] += body.count(b"data:image/")
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with self._session.post(
            f"{url}/v1/chat/completions",
            data=body,
            headers={"Content-Type": "application/json"},
            timeout=timeout,
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if not first and event.get("choices") and event["choices"][0]["delta"]:
                    delta = event["choices"][0]["delta"]
                    first = time.perf_counter() if delta.get("content") else 0.0
                usage = event.get("usage") or usage
        if not first or usage is None:
            raise RuntimeError("an answer without a token")
        now = time.perf_counter()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        prompt = usage["prompt_tokens"] - cached
        return Seen(first - due, now - due, usage["completion_tokens"], prompt)


class Load:
    """One case on real servers: the requests that the simulation has, at its moments, which are
    stretched as the passes are."""

    def __init__(self, sender: Sender, urls: Sequence[str], profile: Profile, case: Case) -> None:
        self._sender, self._urls = sender, urls
        self._outstanding = [0] * len(urls)
        self._workload = case.workload()
        self._arrivals, demand = generators(0)
        self._demand = Demand(self._workload, profile, demand)
        self._routes = random.Random("0 routes")
        self.seen: list[Seen] = []
        # The number of the server of each request.
        self.routes = ""

    async def _send(self, body: bytes, due: float) -> None:
        """Send to the server with the fewest requests, as the simulation does."""
        least = min(self._outstanding)
        equal = [index for index, count in enumerate(self._outstanding) if count == least]
        index = equal[0] if len(equal) == 1 else self._routes.choice(equal)
        self.routes += str(index)
        self._outstanding[index] += 1
        try:
            self.seen.append(await self._sender.ask(self._urls[index], body, due))
        finally:
            self._outstanding[index] -= 1

    async def run(self, rate: float, requests: int) -> float:
        """All of them; requests a second."""
        bodies = [self._sender.body_of(self._demand.next(0.0)) for _ in range(requests)]
        first = due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if isinstance(self._workload.arrival, Closed):
                coming = iter(bodies)
                for _ in range(self._workload.arrival.users):
                    group.create_task(self._user(coming))
            else:
                gaps = intervals(self._workload.arrival, rate, self._arrivals)
                for number, (gap, body) in enumerate(zip(gaps, bodies, strict=False)):
                    due += gap
                    first = due if not number else first
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    group.create_task(self._send(body, due))
        return len(self.seen) / (time.perf_counter() - first)

    async def _user(self, coming: Iterable[bytes]) -> None:
        for body in coming:
            await self._send(body, time.perf_counter())
