"""Shows photographs to an encoder server and a language server, and what each did.

Starts the servers on free ports with a small random checkpoint, asks about one
photograph and then about three side by side over the OpenAI API, prints each answer as
it streams in and how long each image spent in each stage of which encoder, and stops
everything. The model is random, so its answers are words but no sense; that they depend
on the photographs is checked by `scripts/make_checkpoint.py NAME --check`.

With `--emulate PROFILE` a fleet runs on emulated accelerators instead, `bench_serving` sends it
pictures, and one table says what it saw and how busy each accelerator was.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import httpx
import openai
from openai.types.chat import ChatCompletionContentPartParam
from PIL import Image

import demo_emulated
import photographs
from checkpoints.families import SPECS
from make_checkpoint import ensure
from sglang_epd.cli.logs import FIRST_PHASE, PHASES
from sglang_epd.cli.places import Place
from sglang_epd.cli.processes import ServerError, ServerProcess, answers_ok, free_port, stop_all
from sglang_epd.cli.topology import Fleet, Shape, plan
from sglang_epd.errors import ConfigError
from sglang_epd.profile import load_profile


def planned(
    checkpoint: Path, *, encoders: int = 1, language: int = 0, prefill: int = 0, decode: int = 0
) -> Fleet:
    """The servers, by the plan of `sglang-epd up`.

    Raises:
        SystemExit: the numbers make no topology.
    """
    try:
        shape = Shape(str(checkpoint), encoders, language, prefill, decode)
        return plan(shape, free_port, lambda _devices: Place())
    except ConfigError as error:
        raise SystemExit(str(error)) from error


@contextlib.contextmanager
def up(servers: list[ServerProcess], timeout_s: float) -> Iterator[None]:
    """All servers, the router last: it asks the others about themselves as it starts."""
    routers = [server for server in servers if server.name == "router"]
    others = [server for server in servers if server not in routers]
    with contextlib.ExitStack() as stack:
        for each in filter(None, (others, routers)):
            stack.enter_context(running(each, timeout_s))
        yield


@contextlib.contextmanager
def running(servers: list[ServerProcess], timeout_s: float) -> Iterator[None]:
    """Start all servers together, wait for all, and stop them whatever happens."""
    begin = time.monotonic()
    try:
        for server in servers:
            server.start()
            print(f"  {'':>7} {server.name:<9} started, pid {server.pid}", flush=True)
        _wait_ready(servers, begin, timeout_s)
        yield
    finally:
        stopping = time.monotonic()
        print("\nStopping the servers", end="", flush=True)
        stop_all(servers)
        print(f": done in {time.monotonic() - stopping:.1f} s")


def _wait_ready(servers: list[ServerProcess], begin: float, timeout_s: float) -> None:
    """Wait for all, with a line whenever one enters another phase of its start-up.

    Raises:
        ServerError: one ended, or did not answer in time.
    """
    phases = {server.name: FIRST_PHASE for server in servers}
    waiting = servers
    while waiting:
        if time.monotonic() - begin > timeout_s:
            late = ", ".join(f"{server.name} ({server.log_path})" for server in waiting)
            raise ServerError(f"not ready after {timeout_s:.0f} s: {late}")
        time.sleep(0.2)
        for server in servers:
            server.check_running()  # one that died says so at once
            phase = _phase(server)
            if phase != phases[server.name]:
                phases[server.name] = phase
                print(f"  {_since(begin)} {server.name:<9} {phase}", flush=True)
        ready = [server for server in waiting if answers_ok(server.ready_url, timeout_s=5)]
        for server in ready:
            print(f"  {_since(begin)} {server.name:<9} ready", flush=True)
        waiting = [server for server in waiting if server not in ready]


def _phase(server: ServerProcess) -> str:
    log = server.log_path.read_text(errors="replace") if server.log_path.exists() else ""
    reached = [phase for text, phase in PHASES if text in log]
    return reached[-1] if reached else FIRST_PHASE


def ask(fleet: Fleet, model: str, question: str, names: list[str]) -> None:
    """Send one chat completion with the photographs `names`, and print what happens."""
    before = {_identity(item) for item in _encoded(fleet)}
    print(f"\n{question}")
    for index, name in enumerate(names):
        with Image.open(photographs.path(name)) as image:
            print(f"  image {index}: {name}, {image.width}x{image.height}")
    parts: list[ChatCompletionContentPartParam] = [
        {"type": "image_url", "image_url": {"url": _data_url(name)}} for name in names
    ]
    parts.append({"type": "text", "text": question})
    # No trust_env: the servers are on this machine, whatever proxy is configured.
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{fleet.api_url}/v1", api_key="none", max_retries=0, http_client=http
        ) as client,
    ):
        begin = time.monotonic()
        first = None
        print("  answer: ", end="", flush=True)
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": parts}],
            temperature=0,
            max_tokens=24,
            stream=True,
            timeout=180,
        )
        for chunk in stream:
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first = first or time.monotonic()
                print(text, end="", flush=True)
        end = time.monotonic()
    print(
        f"\n  first token after {1e3 * ((first or end) - begin):.0f} ms,"
        f" the whole answer after {1e3 * (end - begin):.0f} ms"
    )
    _print_encoded([item for item in _encoded(fleet) if _identity(item) not in before])


def _print_encoded(items: list[dict]) -> None:
    if not items:
        print("  no encoder was asked: the language server holds these images")
    for item in sorted(items, key=lambda item: item["index"]):
        stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in item.get("ms", {}).items())
        print(
            f"  {item['modality'].lower()} {item['index']}: {item.get('tokens')} tokens"
            f" from encoder {item.get('encoder')} (ms: {stages})"
        )


def _identity(item: dict) -> tuple[object, object]:
    return item.get("request_id"), item.get("index")


def _encoded(fleet: Fleet) -> list[dict]:
    """What the encoder, which is the first server, did lately, oldest first."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{fleet.servers[0].url}/v1/recent", timeout=10) as response:
        return list(json.load(response))


