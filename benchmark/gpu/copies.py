"""What copies between this machine's memory and its GPU cost, by how the memory is held.

    python benchmark/gpu/copies.py [--json FILE]

Copies of 1 to 256 MiB in both directions: from pageable memory, from torch's pinned memory,
and from a mapped memfd that is registered with CUDA (`cudaHostRegister`), which an arena of
received embeddings would be. Then what registering 2, 8 and 32 GiB costs, and what becomes of
memory that is returned to the system (MADV_REMOVE) before and after that.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not __package__:  # a program; in the tests encoder.py there would hide theirs
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu.results import Results, arguments

_MIB = 1 << 20
_GIB = 1 << 30
_REPEATS = 7
_PORTABLE = 1  # cudaHostRegisterPortable


class File:
    """An anonymous file in memory, mapped as an arena is.

    Attributes:
        bytes: uint8 [nbytes], on its pages.
    """

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("benchmark")
        os.ftruncate(fd, nbytes)
        self._map = mmap.mmap(fd, nbytes)
        os.close(fd)
        self.bytes = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self.nbytes = nbytes

    def touch(self) -> None:
        """Give every page memory."""
        self.bytes[:: mmap.PAGESIZE] = 1

    def register(self) -> None:
        """Let the GPU copy from and to it directly.

        Raises:
            RuntimeError: CUDA refuses.
        """
        _check(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.nbytes, _PORTABLE))

    def unregister(self) -> None:
        _check(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr()))

    def remove(self, nbytes: int) -> None:
        """Return the memory of its first bytes to the system.

        Raises:
            OSError: the system refuses.
        """
        self._map.madvise(mmap.MADV_REMOVE, 0, nbytes)


def _check(error: Any) -> None:
    torch.cuda.check_error(int(error))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    options = parser.parse_args()
    results = Results("copies")
    cuda = options.device == "cuda"
    sizes = (1, 4) if options.tiny else (1, 4, 16, 64, 256)
    results.figures["copies"] = copies(cuda, sizes)
    results.tables["Copies, GB/s"] = copy_rows(results.figures["copies"], sizes)
    told = ("pageable to GPU", "registered memfd to GPU", "host to new host memory, one thread")
    results.headline = "; ".join(
        f"{name} {by_size[max(sizes)]['gb_per_s']:.1f} GB/s"
        for name, by_size in results.figures["copies"].items()
        if name in told
    )
    results.write(options.json)
    registered: dict[str, list[dict[str, Any]]] = {"registering": []}
    results.figures.update(registered)
    for nbytes in (8 * _MIB,) if options.tiny else (2 * _GIB, 8 * _GIB, 32 * _GIB):
        for touched in (False, True):
            if touched and nbytes > 8 * _GIB:
                continue
            registered["registering"].append(registering(nbytes, cuda, touched=touched))
            results.tables["Registering, ms"] = register_rows(registered["registering"])
            results.write(options.json)
    results.figures["removed"] = removed(cuda)
    results.tables["Memory that is returned to the system (MADV_REMOVE)"] = [
        ["", ""],
        *([name, str(told)] for name, told in results.figures["removed"].items()),
    ]
    results.write(options.json)
    results.print()


def copies(cuda: bool, sizes: tuple[int, ...]) -> dict[str, dict[int, dict[str, float]]]:
    """Median seconds and rate of each kind of copy, by its size in MiB."""
    nbytes = max(sizes) * _MIB
    file = File(nbytes)
    file.touch()
    there = torch.zeros(nbytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    held = {"pageable": torch.ones(nbytes, dtype=torch.uint8)}
    if cuda:
        file.register()
        held["pinned"] = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
        held["registered memfd"] = file.bytes
    else:
        held["memfd"] = file.bytes
    kinds: dict[str, Callable[[int], None]] = {}
    for name, here in held.items():
        kinds[f"{name} to GPU"] = partial(_copy, there, here)
        kinds[f"GPU to {name}"] = partial(_copy, here, there)
    staged = held.get("pinned", held["pageable"])
    kinds["host to new host memory, one thread"] = partial(_clone, staged)
    kinds["host to host, one thread"] = partial(_plain_copy, file.bytes, staged)
    if cuda:
        other = torch.zeros_like(there)
        kinds["GPU to GPU"] = partial(_copy, other, there)
    made: dict[str, dict[int, dict[str, float]]] = {name: {} for name in kinds}
    for size in sizes:
        took: dict[str, list[float]] = {name: [] for name in kinds}
        for attempt in range(_REPEATS + 1):
            for name, copy in kinds.items():
                _wait(cuda)
                began = time.perf_counter()
                copy(size * _MIB)
                _wait(cuda)
                if attempt:
                    took[name].append(time.perf_counter() - began)
        for name, seconds in took.items():
            median = statistics.median(seconds)
            made[name][size] = {"ms": median * 1e3, "gb_per_s": size * _MIB / median / 1e9}
    if cuda:
        file.unregister()
    return made


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def _copy(to: torch.Tensor, of: torch.Tensor, nbytes: int) -> None:
    to[:nbytes].copy_(of[:nbytes], non_blocking=True)


def _clone(of: torch.Tensor, nbytes: int) -> None:
    """A copy into memory of its own, whose pages are new; by one thread."""
    np.copyto(np.empty(nbytes, np.uint8), of[:nbytes].numpy())


def _plain_copy(to: torch.Tensor, of: torch.Tensor, nbytes: int) -> None:
    np.copyto(to[:nbytes].numpy(), of[:nbytes].numpy())


def registering(nbytes: int, cuda: bool, *, touched: bool) -> dict[str, Any]:
    """Milliseconds that a file's registration takes, and of what goes with it."""
    file = File(nbytes)
    steps: dict[str, Callable[[], None]] = {}
    if touched:
        steps["touch"] = file.touch
    if cuda:
        steps |= {"register": file.register, "unregister": file.unregister}
    steps["remove"] = lambda: file.remove(nbytes)
    made: dict[str, Any] = {"bytes": nbytes, "touched": touched}
    for name, step in steps.items():
        began = time.perf_counter()
        try:
            step()
        except (RuntimeError, OSError) as error:
            made[f"{name}_failed"] = str(error).partition("\n")[0]
            if name == "register":
                break
        else:
            made[f"{name}_ms"] = (time.perf_counter() - began) * 1e3
    return made


