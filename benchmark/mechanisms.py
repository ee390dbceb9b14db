"""What optional mechanisms are worth: arms with each and without it.

    .venv/bin/python benchmark/mechanisms.py stores restarts places urls

`stores` reads and writes embeddings of real sizes in each kind of shared store. `restarts`
is the replay of `zipf.py` with a store behind the caches, and `places` one of conversations:
where the pictures of a later turn are. These three start no server. `urls` asks two encoder
servers for pictures behind URLs, one without a memory of URLs. Each replaces its own figures
in `results/mechanisms.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests as http
import torch
from aiohttp import web
from encoder_arms import Ours
from pages import machine
from pictures import ROOT, jpeg
from zipf import Encoder, Replay, draw

from make_checkpoint import ensure
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.store import SharedStore, open_store
from sglang_epd.wire.messages import Layout, TensorSpec

sys.path.append(str(ROOT / "test"))

from stores import mooncake_master, mooncake_node

RESULTS = ROOT / "benchmark" / "results" / "mechanisms.json"
# Embeddings of a picture with Qwen2.5-VL-7B, [tokens, width] in bfloat16.
SHAPES = {"448 px, 1.8 MB": (256, 3584), "1080p, 19 MB": (2691, 3584)}
NODE_BYTES = 1 << 30
STORE_HIT_S = 0.004
DELAYS_MS = (0, 20, 100)
AGE_S = 3600
PICTURES, ASKED = 50, 120

Runs = list[dict[str, Any]]


def median_ms(values: Sequence[float]) -> float:
    return round(1e3 * statistics.median(values), 2)


# Shared stores, alone


@contextmanager
def store_urls() -> Iterator[dict[str, str]]:
    with ExitStack() as stack:
        folder, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            for place in (None, "/dev/shm")
        )
        master = stack.enter_context(mooncake_master(folder))
        stack.enter_context(mooncake_node(folder, master, NODE_BYTES))
        yield {
            "folder": f"file://{folder}/store",
            "folder-shm": f"file://{memory}/store",
            "Mooncake": f"mooncake://127.0.0.1:{master.port}",
        }
        shutil.rmtree(memory, ignore_errors=True)


async def _timed(url: str, shape: tuple[int, int], count: int = 12) -> dict[str, float]:
    """Milliseconds of an embedding: read by another process's store, not found, written."""
    written = asyncio.Event()

    def observe(direction: str, _outcome: str, _seconds: float) -> None:
        if direction == "write":
            written.set()

    def opened() -> SharedStore:
        return open_store(url, token="", timeout_s=10, observer=observe)

    writer, reader = opened(), opened()
    await writer.connect()
    await reader.connect()
    layout = Layout("IMAGE", TensorSpec("bfloat16", shape), [[1, 32, 32]])
    keys = [os.urandom(32) for _ in range(count)]
    writes, reads, misses = [], [], []
    for key in keys:
        embedding = torch.randn(shape).to(torch.bfloat16)
        written.clear()
        begin = time.perf_counter()
        writer.keep(key, layout, embedding)
        await written.wait()
        writes.append(time.perf_counter() - begin)
    cpu = time.process_time()
    for key in keys * 3:
        begin = time.perf_counter()
        assert await reader.find(key, "IMAGE") is not None
        reads.append(time.perf_counter() - begin)
    cpu = (time.process_time() - cpu) / len(reads)
    for _ in keys:
        begin = time.perf_counter()
        assert await reader.find(os.urandom(32), "IMAGE") is None
        misses.append(time.perf_counter() - begin)
    await writer.close()
    await reader.close()
    return {
        "read_ms": median_ms(reads),
        "read_cpu_ms": median_ms([cpu]),
        "miss_ms": median_ms(misses),
        "write_ms": median_ms(writes),
    }


