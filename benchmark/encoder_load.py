"""What an encoder server does when it is asked too much, and when it is asked nonsense.

    .venv/bin/python benchmark/encoder_load.py [burst] [neighbours] [soak] [--soak 2000]

burst: 500 requests at the same time, at a server that takes 64 items. neighbours: sixteen
good requests, alone and next to a URL that drips, a PNG of 200 megapixels and half a JPEG.
soak: thousands of requests of all kinds, a tenth of which are left by their clients, while
memory, threads, descriptors and tasks are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from encoder_arms import HOST, Ours, closed_loop
from pages import quantile_ms, setting, table
from pictures import bomb, jpeg, truncated

from encoder import RESULTS, write
from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerError
from sglang_epd.wire.http import CONTENT_TYPE, EncodeReply, ErrorReply, decode_body, encode_body

BOUND = 64
# Nothing here takes longer than its media may; what does is said to hang.
HANG_S = 180.0
GOOD = 16
SOAK_CLIENTS = 16
LEAVING = 0.1
BAD = 0.1
REPEATED = 0.3
# What a bounded server may differ by between the second quarter of a soak and the last.
SLACK = {"memory (MB)": 0.05, "descriptors": 0.1, "threads": 0.1, "tasks": 0.25}


@dataclass
class Answer:
    """What came back; `codes` are the items' states, or the refusal of all of them."""

    status: int
    seconds: float
    codes: list[str]
    retry_after: str | None = None


async def post(
    session: aiohttp.ClientSession, arm: Ours, ticket: str, items: Sequence[bytes | str]
) -> Answer:
    begin = time.monotonic()
    body = encode_body(arm.request(ticket, items))
    try:
        async with asyncio.timeout(HANG_S):
            async with session.post(f"{arm.url}/v1/encode", data=body) as response:
                raw, status = await response.read(), response.status
                retry_after = response.headers.get("Retry-After")
    except TimeoutError:
        return Answer(0, time.monotonic() - begin, ["hangs"])
    except aiohttp.ClientError as error:
        return Answer(0, time.monotonic() - begin, [type(error).__name__])
    seconds = time.monotonic() - begin
    if status != 200:
        code = decode_body(raw, ErrorReply, len(raw)).code
        return Answer(status, seconds, [code], retry_after)
    outcomes = decode_body(raw, EncodeReply, len(raw)).outcomes
    return Answer(status, seconds, [one.code or one.state for one in outcomes])


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers={"Content-Type": CONTENT_TYPE}
    ) as opened:
        yield opened


@contextmanager
def encoder(model: str, logs: Path, **env: str) -> Any:
    arm = Ours(str(ensure(model)), logs, env=env)
    try:
        arm.wait_ready()
        yield arm
    finally:
        arm.stop()


def memory_mb(arm: Ours) -> float:
    return sum(process.memory_info().rss for process in arm.tree()) / 1e6


# Too much


async def burst(arm: Ours, requests: int) -> tuple[list[list[str]], dict[str, Any]]:
    """All at the same time."""
    pictures = [jpeg("224", ("burst", number)) for number in range(requests)]
    tickets = arm.tickets([1] * requests)
    before = most = memory_mb(arm)

    async def watch() -> None:
        nonlocal most
        while True:
            await asyncio.sleep(0.2)
            most = max(most, memory_mb(arm))

    watcher = asyncio.create_task(watch())
    begin = time.monotonic()
    async with session() as http:
        answers = await asyncio.gather(
            *(post(http, arm, ticket, [one]) for ticket, one in zip(tickets, pictures, strict=True))
        )
    seconds = time.monotonic() - begin
    watcher.cancel()
    arm.abandon([t for t, one in zip(tickets, answers, strict=True) if one.status != 200])
    await asyncio.sleep(12)  # the server gives memory back every ten seconds
    after = memory_mb(arm)
    kinds = Counter((one.status, *one.codes) for one in answers)
    refused = [one for one in answers if one.status == 503]
    polite = sum(one.retry_after is not None for one in refused)
    rows = [["answer", "requests", "p50 (ms)", "longest (ms)"]]
    for kind, count in sorted(kinds.items()):
        took = [one.seconds for one in answers if (one.status, *one.codes) == kind]
        name = f"{kind[0]} {kind[1]}" if kind[0] else str(kind[1])
        rows.append([name, str(count), quantile_ms(took, 0.5), quantile_ms(took, 1.0)])
    return rows, {
        "seconds": seconds,
        "refused": len(refused),
        "with_retry_after": polite,
        "memory_mb": {"before": before, "most": most, "after": after},
        "answers": {" ".join(map(str, kind)): count for kind, count in kinds.items()},
    }


