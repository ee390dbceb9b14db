"""Rules of adaptive dispatch, reckoned: which requests a language server with a tower keeps.

    .venv/bin/python benchmark/adaptive.py

An encoder and a language server whose times are those of Qwen3-VL-8B on an H100 each
(`results/gpu.md`, one request at a time). Prefill is one request after the other, behind a
step of decoding; the tower of a language server is a part of it. An encoder prepares four
pictures at a time, and its tower takes passes of up to 16,384 patches. Requests come at
random; rates are shares of what can be prefilled where nothing is encoded here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import simpy
from pages import machine, table
from pictures import ROOT

PASS_S, PASS_PATCHES, PATCHES_PER_S = 0.022, 16_384, 450_000.0
STEP_S = 0.010
RULES = ("items", "encoders", "items, while no other waits")
SHARES = (0.02, 0.1, 0.3, 0.5, 0.8)
SLOW = {"": 1.0, "encoder four times as slow": 4.0}
RESULTS = ROOT / "benchmark" / "results" / "mechanisms.json"


class Kind(NamedTuple):
    """A kind of request: its pictures, and seconds.

    Attributes:
        read_here_s, read_there_s: to decode and preprocess all of them.
        tower_here_s: in the forward pass that prefills.
        prefill_s: without the tower.
        way_s: to the encoder, and back into the scheduler's queue.
    """

    images: int
    patches: int
    read_here_s: float
    read_there_s: float
    tower_here_s: float
    prefill_s: float
    way_s: float


KINDS = {
    "1 x 448 px": Kind(1, 1024, 0.017, 0.012, 0.018, 0.048, 0.046),
    "4 x 448 px": Kind(4, 1024, 0.054, 0.022, 0.029, 0.045, 0.060),
    "1 x 1080p": Kind(1, 10_500, 0.071, 0.060, 0.045, 0.049, 0.033),
    "4 x 1080p": Kind(4, 10_500, 0.257, 0.111, 0.180, 0.212, 0.040),
}


class World:
    """One load under one rule."""

    def __init__(self, rule: str, kind: Kind, rate: float, slow: float, seed: int) -> None:
        self._rule, self._kind, self._slow = rule, kind, slow
        self._draw = random.Random(seed)
        self.env = simpy.Environment()
        self._prefill = simpy.Resource(self.env)
        self._readers = simpy.Resource(self.env, 4)
        self._preparing = simpy.Resource(self.env, 4)
        self._queue = simpy.Store(self.env)
        self._waiting = 0
        self.ttft_s: list[float] = []
        self.kept = 0
        self.env.process(self._tower())
        self.env.process(self._arrive(rate))

    def _arrive(self, rate: float, count: int = 400) -> Generator[Any, Any, None]:
        for _ in range(count):
            yield self.env.timeout(self._draw.expovariate(rate))
            self.env.process(self._request())

    def _tower(self) -> Generator[Any, Any, None]:
        while True:
            batch = [(yield self._queue.get())]
            while self._queue.items and (len(batch) + 1) * self._kind.patches <= PASS_PATCHES:
                batch.append((yield self._queue.get()))
            patches = len(batch) * self._kind.patches
            seconds = max(PASS_S, patches / PATCHES_PER_S) * self._slow
            yield self.env.timeout(seconds)
            for done in batch:
                done.succeed()

    def _item(self, read_s: float) -> Generator[Any, Any, None]:
        with self._preparing.request() as turn:
            yield turn
            yield self.env.timeout(read_s)
        done = self.env.event()
        self._queue.put(done)
        yield done

    def _request(self) -> Generator[Any, Any, None]:
        kind, began = self._kind, self.env.now
        here = self._stays()
        self._waiting += 1
        if here:
            self.kept += 1
            with self._readers.request() as turn:
                yield turn
                yield self.env.timeout(kind.read_here_s)
        else:
            read_s = [kind.read_there_s * (1 + n) / kind.images for n in range(kind.images)]
            yield self.env.all_of([self.env.process(self._item(one)) for one in read_s])
            yield self.env.timeout(kind.way_s)
        with self._prefill.request() as turn:
            yield turn
            yield self.env.timeout(STEP_S + kind.prefill_s + (kind.tower_here_s if here else 0))
        self._waiting -= 1
        self.ttft_s.append(self.env.now - began)

    def _stays(self) -> bool:
        few = self._rule != "encoders" and self._kind.images < 2
        return few and (self._rule == "items" or not self._waiting)


def run(rule: str, kind: Kind, share: float, slow: float, seeds: int) -> dict[str, float]:
    """The mean time to the first token, in ms, and the share of requests that stayed."""
    rate = share / (STEP_S + kind.prefill_s)
    worlds = [World(rule, kind, rate, slow, seed) for seed in range(seeds)]
    for world in worlds:
        world.env.run()
    every = [seconds for world in worlds for seconds in world.ttft_s]
    kept = sum(world.kept for world in worlds)
    return {"ttft_ms": 1e3 * statistics.fmean(every), "kept": kept / len(every)}


def report(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["request", "encoder", "share", "best (ms)", *RULES]]
    for key in dict.fromkeys((one["kind"], one["slow"], one["share"]) for one in rows):
        runs = {one["rule"]: one for one in rows if (one["kind"], one["slow"], one["share"]) == key}
        best = min(one["ttft_ms"] for one in runs.values())
        cells = [f"{one['ttft_ms'] / best:.2f} ({one['kept']:.0%})" for one in runs.values()]
        lines.append([key[0], key[1], f"{key[2]:.0%}", f"{best:.0f}", *cells])
    return table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [
        {"kind": name, "slow": slow, "share": share, "rule": rule}
        | run(rule, kind, share, SLOW[slow], options.seeds)
        for name, kind in KINDS.items()
        for slow in SLOW
        for share in SHARES
        for rule in RULES
    ]
    figures = json.loads(options.out.read_text()) if options.out.exists() else {}
    figures["adaptive"] = {"machine": machine(), "runs": rows}
    options.out.write_text(json.dumps(figures) + "\n")
    print(report(rows))


if __name__ == "__main__":
    main()
