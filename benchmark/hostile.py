"""What an honest load sees beside each attack.

    .venv/bin/python benchmark/hostile.py [--attacks tiff chunks] [--arms sglang-epd] [--resume]

One encoder and one language server answer a steady load of pictures, sent along and behind
URLs: calm first, then beside an attack of at most 10 MB/s or 20 requests/s, then beside the next
one. This package first, then SGLang's own EPD (SGLANG_EPD=off), with ten of the attacks of
users. Every answer is compared with that of a server at peace. A server that has ended, or
does not come back to itself, is started anew, and the row says so.

All is on one machine, so attackers yield their cores to the servers, as if they were on
machines of their own. What is done is kept in the JSON file beside the page; `--resume` goes on
there. `--as` names a run that is to be kept beside another version's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web
from comparison.arms import HOST, Arm, Place, Running, Server
from hostile_attacks import ATTACKS
from hostile_report import Results, Row, load, save
from open_loop import Answer, Bodies, ask, chat, open_loop, session
from pages import setting
from pictures import jpeg

from encoder import RESULTS
from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerError, ServerProcess

PICTURES = 16
TOKENS = 8
# What all servers may hold together: a container would end them there.
MEMORY_LIMIT_MB = 10_000
RECOVERY_S = 20.0
ANSWER_TIMEOUT_S = 30.0
WATCH_EVERY_S = 0.5
HEALTH_TIMEOUT_S = 30.0
# A tenth of a core is left to attackers where servers want both.
_NICE = 10
_ATTACKER = Path(__file__).with_name("hostile_attacks.py")
_MOVES = re.compile(r'^sglang:epd_dispatch_moves_total\{.*state="(\w+)".*\} (\S+)$', re.MULTILINE)

# Pictures repeat, and each is to be encoded. All else is as it is by default.
_NO_CACHES = {"SGLANG_EPD_EMBEDDING_CACHE_MB": "0", "SGLANG_VLM_CACHE_SIZE_MB": "0"}
_SERVERS = [
    Server(role="encoder"),
    Server(role="language", flags="--disable-radix-cache --enable-metrics"),
]
OURS = Arm(
    name="sglang-epd",
    title="sglang-epd",
    family="sglang-epd",
    servers=_SERVERS,
    env={
        **_NO_CACHES,
        "SGLANG_EPD_TOKEN": "a token of this benchmark",
        "SGLANG_EPD_MEDIA_ALLOWED_NETWORKS": "127.0.0.0/8",
    },
)
IN_TREE = Arm(
    name="in-tree",
    title="in-tree EPD",
    family="in-tree",
    servers=_SERVERS,
    env={**_NO_CACHES, "SGLANG_EPD": "off"},
)
# In-tree EPD often ends of these, and starts anew for the next.
THEIRS = (
    *("chunks", "drips", "large-urls", "escapes", "large-inline"),
    *("tiff", "jpeg2000", "webp", "video-packets", "leaving", "many-items"),
)
ARMS = {arm.title: arm for arm in (OURS, IN_TREE)}


class Honest(Bodies):
    """The same requests again and again, every other one with its picture behind a URL."""

    def __init__(self, media: str) -> None:
        super().__init__("448", TOKENS, "honest")
        self._media = media
        self.prepare(PICTURES)

    def take(self, number: int) -> bytes:
        return self._made[number % PICTURES]

    def _make(self, number: int) -> bytes:
        return chat(f"{self._media}/{number}", TOKENS) if number % 2 else super()._make(number)


@asynccontextmanager
async def media_server() -> AsyncIterator[str]:
    """Serve honest pictures by number, marked `no-store`; yields the URL."""
    pictures = [jpeg("448", ("behind a URL", number)) for number in range(PICTURES)]

    async def handle(request: web.Request) -> web.Response:
        picture = pictures[int(request.match_info["number"])]
        headers = {"Cache-Control": "no-store"}
        return web.Response(body=picture, content_type="image/jpeg", headers=headers)

    app = web.Application()
    app.router.add_get(r"/{number:\d+}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


def memory_mb(server: ServerProcess) -> float:
    """Proportional set size of a server and its processes, as the kernel adds it up."""
    total = 0.0
    try:
        root = psutil.Process(server.pid)
        for process in (root, *root.children(recursive=True)):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += int(text.partition("\nPss:")[2].split()[0]) * 1024 / 1e6
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, IndexError):
        pass  # it is ending
    return total


class Watch:
    """What is seen of an arm's servers from outside, until cancelled."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._servers = dict(zip(("encoder", "language"), running.servers, strict=True))
        self.health_s = dict.fromkeys(self._servers, 0.0)
        self.memory_mb = dict.fromkeys(self._servers, 0.0)
        self.ended = ""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._weigh())
            for role in self._servers:
                tasks.create_task(self._ask(role))

    async def _weigh(self) -> None:
        while True:
            now = {
                role: await asyncio.to_thread(memory_mb, server)
                for role, server in self._servers.items()
            }
            self.memory_mb = {role: max(now[role], most) for role, most in self.memory_mb.items()}
            if sum(now.values()) > MEMORY_LIMIT_MB and not self.ended:
                self.ended = f"over {MEMORY_LIMIT_MB / 1e3:.0f} GB: ended, as a container would"
                for server in self._servers.values():
                    await asyncio.to_thread(server.kill)
            for role, server in self._servers.items():
                if not server.running and not self.ended:
                    self.ended = f"the {role} server ended: {server.tail(1)}"
            await asyncio.sleep(WATCH_EVERY_S)

    async def _ask(self, role: str) -> None:
        (url,) = self._running.urls("encoder" if role == "encoder" else "language")
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                begin = time.monotonic()
                try:
                    async with http.get(f"{url}/health") as response:
                        await response.read()
                except TimeoutError:
                    pass  # it took that long
                except aiohttp.ClientError:
                    await asyncio.sleep(WATCH_EVERY_S)
                    continue  # it has ended, which `_weigh` tells
                self.health_s[role] = max(self.health_s[role], time.monotonic() - begin)
                await asyncio.sleep(WATCH_EVERY_S / 2)


