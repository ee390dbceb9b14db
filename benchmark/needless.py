"""How often a picture needs no encoder, by workload.

    .venv/bin/python benchmark/needless.py [--workloads turns zipf]

Real servers on the tiny checkpoint: an encoder with a cache, and a language server that keeps
embeddings. Workloads are those of `benchmark/workloads/` at their small scale, and pictures that
come again by Zipf's law. All caches are as large as they are by default, so nothing is evicted;
no workload has a picture of another. The language server counts where the KV or the embedding of
each picture came from. Figures go into `results/needless_encoding.json`, beside those of other
workloads; the table is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

import msgspec  # noqa: E402
import tokenizers  # noqa: E402
from comparison.arms import Arm, Place, Running  # noqa: E402
from comparison.clients import ClientError, converse  # noqa: E402
from comparison.files import read, read_all  # noqa: E402
from comparison.published_page import SOURCES  # noqa: E402
from comparison.workloads import Images, Repeats, Request, Scale, Size, Workload  # noqa: E402
from comparison.workloads import requests as requests_of  # noqa: E402
from pages import machine, table  # noqa: E402
from reproduce import HERE, RESULTS  # noqa: E402

from demo_emulated import counted  # noqa: E402
from make_checkpoint import ensure  # noqa: E402

ARM = "epd-cache"
CHECKPOINT = "tiny-qwen3-vl"
# Requests a second, and their number where pictures come again and where none does.
RATE, MANY, FEW = 4.0, 120, 8
CONVERSATIONS = 10
# There is neither a shared store nor a tower on language servers.
SHOWN = {name: title for name, title in SOURCES.items() if name not in ("store", "local")}
TEXT_FIRST = "zipf-text-first"


def workloads() -> dict[str, Workload]:
    """By name."""
    named = {one.name: one for one in read_all(ROOT / "benchmark" / "workloads", Workload)}
    scale = Scale(24, 4, [RATE], sizes=[Size(224, 224)], repeats=Repeats(200, 1.1))
    for name in ("zipf", TEXT_FIRST):
        named[name] = Workload(name, "one of 200 pictures", scale, scale, Images())
    return named


def sent(workload: Workload, tokenizer: tokenizers.Tokenizer) -> list[Request]:
    """The requests, or conversations."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    number = MANY if workload.small.repeats else CONVERSATIONS if workload.turns > 1 else FEW
    # The one with pictures is the middle one of each so many.
    number *= workload.every
    found: Iterator[Request] = islice(requests_of(workload, "small", 0, count), number)
    if workload.name == TEXT_FIRST:
        found = (
            msgspec.structs.replace(one, turns=[turn[::-1] for turn in one.turns]) for one in found
        )
    return list(found)


def measure(
    arm: Arm, chosen: dict[str, Workload], model: str, folder: Path
) -> Iterator[tuple[str, int, Counter[str]]]:
    """Each workload's name, requests and pictures by source.

    Raises:
        ClientError: a request was not answered.
    """
    tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
    running = Running(arm, model, "", Place(cores=sorted(os.sched_getaffinity(0))), folder)
    try:
        print(f"{arm.name}: up after {running.start():.0f} s", flush=True)
        before = Counter[str]()
        for name, workload in chosen.items():
            talks = sent(workload, tokenizer)
            outcomes, _ = asyncio.run(converse(running.url, talks, RATE, 0))
            if failed := [one.failure for one in outcomes if one.failure]:
                raise ClientError(f"{name}: {len(failed)} of {len(outcomes)}: {failed[0]}")
            items = counted(running.url).items
            yield name, len(outcomes), items - before
            before = items
    finally:
        running.stop()


class Counted(msgspec.Struct, frozen=True):
    """A workload.

    Attributes:
        items: pictures by source.
    """

    workload: str
    requests: int
    items: dict[str, int]

    def row(self) -> list[str]:
        total = sum(self.items.values())
        shares = [f"{self.items.get(source, 0) / total:.0%}" for source in SHOWN]
        return [self.workload, f"{self.requests}", f"{total}", *shares]


def kept(path: Path) -> dict[str, Counted]:
    """Kept figures of earlier runs, by workload."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    return {one.workload: one for one in msgspec.convert(runs, list[Counted])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=sorted(workloads()))
    parser.add_argument("--out", type=Path, default=RESULTS / "needless_encoding.json")
    options = parser.parse_args()
    chosen = {n: one for n, one in workloads().items() if n in (options.workloads or [n])}
    model = str(ensure(CHECKPOINT))
    folder = Path(tempfile.mkdtemp(prefix="sglang-epd-needless-"))
    print("logs:", folder, flush=True)
    runs = kept(options.out)
    for name, number, items in measure(
        read(HERE / "arms" / f"{ARM}.toml", Arm), chosen, model, folder
    ):
        runs[name] = Counted(name, number, dict(items))
        print(" | ".join(runs[name].row()), flush=True)
        told = {"machine": machine(), "runs": [runs[key] for key in sorted(runs)]}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    head = ["workload", "requests", "pictures", *SHOWN.values()]
    print(table([head, *(runs[key].row() for key in sorted(runs))]))


if __name__ == "__main__":
    main()
