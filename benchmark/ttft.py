"""Where the time to the first token goes: every millisecond of one request has an owner.

    .venv/bin/python benchmark/ttft.py [--images 1 4] [--size 448] [--repeats 20]
    .venv/bin/python benchmark/ttft.py --render benchmark/results/single_image.json

One server, in-tree EPD and this package are up side by side, each pinned to the same cores;
requests are sent one at a time, to the arms in turn, each with new pictures, for one token.
The steps are what the servers report themselves: SGLang's times of a request
(`--enable-metrics`), and on encoders those of an item (`/v1/status`). They follow one another
without a gap from the client's first byte to its last, so their means add up to the mean
time to the first token.

(Not profile.py: that would hide the standard library's module of this name, which torch
imports.)
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import requests

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

from comparison.arms import Arm, Place, Running  # noqa: E402
from comparison.files import read_all  # noqa: E402
from comparison.results import machine, versions  # noqa: E402
from pages import table  # noqa: E402
from pictures import SIZES, jpeg  # noqa: E402

from make_checkpoint import ensure  # noqa: E402

HERE = Path(__file__).parent
ARMS = ("colocated", "in-tree-1e1p", "epd-1e1p")
WARM_UP = 3
# What a request leaves to do once it has been answered.
SETTLED_S = 0.1
ANSWER_TIMEOUT_S = 300.0
# Of an item on an encoder, in their order, up to its delivery.
ENCODER_STAGES = ("acquire", "store", "wait", "preprocess", "queue", "forward", "grant")
_PROMPT = (
    "<|im_start|>user\n{marks}Question {number}: what is on it?<|im_end|>\n<|im_start|>assistant\n"
)
_MARK = "<|vision_start|><|image_pad|><|vision_end|>"

# Steps, by what they are called in the JSON.
OWNERS = {
    "http_in": "client's bytes read and parsed",
    "prepare": "media read and preprocessed, prompt laid out",
    "to_encoder": "planned, announced, sent to the encoder",
    "elsewhere": "all of the encoder, and the way there and back",
    **{f"encoder_{stage}": f"encoder: {stage}" for stage in ENCODER_STAGES[:-2]},
    "encoder_others": "encoder: forward, of the request's other images",
    **{f"encoder_{stage}": f"encoder: {stage}" for stage in ENCODER_STAGES[-2:]},
    "to_queue": "delivered, settled, prompt laid out, queued",
    "queue": "in the scheduler's queue",
    "prefill": "prefill forward",
    "answer": "token to the tokenizer process, decoded",
    "http_out": "answer written and read",
}
# What other work on the machine makes slower is above the lowest ones.
QUANTILES: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median,
    "lowest quarter": lambda values: sorted(values)[len(values) // 4],
    "lowest": min,
    "highest": max,
}
# Needed whoever does them: the tower, and prefill.
MODEL = ("encoder_others", "encoder_forward", "prefill")


class Sample(msgspec.Struct, frozen=True):
    """One request: seconds since 1970 at the client, what the server said, and its encoder.

    Attributes:
        apart: whether there is an encoder.
        items: what it told of the request's; nothing where it tells nothing.
        cpu_s: processor time of all of the arm's processes; what else the machine does, which
            makes everybody wait, is not in it.
    """

    arm: str
    images: int
    apart: bool
    sent_at: float
    got_at: float
    meta: dict[str, Any]
    items: list[dict[str, Any]]
    cpu_s: float | None = None


class Profile(msgspec.Struct, frozen=True):
    """What was measured, and all that its page says.

    Attributes:
        titles: of the arms, by name, in the order of the page.
        commands: of the servers.
        read: what a person sees in it, written into the JSON by hand.
    """

    setting: str
    titles: dict[str, str]
    commands: list[str]
    samples: list[Sample]
    read: str = ""


def steps(sample: Sample) -> dict[str, float]:
    """Milliseconds of each step of a request, in their order, without a gap.

    Of several items it is the one that ended last whose way is followed: the request waited
    for it.

    Raises:
        KeyError: the server did not report a time (`--enable-metrics`).
    """
    meta = sample.meta
    received, forward = meta["request_received_ts"], meta["forward_entry_time"]
    queued = forward - meta["queue_time"]
    found = {"http_in": received - sample.sent_at}
    last = max(sample.items, key=lambda item: item["ended_at"], default=None)
    if last is not None:
        found["to_encoder"] = last["began_at"] - received
        stages = {name: last["ms"].get(name, 0.0) / 1e3 for name in ENCODER_STAGES}
        # It waits for the tower, which may be at work for this very request.
        others = _others(last, sample.items)
        stages["queue"] -= others
        for name, seconds in stages.items():
            if name == "forward":
                found["encoder_others"] = others
            found[f"encoder_{name}"] = seconds
        # The encoder hears that all is well beside this, sooner or later.
        found["to_queue"] = queued - last["began_at"] - sum(stages.values()) - others
    else:
        found["elsewhere" if sample.apart else "prepare"] = queued - received
    found["queue"] = forward - queued
    found["prefill"] = meta["prefill_finished_time"] - forward
    found["answer"] = meta["request_finished_ts"] - meta["prefill_finished_time"]
    found["http_out"] = sample.got_at - meta["request_finished_ts"]
    return {name: seconds * 1e3 for name, seconds in found.items()}


def _others(last: dict[str, Any], items: Sequence[dict[str, Any]]) -> float:
    """Seconds of an item's wait in the queue in which the tower ran others of the request."""
    begin, end = _forward(last)
    begin -= last["ms"].get("queue", 0.0) / 1e3
    end -= last["ms"].get("forward", 0.0) / 1e3
    covered, until = 0.0, begin
    for first, second in sorted(_forward(item) for item in items if item is not last):
        covered += max(0.0, min(second, end) - max(first, until))
        until = max(until, min(second, end))
    return covered


