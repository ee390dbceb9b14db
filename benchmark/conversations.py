"""Conversations that begin with pictures: what the turns after the first one cost.

    .venv/bin/python benchmark/conversations.py [--rounds 5] [--at-once 1 4] [--in-tree-batch 1]

A conversation shows its pictures in its first turn and sends them again with each of the
others, as clients of the chat API do. Every picture belongs to one conversation. One
server that does everything, SGLang's own EPD (its encoder's prefix cache on) and this
package run side by side on the same cores; each round has the same conversations on one
after the other, in a random order. Times are to the first token of a streamed answer.
In-tree EPD's encoder asks its cache for a request that is alone in its batch:
`--in-tree-batch 1` has each alone.

What was asked of our encoder, and the embedding bytes that left it, are by its metrics; of
SGLang's, which tells neither, requests are counted in its access log.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import requests
from pages import setting, table
from pictures import jpeg

from encoder import RESULTS, write
from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerProcess, free_port, stop_all

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0
ONE, INTREE, OURS = "one server", "in-tree EPD", "sglang-epd"
# Environment and whether an encoder is apart.
ARMS: dict[str, tuple[dict[str, str], bool]] = {
    ONE: ({}, False),
    INTREE: ({"SGLANG_EPD": "off"}, True),
    OURS: ({}, True),
}
QUESTIONS = (
    "What do these pictures show?",
    "Which of them is the brightest?",
    "And what is in the corner of the second one?",
    "How do the first and the last differ?",
    "What might have been taken at night?",
    "Say it all again in one sentence.",
)
_ENCODE_LINE = re.compile(r'"POST /encode\b')
_REQUESTS, _BYTES = (f"sglang:epd_encoder_{name}_total" for name in ("requests", "delivered_bytes"))


@dataclass(frozen=True)
class Turn:
    """One turn of one conversation.

    Attributes:
        ttft_s: from the request to its first token.
        failure: why there was none; empty where there was.
    """

    arm: str
    at_once: int
    round: int
    conversation: int
    turn: int
    ttft_s: float
    failure: str = ""


@dataclass(frozen=True)
class Traffic:
    """What an arm's encoder did for all conversations of one round, the first turns apart."""

    arm: str
    at_once: int
    round: int
    first_requests: int
    later_requests: int
    first_bytes: float
    later_bytes: float


class Servers:
    """One arm's."""

    def __init__(self, arm: str, model: str, logs: Path, batch: str) -> None:
        env, apart = ARMS[arm]
        if arm == INTREE and batch:
            env = {**env, "SGLANG_ENCODER_MAX_BATCH_SIZE": batch}
        self._env = {**os.environ, **env}
        self._logs, self._arm = logs, arm
        self._model = model
        self.encoder: ServerProcess | None = None
        self.encoder_url = ""
        flags: list[str] = []
        if apart:
            self.encoder_url, self.encoder = self._server(
                "encoder", ["--encoder-only", "--enable-prefix-mm-cache"]
            )
            flags = ["--language-only", "--encoder-urls", self.encoder_url]
            flags += ["--encoder-bootstrap-port", str(free_port())]
        self.url, self.front = self._server("language" if apart else "server", flags)

    @property
    def all(self) -> list[ServerProcess]:
        return [server for server in (self.encoder, self.front) if server is not None]

    def _server(self, name: str, flags: list[str]) -> tuple[str, ServerProcess]:
        port = free_port()
        url = f"http://{HOST}:{port}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self._model]
        command += ["--dtype", "float32", "--port", str(port), *flags]
        log = self._logs / f"{self._arm.replace(' ', '-')}-{name}.log"
        server = ServerProcess(
            name, command, log_path=log, ready_url=f"{url}/health", env=self._env
        )
        return url, server

    def encode_requests(self) -> int:
        """How often the encoder has been asked so far."""
        if self.encoder is None:
            return 0
        if self._arm == OURS:
            return round(self._metric(_REQUESTS))
        return len(_ENCODE_LINE.findall(self.encoder.log_path.read_text(errors="replace")))

    def encoder_bytes(self) -> float:
        """Embedding bytes that have left the encoder; NaN where it does not tell."""
        if self._arm != OURS:
            return float("nan") if self.encoder else 0.0
        return self._metric(_BYTES)

    def _metric(self, name: str) -> float:
        """Of our encoder, summed over its labels."""
        text = requests.get(f"{self.encoder_url}/metrics", timeout=20).text
        lines = [line.split() for line in text.splitlines() if line.startswith(name)]
        return sum(float(line[-1]) for line in lines)


