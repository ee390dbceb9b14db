"""What one can see of a running deployment, from real servers, into docs/observed/.

Brings two encoders and a language server up with `sglang-epd up`, on a small random
checkpoint, and writes

  trace.svg       the trace of one request with two images, from what the servers exported to
                  an OTLP collector of this script's
  top.svg         `sglang-epd top` while requests run
  status.svg      `sglang-epd status`
  prometheus.md   what a real Prometheus, which scrapes the servers, answers to each query of
                  docker/observability (without `prometheus` in PATH, left out)

scripts/observe                 # into docs/observed
scripts/observe --out FOLDER
scripts/observe --encoders 1    # where memory is short
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import io
import json
import os
import pty
import random
import re
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.text import Text

import photographs
from make_checkpoint import ensure
from observing import prometheus
from observing.collector import collecting
from observing.picture import draw
from sglang_epd.cli.processes import free_port

DOCS = Path(__file__).resolve().parent.parent / "docs" / "observed"
_COMMAND = [sys.executable, "-m", "sglang_epd.cli.main"]
_COLUMNS = 118
_READY_S = 420.0
_LOAD_S = 30.0
# What this deployment has nothing to tell of, by the panel.
RIGHTLY_EMPTY = {
    "Prompts by where they were encoded": "no server here decides (no adaptive dispatch)",
    "Sent again, by what encoders failed of": "no encoder failed",
    "Prompts on decode servers": "there is none",
    "Declined and dropped": "nothing was",
    "Failures and refusals": "nothing was refused",
    "Wait for memory or the prefix cache, p99": "nothing waited",
    "Waiting and running": "prefill and decode are not apart",
    "Late, p99": "there is no decode server",
    "Stood still for over 300 ms, times a minute": "there is no decode server",
}


@dataclass
class Up:
    """A running `sglang-epd up`, by its folder for what runs."""

    env: dict[str, str]
    process: subprocess.Popen[bytes]
    encoders: int

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            [*_COMMAND, "status", "--json"],
            env=self.env,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return json.loads(done.stdout or "{}")

    def wait_ready(self, log: Path) -> dict[str, Any]:
        end = time.monotonic() + _READY_S
        while time.monotonic() < end and self.process.poll() is None:
            told = self.status()
            servers = told.get("servers", [])
            if len(servers) > self.encoders and all(one["state"] == "ready" for one in servers):
                return told
            time.sleep(2.0)
        raise SystemExit(f"the servers are not ready:\n{log.read_text()[-4000:]}")


@contextlib.contextmanager
def up(folder: Path, otlp: str, encoders: int) -> Iterator[Up]:
    """Encoders and a language server, traced."""
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    env = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(runtime),
        "HF_HUB_OFFLINE": "1",
        # So that spans come soon.
        "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "200",
        # Pictures behind URLs are this machine's own.
        "SGLANG_EPD_MEDIA_ALLOWED_NETWORKS": "127.0.0.0/8",
        # Two pictures go to two encoders; every third one comes from the shared store.
        "SGLANG_EPD_DISPATCH_POLICY": "round_robin",
        "SGLANG_EPD_STORE": f"file://{folder / 'store'}",
        "SGLANG_EPD_EMBEDDING_CACHE_MB": "4",
    }
    (folder / "store").mkdir()
    command = [
        *(*_COMMAND, "up", "--model", str(ensure("tiny-qwen2_5-vl")), "--encoders", str(encoders)),
        *("--flags", f"--enable-trace --otlp-traces-endpoint {otlp}"),
        *("--encoder-flags", "--otlp-service-name encoder --enable-prefix-mm-cache"),
        *("--language-flags", "--otlp-service-name language --enable-metrics"),
        *("--port", str(free_port()), "--timeout", str(_READY_S)),
    ]
    log = folder / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    running = Up(env, process, encoders)
    try:
        running.wait_ready(log)
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def chat(url: str, pictures: Sequence[str], *, traceparent: str = "", tokens: int = 16) -> int:
    """Ask about pictures, by their URLs; returns the HTTP status."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "What is there to be seen?"}]
    content += [{"type": "image_url", "image_url": {"url": one}} for one in pictures]
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        # SGLang measures the time between tokens of streams alone.
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            **({"traceparent": traceparent} if traceparent else {}),
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def inline(picture: Image.Image) -> str:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


class Load:
    """Requests of one to four pictures, some of them seen before, from three clients.

    Attributes:
        statuses: how many answers had which HTTP status.
    """

    def __init__(self, url: str, site: str) -> None:
        self._url = url
        self._site = site
        self._photographs = [photographs.load(name) for name in photographs.NAMES]
        self._over = threading.Event()
        self.statuses: Counter[int] = Counter()
        self._clients = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(3)]

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join(150)

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._over.is_set():
            pictures = [self._picture(rng) for _ in range(rng.randint(1, 4))]
            if rng.random() < 0.1:
                pictures.append(f"{self._site}/{rng.choice(('missing', 'bad'))}.png")
            self.statuses[chat(self._url, pictures, tokens=rng.randint(8, 48))] += 1

    def _picture(self, rng: random.Random) -> str:
        if rng.random() < 0.3:
            return f"{self._site}/{rng.randrange(4)}.png"
        photograph = rng.choice(self._photographs)
        side = 28 * rng.randint(6, 12)
        x, y = (rng.randrange(max(1, extent - side)) for extent in photograph.size)
        return inline(photograph.crop((x, y, x + side, y + side)))


