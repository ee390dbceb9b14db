"""What a picture costs the host, by process and by step.

    .venv/bin/python benchmark/host.py [--rounds 3] [--checkpoints wide] [--seconds 3]
    .venv/bin/python benchmark/host.py --render benchmark/results/host.json

Servers of hollow models: a tower and a language model in the shape of Qwen3-VL that compute
next to nothing, with embeddings that are narrow, or as wide as those of Qwen3-VL-8B. So what
is left is the host's work. In-tree EPD, this package and one server are up side by side on the
same cores, one torch thread each; each load is put on one arm after the other, every request
with new pictures and for one token. Processor time is that of each process and its children
(user and system, ended children included), read around each load. A request without pictures
and with as many tokens tells what scheduler and tokenizer process would spend anyway.

Beside them, without servers: the steps that no encoder can do without, and how busy threads and
processes keep an emulated tower (`host_alone.py`); this package's own work for a picture, without
SGLang and a model (`host_path.py`); and what an item costs while others wait (`host_queues.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

from comparison.arms import Arm, Place, Running  # noqa: E402
from comparison.files import read_all  # noqa: E402
from comparison.results import machine, versions  # noqa: E402
from encoder_arms import Child  # noqa: E402
from gpu.serve_checkpoints import Large  # noqa: E402
from host_alone import STEPS, Kept, floor, keep_busy, kept_rows  # noqa: E402
from host_path import PROCESSES as OWN  # noqa: E402
from host_path import Own, own_rows, own_work  # noqa: E402
from host_queues import WAITING, Queued, queued, queued_rows  # noqa: E402
from open_loop import Bodies, closed_loop  # noqa: E402
from pages import table  # noqa: E402
from pictures import jpeg  # noqa: E402

from checkpoints.build import build  # noqa: E402
from checkpoints.families.qwen3_vl import Qwen3VL  # noqa: E402
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec  # noqa: E402

HERE = Path(__file__).parent
OURS, INTREE, ONE = ARMS = ("epd-1e1p", "in-tree-1e1p", "colocated")
FLAGS = "--dtype bfloat16"
# Size and number of a request's pictures.
CELLS = {"1 x 448": ("448", 1), "4 x 448": ("448", 4), "1 x 1080p": ("1080p", 1)}
# A request without pictures, with as many tokens as a picture of 448 px has.
TEXT, TOKENS = "text", 196
CLIENTS = (1, 8)
# Different pictures of a cell, and of each as many others as the steps of so many frequencies
# make, four a frequency, in the table of brightness that this begins.
_JPEGS = 8
_STEPS, _CHANGED = b"\xff\xdb\x00\x43\x00", 12
ENCODER = ("encoder", "encoder's children")
LANGUAGE = ("tokenizer", "scheduler", "detokenizer", "others")
PROCESSES = (*ENCODER, *LANGUAGE)
# Processor milliseconds of this package's own work for an image, at most; an encoder copies as
# many bytes as an image has.
AIMS_MS = {"448": dict(zip(OWN, (2.0, 2.0, 0.5), strict=True)), "1080p": {OWN[2]: 2.0}}
_SHARE = 0.9
# Of an item's cost with the most waiting to that with ten.
_GROWTH = 1.5
_NOTE = """Processor milliseconds an image, medians of rounds; arms in turns. *Text* is a request
without pictures, of as many tokens as a picture of 448 px has, and counts as one image."""
_OWN_NOTE = """Processor milliseconds an image, of this package without SGLang and without a model;
medians of rounds."""
_QUEUED_NOTE = f"""Processor milliseconds an item, with so many on their way at a time; medians.
Met: with {WAITING[-1]:,} at most {_GROWTH} times as much as with {WAITING[1]}."""
_KEPT_NOTE = """A picture holds the device 2.5 ms; its launch, alone, takes the interpreter 1 ms.
Milliseconds are of an image; processor time is that of the encoder's engine with its children."""