class Bench:
    """The servers of all arms, up together, and what was measured of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        logs = Path(tempfile.mkdtemp(prefix="sglang-epd-conversations-"))
        print("logs:", logs, flush=True)
        model = str(ensure(options.model))
        self.arms = {arm: Servers(arm, model, logs, options.in_tree_batch) for arm in ARMS}
        self.turns: list[Turn] = []
        self.traffic: list[Traffic] = []
        self._draw = random.Random(options.seed)

    def start(self) -> None:
        for servers in self.arms.values():
            for server in servers.all:
                server.start()
                server.wait_ready(START_TIMEOUT_S)

    def stop(self) -> None:
        stop_all([server for servers in self.arms.values() for server in servers.all])

    async def run(self) -> None:
        for at_once in self.options.at_once:
            # The first round of each warms the servers up, and is not counted.
            for number in range(-1, self.options.rounds):
                arms = list(ARMS)
                self._draw.shuffle(arms)
                for arm in arms:
                    await self._round(arm, at_once, number)
                print(f"{at_once} at once: round {number + 1} of {self.options.rounds}", flush=True)

    async def _round(self, arm: str, at_once: int, number: int) -> None:
        servers = self.arms[arm]
        talks = [
            Conversation(servers.url, self.options, f"{at_once}-{number}-{index}")
            for index in range(at_once)
        ]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            counted = [(servers.encode_requests(), servers.encoder_bytes())]
            for turn in range(self.options.turns):
                answers = await asyncio.gather(*(talk.ask(http, turn) for talk in talks))
                if turn in (0, self.options.turns - 1):
                    counted.append((servers.encode_requests(), servers.encoder_bytes()))
                if number >= 0:
                    self.turns += [
                        Turn(arm, at_once, number, index, turn, seconds, failure)
                        for index, (seconds, failure) in enumerate(answers)
                    ]
        if number >= 0:
            (r0, b0), (r1, b1), (r2, b2) = counted
            self.traffic.append(Traffic(arm, at_once, number, r1 - r0, r2 - r1, b1 - b0, b2 - b1))


class Conversation:
    """Turns about pictures of its own.

    Args:
        seed: the same on every arm, for the same pictures.
    """

    def __init__(self, url: str, options: argparse.Namespace, seed: str) -> None:
        self._url, self._tokens = url, options.tokens
        pictures = [jpeg(options.size, (options.seed, seed, i)) for i in range(options.pictures)]
        urls = ["data:image/jpeg;base64," + base64.b64encode(one).decode() for one in pictures]
        self._first: list[dict[str, Any]] = [
            {"type": "text", "text": f"Conversation {seed}."},
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        ]
        self._messages: list[dict[str, Any]] = []

    async def ask(self, http: aiohttp.ClientSession, turn: int) -> tuple[float, str]:
        """Seconds to the first token of the turn's answer, and why there was none."""
        text = {"type": "text", "text": QUESTIONS[turn % len(QUESTIONS)]}
        content = [*self._first, text] if turn == 0 else [text]
        self._messages.append({"role": "user", "content": content})
        body = {
            "model": "default",
            "messages": self._messages,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        begin = time.perf_counter()
        first: float | None = None
        answer, failure = "", ""
        try:
            async with (
                asyncio.timeout(ANSWER_TIMEOUT_S),
                http.post(f"{self._url}/v1/chat/completions", json=body) as response,
            ):
                if response.status != 200:
                    failure = f"HTTP {response.status}: {(await response.text())[:200]}"
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line.removeprefix(b"data:"))
                    if "error" in event:
                        failure = json.dumps(event)[:200]
                        break
                    first = first or time.perf_counter()
                    answer += event["choices"][0]["delta"].get("content") or ""
        except (aiohttp.ClientError, TimeoutError) as error:
            failure = repr(error)
        self._messages.append({"role": "assistant", "content": answer})
        if first is None and not failure:
            failure = "no token"
        return (float("nan") if first is None else first - begin), failure