# Nonsense


@asynccontextmanager
async def media_server() -> AsyncIterator[str]:
    """Serves bad media on loopback; gives its URL."""
    drops = jpeg("448", "drip")

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/jpeg"})
        response.content_length = len(drops)
        await response.prepare(request)
        with suppress(ConnectionError):
            for drop in drops:
                await response.write(bytes([drop]))
                await asyncio.sleep(0.2)
        return response

    def fixed(data: bytes) -> Any:
        async def handle(_request: web.Request) -> web.Response:
            return web.Response(body=data)

        return handle

    app = web.Application()
    app.router.add_get("/drip", drip)
    app.router.add_get("/bomb", fixed(bomb()))
    app.router.add_get("/truncated", fixed(truncated()))
    app.router.add_get("/good", fixed(drops))
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://{HOST}:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


async def neighbours(arm: Ours, rounds: int) -> tuple[list[list[str]], dict[str, Any]]:
    """Good requests with and without bad ones among them, in turn."""
    good: dict[bool, list[Answer]] = {False: [], True: []}
    bad: dict[str, list[Answer]] = {"drip": [], "bomb": [], "truncated": []}
    ratios = []
    async with media_server() as media, session() as http:

        async def together(seed: object, *, disturbed: bool) -> float:
            work: list[tuple[str | None, bytes | str]] = [
                (None, jpeg("448", ("neighbours", seed, number))) for number in range(GOOD)
            ]
            if disturbed:
                for place, name in enumerate(bad):
                    work.insert(5 * place, (name, f"{media}/{name}"))
            tickets = arm.tickets([1] * len(work))
            answers = await asyncio.gather(
                *(post(http, arm, t, [item]) for t, (_, item) in zip(tickets, work, strict=True))
            )
            fine: list[Answer] = []
            for ticket, (kind, _), answer in zip(tickets, work, answers, strict=True):
                if kind is None:
                    fine.append(answer)
                else:
                    bad[kind].append(answer)
                    arm.abandon([ticket])
            good[disturbed] += fine
            return statistics.median(answer.seconds for answer in fine)

        await together("warm-up", disturbed=False)
        good[False].clear()
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            took = {one: await together((number, one), disturbed=one) for one in order}
            ratios.append(took[True] / took[False])
    rows = [["requests", "answers", "p50 (ms)", "p99 (ms)"]]
    for disturbed, name in ((False, "good ones, alone"), (True, "good ones, with bad ones")):
        rows.append([name, *_summary(good[disturbed])])
    rows += [[kind, *_summary(answers)] for kind, answers in bad.items()]
    return rows, {
        "latency_ratio": ratios,
        "latency_ratio_median": statistics.median(ratios),
        "rows": rows[1:],
    }


def _summary(answers: Sequence[Answer]) -> list[str]:
    kinds = Counter((one.status, *one.codes) for one in answers)
    text = ", ".join(f"{count} x {' '.join(map(str, kind))}" for kind, count in kinds.items())
    seconds = [one.seconds for one in answers]
    return [text, quantile_ms(seconds, 0.5), quantile_ms(seconds, 0.99)]


# For long