async def moves(running: Running) -> Counter[str]:
    """How often the language server's encoder came into each state."""
    async with aiohttp.ClientSession() as http, http.get(f"{running.url}/metrics") as response:
        return Counter({state: int(float(n)) for state, n in _MOVES.findall(await response.text())})


class Trial:
    """One arm's servers, the honest load, and one attack after the other."""

    def __init__(self, arm: Arm, options: argparse.Namespace, logs: Path, media: str) -> None:
        self._arm, self._options, self._logs = arm, options, logs
        self._bodies = Honest(media)
        self._expected: list[str] = []
        self._running: Running | None = None
        self._lives = 0

    async def start(self) -> Running:
        """Servers that are up and warm; those that were there before are ended."""
        self.stop()
        self._lives += 1
        place = Place(cores=sorted(os.sched_getaffinity(0)))
        logs = self._logs / f"{self._lives}"
        model = str(ensure(self._options.model))
        self._running = Running(self._arm, model, "--dtype float32", place, logs)
        self._running.start()
        for _ in range(2):
            texts = [(await self._one(number)).text for number in range(PICTURES)]
            self._expected = self._expected or texts
            if texts != self._expected:
                raise ServerError("the same requests got other answers, at peace")
        if len(set(texts)) < 0.7 * PICTURES:
            raise ServerError("answers of this checkpoint tell too little of its pictures")
        return self._running

    def stop(self) -> None:
        if self._running:
            self._running.stop()
            self._running = None

    async def attack(self, name: str) -> Row:
        """An honest load without, and one with this attack."""
        running = self._running or await self.start()
        watch = Watch(running)
        watching = asyncio.create_task(watch.run())
        until = time.monotonic() + self._options.calm
        calm = await self._load(lambda: time.monotonic() < until)
        memory_before, watch.health_s = watch.memory_mb, dict.fromkeys(watch.health_s, 0.0)
        before = await moves(running)
        attacker = await self._attacker(name, running)
        assert attacker.stdout is not None
        begun = await attacker.stdout.readline()
        if begun.strip() != b"attacking":
            raise RuntimeError(f"the attacker did not begin: {begun!r}")
        told = asyncio.create_task(attacker.communicate())
        answers = await self._load(lambda: not told.done())
        done = json.loads((await told)[0])
        recovered = await self._recover(watch)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        after = before if watch.ended else await moves(running)
        if watch.ended or recovered is None:
            self.stop()
        return Row(
            arm=self._options.name or self._arm.title,
            attack=name,
            calm_s=[one.seconds for one in calm if not one.failure],
            calm_failed=self._failures(calm),
            seconds=[one.seconds for one in answers if not one.failure],
            failed=self._failures(answers),
            moves=dict(after - before),
            health_s=watch.health_s,
            memory_before_mb=memory_before,
            memory_mb=watch.memory_mb,
            ended=watch.ended,
            recovered_s=recovered,
            answers=done["answers"],
            sent_bytes=done["sent_bytes"],
        )

    def _failures(self, answers: list[Answer]) -> dict[str, int]:
        """How many failed, by what they failed of; a wrong answer has failed too."""
        failed = Counter(one.failure for one in answers if one.failure)
        for number, one in enumerate(answers):
            if not one.failure and one.text != self._expected[number % PICTURES]:
                failed["another answer than at peace"] += 1
        return dict(failed)

    async def _load(self, more: Callable[[], bool]) -> list[Answer]:
        assert self._running is not None
        rate, seed = self._options.rate, self._options.seed
        url, begin = self._running.url, time.monotonic()
        return await open_loop(
            *(url, self._bodies),
            rate=rate,
            seed=seed,
            begin=begin,
            more=more,
            timeout_s=ANSWER_TIMEOUT_S,
        )

    async def _one(self, number: int) -> Answer:
        assert self._running is not None
        async with session() as http:
            now = time.monotonic()
            body, url = self._bodies.take(number), self._running.url
            return await ask(http, url, body, now, now, timeout_s=ANSWER_TIMEOUT_S)

    async def _recover(self, watch: Watch) -> float | None:
        """Seconds until a picture and one behind a URL are answered; None for never."""
        begin = time.monotonic()
        while not watch.ended and time.monotonic() - begin < RECOVERY_S:
            if not any([(await self._one(number)).failure for number in (0, 1)]):
                return time.monotonic() - begin
            await asyncio.sleep(0.5)
        return None

    async def _attacker(self, name: str, running: Running) -> asyncio.subprocess.Process:
        log = running.servers[-1].log_path.read_text(errors="replace")
        found = re.findall(r"encoders deliver to tcp://(?:\S+@)?(\S+:\d+)", log)
        (encoder,) = running.urls("encoder")
        command = [sys.executable, str(_ATTACKER), name, "--seconds", str(self._options.seconds)]
        command += ["--language", running.url, "--encoder", encoder]
        command += ["--payload", found[-1]] if found else []
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(_NICE), *command),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        # Linux shares a core between sessions first (sched(7), "The autogroup feature").
        weight = Path(f"/proc/{process.pid}/autogroup")
        if weight.exists():
            weight.write_text(str(_NICE))
        return process