def stores(options: argparse.Namespace) -> Runs:
    with store_urls() as urls:
        return [
            {"kind": kind, "size": size, "round": number}
            | asyncio.run(_timed(f"{url}?namespace=round-{number}", shape))
            for number in range(options.rounds)
            for size, shape in SHAPES.items()
            for kind, url in urls.items()
        ]


# A shared store behind the encoders' caches


@dataclass
class Stored(Encoder):
    """With a store that has all that was ever encoded."""

    store: set[bytes] = field(default_factory=set)

    def ask(self, key: bytes, patches: float, now: float) -> tuple[float, str]:
        if key not in self.making and key not in self.cache and key in self.store:
            self.asked += 1
            self.hits += 1
            self.making[key] = now + STORE_HIT_S
            return self.making[key], "stored"
        return super().ask(key, patches, now)

    def done(self, key: bytes, embedding: torch.Tensor) -> None:
        super().done(key, embedding)
        self.store.add(key)


def restarts(options: argparse.Namespace) -> Runs:
    """Hit rates of 500 requests, after 2,000, when so many of three encoders started anew."""
    found = []
    for cleared in (0, 1, 3):
        for stored in (False, True):
            rates = []
            for seed in range(options.seeds):
                run = Replay("affinity", seed)
                if stored:
                    kept: set[bytes] = set()
                    for url, one in run._encoders.items():
                        run._encoders[url] = Stored(url, one.cache, one.rate, store=kept)
                asked = [(image,) for image in draw(2500, seed)]
                asyncio.run(run.run(asked[:2000], 8))
                encoders = list(run._encoders.values())
                for one in encoders[:cleared]:
                    one.cache.clear()
                before = sum(one.hits for one in encoders)
                asyncio.run(run.run(asked[2000:], 8))
                rates.append((sum(one.hits for one in encoders) - before) / 500)
            found.append({"anew": cleared, "store": stored, "hit_rate": statistics.fmean(rates)})
    return found


# Where a conversation's pictures are