def _forward(item: dict[str, Any]) -> tuple[float, float]:
    """When an item's forward pass began and ended."""
    before = ENCODER_STAGES[: ENCODER_STAGES.index("forward")]
    begin = item["began_at"] + sum(item["ms"].get(name, 0.0) for name in before) / 1e3
    return begin, begin + item["ms"].get("forward", 0.0) / 1e3


def ask(arm: Arm, running: Running, pictures: Sequence[bytes], number: int) -> Sample:
    """Have one token of an answer about new pictures."""
    body = {
        "text": _PROMPT.format(marks=_MARK * len(pictures), number=number),
        "image_data": [
            "data:image/jpeg;base64," + base64.b64encode(one).decode() for one in pictures
        ],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    }
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    worked_s = cpu_s(running)
    sent_at = time.time()
    response = requests.post(
        f"{running.url}/generate", data=data, headers=headers, timeout=ANSWER_TIMEOUT_S
    )
    got_at = time.time()
    response.raise_for_status()
    time.sleep(SETTLED_S)
    worked_s = cpu_s(running) - worked_s
    items: list[dict[str, Any]] = []
    if arm.family == "sglang-epd":
        for url in running.urls("encoder"):
            recent = requests.get(f"{url}/v1/recent", timeout=20).json()
            items += [item for item in recent if item["began_at"] >= sent_at]
        if [item["state"] for item in items] != ["delivered"] * len(pictures):
            raise RuntimeError(f"the encoder speaks of other items: {items}")
    apart = bool(running.urls("encoder"))
    meta = response.json()["meta_info"]
    return Sample(arm.name, len(pictures), apart, sent_at, got_at, meta, items, worked_s)


def cpu_s(running: Running) -> float:
    """Processor time that an arm's processes have taken."""
    total = 0.0
    for server in running.servers:
        root = psutil.Process(server.pid)
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def measure(options: argparse.Namespace) -> Iterator[Profile]:
    """Samples of all arms, which take turns: after each turn all that there are by then."""
    # Before servers are up: of the load average it is that of others.
    where = ", ".join(f"{name} {value}" for name, value in (machine() | versions()).items())
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-ttft-"))
    print("logs:", logs, flush=True)
    model = str(ensure(options.model))
    place = Place(cores=options.cores)
    arms = read_all(HERE / "arms", Arm, options.arms)
    flags = f"{options.flags} --enable-metrics"
    servers = {arm.name: Running(arm, model, flags, place, logs) for arm in arms}
    titles = {arm.name: arm.title for arm in arms}
    commands = [line for one in servers.values() for line in one.commands]
    draw = random.Random(options.seed)
    samples: list[Sample] = []
    try:
        for running in servers.values():
            running.start()
        for number in range(-WARM_UP, options.repeats):
            for images in options.images:
                seed = (options.seed, number, images)
                pictures = [jpeg(options.size, (seed, one)) for one in range(images)]
                for arm in draw.sample(arms, len(arms)):
                    one = ask(arm, servers[arm.name], pictures, number)
                    if number >= 0:
                        samples.append(one)
            print(f"{number + 1} of {options.repeats}", flush=True)
            if samples:
                yield Profile(_setting(options, where, number + 1), titles, commands, samples)
    finally:
        for running in servers.values():
            running.stop()


