"""Clients: `sglang.bench_serving` where it can express a workload, our open loop where a
request needs the answer to the one before it, and single questions whose answers are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import requests as http_requests
from open_loop import ANSWER_TIMEOUT_S, Answer, ask, session

from comparison.figures import Outcome
from comparison.workloads import Request

_CHILD = Path(__file__).with_name("bench_serving_child.py")
# It imports SGLang and a tokenizer.
_START_TIMEOUT_S = 120.0
# What a run may take beside the time in which it sends.
_DRAIN_S = 120.0
_ANSWER_TIMEOUT_S = 120.0
_SHOWN = 200


class ClientError(RuntimeError):
    """A client could not do its work; nothing is said of the server."""


@dataclass(frozen=True)
class Load:
    """What a run sends.

    Attributes:
        path: its requests, one a line, as bench_serving's dataset `openai` has them.
        kinds, tokens: of each of them.
        digest: of the file.
        rate: requests a second; 0 is `at_once` in flight.
        seed: of the moments.
    """

    path: Path
    kinds: list[str]
    tokens: list[int]
    digest: str
    rate: float
    seed: int
    at_once: int = 1


def write_load(
    path: Path, requests: Iterable[Request], count: int, rate: float, seed: int, *, at_once: int = 1
) -> Load:
    """Write the first `count` requests to a file."""
    kinds, tokens, digest = [], [], hashlib.blake2b(digest_size=12)
    with path.open("wb") as file:
        for request in islice(requests, count):
            # Of an answer that ended early the number of tokens tells.
            line = {**request.body(), "stream_options": {"include_usage": True}}
            data = json.dumps(line).encode() + b"\n"
            digest.update(data)
            file.write(data)
            kinds.append(request.kind)
            tokens.append(request.answer_tokens)
    return Load(path, kinds, tokens, digest.hexdigest(), rate, seed, at_once)


class BenchServing:
    """`sglang.bench_serving` in a process that imports it once and runs it again and again.

    Args:
        model: a checkpoint's folder or name, for its tokenizer.
        folder: for its log and what it writes.
        cores: that it runs on.
    """

    def __init__(self, model: str, folder: Path, cores: Sequence[int]) -> None:
        self._model, self._folder, self._cores = model, folder, cores
        self._log = folder / "bench_serving.log"
        self._process: subprocess.Popen[str] | None = None
        self._said: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> BenchServing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def command(self, url: str, load: Load) -> list[str]:
        """The arguments of a run."""
        many = ["--request-rate", f"{load.rate:g}"]
        if not load.rate:
            many = ["--max-concurrency", str(load.at_once)]
        return [
            *("--backend", "sglang-oai-chat", "--base-url", url),
            *("--model", self._model, "--tokenizer", self._model),
            *("--dataset-name", "openai", "--dataset-path", str(load.path)),
            *("--num-prompts", str(len(load.kinds)), *many, "--seed", str(load.seed)),
            *("--warmup-requests", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
            *("--output-details", "--output-file", str(self._folder / "bench.jsonl")),
        ]

    def run(self, url: str, load: Load, seconds: float) -> tuple[list[Outcome], float]:
        """What became of each request, and how long all of them took.

        Args:
            seconds: how long it is expected to send.

        Raises:
            ClientError: it could not be started.
        """
        output = self._folder / "bench.jsonl"
        output.unlink(missing_ok=True)
        begin = time.monotonic()
        failure = self._call(self.command(url, load), seconds + _DRAIN_S)
        if not failure and not output.exists():
            failure = "bench_serving wrote no result"
        if failure:
            lost = [Outcome(kind, None, None, 0, failure) for kind in load.kinds]
            return lost, time.monotonic() - begin
        result = json.loads(output.read_text().splitlines()[-1])
        return outcomes(result, load), float(result["duration"])

    def close(self) -> None:
        """End the process; the next run starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process = None

    def _call(self, arguments: list[str], timeout_s: float) -> str:
        """Run it; returns why there is no result, empty where there is."""
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
            return self._hear(timeout_s)
        except BrokenPipeError:
            self.close()
            raise ClientError(f"bench_serving has ended; see {self._log}") from None
        except TimeoutError:
            self.close()
            return f"no answer in {timeout_s:.0f} s"

    def _start(self) -> None:
        self._said = queue.Queue()
        pinned = ["taskset", "--cpu-list", ",".join(map(str, self._cores))]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                # Not with its own folder in front of SGLang's imports.
                [*pinned, sys.executable, "-P", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )
        threading.Thread(
            target=_listen, args=(self._process.stdout, self._said), daemon=True
        ).start()
        try:
            self._hear(_START_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise ClientError("bench_serving does not start") from None

    def _hear(self, timeout_s: float) -> str:
        """The next line: a failure, or nothing.

        Raises:
            ClientError: the process ended.
            TimeoutError: it says nothing.
        """
        try:
            line = self._said.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            self.close()
            raise ClientError(f"bench_serving has ended; see {self._log}")
        return str(json.loads(line))


def _listen(stream: Iterable[str], said: queue.Queue[str]) -> None:
    for line in stream:
        said.put(line)
    said.put("")


def outcomes(result: dict[str, Any], load: Load) -> list[Outcome]:
    """What bench_serving says of each request (`--output-details`).

    It counts as answered what ended with HTTP 200, so errors within a stream, and answers
    that ended early, are told by what is missing of them.

    Raises:
        ClientError: it speaks of other requests than were sent.
    """
    found = []
    each = ("output_lens", "ttfts", "itls", "errors")
    if any(len(result[name]) != len(load.kinds) for name in each):
        raise ClientError(f"bench_serving says something of {len(result['ttfts'])} requests")
    rows = zip(load.kinds, load.tokens, *(result[name] for name in each), strict=True)
    for kind, asked, tokens, ttft_s, gaps_s, error in rows:
        failure = str(error).strip()[-_SHOWN:]
        if not failure and tokens < asked:
            failure = f"{tokens} of {asked} tokens"
        if not failure and not ttft_s:
            failure = "no token"
        if failure:
            found.append(Outcome(kind, None, None, tokens, failure))
            continue
        tpot_ms = sum(gaps_s) / (tokens - 1) * 1e3 if tokens > 1 else None
        found.append(Outcome(kind, ttft_s * 1e3, tpot_ms, tokens))
    return found


async def converse(
    url: str,
    talks: Sequence[Request],
    rate: float,
    seed: int,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> tuple[list[Outcome], float]:
    """Hold conversations, each begun at its moment (Poisson), its turns one after the other.

    Args:
        rate: conversations a second; 0 is one at a time, infinity all at once.
        seed: of the moments.
        timeout_s: after so long a turn has failed.
    """
    draw = random.Random(repr(("moments", seed)))
    begin = time.monotonic()
    due, waiting = begin, []
    async with session() as http:
        for talk in talks:
            if rate:
                due += draw.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            moment = due if rate else 0.0
            waiting.append(
                asyncio.create_task(_talk(http, url, talk, begin, moment, timeout_s=timeout_s))
            )
            if not rate:
                await waiting[-1]
        told = [one for talk in await asyncio.gather(*waiting) for one in talk]
    return told, time.monotonic() - begin


async def _talk(
    http: aiohttp.ClientSession,
    url: str,
    talk: Request,
    begin: float,
    due: float,
    *,
    timeout_s: float,
) -> list[Outcome]:
    messages: list[dict[str, Any]] = []
    found = []
    for number, content in enumerate(talk.turns):
        if talk.sliding:
            messages.clear()
        messages.append({"role": "user", "content": content})
        body = {**talk.body(), "model": "default", "messages": messages, "stream": True}
        moment = due if due and number == 0 else time.monotonic()
        answer = await ask(http, url, json.dumps(body).encode(), begin, moment, timeout_s=timeout_s)
        found.append(turn_outcome(answer, "later" if number else "first", talk.answer_tokens))
        messages.append({"role": "assistant", "content": answer.text})
    return found


def turn_outcome(answer: Answer, kind: str, tokens: int) -> Outcome:
    """Of an answer that was to have so many tokens."""
    if answer.failure or answer.ttft_s is None:
        return Outcome(kind, None, None, 0, answer.failure or "no token")
    rest_s = answer.seconds - answer.ttft_s
    tpot_ms = rest_s / (tokens - 1) * 1e3 if tokens > 1 else None
    return Outcome(kind, answer.ttft_s * 1e3, tpot_ms, tokens)


def question(url: str, request: Request, tokens: int) -> dict[str, Any]:
    """One answer's tokens and their log-probabilities, or its `failure`."""
    body = {**request.body(), "model": "default", "max_tokens": tokens}
    body |= {"logprobs": True, "top_logprobs": 1}
    try:
        response = http_requests.post(
            f"{url}/v1/chat/completions", json=body, timeout=_ANSWER_TIMEOUT_S
        )
        if response.status_code != 200:
            return {"failure": f"HTTP {response.status_code}: {response.text[:_SHOWN]}"}
        content = response.json()["choices"][0]["logprobs"]["content"]
        return {
            "tokens": [one["token"] for one in content],
            "logprobs": [one["logprob"] for one in content],
        }
    except (http_requests.RequestException, KeyError, TypeError, ValueError) as error:
        return {"failure": f"{type(error).__name__}: {error}"[:_SHOWN]}