def page(bench: Bench) -> str:
    options = bench.options
    times = [["at once", "turn", *ARMS, f"{OURS} / {ONE}", f"{INTREE} / {ONE}"]]
    asked = [["at once", "arm", "turn 1", "later turns", "bytes, turn 1", "bytes, later"]]
    for at_once in options.at_once:
        turns = [turn for turn in bench.turns if turn.at_once == at_once]
        rows = [(str(turn + 1), [turn]) for turn in range(options.turns)]
        rows.append((f"2 to {options.turns}", list(range(1, options.turns))))
        for name, chosen in rows:
            medians = {
                arm: statistics.median(
                    [t.ttft_s for t in turns if t.arm == arm and t.turn in chosen and not t.failure]
                    or [float("nan")]
                )
                for arm in ARMS
            }
            ratios = {arm: _ratio(turns, arm, chosen) for arm in (OURS, INTREE)}
            times.append(
                [
                    *(str(at_once), name),
                    *(f"{medians[arm] * 1e3:.0f}" for arm in ARMS),
                    *(f"{ratio:.2f}" for ratio in ratios.values()),
                ]
            )
        for arm in (INTREE, OURS):
            counts = [t for t in bench.traffic if (t.arm, t.at_once) == (arm, at_once)]
            asked.append(
                [
                    *(str(at_once), arm),
                    str(sum(t.first_requests for t in counts)),
                    str(sum(t.later_requests for t in counts)),
                    _bytes(sum(t.first_bytes for t in counts)),
                    _bytes(sum(t.later_bytes for t in counts)),
                ]
            )
    failed = [turn for turn in bench.turns if turn.failure]
    failures = "\n".join(
        f"- {arm}: {sum(turn.arm == arm for turn in failed)} of "
        f"{sum(turn.arm == arm for turn in bench.turns)} turns failed"
        + "".join(f" ({turn.failure})" for turn in [t for t in failed if t.arm == arm][:1])
        for arm in ARMS
    )
    return f"""# Conversations about {options.pictures} pictures

{setting(options)} {options.turns} turns of {options.tokens} tokens each, pictures of
{options.size} px in the first one, {options.rounds} rounds. All servers up together, one arm
in work at a time.

## Time to the first token (ms, medians)

Ratios are medians over rounds of the ratio of a round's medians.

{table(times)}

## Asked of the encoder, all rounds together

{table(asked)}

## Failures

{failures}
"""


def _ratio(turns: list[Turn], arm: str, chosen: list[int]) -> float:
    """Median over rounds of an arm's median time by that of one server."""
    found = []
    for number in {turn.round for turn in turns}:
        of_round = [t for t in turns if t.round == number and t.turn in chosen and not t.failure]
        mine = [t.ttft_s for t in of_round if t.arm == arm]
        theirs = [t.ttft_s for t in of_round if t.arm == ONE]
        if mine and theirs:
            found.append(statistics.median(mine) / statistics.median(theirs))
    return statistics.median(found) if found else float("nan")


def _bytes(count: float) -> str:
    return "not told" if math.isnan(count) else f"{count:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bench-qwen2_5-vl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--size", choices=("224", "448"), default="448")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--in-tree-batch",
        default="",
        metavar="REQUESTS",
        help="in-tree EPD's SGLANG_ENCODER_MAX_BATCH_SIZE",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "conversations.md")
    options = parser.parse_args()
    bench = Bench(options)
    try:
        bench.start()
        asyncio.run(bench.run())
    finally:
        bench.stop()
    figures = {
        "turns": [asdict(turn) for turn in bench.turns],
        "traffic": [asdict(traffic) for traffic in bench.traffic],
    }
    write(options.out, page(bench), figures)


if __name__ == "__main__":
    main()
