"""A receiver in a process of its own, which can be measured, frozen and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MIB = 1 << 20


def peak(pid: int | str) -> int:
    """Bytes of a process that were resident at a time, shared ones included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def forget_peak(pid: int | str) -> int:
    """Let the peak begin again from what is resident now; that many bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


class ReceiverProcess:
    """What is known of it from outside.

    Attributes:
        endpoint: where it takes payloads.
        pid: its process.
    """

    def __init__(self, control: Path, budget: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__, str(control), str(budget)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._child.pid
        self.endpoint: str = self._heard()

    def _heard(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, "the receiver's process has ended"
        return json.loads(line)

    def state(self) -> dict[str, int]:
        """What its books and its tally say."""
        print(file=self._child.stdin, flush=True)
        state: dict[str, int] = self._heard()
        return state

    @property
    def rss(self) -> int:
        """Bytes of its own, without the arena."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (kib,) = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
        return int(kib) << 10

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


@contextmanager
def receiver_process(control: Path, budget: int = MIB) -> Iterator[ReceiverProcess]:
    process = ReceiverProcess(control, budget)
    try:
        yield process
    finally:
        process.close()


def _run(control: Path, budget: int) -> None:
    from sglang_epd.transfer.receiver import Receiver

    receiver = Receiver("127.0.0.1", "127.0.0.1", control, budget_bytes=budget, readers=3)
    receiver.start()
    print(json.dumps(receiver.endpoint), flush=True)
    for _ in sys.stdin:
        counts = receiver.tally.counts
        state = {
            "held": receiver._reservations.held_bytes,
            "quarantined": len(receiver._reservations.quarantined),
            "unanswered": len(receiver._held),
            "waits": counts["waits", ""],
            "received_bytes": counts["received_bytes", ""],
            "internal": counts["dropped", "internal"],
            "entries": len(receiver._ledger),
        }
        print(json.dumps(state), flush=True)


if __name__ == "__main__":
    _run(Path(sys.argv[1]), int(sys.argv[2]))
