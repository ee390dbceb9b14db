"""What a language server's prefill waits for once its last picture has landed.

    PYTHONPATH=python python benchmark/gpu/uploads.py [--json FILE]

Replays what SGLang 0.5.23 does with embeddings in host memory at prefill (concatenate, split
columns, copy, scatter; its own functions where they can be imported) with and without
`sglang_epd.language.uploads`, on one host thread, as in SGLang's schedulers:

- *as before*: everything on the host, then blocking copies.
- *staged*: rows are copied when the pass is launched; from pageable or registered memory.
- *landing*: as staged, but all pictures except the last were copied when they landed.
- *there*: all rows are on the device already, the least that any of it can cost.

Each is measured behind some 20 ms of kernels, as a pass that runs while the next one is
launched, and on an idle device.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # a program; in the tests encoder.py there would hide theirs
    sys.path += [str(_ROOT / "benchmark"), str(_ROOT / "python")]

from gpu.results import Results, arguments  # noqa: E402
from sglang_epd.device import Device, device_of  # noqa: E402
from sglang_epd.language.uploads import Stager  # noqa: E402

_ROUNDS = 24
_TEXT_TOKENS = 64
_REUSES = 200

Stage = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Embeddings of a request: `items` of bf16 [rows, width], `hidden` columns of which are
    the prompt's, the others deepstack's."""

    name: str
    items: int
    rows: int
    width: int
    hidden: int

    @property
    def nbytes(self) -> int:
        return self.items * self.rows * self.width * 2


_SHAPES = [
    Shape(f"{items} x {name}", items, rows, width, hidden)
    for name, rows, width, hidden in (
        ("1080p, Qwen3-VL-8B", 2040, 16384, 4096),
        ("448 px, Qwen2.5-VL-7B", 256, 3584, 3584),
    )
    for items in (1, 4)
]


