"""Time to the first token on one GPU: by owner and one at a time, and under a small load."""

from __future__ import annotations

import asyncio
import http.server
import json
import math
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import requests
from open_loop import Answer, Bodies, open_loop
from ttft import OWNERS, Sample, ask, steps

from gpu.serve_fleet import Fleet, GpuWatch
from gpu.serve_pictures import data_url, picture

WARM_UP = 2
# From the moment that the tower's output is in host memory until prefill begins.
TAIL = ("encoder_grant", "to_queue", "queue")
_TOKENS = 16
# Of what one server could do with requests one at a time.
_LOAD = 0.5
_TIMEOUT_S = 60.0
# Processes that make pictures before the first request.
_PAINTERS = 8


@dataclass(frozen=True)
class Cell:
    """What a request has."""

    images: int
    size: str

    def __str__(self) -> str:
        return f"{self.images} x {self.size}"

    @property
    def weight(self) -> int:
        """Roughly how long a request takes."""
        return (2 + self.images) * (2 if self.size == "1080p" else 1)

    def pictures(self, seed: object) -> list[bytes]:
        return [picture(self.size, (str(self), seed, number)) for number in range(self.images)]


@dataclass
class Measured:
    """All samples of a checkpoint.

    Attributes:
        failures: requests that were not answered, by cell and arm.
    """

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def of(self, cell: Cell, arm: str) -> list[Sample]:
        return self.samples.setdefault(f"{cell}, {arm}", [])

    def ttfts_ms(self, cell: Cell, arm: str) -> list[float]:
        return [1e3 * (one.got_at - one.sent_at) for one in self.of(cell, arm)]


def alone(
    fleet: Fleet, cells: Sequence[Cell], repeats: int, seconds: float, *, again: str = ""
) -> Measured:
    """Requests one at a time, to the arms in turns, each with new pictures.

    Args:
        repeats: of every cell in every arm, at most.
        seconds: for all of it beside warming up; those of many pixels have most.
        again: names pictures that are unlike those of another call.
    """
    measured = Measured()
    draw = random.Random(1)
    numbers = range(-WARM_UP, repeats)
    with ProcessPoolExecutor(_PAINTERS, get_context("spawn")) as painters:
        seeds = [(again, number) for number in numbers]
        albums = {cell: list(painters.map(cell.pictures, seeds)) for cell in cells}
    for index, cell in enumerate(cells):
        end = math.inf
        for number, pictures in zip(numbers, albums[cell], strict=True):
            if number == 0:
                share = cell.weight / sum(one.weight for one in cells)
                end = time.monotonic() + share * seconds
            elif time.monotonic() > end:
                break
            for name in draw.sample(list(fleet.running), len(fleet.running)):
                try:
                    sample = ask(fleet.arm(name), fleet.running[name], pictures, number)
                except (requests.RequestException, RuntimeError) as error:
                    measured.failures.append(f"{cell}, {name}: {error}"[:400])
                    continue
                if number >= 0:
                    measured.of(cell, name).append(sample)
        medians = {name: _at(measured.ttfts_ms(cell, name), 0.5) for name in fleet.running}
        print(f"alone, {index + 1} of {len(cells)}: {cell}: {medians}", flush=True)
    return measured


def summary(fleet: Fleet, cells: Sequence[Cell], measured: Measured) -> list[list[str]]:
    """Quantiles and the tail before prefill, of every cell and arm."""
    rows = [["alone", "arm", "requests", "p50 (ms)", "p90", "lowest", "prefill", "tail"]]
    for cell in cells:
        for name in fleet.running:
            totals = measured.ttfts_ms(cell, name)
            if not totals:
                rows.append([str(cell), name, "0", *["-"] * 5])
                continue
            found = [steps(one) for one in measured.of(cell, name)]
            told = any("encoder_forward" in one for one in found)
            rows.append(
                [
                    *(str(cell), name, str(len(totals))),
                    *(f"{_at(totals, at):.1f}" for at in (0.5, 0.9, 0.0)),
                    f"{statistics.median(one['prefill'] for one in found):.1f}",
                    f"{statistics.median(tail(one) for one in found):.1f}" if told else "-",
                ]
            )
    return rows


def tail(found: dict[str, float]) -> float:
    """Milliseconds from a tower's last output in host memory to the beginning of prefill."""
    return sum(found.get(name, 0.0) for name in TAIL)


def owners(fleet: Fleet, cell: Cell, measured: Measured) -> list[list[str]]:
    """Median milliseconds of every step, by arm."""
    names = [name for name in fleet.running if measured.of(cell, name)]
    found = {name: [steps(one) for one in measured.of(cell, name)] for name in names}
    rows = [["owner (median, ms)", *names]]
    for step, owner in OWNERS.items():
        cells = [
            f"{statistics.median(one.get(step, 0.0) for one in found[name]):.1f}"
            if any(step in one for one in found[name])
            else ""
            for name in names
        ]
        if any(cells):
            rows.append([owner, *cells])
    return rows