class Hollow(Large, Qwen3VL):
    """Pictures keep the size that released processors give them."""

    vocabulary = 4096
    device = "cpu"


def _spec(name: str, width: int, depth: int, taps: tuple[int, ...]) -> CheckpointSpec:
    text = TextSpec(depth, width, 64, 1, 1)
    return CheckpointSpec(name, text, VisionSpec(depth, 32, 32, 1, taps))


SPECS = {
    "narrow": _spec("narrow", 128, 1, ()),
    "wide": _spec("wide", 4096, 3, (0, 1, 2)),
}


class Load(msgspec.Struct, frozen=True):
    """One closed loop on one arm.

    Attributes:
        cpu_s: processor seconds, by process.
    """

    checkpoint: str
    cell: str
    clients: int
    arm: str
    round: int
    requests: int
    seconds: float
    cpu_s: dict[str, float]

    @property
    def images(self) -> int:
        """A request without pictures counts as one."""
        return self.requests * CELLS.get(self.cell, ("", 1))[1]


class Results(msgspec.Struct):
    """All that a page says.

    Attributes:
        floor_ms: of each step, by checkpoint and size.
        kept: how busy an emulated tower was.
        own: of this package alone.
        queued: of an item while others wait.
        read: what a person sees in it, written into the JSON by hand.
    """

    setting: str
    titles: dict[str, str]
    floor_ms: dict[str, dict[str, dict[str, float]]]
    loads: list[Load]
    kept: list[Kept]
    own: list[Own] = []
    queued: list[Queued] = []
    read: str = ""