class Plain:
    """What SGLang does at prefill, in torch's words."""

    name = "the same operations"

    def gather(self, items: Sequence[torch.Tensor], stage: Stage) -> torch.Tensor:
        rows = [stage(item[: len(item)]) for item in items]
        return rows[0] if len(rows) == 1 else torch.concat(rows)

    def scatter(self, there: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
        rows = rows.to(there.device, there.dtype)
        ranks = torch.where(mask[:, 0], torch.cumsum(mask[:, 0], 0) - 1, len(rows))
        places = torch.full((len(rows) + 1,), len(there), device=there.device)
        places.scatter_(0, ranks, torch.arange(len(mask), device=there.device))
        there.index_copy_(0, places[:-1], rows)


class Sglangs:
    """SGLang's own functions."""

    name = "SGLang's functions"

    def __init__(self) -> None:
        from sglang.srt.managers import mm_schedule, mm_utils

        self._schedule = mm_schedule
        self._chunk = mm_schedule.get_embedding_chunk
        self.scatter = mm_utils._scatter_mm_embedding

    def gather(self, items: Sequence[torch.Tensor], stage: Stage) -> torch.Tensor:
        def chunk(*args: Any) -> Any:
            rows, begin, end = self._chunk(*args)
            return stage(rows), begin, end

        self._schedule.get_embedding_chunk = chunk
        total = sum(map(len, items))
        ends = np.cumsum([len(item) for item in items]).tolist()
        theirs = [
            SimpleNamespace(precomputed_embeddings=item, offsets=[(end - len(item), end - 1)])
            for item, end in zip(items, ends, strict=True)
        ]
        offsets = [[one.offsets[0] for one in theirs]]
        rows: torch.Tensor = self._schedule._get_precomputed_embedding(
            theirs, [0, len(items)], [0], [total], offsets
        )
        return rows


class Bench:
    """One shape's arms.

    Args:
        ours: SGLang's operations.
        kernels: that a measurement is behind, of some 0.2 ms each: the host must be far ahead.
    """

    def __init__(self, device: Device, ours: Plain | Sglangs, shape: Shape, kernels: int) -> None:
        self._device, self._ours, self._shape = device, ours, shape
        self._cuda = device.name.type == "cuda"
        tokens = shape.items * shape.rows + _TEXT_TOKENS
        made = partial(torch.zeros, device=device.name, dtype=torch.bfloat16)
        self._embeds = made((tokens, shape.hidden))
        self._deepstack = made((tokens, shape.width - shape.hidden))
        mask = torch.ones((tokens, 1), dtype=torch.bool)
        mask[: _TEXT_TOKENS // 2] = mask[-_TEXT_TOKENS // 2 :] = False
        self._mask = mask.to(device.name)
        self._stager = Stager(device)
        self._pageable, self._registered = mapped(shape.nbytes), mapped(shape.nbytes)
        begin = time.perf_counter()
        device.register(self._registered.data_ptr(), shape.nbytes)
        self.register_ms = 1e3 * (time.perf_counter() - begin)
        pattern = torch.randint(-(2**15), 2**15, (shape.nbytes // 2,), dtype=torch.int16)
        pattern &= ~0x4000  # no infinity and no NaN
        for memory in (self._pageable, self._registered):
            memory.copy_(pattern.view(torch.uint8))
        self._there = [item.to(device.name) for item in self._items(self._pageable)]
        self._ahead: list[torch.Tensor] = []
        self._weights = made((4096, 4096)) if kernels else made((1, 1))
        self._kernels = kernels
        staged = self._stager.stage
        self.arms: dict[str, Callable[[], None]] = {
            "as before": partial(self._prefill, self._items(self._pageable), lambda rows: rows),
            "staged, pageable": partial(self._prefill, self._items(self._pageable), staged),
            "staged, registered": partial(self._prefill, self._items(self._registered), staged),
            "landing, registered": self._landing,
            "there": partial(self._prefill, self._there, lambda rows: rows),
        }

    def measure(self, arm: str, *, busy: bool) -> dict[str, float]:
        """Milliseconds: of the host's thread, until the device has all rows in their places,
        and of the device between the kernels before and that."""
        self._ahead = []
        if arm.startswith("landing"):
            self._ahead = [self._stager.stage(item) for item in self._items(self._registered)[:-1]]
        self._device.synchronize()
        if busy:
            self._compute()
        before = timestamp() if self._cuda else None
        begin = time.perf_counter()
        self.arms[arm]()
        launched = time.perf_counter()
        after = timestamp() if self._cuda else None
        self._device.synchronize()
        end = time.perf_counter()
        taken = {"host": 1e3 * (launched - begin), "ready": 1e3 * (end - begin)}
        if before is not None and after is not None:
            taken["gap"] = before.elapsed_time(after)
        self._stager.let_go()
        return taken

    def kernels_ms(self) -> float:
        begin = timestamp() if self._cuda else None
        self._compute()
        end = timestamp() if self._cuda else None
        self._device.synchronize()
        return float(begin.elapsed_time(end)) if begin is not None else 0.0

    def check(self, arm: str) -> None:
        """Raise AssertionError if an arm's rows are not those that landed."""
        self._embeds.zero_()
        self._deepstack.zero_()
        self.measure(arm, busy=True)
        mask = self._mask[:, 0].cpu()
        rows = torch.cat([self._embeds.cpu()[mask], self._deepstack.cpu()[mask]], dim=1)
        expected = torch.cat(self._items(self._pageable))
        assert torch.equal(rows.view(torch.int16), expected.view(torch.int16)), arm
        assert not self._embeds.cpu()[~mask].any(), arm

    def _compute(self) -> None:
        for _ in range(self._kernels):
            self._weights @ self._weights

    def _prefill(self, items: Sequence[torch.Tensor], stage: Stage) -> None:
        rows = self._ours.gather(items, stage)
        self._ours.scatter(self._embeds, self._mask, rows[:, : self._shape.hidden])
        if self._shape.width > self._shape.hidden:
            self._ours.scatter(self._deepstack, self._mask, rows[:, self._shape.hidden :])

    def _landing(self) -> None:
        last = self._stager.stage(self._items(self._registered)[-1])
        self._prefill([*self._ahead, last], lambda rows: rows)

    def _items(self, memory: torch.Tensor) -> list[torch.Tensor]:
        shape = self._shape
        rows = memory.view(torch.bfloat16).view(shape.items * shape.rows, shape.width)
        return list(rows.split(shape.rows))


# Registered memory has to stay mapped: the next mapping might lie where it was.
_mapped: list[mmap.mmap] = []


def mapped(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] on an anonymous file in memory, as an arena is."""
    fd = os.memfd_create("uploads")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    _mapped.append(memory)
    return torch.from_numpy(np.frombuffer(memory, np.uint8))


def timestamp() -> Any:
    from sglang_epd.device.cuda import timestamp as now

    return now()


def operations() -> tuple[Plain | Sglangs, str]:
    """SGLang's, or the same, and which they are."""
    try:
        ours: Plain | Sglangs = Sglangs()
    except Exception as error:
        return Plain(), f"{Plain.name} ({type(error).__name__}: {error})"
    return ours, ours.name


def reused(device: Device, rounds: int) -> str:
    """Whether memory that is written again, as soon as the stager lets go of it, is read before
    that; and whether work goes on after the driver has refused to register memory twice."""
    memory = mapped(8 << 20)
    device.register(memory.data_ptr(), len(memory))
    refused = "nothing to refuse"
    if device.queues:
        try:
            device.register(memory.data_ptr(), len(memory))
            refused = "NOT REFUSED"
        except RuntimeError as error:
            refused = f"refused ({error})"
    stager = Stager(device)
    block = memory.view(torch.float32)
    sums = []
    for value in range(rounds):
        while len(stager):
            stager.let_go()
        block.fill_(value)
        sums.append(stager.stage(block).double().mean())
    wrong = [value for value, mean in enumerate(sums) if mean.item() != value]
    if wrong or refused == "NOT REFUSED":
        raise AssertionError(f"{len(wrong)} of {rounds} rows were overwritten; {refused}")
    return f"{rounds} of {rounds} right where memory is used again; registering twice: {refused}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)  # SGLang's model runner does
    device = device_of(options.device)
    device.bind()
    ours, named = operations()
    results = Results("uploads")
    rounds = 3 if options.tiny else _ROUNDS
    kernels = 100 if device.queues else 0
    failed = []
    try:
        results.figures["reuse"] = reused(device, 10 if options.tiny else _REUSES)
    except (AssertionError, RuntimeError) as error:
        failed.append(f"reuse: {error}")
    rows = [["request", "behind", "arm", "host ms", "device gap ms", "ready ms"]]
    results.tables[f"median of {rounds}; {named}"] = rows
    for shape in [replace(one, rows=one.rows // 8) for one in _SHAPES] if options.tiny else _SHAPES:
        bench = Bench(device, ours, shape, kernels)
        for arm in bench.arms:
            bench.check(arm)
        taken: dict[tuple[bool, str], list[dict[str, float]]] = defaultdict(list)
        for _ in range(rounds):
            for busy in (True, False):
                for arm in bench.arms:
                    if time.monotonic() < end:
                        taken[busy, arm].append(bench.measure(arm, busy=busy))
        figures: dict[str, Any] = {
            "register_ms": bench.register_ms,
            "kernels_ms": bench.kernels_ms(),
            "medians": {},
            "samples": {
                f"{arm}, {'busy' if busy else 'idle'}": told for (busy, arm), told in taken.items()
            },
        }
        results.figures[shape.name] = figures
        for (busy, arm), samples in sorted(taken.items(), key=lambda one: not one[0][0]):
            median = {
                key: statistics.median(sample[key] for sample in samples) for key in samples[0]
            }
            cells = [
                f"{median[key]:.2f}" if key in median else "-" for key in ("host", "gap", "ready")
            ]
            rows.append([shape.name, "kernels" if busy else "nothing", arm, *cells])
            figures["medians"][f"{arm}, {'busy' if busy else 'idle'}"] = median
        results.headline = _headline(results)
        results.write(options.json)
    results.print()
    print(results.figures.get("reuse", ""), flush=True)
    if failed:
        sys.exit("; ".join(failed))


def _headline(results: Results) -> str:
    told = results.figures.get(_SHAPES[1].name, {}).get("medians", {})
    return "; ".join(
        f"{arm}: {told[f'{arm}, busy']['host']:.1f} ms of host, ready after "
        f"{told[f'{arm}, idle']['ready']:.1f} ms"
        for arm in ("as before", "staged, registered")
        if f"{arm}, idle" in told
    )


if __name__ == "__main__":
    main()
