"""Two processes on one GPU: what handing an embedding over costs, and when its owner dies.

    python benchmark/gpu/peers.py [--json FILE]

The owner has an embedding of 67 MB on the GPU and exports a handle; the reader opens it and
copies. Handles are CUDA's legacy ones, as `torch.multiprocessing` makes them, and file
descriptors of CUDA's virtual memory. Then the owner is killed, and the reader copies again.
"""

from __future__ import annotations

import argparse
import array
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

if not __package__:  # a program; in the tests encoder.py there would hide theirs
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu.results import Results, arguments

# Of a 1080p picture in Qwen3-VL-8B.
_ROWS, _WIDTH = 2040, 16_384
_REPEATS = 5
_DEATH_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    options = parser.parse_args()
    results = Results("peers")
    ways: dict[str, Callable[..., None]] = {"legacy": _read_legacy}
    if options.device == "cuda":
        ways["virtual memory"] = _read_virtual
    for name, read in ways.items():
        results.figures[name] = _in_process(read, options.device, options.tiny)
    keys = list(dict.fromkeys(key for told in results.figures.values() for key in told))
    results.tables["Handing over a tensor on one GPU"] = [
        ["", *results.figures],
        *([key, *(_shown(told.get(key)) for told in results.figures.values())] for key in keys),
    ]
    results.headline = "; ".join(
        f"{name}: opened in {_shown(told.get('open_ms'))} ms, afterwards {told.get('afterwards')}"
        for name, told in results.figures.items()
    )
    results.write(options.json)
    results.print()
    if failed := [name for name, told in results.figures.items() if "failed" in told]:
        sys.exit(f"failed: {', '.join(failed)}")


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _in_process(read: Callable[..., None], device: str, tiny: bool) -> dict[str, Any]:
    """What a reader of its own tells, as far as it got; it may not survive its owner."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_reader, args=(theirs, read, device, tiny))
    reader.start()
    theirs.close()
    told: dict[str, Any] = {}
    with suppress(EOFError):
        while ours.poll(60):
            told |= ours.recv()
    reader.join(10)
    if reader.exitcode is None:
        reader.kill()
        told["failed"] = "the reader hangs"
    elif reader.exitcode:
        told.setdefault("failed", f"the reader ended with {reader.exitcode}")
    return told


def _reader(pipe: Connection, read: Callable[..., None], device: str, tiny: bool) -> None:
    try:
        read(pipe, device, (4, 64) if tiny else (_ROWS, _WIDTH))
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {error}".partition("\n")[0]})
        raise


def _read_legacy(pipe: Connection, device: str, shape: tuple[int, int]) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own_legacy, args=(theirs, device, shape))
    owner.start()
    theirs.close()
    _wait(device)
    export_ms, rebuild, parts = ours.recv()
    began = time.perf_counter()
    tensor = rebuild(*parts)
    _wait(device)
    pipe.send({"export_ms": export_ms, "open_ms": (time.perf_counter() - began) * 1e3})
    _copy_before_and_after(pipe, tensor, device, owner)


def _own_legacy(pipe: Connection, device: str, shape: tuple[int, int]) -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    tensor = torch.full(shape, 3.0, dtype=torch.bfloat16, device=device)
    _wait(device)
    began = time.perf_counter()
    rebuild, parts = reduce_tensor(tensor)
    pipe.send(((time.perf_counter() - began) * 1e3, rebuild, parts))
    time.sleep(600)


def _read_virtual(pipe: Connection, device: str, shape: tuple[int, int]) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    nbytes = 2 * shape[0] * shape[1]
    owner = context.Process(target=_own_virtual, args=(theirs, nbytes))
    owner.start()
    theirs.close()
    torch.zeros(1, device=device)
    told, fds, _, _ = socket.recv_fds(ours, 64, 1)
    export_ms = array.array("d", told)[0]
    began = time.perf_counter()
    memory = _Virtual.opened(fds[0], nbytes)
    pipe.send({"export_ms": export_ms, "open_ms": (time.perf_counter() - began) * 1e3})
    os.close(fds[0])
    tensor = memory.tensor().view(torch.bfloat16)[: shape[0] * shape[1]].view(shape)
    _copy_before_and_after(pipe, tensor, device, owner)


def _own_virtual(end: socket.socket, nbytes: int) -> None:
    torch.zeros(1, device="cuda")
    memory = _Virtual.made(nbytes)
    memory.tensor().view(torch.bfloat16).fill_(3.0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    fd = memory.export()
    told = array.array("d", [(time.perf_counter() - began) * 1e3])
    socket.send_fds(end, [told.tobytes()], [fd])
    time.sleep(600)


def _copy_before_and_after(pipe: Connection, tensor: torch.Tensor, device: str, owner: Any) -> None:
    """Copy while the owner lives, kill it, and copy again."""
    here = torch.empty_like(tensor, device=device)
    took = []
    for _ in range(_REPEATS):
        _wait(device)
        began = time.perf_counter()
        here.copy_(tensor)
        _wait(device)
        took.append((time.perf_counter() - began) * 1e3)
    right = bool((here == 3.0).all())
    pipe.send({"copy_ms": statistics.median(took), "bytes": here.nbytes, "right": right})
    owner.kill()
    owner.join(_DEATH_S)
    time.sleep(0.5)  # the driver frees what the owner had
    here.zero_()
    try:
        here.copy_(tensor)
        _wait(device)
        same = bool((here == 3.0).all())
        pipe.send({"afterwards": "the same embedding" if same else "another embedding"})
    except RuntimeError as error:
        pipe.send({"afterwards": str(error).partition("\n")[0]})
    try:
        other = float(torch.ones(4, device=device).sum())
        pipe.send({"the reader's GPU then": "works" if other == 4.0 else "computes wrong"})
    except RuntimeError as error:
        pipe.send({"the reader's GPU then": str(error).partition("\n")[0]})
    # A tensor of a dead owner may fail at being given back.
    os._exit(0)


class _Virtual:
    """Memory of CUDA's virtual memory management, mapped here."""

    def __init__(self, handle: Any, nbytes: int) -> None:
        self._handle = handle
        self.nbytes = nbytes
        driver = _driver()
        properties = _properties()
        self._at = _done(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
        _done(driver.cuMemMap(self._at, nbytes, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _done(driver.cuMemSetAccess(self._at, nbytes, [access], 1))

    @classmethod
    def made(cls, nbytes: int) -> _Virtual:
        whole = _whole(nbytes)
        return cls(_done(_driver().cuMemCreate(whole, _properties(), 0)), whole)

    @classmethod
    def opened(cls, fd: int, nbytes: int) -> _Virtual:
        driver = _driver()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = _done(driver.cuMemImportFromShareableHandle(fd, kind))
        return cls(handle, _whole(nbytes))

    def export(self) -> int:
        """A file descriptor of it."""
        driver = _driver()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(_done(driver.cuMemExportToShareableHandle(self._handle, kind, 0)))

    def tensor(self) -> torch.Tensor:
        """Its bytes, uint8."""
        interface = {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (int(self._at), False),
            "version": 3,
        }
        return torch.as_tensor(
            type("Bytes", (), {"__cuda_array_interface__": interface})(), device="cuda"
        )


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _properties() -> Any:
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = (
        driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    )
    return properties


def _whole(nbytes: int) -> int:
    driver = _driver()
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    unit = int(_done(driver.cuMemGetAllocationGranularity(_properties(), minimum)))
    return -(-nbytes // unit) * unit


def _done(answer: Any) -> Any:
    """What a call of the driver gave.

    Raises:
        RuntimeError: it failed.
    """
    error, *given = answer
    if int(error):
        raise RuntimeError(f"CUDA driver: {error}")
    return given[0] if given else None


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