class Requests(Bodies):
    """Bodies of a cell's requests, of which no two have a picture in common; counts them.

    Args:
        cell: of CELLS, or TEXT.
        seed: another one, other pictures.
    """

    def __init__(self, cell: str, seed: object) -> None:
        self.sent = 0
        size, self._pictures = CELLS.get(cell, ("448", 0))
        super().__init__(size, 1, seed)
        self._jpegs = [jpeg(size, number) for number in range(_JPEGS if self._pictures else 0)]
        self._words = "Why?" if self._pictures else "a " * TOKENS

    def take(self, number: int) -> bytes:
        self.sent += 1
        made = (self._new((self._seed, number, one)) for one in range(self._pictures))
        urls = [f"data:image/jpeg;base64,{base64.b64encode(one).decode()}" for one in made]
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
        text = {"type": "text", "text": f"{number} {self._seed} {self._words}"}
        body = {"messages": [{"role": "user", "content": [*parts, text]}], "stream": True}
        told = {"model": "default", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        return json.dumps(body | told).encode()

    def _new(self, name: object) -> bytes:
        """A picture of which no cache has the bytes or the pixels, without encoding it: steps of
        its first frequencies are other ones."""
        draw = random.Random(repr(name))
        data = bytearray(draw.choice(self._jpegs))
        begin = data.index(_STEPS) + len(_STEPS) + 1
        for at in range(begin, begin + _CHANGED):
            data[at] += draw.randrange(4)
        return bytes(data)


def spent_s(running: Running) -> dict[str, float]:
    """Processor seconds of an arm so far, by process."""
    found: dict[str, float] = defaultdict(float)
    for kind, server in zip(running.arm.servers, running.servers, strict=True):
        root = psutil.Process(server.pid)
        for process in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[_role(kind.role, process, root)] += sum(process.cpu_times()[:4])
    return dict(found)


def _role(server: str, process: psutil.Process, root: psutil.Process) -> str:
    if server == "encoder":
        return "encoder" if process == root else "encoder's children"
    title = " ".join(process.cmdline())
    known = [name for name in ("scheduler", "detokenizer") if name in title]
    return known[0] if known else "tokenizer" if process == root else "others"


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """What there is after each round."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a team's waiting counts as work
    # Of each server: full soon, as after some hours. Six of SGLang's size, full of wide
    # embeddings, do not fit into 24 GiB.
    os.environ["SGLANG_VLM_CACHE_SIZE_MB"] = "512"
    where = ", ".join(f"{name} {value}" for name, value in (machine() | versions()).items())
    command = shlex.join([".venv/bin/python", "benchmark/host.py", *sys.argv[1:]])
    arms = read_all(HERE / "arms", Arm, list(ARMS))
    results = Results(f"`{command}`: {where}.", {arm.name: arm.title for arm in arms}, {}, [], [])
    with tempfile.TemporaryDirectory(prefix="sglang-epd-host-") as name:
        folder = Path(name)
        for checkpoint in options.checkpoints:
            model = folder / checkpoint
            model.mkdir()
            build(Hollow(), SPECS[checkpoint], model)
            log = str(folder / "alone.log")
            results.floor_ms[checkpoint] = _ask(floor, str(model), FLAGS, log)
            if not results.kept:
                keep = partial(keep_busy, rounds=options.rounds, seconds=options.seconds)
                results.kept = _ask(keep, str(model), FLAGS, log)
                results.queued = _ask(queued)
            spec = SPECS[checkpoint]
            assert spec.vision is not None
            row = spec.text.hidden_size * (1 + len(spec.vision.taps))
            for size in AIMS_MS:
                results.own += own_work(row, size, rounds=options.rounds, seconds=options.seconds)
            if options.alone:
                yield results
                continue
            place = Place(cores=options.cores)
            logs = Path(tempfile.mkdtemp(prefix="sglang-epd-host-logs-"))
            print(f"{checkpoint}: the servers' logs are in {logs}", flush=True)
            servers = {one.name: Running(one, str(model), FLAGS, place, logs) for one in arms}
            try:
                for running in servers.values():
                    running.start()
                for number in range(-1, options.rounds):
                    for load in _round(options, checkpoint, servers, number):
                        results.loads += [load] if number >= 0 else []
                    print(f"{checkpoint}: round {number + 1} of {options.rounds}", flush=True)
                    if number >= 0:
                        yield results
            finally:
                for running in servers.values():
                    running.stop()


def _ask(target: Callable[..., None], *arguments: Any) -> Any:
    """What a process of its own sends."""
    child = Child(target, *arguments)
    try:
        return child.get()
    finally:
        child.stop()


def _round(
    options: argparse.Namespace, checkpoint: str, servers: dict[str, Running], number: int
) -> Iterator[Load]:
    draw = random.Random(repr((options.seed, number)))
    seconds = options.seconds if number >= 0 else 1.0
    for cell in (*options.cells, TEXT):
        for clients in CLIENTS:
            for arm in draw.sample(list(servers), len(servers)):
                bodies = Requests(cell, (options.seed, number, clients))
                before, begin = spent_s(servers[arm]), time.monotonic()
                try:
                    asyncio.run(closed_loop(servers[arm].url, bodies, clients, seconds))
                except RuntimeError as error:
                    error.add_note(f"by {arm}: {cell}, {clients} clients")
                    raise
                took, after = time.monotonic() - begin, spent_s(servers[arm])
                cpu_s = {name: after[name] - before.get(name, 0.0) for name in after}
                yield Load(checkpoint, cell, clients, arm, number, bodies.sent, took, cpu_s)


def page(results: Results) -> str:
    """Tables of the medians of rounds, and the aims."""
    parts = [f"# What a picture costs the host\n\n{results.setting}"]
    parts += [f"Read: {results.read}"] if results.read else []
    for checkpoint, floor_ms in results.floor_ms.items():
        loads = [one for one in results.loads if one.checkpoint == checkpoint]
        width = SPECS[checkpoint].text.hidden_size
        steps = [["size", *STEPS]]
        steps += [[size, *(f"{ms[s]:.1f}" for s in STEPS)] for size, ms in floor_ms.items()]
        parts.append(f"## {checkpoint.capitalize()}, embeddings of {width}")
        parts += ["### Steps of an encoder, alone", table(steps)]
        if loads:
            aims = [["aim", "pictures", "clients", "found", "met"], *_aims(loads)]
            parts += ["### Servers", _NOTE, table(_servers(results, loads))]
            parts += ["### Aims", table(aims)]
    parts += ["## An emulated tower", _KEPT_NOTE, table(kept_rows(results.kept))]
    if results.own:
        own = list(own_rows(results.own))
        parts += ["## This package's own work", _OWN_NOTE, table(own), table(_own_aims(own))]
    if results.queued:
        rows = queued_rows(results.queued)
        rows[0].append("met")
        for row in rows[1:]:
            row.append(_met(float(row[-1]) <= _GROWTH * float(row[2])))
        parts += ["## While others wait", _QUEUED_NOTE, table(rows)]
    return "\n\n".join(parts) + "\n"


def _servers(results: Results, loads: Sequence[Load]) -> list[list[str]]:
    rows = [["pictures", "clients", "arm", "images/s", "all", *PROCESSES]]
    cells = dict.fromkeys(one.cell for one in loads)
    for cell, clients, (arm, title) in itertools.product(cells, CLIENTS, results.titles.items()):
        some = _of(loads, cell, clients, arm)
        rate = statistics.median(one.images / one.seconds for one in some)
        told = {name for one in some for name in one.cpu_s}
        row = [cell, str(clients), title, f"{rate:.1f}", f"{_ms(some):.1f}"]
        rows.append(row + [f"{_ms(some, p):.1f}" if p in told else "" for p in PROCESSES])
    return rows


def _aims(loads: Sequence[Load]) -> Iterator[list[str]]:
    cells = dict.fromkeys(one.cell for one in loads if one.cell != TEXT)
    for cell, clients in itertools.product(cells, CLIENTS):
        ours, theirs = (_of(loads, cell, clients, arm) for arm in (OURS, INTREE))
        for server, mine in (("encoder", ENCODER), ("language server", LANGUAGE)):
            share = _ms(ours, *mine) / _ms(theirs, *mine)
            aim = f"{server}: at most {_SHARE} of in-tree EPD's"
            yield [aim, cell, str(clients), f"{share:.2f}", _met(share <= _SHARE)]


def _own_aims(own: Sequence[Sequence[str]]) -> list[list[str]]:
    rows = [["aim", "pictures", "row of an embedding", "clients", "found", "met"]]
    for pictures, width, clients, _, *spent in own[1:]:
        found = dict(zip(OWN, spent, strict=True))
        for name, most in AIMS_MS[pictures.split(" x ")[1]].items():
            aim, ms = f"{name}: at most {most:g} ms", found[name]
            rows.append([aim, pictures, width, clients, ms, _met(float(ms) <= most)])
    return rows


def _met(good: bool) -> str:
    return "yes" if good else "**no**"


def _of(loads: Sequence[Load], cell: str, clients: int, arm: str) -> list[Load]:
    return [o for o in loads if (o.cell, o.clients, o.arm) == (cell, clients, arm)]


def _ms(loads: Sequence[Load], *processes: str) -> float:
    """Processor milliseconds an image, of these processes or of all."""
    return statistics.median(
        1e3
        * sum(s for name, s in one.cpu_s.items() if name in (processes or one.cpu_s))
        / one.images
        for one in loads
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", nargs="+", choices=SPECS, default=list(SPECS))
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--alone", action="store_true", help="without servers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "host.md")
    parser.add_argument("--render", type=Path, metavar="JSON", help="write its page anew")
    options = parser.parse_args()
    if options.render:
        results = msgspec.json.decode(options.render.read_bytes(), type=Results)
        options.render.with_suffix(".md").write_text(page(results))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers
    for results in measure(options):
        data = msgspec.json.format(msgspec.json.encode(results), indent=1)
        options.out.with_suffix(".json").write_bytes(data + b"\n")
    options.out.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