@dataclass
class Load:
    """What an arm did under a load.

    Attributes:
        busy_percent: of the time in which some kernel ran; None without samples.
    """

    cell: str
    arm: str
    rate: float
    answers: list[Answer]
    busy_percent: float | None

    def row(self) -> list[str]:
        ttfts = [1e3 * one.ttft_s for one in self.answers if one.ttft_s is not None]
        failed = sum(bool(one.failure) for one in self.answers)
        times = [f"{_at(ttfts, at):.1f}" if ttfts else "-" for at in (0.5, 0.9)]
        busy = "-" if self.busy_percent is None else f"{self.busy_percent:.0f}"
        answered = f"{len(self.answers) - failed} of {len(self.answers)}"
        return [self.cell, self.arm, f"{self.rate:.2f}", answered, *times, busy]


LOAD_TITLES = ["load", "arm", "requests/s", "answered", "p50 (ms)", "p90", "GPU busy (%)"]


class _Bodies(Bodies):
    """Requests of a cell: no picture comes twice."""

    def __init__(self, cell: Cell, seed: object) -> None:
        super().__init__(cell.size, _TOKENS, seed)
        self._cell = cell

    def _make(self, number: int) -> bytes:
        return chat([data_url(one) for one in self._cell.pictures((self._seed, number))])


def chat(urls: Sequence[str]) -> bytes:
    """The body of a streamed chat request about pictures."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Why?"}]}],
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(body).encode()


def under_load(
    fleet: Fleet, cell: Cell, measured: Measured, watch: GpuWatch, seconds: float
) -> list[Load]:
    """The same open load for one arm after the other.

    Args:
        measured: requests one at a time; the rate is half of what one server did there.
        seconds: that requests are sent for, per arm.
    """
    baseline = measured.ttfts_ms(cell, "one") or measured.ttfts_ms(cell, "sglang-epd")
    rate = _LOAD * 1e3 / statistics.median(baseline)
    loads = []
    for name, running in fleet.running.items():
        bodies = _Bodies(cell, ("load", name))
        bodies.prepare(int(1.5 * rate * seconds) + 4)
        begin = time.monotonic()
        sending = open_loop(
            running.url,
            bodies,
            rate=rate,
            seed=str(cell),
            begin=begin,
            more=partial(_before, begin + seconds),
            timeout_s=_TIMEOUT_S,
        )
        answers = asyncio.run(sending)
        busy = watch.busy_percent(begin + 0.5, time.monotonic())
        loads.append(Load(str(cell), name, rate, answers, busy))
        print("load:", loads[-1].row(), flush=True)
    return loads


def _before(end: float) -> bool:
    return time.monotonic() < end


@contextmanager
def served(pictures: Sequence[bytes]) -> Iterator[list[str]]:
    """URLs of pictures, on a server of this process on loopback."""
    contents = {f"/{number}.jpg": one for number, one in enumerate(pictures)}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/jpeg")
            self.send_header("Content-Length", str(len(contents[self.path])))
            self.end_headers()
            self.wfile.write(contents[self.path])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield [f"http://127.0.0.1:{server.server_port}{path}" for path in contents]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def by_url(fleet: Fleet, cell: Cell, repeats: int) -> tuple[list[list[str]], list[str]]:
    """Time to the first token where the pictures are behind URLs: a table, and failures."""
    totals: dict[str, list[float]] = {name: [] for name in fleet.running}
    failures = []
    for number in range(repeats + 1):
        for name, running in fleet.running.items():
            with served(cell.pictures(("url", number, name))) as urls:
                begin = time.monotonic()
                answers = asyncio.run(_ask_once(running.url, chat(urls), begin))
            if answers.failure or answers.ttft_s is None:
                failures.append(f"{cell} by URL, {name}: {answers.failure}")
            elif number:
                totals[name].append(1e3 * answers.ttft_s)
    rows = [["by URL", "arm", "requests", "p50 (ms)", "highest"]]
    for name, found in totals.items():
        times = [f"{_at(found, at):.1f}" if found else "-" for at in (0.5, 1.0)]
        rows.append([str(cell), name, str(len(found)), *times])
    return rows, failures


async def _ask_once(url: str, body: bytes, begin: float) -> Answer:
    from open_loop import ask as ask_streaming
    from open_loop import session

    async with session() as http_session:
        return await ask_streaming(http_session, url, body, begin, begin, timeout_s=_TIMEOUT_S)


def _at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