class Soak:
    """Mixed requests by SOAK_CLIENTS clients, and what the server held meanwhile."""

    def __init__(self, arm: Ours, seed: int) -> None:
        self._arm = arm
        self._draw = random.Random(seed)
        self._seed = seed
        self._known = [
            jpeg(self._draw.choice(["224", "448"]), ("soak", number)) for number in range(16)
        ]
        self._broken = [truncated(), b"not a picture", bomb(), b""]
        self._done = 0
        self.samples: list[dict[str, float]] = []
        self.kinds: Counter[str] = Counter()

    async def run(self, count: int) -> dict[str, Any]:
        async with media_server() as media, session() as http:
            begin = time.monotonic()
            watcher = asyncio.create_task(self._watch(http))
            await closed_loop(range(count), SOAK_CLIENTS, lambda n: self._one(http, media, n))
            seconds = time.monotonic() - begin
            watcher.cancel()
            await asyncio.sleep(15)  # the server tidies every ten seconds
            idle = await state(http, self._arm)
        kinds = dict(self.kinds)
        return {"seconds": seconds, "kinds": kinds, "samples": self.samples, "idle": idle}

    def rows(self, count: int, idle: dict[str, float]) -> list[list[str]]:
        """The second quarter of the run beside the last one."""
        second = [s for s in self.samples if count / 4 <= s["requests"] < count / 2]
        last = [s for s in self.samples if s["requests"] >= 3 * count / 4]
        rows = [["", "at first", "second quarter", "last quarter", "idle afterwards", "verdict"]]
        for name, slack in SLACK.items():
            if name not in idle:
                rows.append([name, "not told", "", "", "", ""])
                continue
            early = statistics.fmean(one[name] for one in second)
            late = statistics.fmean(one[name] for one in last)
            verdict = "flat" if late <= early * (1 + slack) else f"grew by {late / early - 1:.0%}"
            shown = [self.samples[0][name], early, late, idle[name]]
            rows.append([name, *(f"{value:.0f}" for value in shown), verdict])
        return rows

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        while True:
            self.samples.append({"requests": self._done, **await state(http, self._arm)})
            await asyncio.sleep(1.0)

    async def _one(self, http: aiohttp.ClientSession, media: str, number: int) -> None:
        items = await asyncio.to_thread(self._items, media, number)
        (ticket,) = self._arm.tickets([len(items)])
        asking = post(http, self._arm, ticket, items)
        answer = None
        if self._draw.random() < LEAVING:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._draw.uniform(0.0, 1.0)):
                    answer = await asking
        else:
            answer = await asking
        if answer is None:
            self.kinds["left"] += 1
        elif answer.status != 200:
            self.kinds[f"{answer.status} {answer.codes[0]}"] += 1
        else:
            self.kinds.update(f"item {code}" for code in answer.codes)
        if answer is None or set(answer.codes) != {"delivered"}:
            self._arm.abandon([ticket])
        self._done += 1

    def _items(self, media: str, number: int) -> list[bytes | str]:
        items: list[bytes | str] = [self._picture(number) for _ in range(self._draw.randint(1, 4))]
        if self._draw.random() < BAD:
            bad: list[bytes | str] = [*self._broken, f"{media}/truncated"]
            items[self._draw.randrange(len(items))] = self._draw.choice(bad)
        elif self._draw.random() < BAD:
            items[0] = f"{media}/good"
        return items

    def _picture(self, number: int) -> bytes | str:
        if self._draw.random() < REPEATED:
            return self._draw.choice(self._known)
        size = self._draw.choices(("224", "448", "1080p"), (0.65, 0.3, 0.05))[0]
        return jpeg(size, ("soak", self._seed, number, self._draw.random()))


async def state(http: aiohttp.ClientSession, arm: Ours) -> dict[str, float]:
    tree = await asyncio.to_thread(arm.tree)
    found = {
        "memory (MB)": sum(one.memory_info().rss for one in tree) / 1e6,
        "descriptors": float(sum(one.num_fds() for one in tree)),
        "threads": float(sum(one.num_threads() for one in tree)),
    }
    async with http.get(f"{arm.url}/v1/status") as response:
        status = await response.json()
    found["items in work"] = float(status["items"])
    if "tasks" in status:
        found["tasks"] = float(status["tasks"])
    return found