@contextlib.contextmanager
def site(folder: Path) -> Iterator[str]:
    """A media server with four pictures, and one that is none."""
    folder.mkdir()
    for number, name in enumerate(photographs.NAMES):
        photographs.load(name).resize((224, 224)).save(folder / f"{number}.png")
    (folder / "bad.png").write_bytes(b"no picture")
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=folder, stdout=quiet, stderr=quiet)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def capture(env: dict[str, str], command: str, seconds: float) -> str:
    """What a command has on a terminal after some time, or at its end, with its colours."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, _COLUMNS, 0, 0))
    process = subprocess.Popen(
        [*_COMMAND, *command.split()],
        env={**env, "TERM": "xterm-256color", "COLUMNS": str(_COLUMNS)},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    written = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(leader, 65536):
                written.extend(chunk)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    reader.join(5)
    os.close(leader)
    return written.decode(errors="replace")


def last_frame(written: str) -> str:
    """What rich's live display showed last: all behind the last time that it erased lines."""
    frames = re.split(r"(?:\r?\x1b\[2K(?:\x1b\[1A)?)+", written)
    shown = [frame for frame in frames if frame.strip("\r\n \x1b[?25hl")]
    return re.sub(r"\x1b\[\?25[hl]", "", shown[-1]).replace("\r", "").strip("\n")


def to_svg(shown: str, title: str, path: Path) -> None:
    screen = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    # For rich what is before a carriage return has been written over.
    screen.print(Text.from_ansi(shown.replace("\r\n", "\n").strip("\n")))
    screen.save_svg(str(path), title=title)


def ask_prometheus(asked: prometheus.Prometheus) -> tuple[str, list[str]]:
    """A page with every query's answer, and what is wrong with them."""
    wrong = [f"{url} is {health}" for url, health in asked.targets().items() if health != "up"]
    lines = ["| panel | samples | query |", "|---|---|---|"]
    for query in prometheus.dashboard_queries():
        found = asked.ask(query.text)
        said = str(len(found))
        if not found:
            said = f"none: {RIGHTLY_EMPTY.get(query.where, '')}"
            if query.where not in RIGHTLY_EMPTY:
                wrong.append(f"{query.where}: no data for {query.text}")
        text = query.text.replace("|", "\\|")
        lines.append(f"| {query.where} | {said} | `{text}` |")
    lines += ["", "| alert | health | state |", "|---|---|---|"]
    for rule in asked.rules():
        lines.append(f"| {rule['name']} | {rule['health']} | {rule['state']} |")
        if rule["health"] != "ok":
            wrong.append(f"alert {rule['name']}: {rule.get('lastError', rule['health'])}")
    return "\n".join(lines) + "\n", wrong


def scraped(told: dict[str, Any]) -> dict[str, list[str]]:
    """host:port of the servers that have metrics, by role."""
    roles: dict[str, list[str]] = {}
    for server in told["servers"]:
        roles.setdefault(server["role"], []).append(server["url"].split("//")[1])
    return roles


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DOCS)
    parser.add_argument("--encoders", type=int, default=2)
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-observe-")))
        collector, otlp = stack.enter_context(collecting())
        pictures = stack.enter_context(site(folder / "site"))
        running = stack.enter_context(up(folder, otlp, given.encoders))
        told = running.status()
        api = told["run"]["api_url"]

        # Warm: the first request of a server compiles and allocates.
        chat(api, [inline(photographs.load("rocket").resize((224, 224)))])
        trace = secrets.token_hex(16)
        two = [photographs.load(name).resize((448, 448)) for name in ("astronaut", "coffee")]
        status = chat(api, [*map(inline, two)], traceparent=f"00-{trace}-{'1' * 16}-01")
        spans = collector.wait(trace)
        names = Counter(span.name for span in spans)
        print(f"HTTP {status}, {len(spans)} spans: {dict(names)}")
        wrong += [
            f"no span {name}"
            for name in ("epd_media", "epd_dispatch", "epd_item")
            if not names[name]
        ]
        if spans:
            title = f"One request with two images of 448 x 448, encoders: {given.encoders}"
            (out / "trace.svg").write_text(draw(spans, title))

        with contextlib.ExitStack() as measured:
            asked = None
            if prometheus.installed():
                (folder / "prometheus").mkdir()
                scraping = prometheus.running(folder / "prometheus", free_port(), scraped(told))
                asked = measured.enter_context(scraping)
            with Load(api, pictures) as load:
                time.sleep(_LOAD_S / 3)
                to_svg(
                    last_frame(capture(running.env, "top", 15.0)), "sglang-epd top", out / "top.svg"
                )
                to_svg(
                    capture(running.env, "status", 30.0), "sglang-epd status", out / "status.svg"
                )
                time.sleep(_LOAD_S / 3)
                if asked is None:
                    print("prometheus and promtool are not in PATH: they are not asked")
                else:
                    page, found = ask_prometheus(asked)
                    wrong += found
                    rules = prometheus.check_rules()
                    head = (
                        "# What Prometheus answers\n\nWritten by `scripts/observe`: every query of "
                        "the dashboard and every alert rule in `docker/observability/`, asked of "
                        f"{prometheus.version()}, which scraped the servers of `sglang-epd up "
                        f"--encoders {given.encoders}` under load. `promtool check rules`: "
                        f"{rules.splitlines()[-1].strip()}. Nothing was wrong with the servers, so "
                        "no alert had a cause to fire.\n\n"
                    )
                    (out / "prometheus.md").write_text(head + page)
        print(f"answers by status under load: {dict(load.statuses)}")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