def removed(cuda: bool) -> dict[str, Any]:
    """What the GPU reads of registered memory that the system was given back meanwhile."""
    nbytes = 16 * _MIB
    file = File(nbytes)
    file.bytes.fill_(1)
    if cuda:
        file.register()
    told: dict[str, Any] = {"registered": cuda}
    began = time.perf_counter()
    try:
        file.remove(nbytes)
    except OSError as error:
        told["refused"] = str(error)
        return told
    told["milliseconds for 16 MiB"] = round((time.perf_counter() - began) * 1e3, 3)
    told["the host reads"] = int(file.bytes[0])
    file.bytes.fill_(2)
    read = file.bytes.cuda() if cuda else file.bytes.clone()
    told["after the host wrote 2 the GPU reads"] = sorted(set(read[:: mmap.PAGESIZE].tolist()))
    if cuda:
        file.unregister()
    return told


def copy_rows(
    made: dict[str, dict[int, dict[str, float]]], sizes: tuple[int, ...]
) -> list[list[str]]:
    rows = [["copy", *(f"{size} MiB" for size in sizes)]]
    for name, by_size in made.items():
        cells = [f"{one['gb_per_s']:.1f} ({one['ms']:.2f} ms)" for one in by_size.values()]
        rows.append([name, *cells])
    return rows


def register_rows(made: list[dict[str, Any]]) -> list[list[str]]:
    steps = ("touch", "register", "unregister", "remove")
    rows = [["GiB", *steps]]
    for one in made:
        cells = [one.get(f"{step}_failed") or one.get(f"{step}_ms") for step in steps]
        shown = [f"{cell:.0f}" if isinstance(cell, float) else str(cell or "") for cell in cells]
        rows.append([f"{one['bytes'] / _GIB:g}", *shown])
    return rows


if __name__ == "__main__":
    main()