# The page


def burst_part(options: argparse.Namespace, logs: Path) -> tuple[str, dict[str, Any]]:
    bounded = {"SGLANG_EPD_ENCODER_MAX_ITEMS": str(BOUND)}
    note = f"The server takes {BOUND} items at a time (`SGLANG_EPD_ENCODER_MAX_ITEMS`)."
    try:
        with encoder(options.model, logs, **bounded) as arm:
            rows, figures = asyncio.run(burst(arm, options.burst))
    except ServerError as error:
        if "is not a setting of sglang-epd" not in str(error):
            raise
        note = (
            "This version does not know `SGLANG_EPD_ENCODER_MAX_ITEMS`: "
            "its own bound, of 1024 items, held, so this shows no refusals."
        )
        print(note, flush=True)
        with encoder(options.model, logs) as arm:
            rows, figures = asyncio.run(burst(arm, options.burst))
    memory = figures["memory_mb"]
    return (
        f"""## {options.burst} requests at the same time

{note} One 224x224 picture each. All were answered after {figures["seconds"]:.1f} s; of
{figures["refused"]} refusals {figures["with_retry_after"]} had a `Retry-After`. Resident
memory {memory["before"]:.0f} MB before, {memory["most"]:.0f} MB at most, {memory["after"]:.0f} MB
twelve seconds later.

{table(rows)}
""",
        figures,
    )


def neighbours_part(options: argparse.Namespace, logs: Path) -> tuple[str, dict[str, Any]]:
    with encoder(options.model, logs, SGLANG_EPD_MEDIA_ALLOWED_NETWORKS="127.0.0.1/32") as arm:
        rows, figures = asyncio.run(neighbours(arm, options.rounds))
    ratios = figures["latency_ratio"]
    return (
        f"""## {GOOD} good requests, and bad ones among them

Median latency of the good ones with bad ones, by that without, over {len(ratios)} rounds:
{figures["latency_ratio_median"]:.2f} ({min(ratios):.2f} to {max(ratios):.2f}).
One 448x448 picture each.

{table(rows)}
""",
        figures,
    )


def soak_part(options: argparse.Namespace, logs: Path) -> tuple[str, dict[str, Any]]:
    with encoder(options.soak_model, logs, SGLANG_EPD_MEDIA_ALLOWED_NETWORKS="127.0.0.1/32") as arm:
        run = Soak(arm, options.seed)
        figures = asyncio.run(run.run(options.soak))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(figures["kinds"].items()))
    return (
        f"""## {options.soak} mixed requests

{SOAK_CLIENTS} clients, checkpoint {options.soak_model}, in {figures["seconds"]:.0f} s: one to four
pictures of three sizes, {REPEATED:.0%} of them seen before, {BAD:.0%} of the requests with a bad
one, {LEAVING:.0%} left by their clients within a second. What came back: {kinds}.

{table(run.rows(options.soak, figures["idle"]))}
""",
        figures,
    )


PARTS = {"burst": burst_part, "neighbours": neighbours_part, "soak": soak_part}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--model", default="bench-qwen2_5-vl")
    parser.add_argument("--soak-model", default="tiny-qwen2_5-vl")
    parser.add_argument("--burst", type=int, default=500, metavar="REQUESTS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=int, default=2000, metavar="REQUESTS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "encoder_load.md")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-bench-"))
    pages, figures = [], {}
    for name in options.parts or PARTS:
        page, figures[name] = PARTS[name](options, logs)
        print(page, flush=True)
        pages.append(page)
    page = f"# An encoder server under load\n\n{setting(options)}\n\n" + "\n".join(pages)
    write(options.out, page, figures)


if __name__ == "__main__":
    main()
