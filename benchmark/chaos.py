"""What requests see of encoders that are killed, frozen and told to go.

    .venv/bin/python benchmark/chaos.py [--minutes 3] [--dynamic]

Three encoder servers and one language server take a steady load of requests, one picture
each that nobody has seen, at 60% of what they answer at most: first in peace, then while
encoders are killed (kill -9), frozen (SIGSTOP) and told to go (SIGTERM), and come back.
A language server that ends is started again at once, as a supervisor would. This package first;
when its servers have ended, SGLang's own EPD (SGLANG_EPD=off) the same
way. `--dynamic`: the encoders register themselves (--encoder-register-urls).

On one machine, so a server that starts again takes processor time from those that serve,
which it would not in a cluster: it starts at a lower priority (`--restart-nice`) and gets
its own back when it is ready. `--forks`: our servers are forks of a process that has
imported SGLang, so that a start does not take the processor time of the imports.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import aiohttp
from chaos_report import CAPACITY_CLIENTS, ENCODERS, Event, Result, Run, figures, page
from open_loop import Bodies, closed_loop, open_loop

from encoder import RESULTS, write
from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerError, ServerProcess, free_port, stop_all

sys.path.append(str(Path(__file__).resolve().parents[1] / "test"))
from integration.forked import ForkedServer, ForkServer

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
# An encoder is told to go, and gets this long.
DRAIN_S = 40.0
CAPACITY_S = 8.0
SCRAPE_EVERY_S = 0.5
FORWARDS = 'sglang:epd_encoder_stage_seconds_count{stage="forward"}'
OURS = "sglang-epd"
ARMS: dict[str, dict[str, str]] = {OURS: {}, "in-tree EPD": {"SGLANG_EPD": "off"}}

# When a fault comes, in a run of 180 s (others are scaled), what it is, which encoder is
# hit, and for how many seconds it is gone or frozen; None: until it has ended by itself.
# Each waits until all encoders have been back from the one before for a while.
FAULTS: tuple[tuple[float, str, int, float | None], ...] = (
    (15.0, "kill -9", 0, 10.0),
    (60.0, "SIGSTOP", 1, 20.0),
    (105.0, "SIGTERM", 2, None),
    (140.0, "kill -9", 1, 10.0),
)
_FAULTS_FOR_S = 180.0
_SETTLE_S = 5.0
# After which the run goes on for so long.
_AFTER_S = 15.0


class Servers:
    """The servers of one arm; start and stop them from the main thread."""

    def __init__(
        self, arm: str, options: argparse.Namespace, logs: Path, forks: ForkServer | None
    ) -> None:
        self._arm = arm
        self._logs = logs
        self._forks = forks
        self._nice = options.restart_nice
        self.notes: list[str] = []
        model = str(ensure(options.model))
        ports = [free_port() for _ in range(ENCODERS)]
        language, registry = free_port(), free_port()
        self.encoder_urls = [f"http://{HOST}:{port}" for port in ports]
        self.url = f"http://{HOST}:{language}"
        register = ["--encoder-register-urls", f"http://{HOST}:{registry}"]
        known = ["--encoder-urls", *self.encoder_urls]
        common = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        common += ["--dtype", "float32"]
        self._commands = [
            [*common, "--encoder-only", "--port", str(port), *(register if options.dynamic else ())]
            for port in ports
        ]
        self.encoders = [
            self._server(f"encoder-{number}", command, url)
            for number, (command, url) in enumerate(
                zip(self._commands, self.encoder_urls, strict=True)
            )
        ]
        command = [*common, "--language-only", "--port", str(language)]
        command += ["--encoder-bootstrap-port", str(registry)]
        command += [] if options.dynamic else known
        self.language = self._server("language", command, self.url)
        self._lives = [0] * ENCODERS

    def _server(self, name: str, command: list[str], url: str) -> ServerProcess:
        make = ServerProcess if self._forks is None else partial(ForkedServer, self._forks)
        return make(
            name,
            command,
            log_path=self._logs / f"{self._arm.replace(' ', '-')}-{name}.log",
            ready_url=f"{url}/health",
            env={**os.environ, "SGLANG_VLM_CACHE_SIZE_MB": "0", **ARMS[self._arm]},
        )

    def start(self) -> None:
        for server in [*self.encoders, self.language]:
            server.start()
        end = time.monotonic() + START_TIMEOUT_S
        for server in [*self.encoders, self.language]:
            server.wait_ready(max(1.0, end - time.monotonic()))

    def stop(self) -> None:
        stop_all([*self.encoders, self.language])

    def last_words(self) -> str:
        """What the language server's log tells of its end."""
        log = self.language.log_path.read_text(errors="replace")
        raised = log.partition("Scheduler hit an exception")[2]
        errors = re.findall(r"^\w*(?:Error|Exception)\b.*", raised, re.MULTILINE)
        why = f"its scheduler raised {errors[0]!r}" if errors else self.language.tail(1)
        return why

    def signal(self, number: int, which: signal.Signals) -> None:
        """To an encoder and all that it has started."""
        os.killpg(self.encoders[number].pid, which)

    def restart(self, number: int) -> None:
        """Start an encoder that has ended, at its old port; returns at once."""
        self._lives[number] += 1
        server = self.encoders[number]
        stem = f"{self._arm.replace(' ', '-')}-encoder-{number}"
        server.log_path = self._logs / f"{stem}-again-{self._lives[number]}.log"
        server.start()
        self._weigh(number, self._nice)

    def restart_language(self, life: int) -> None:
        """Start the language server, which has ended, at its old port; returns at once."""
        self.language.kill()  # what it has left behind
        stem = f"{self._arm.replace(' ', '-')}-language"
        self.language.log_path = self._logs / f"{stem}-again-{life}.log"
        self.language.start()

    async def language_ready(self) -> None:
        """Wait for a restarted language server.

        Raises:
            ServerError: it ended.
            TimeoutError: it was not ready in time.
        """
        await self._ready(self.language, self.url)

    async def _ready(self, server: ServerProcess, url: str) -> None:
        """As `wait_ready`, but it can be cancelled."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await _healthy(url):
                server.check_running()
                await asyncio.sleep(0.2)

    async def ready(self, number: int) -> None:
        """Wait for a restarted encoder.

        Raises:
            ServerError: it ended.
            TimeoutError: it was not ready in time.
        """
        await self._ready(self.encoders[number], self.encoder_urls[number])
        if self._nice:
            try:
                self._weigh(number, 0)
            except PermissionError:
                note = "Restarted encoders kept their low priority: only root may raise it."
                if note not in self.notes:
                    self.notes.append(note)

    def _weigh(self, number: int, nice: int) -> None:
        """Set the priority of a server's threads, and of its session.

        Where Linux shares a core between sessions first, a nice value counts within one only, and
        each server is a session of its own (sched(7), "The autogroup feature").
        """
        pid = self.encoders[number].pid
        while os.getpgid(pid) != pid:  # a fork leads its own session in a moment
            time.sleep(0.001)
        os.setpriority(os.PRIO_PGRP, pid, nice)
        weight = Path(f"/proc/{pid}/autogroup")
        if weight.exists():
            weight.write_text(str(nice))


class Counts:
    """What our encoders say of their work; the last word of those that died stands."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._now = [0.0] * len(urls)
        self._before = [0.0] * len(urls)

    @property
    def forwards(self) -> int:
        return round(sum(self._now) + sum(self._before))

    async def watch(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(SCRAPE_EVERY_S)

    async def ask(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as http:
            await asyncio.gather(*(self._ask(http, number) for number in range(len(self._urls))))

    async def _ask(self, http: aiohttp.ClientSession, number: int) -> None:
        try:
            async with http.get(f"{self._urls[number]}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return  # dead or frozen
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        value = float(samples.get(FORWARDS, 0.0))
        if value < self._now[number]:
            self._before[number] += self._now[number]
        self._now[number] = value


class Chaos:
    """Hits the encoders of one arm, one fault after the other."""

    def __init__(self, servers: Servers, begin: float, scale: float) -> None:
        self._servers = servers
        self._begin = begin
        self._scale = scale
        self.events: list[Event] = []

    async def run(self) -> None:
        for at, what, number, gone_s in FAULTS:
            await asyncio.sleep(max(0.0, self._begin + at * self._scale - time.monotonic()))
            await self._hit(what, number, None if gone_s is None else gone_s * self._scale)
            await asyncio.sleep(_SETTLE_S)
        end = max(
            time.monotonic() + _AFTER_S * self._scale,
            self._begin + _FAULTS_FOR_S * self._scale,
        )
        await asyncio.sleep(end - time.monotonic())

    async def _hit(self, what: str, number: int, gone_s: float | None) -> None:
        server = self._servers.encoders[number]
        in_work = await _in_work(self._servers.encoder_urls[number])
        self._note(what, number, in_work)
        if what == "SIGSTOP":
            assert gone_s is not None
            self._servers.signal(number, signal.SIGSTOP)
            try:
                await asyncio.sleep(gone_s)
            finally:
                self._servers.signal(number, signal.SIGCONT)
            self._note("SIGCONT", number)
            return
        if what == "SIGTERM":
            await asyncio.to_thread(server.stop, DRAIN_S)
        else:
            self._servers.signal(number, signal.SIGKILL)
            await asyncio.to_thread(server.kill)  # waits until all of it has ended
            assert gone_s is not None
            await asyncio.sleep(gone_s)
        # From this thread: the server would end with the one that started it.
        self._servers.restart(number)
        self._note("starts again", number)
        try:
            await self._servers.ready(number)
        except (ServerError, TimeoutError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            self._servers.notes.append(f"encoder {number} did not come back: {why}")
            return
        self._note("is ready again", number)

    def _note(self, what: str, number: int, in_work: int | None = None) -> None:
        self._tell(what, f"encoder {number}", in_work)

    def _tell(self, what: str, server: str, in_work: int | None = None) -> None:
        self.events.append(Event(time.monotonic() - self._begin, what, server, in_work))
        print(f"{self.events[-1].at_s:6.1f} s: {server}, {what}", flush=True)

    async def watch_language(self) -> None:
        """Start it again whenever it ends, until cancelled; that is an event like the others."""
        for life in itertools.count(1):
            while self._servers.language.running:  # noqa: ASYNC110, no event tells
                await asyncio.sleep(0.1)
            self._tell("has ended", "language server")
            self._servers.notes.append(f"the language server ended: {self._servers.last_words()}")
            self._servers.restart_language(life)
            try:
                await self._servers.language_ready()
            except (ServerError, TimeoutError) as error:
                why = (str(error).splitlines() or [type(error).__name__])[0]
                self._servers.notes.append(f"the language server did not come back: {why}")
                continue
            self._tell("is ready again", "language server")


async def _healthy(url: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as http,
            http.get(f"{url}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _in_work(url: str) -> int | None:
    """Images that an encoder has taken and not delivered yet."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as http,
            http.get(f"{url}/v1/status") as response,
        ):
            return int((await response.json())["items"]) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


async def measure(arm: str, servers: Servers, options: argparse.Namespace) -> Result:
    """Capacity, a calm load, and the same with faults."""

    def bodies(name: str, count: float) -> Bodies:
        made = Bodies(options.size, options.tokens, (options.seed, name))
        made.prepare(int(count))
        return made

    await closed_loop(servers.url, bodies("warm-up", 20), 4, 2.0)
    clients = CAPACITY_CLIENTS
    capacity = await closed_loop(servers.url, bodies("capacity", 600), clients, CAPACITY_S)
    rate = capacity * options.load
    print(f"{arm}: {capacity:.1f} requests/s at most, so {rate:.1f} requests/s", flush=True)

    ours = arm == OURS
    counts = Counts(servers.encoder_urls)
    if ours:
        await counts.ask()
    before = counts.forwards

    calm_s = 60 * options.calm_minutes
    sent = bodies("calm", 1.1 * rate * calm_s)
    begin = time.monotonic()
    until = begin + calm_s
    answers = await open_loop(
        servers.url,
        sent,
        rate=rate,
        seed=(options.seed, 1),
        begin=begin,
        more=lambda: time.monotonic() < until,
    )
    calm = Run(answers)
    _say(arm, "calm", calm)

    sent = bodies("chaos", 1.1 * rate * 60 * options.minutes)
    begin = time.monotonic()
    chaos = Chaos(servers, begin, scale=60 * options.minutes / _FAULTS_FOR_S)
    watching = [asyncio.create_task(chaos.watch_language())]
    if ours:
        watching.append(asyncio.create_task(counts.watch()))
    faults = asyncio.create_task(chaos.run())
    try:
        answers = await open_loop(
            servers.url,
            sent,
            rate=rate,
            seed=(options.seed, 2),
            begin=begin,
            more=lambda: not faults.done(),
        )
        await faults
    finally:
        for task in (*watching, faults):
            task.cancel()
        await asyncio.gather(*watching, faults, return_exceptions=True)
    if ours:
        await counts.ask()
    run = Run(answers, chaos.events)
    _say(arm, "with faults", run)
    done = counts.forwards - before if ours else None
    return Result(capacity, rate, calm, run, servers.notes, done)


def _say(arm: str, what: str, run: Run) -> None:
    print(
        f"{arm}, {what}: {len(run.answers)} requests, {len(run.failed)} failed, "
        f"TTFT p50 {run.ttft_ms(0.5):.0f} ms, p99 {run.ttft_ms(0.99):.0f} ms",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-qwen2_5-vl")
    parser.add_argument("--minutes", type=float, default=3.0, help="of the load with faults")
    parser.add_argument("--calm-minutes", type=float, help="of the load without; a third")
    parser.add_argument("--load", type=float, default=0.6, help="share of the capacity")
    parser.add_argument("--size", default="224", choices=("224", "448"))
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--dynamic", action="store_true", help="encoders register themselves")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--forks", action="store_true", help="our servers start as forks")
    parser.add_argument("--restart-nice", type=int, default=19, metavar="PRIORITY")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, help="default: results/chaos.md, chaos_dynamic.md, _forks"
    )
    options = parser.parse_args()
    if options.calm_minutes is None:
        options.calm_minutes = options.minutes / 3
    return options


def main() -> None:
    options = arguments()
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-chaos-"))
    print(f"logs: {logs}", flush=True)
    results: dict[str, Result] = {}
    with closing(ForkServer()) as forks:
        for arm in options.arms:
            servers = Servers(arm, options, logs, forks if options.forks and arm == OURS else None)
            try:
                servers.start()
                results[arm] = asyncio.run(measure(arm, servers, options))
            finally:
                servers.stop()
    name = "chaos_dynamic.md" if options.dynamic else "chaos.md"
    name = "chaos_forks.md" if options.forks else name
    write(options.out or RESULTS / name, page(options, results), figures(options, results))


if __name__ == "__main__":
    main()