class Lru:
    """Names with sizes in tokens; the least recently used go first."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()

    def find(self, name: Hashable) -> bool:
        if name in self._sizes:
            self._sizes.move_to_end(name)
        return name in self._sizes

    def put(self, name: Hashable, tokens: int) -> None:
        self._left += self._sizes.pop(name, 0) - tokens
        self._sizes[name] = tokens
        while self._left < 0:
            self._left += self._sizes.popitem(last=False)[1]


# In tokens of Qwen2.5-VL-7B: 50 GB of KV, half of a receive budget of 2 GB, 4 GB an encoder.
KV, ARENA, ENCODER, TEXT, TURNS = 900_000, 146_000, 585_000, 300, 6


def _places(conversations: int, pictures: int, tokens: int, encoders: int) -> dict[str, float]:
    """Shares of the pictures of later turns, by what has them."""
    draws = random.Random(0)
    kv, arena = Lru(KV), Lru(ARENA)
    caches = [Lru(ENCODER) for _ in range(encoders)]
    live = [(number, 0) for number in range(conversations)]
    counts: Counter[str] = Counter()
    steps = 6 * TURNS * conversations
    for step in range(steps):
        place = draws.randrange(conversations)
        talk, turn = live[place]
        covered = kv.find(talk)
        for picture in range(pictures):
            name = talk, picture
            cache = caches[hash(name) % encoders] if caches else None
            kept, cached = arena.find(name), cache is not None and cache.find(name)
            if turn and step > steps // 3:
                here = "arena" if kept else "encoder" if cached else "nowhere"
                counts[f"{'KV' if covered else 'no KV'}, {here}"] += 1
            if not covered:
                if cache is not None and not kept:
                    cache.put(name, tokens)
                arena.put(name, tokens)
        kv.put(talk, pictures * tokens + TEXT * (turn + 1))
        live[place] = (talk, turn + 1) if turn + 1 < TURNS else (talk + conversations, 0)
    return {name: round(count / counts.total(), 3) for name, count in sorted(counts.items())}


def places(_options: argparse.Namespace) -> Runs:
    return [
        {"pictures": pictures, "tokens": tokens, "conversations": many, "caches": encoders}
        | _places(many, pictures, tokens, encoders)
        for pictures, tokens in ((4, 256), (4, 2691), (1, 2691))
        for many in (10, 40, 80, 160)
        for encoders in (0, 1, 2)
    ]


# Media behind URLs


@asynccontextmanager
async def media(pictures: Sequence[bytes], delay: list[float]) -> AsyncIterator[str]:
    """A server of pictures that may be kept.

    Args:
        delay: its only element is how many seconds an answer takes.
    """

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(delay[0])
        number = int(request.match_info["number"])
        fresh = {"Cache-Control": f"max-age={AGE_S}"}
        return web.Response(body=pictures[number], content_type="image/jpeg", headers=fresh)

    app = web.Application()
    app.router.add_get("/{number}.jpg", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def urls(options: argparse.Namespace) -> Runs:
    env = {"SGLANG_EPD_MEDIA_ALLOWED_NETWORKS": "127.0.0.0/8"}
    model, logs = str(ensure("tiny-qwen2_5-vl")), Path(tempfile.mkdtemp())
    arms = {
        "none": Ours(model, logs, cache=True, env={**env, "SGLANG_EPD_URL_CACHE_ENTRIES": "0"}),
        "URLs remembered": Ours(model, logs, cache=True, env=env),
    }
    try:
        for arm in arms.values():
            arm.wait_ready()
        return asyncio.run(_urls(arms, options))
    finally:
        for arm in arms.values():
            arm.stop()


async def _urls(arms: dict[str, Ours], options: argparse.Namespace) -> Runs:
    # With bytes behind their end, so that each has as many as a photograph of that size.
    pictures = [jpeg("448", ("url", number)) + bytes(150_000) for number in range(PICTURES)]
    found, delay = [], [0.0]
    async with media(pictures, delay) as url:
        for number in range(-1, options.rounds):
            order = [image % PICTURES for image in draw(ASKED, number + 10)]
            for delay_ms in DELAYS_MS if number >= 0 else (0,):
                for name in random.Random(number).sample(list(arms), len(arms)):
                    delay[0] = delay_ms / 1e3
                    ran = await _ask(arms[name], [f"{url}/{image}.jpg" for image in order])
                    if number >= 0:
                        found.append({"arm": name, "delay_ms": delay_ms, "round": number} | ran)
    return found


def _clear(arm: Ours) -> None:
    for path in ("cache", "urls"):
        http.delete(f"{arm.url}/v1/{path}", timeout=10).raise_for_status()


async def _ask(arm: Ours, items: Sequence[str]) -> dict[str, Any]:
    """Ask for items one after the other; nothing was known of any before."""
    await asyncio.to_thread(_clear, arm)
    first: list[float] = []
    again: list[float] = []
    seen: set[str] = set()
    cpu = arm.cpu_s()
    async with EncoderClient() as client:
        for item in items:
            (ticket,) = arm.tickets([1])
            begin = time.perf_counter()
            reply = await client.encode(arm.url, arm.request(ticket, [item]))
            (again if item in seen else first).append(time.perf_counter() - begin)
            seen.add(item)
            assert reply.outcomes[0].state == "delivered", reply.outcomes[0]
    return {
        "first_ms": median_ms(first),
        "again_ms": median_ms(again),
        "cpu_ms": round(1e3 * (arm.cpu_s() - cpu) / len(items), 2),
    }


PARTS: dict[str, Callable[[argparse.Namespace], Runs]] = {
    "stores": stores,
    "restarts": restarts,
    "places": places,
    "urls": urls,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=4, help="of the replay")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    figures = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in options.parts:
        runs = PARTS[part](options)
        figures[part] = {"machine": machine(), "runs": runs}
        options.out.write_text(json.dumps(figures) + "\n")
        for one in runs:
            print(one)


if __name__ == "__main__":
    main()