def _setting(options: argparse.Namespace, where: str, repeats: int) -> str:
    command = shlex.join([".venv/bin/python", "benchmark/ttft.py", *sys.argv[1:]])
    return (
        f"`{command}`: {where}; checkpoint {options.model}, pictures of {options.size} px, "
        f"{repeats} requests a cell, seed {options.seed}. {options.note}"
    ).strip()


def page(profile: Profile) -> str:
    """Tables of the steps' means, by number of images."""
    samples, arms = profile.samples, list(profile.titles)
    parts = []
    for images in sorted({sample.images for sample in samples}):
        found = {
            arm: [steps(s) for s in samples if (s.arm, s.images) == (arm, images)] for arm in arms
        }
        rows = [["owner", *profile.titles.values()]]
        for name, owner in OWNERS.items():
            cells = [_mean(found[arm], (name,)) for arm in arms]
            if any(cell not in ("", "0.0") for cell in cells):
                rows.append([owner, *cells])
        beside = tuple(name for name in OWNERS if name not in MODEL)
        whole = [_mean(found[arm], tuple(OWNERS)) for arm in arms]
        rows.append(["**time to the first token**", *whole])
        silent = {arm for arm in arms for one in found[arm] if "elsewhere" in one}
        left = ["not told" if arm in silent else _mean(found[arm], beside) for arm in arms]
        rows.append(["of it beside tower and prefill", *left])
        totals = {arm: [sum(one.values()) for one in found[arm]] for arm in arms}
        for name, figure in QUANTILES.items():
            rows.append([name, *(f"{figure(totals[arm]):.1f}" for arm in arms)])
        towers = {
            arm: [sum(one.get(name, 0.0) for name in MODEL) for one in found[arm]] for arm in arms
        }
        for name in ("median", "lowest quarter"):
            cells = [
                "not told" if arm in silent else f"{QUANTILES[name](towers[arm]):.1f}"
                for arm in arms
            ]
            rows.append([f"tower and prefill, {name}", *cells])
        if all(one.cpu_s is not None for one in samples):
            rows.append(["processor time, mean", *(_worked(samples, arm, images) for arm in arms)])
        parts.append(f"## {images} image{'s' if images > 1 else ''}\n\n{table(rows)}")
    told = "\n".join(f"    {command}" for command in profile.commands)
    parts += [f"Read: {profile.read}"] if profile.read else []
    tables = "\n\n".join(parts)
    return f"""# Where the time to the first token goes

{profile.setting}

Means in milliseconds, of requests one at a time, each with new pictures; all servers were up,
one arm in work at a time. Of several images the way of the one that was delivered last is
followed. One server runs its tower within what is called prefill here; SGLang's encoder tells
no times of its own.

{tables}

## Commands

{told}
"""


def _worked(samples: Sequence[Sample], arm: str, images: int) -> str:
    mine = [one.cpu_s or 0.0 for one in samples if (one.arm, one.images) == (arm, images)]
    return f"{1e3 * statistics.fmean(mine):.0f}"


def _mean(found: Sequence[dict[str, float]], names: Sequence[str]) -> str:
    """Mean of the steps' sum; empty where an arm has none of them."""
    if not any(name in one for one in found for name in names):
        return ""
    return f"{statistics.fmean(sum(one.get(name, 0.0) for name in names) for one in found):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bench-qwen2_5-vl", help="a checkpoint of scripts/")
    parser.add_argument("--flags", default="--dtype float32", help="of every server, after `=`")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--images", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--size", choices=SIZES, default="448")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--note", default="", help="for the page")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ttft.md")
    parser.add_argument("--render", type=Path, metavar="JSON", help="write its page anew")
    options = parser.parse_args()
    if options.render:
        profile = msgspec.json.decode(options.render.read_bytes(), type=Profile)
        options.render.with_suffix(".md").write_text(page(profile))
        return
    # Ends the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for profile in measure(options):
        _write(options.out, profile)
    print(options.out)


def _write(out: Path, profile: Profile) -> None:
    """As it goes: what is ended early leaves what was measured by then."""
    out.parent.mkdir(parents=True, exist_ok=True)
    raw = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    out.with_suffix(".json").write_bytes(raw + b"\n")
    out.write_text(page(profile))


if __name__ == "__main__":
    main()