async def measure(options: argparse.Namespace, logs: Path) -> None:
    async with media_server() as media:
        for title in options.arms:
            arm = ARMS[title]
            trial = Trial(arm, options, logs / arm.name, media)
            try:
                for name in options.attacks:
                    await _measure_one(trial, options, title, name)
            finally:
                trial.stop()


async def _measure_one(trial: Trial, options: argparse.Namespace, title: str, name: str) -> None:
    kept = load(options.out, options).rows
    key = (options.name or title, name)
    if title != OURS.title and name not in THEIRS:
        return
    if options.resume and any((row.arm, row.attack) == key for row in kept):
        return
    begin = time.monotonic()
    row = await trial.attack(name)
    rows = [one for one in kept if (one.arm, one.attack) != key] + [row]
    save(options.out, Results(setting(options), options.rate, options.calm, options.seconds, rows))
    print(f"{title}, {name}: {row.summary}, {time.monotonic() - begin:.0f} s", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-qwen2_5-vl")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    parser.add_argument("--calm", type=float, default=6.0, metavar="SECONDS", help="before each")
    parser.add_argument("--rate", type=float, default=2.0, help="honest requests/s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--as", dest="name", metavar="NAME", help="of the one arm, in the page")
    parser.add_argument("--resume", action="store_true", help="do only what the file lacks")
    parser.add_argument("--render", action="store_true", help="write the page again, no more")
    parser.add_argument("--out", type=Path, default=RESULTS / "hostile.md")
    options = parser.parse_args()
    if options.name and len(options.arms) != 1:
        parser.error("--as names one arm: give --arms one")
    return options


def main() -> None:
    options = arguments()
    if options.render:
        save(options.out, load(options.out, options))
        return
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-hostile-"))
    print(f"logs: {logs}", flush=True)
    asyncio.run(measure(options, logs))


if __name__ == "__main__":
    main()