def _data_url(name: str) -> str:
    path = photographs.path(name)
    kind = "jpeg" if path.suffix == ".jpg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _since(begin: float) -> str:
    return f"{time.monotonic() - begin:5.1f} s"


def _leave(number: int, _frame: FrameType | None) -> None:
    """Turn a signal into an exception, so that the servers are stopped on the way out."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pd", action="store_true", help="prefill and decode apart as well")
    parser.add_argument("--checkpoint", choices=sorted(SPECS))
    parser.add_argument("--emulate", metavar="PROFILE", help="on emulated accelerators")
    parser.add_argument("--encoders", type=int, default=1, help="with --emulate")
    parser.add_argument("--language", type=int, default=1, help="with --emulate")
    parser.add_argument(
        "--dilate",
        type=float,
        default=8.0,
        help="with --emulate: how many times slower the emulated machines are, beside this one",
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the start-up")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)

    if options.emulate:
        return emulated(options)
    name = options.checkpoint or "tiny-qwen2_5-vl"
    print(f"Making the checkpoint {name}", flush=True)
    checkpoint = ensure(name)
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-demo-"))
    apart = {"prefill": 1, "decode": 1} if options.pd else {"language": 1}
    fleet = planned(checkpoint, **apart)
    servers = demo_emulated.processes_of(fleet, logs)
    print("Its weights are random: what it says of an image depends on it, but means nothing")
    print(f"Starting {len(servers)} servers; their logs are in {logs}", flush=True)
    try:
        with up(servers, options.timeout):
            ask(fleet, name, "What is in this photograph?", ["coffee"])
            side_by_side = ["astronaut", "rocket", "cat"]
            ask(fleet, name, "What do these have in common?", side_by_side)
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except openai.OpenAIError as error:
        print(f"\nThe request failed: {error}\nThe logs are in {logs}", file=sys.stderr)
        return 1
    shutil.rmtree(logs)
    return 0


def emulated(options: argparse.Namespace) -> int:
    """The demo on emulated accelerators; returns its exit status."""
    try:
        pixels = load_profile(options.emulate).pixels
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    small = "tiny-qwen2_5-vl" if pixels.patch_px == 14 else "tiny-qwen3-vl"
    checkpoint = ensure(options.checkpoint or small)
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-demo-"))
    fleet = planned(checkpoint, encoders=options.encoders, language=options.language)
    dilation = f"{options.dilate:g}"
    emulation = {"SGLANG_EPD_EMULATE": options.emulate, "SGLANG_EPD_EMULATE_DILATE": dilation}
    servers = demo_emulated.processes_of(fleet, logs, emulation)
    print(f"Starting {len(servers)} servers; their logs are in {logs}", flush=True)
    try:
        with up(servers, options.timeout):
            demo_emulated.show(fleet, options, checkpoint, logs)
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:
        print(f"\nbench_serving failed; the logs are in {logs}", file=sys.stderr)
        return 1
    shutil.rmtree(logs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
