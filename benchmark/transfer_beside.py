"""Processor time of a transfer by this checkout and by another one, in turns.

    git worktree add ../before 02d0cda
    .venv/bin/python benchmark/transfer_beside.py ../before [--sizes 1 8 64] [--rounds 15]

Each checkout transfers by its own `benchmark/transfer.py` (`Ours`): a sender and a receiver
process for each landing. The figures are what both processes spend on a transfer, all threads,
as the kernel counts it, in the lowest quarter of rounds: others' use of caches makes it more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
# By the names in `transfer.ways`.
LANDINGS = {"shared memory": "shared", "socket": "inline", "Mooncake": "remote"}
# Of one measurement, so that its transfers take some milliseconds.
_BYTES = 128 * MIB
_ARM = """
import os, sys
checkout, landing, largest = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.path[:0] = [f"{checkout}/benchmark", f"{checkout}/python"]
import torch, sglang_epd, transfer
assert sglang_epd.__file__.startswith(checkout), sglang_epd.__file__
way = transfer.Ours(largest, landing)

def spent_ns():
    return sum(
        int(open(f"/proc/{pid}/task/{thread}/schedstat").read().split()[0])
        for pid in (os.getpid(), way._child._process.pid)
        for thread in os.listdir(f"/proc/{pid}/task")
    )

print("ready", flush=True)
for line in sys.stdin:
    size, count = map(int, line.split())
    payload = torch.ones(size // 4 // transfer.WIDTH, transfer.WIDTH)
    way.transfer(payload)
    before = spent_ns()
    for _ in range(count):
        way.transfer(payload)
    print((spent_ns() - before) / count / 1e6, flush=True)
"""


class Arm:
    """One checkout's transfers by one landing."""

    def __init__(self, checkout: Path, landing: str, largest: int) -> None:
        command = [sys.executable, "-c", _ARM, str(checkout), landing, str(largest)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def ms(self, size: int) -> float:
        """Milliseconds of processors for a transfer of so many bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{size} {max(2, _BYTES // size)}\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measure(other: Path, landing: str, sizes: Sequence[int], rounds: int) -> list[str]:
    """For each size (MiB), now and before, and the former by the latter."""
    arms = [Arm(checkout, landing, max(sizes) * MIB) for checkout in (ROOT, other)]
    cells = []
    for size in sizes:
        turns = [[arm.ms(size * MIB) for arm in arms] for _ in range(rounds + 1)][1:]
        now, before = (sorted(each)[rounds // 4] for each in zip(*turns, strict=True))
        cells.append(f"{now:.2f} ms, {before:.2f} ms: {now / before:.2f}")
    for arm in arms:
        arm.close()
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--landings", nargs="+", choices=LANDINGS, default=list(LANDINGS))
    options = parser.parse_args()
    print("| way | " + " | ".join(f"{size} MiB" for size in options.sizes) + " |")
    print("|---|" + "---|" * len(options.sizes))
    for name in options.landings:
        cells = measure(options.other.resolve(), LANDINGS[name], options.sizes, options.rounds)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
