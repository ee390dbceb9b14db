"""The steps of a run of `serve.py`: time, servers and results that outlive a step's failure."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gpu import serve_checkpoints
from gpu.results import aligned, machine
from gpu.serve_fleet import Fleet, Hardware, NothingStartedError

_START_S = {"cuda": 240.0, "cpu": 400.0}
# What a step needs at least, start-up included.
LEAST_S = 60.0
# Both large checkpoints.
_LARGE_BYTES = 40 << 30


@dataclass
class Step:
    """What became of a step.

    Attributes:
        status: "ok"; "failed", where something was measured that is not as it should be;
            "broken", where it could not be measured; "skipped", where time was short;
            "unfinished".
        wrong: why it is not ok.
        tables: rows by title, the first of each its head.
        figures: everything measured, as plain data.
    """

    status: str = "unfinished"
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


class Bench:
    """One run.

    Args:
        options: as typed.
        large: checkpoints that take long to make, in the order in which they are needed.
    """

    def __init__(self, options: argparse.Namespace, large: Sequence[str]) -> None:
        self.options = options
        self.hardware = Hardware(
            device=options.device,
            attention=options.attention,
            tower_attention=options.tower_attention,
            graphs=not options.no_graphs,
            flags=options.flags,
        )
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self._checkpoints: Path = options.checkpoints or _roomy() / "sglang-epd-checkpoints"
        self._end = time.monotonic() + 60 * options.minutes
        self.steps: dict[str, Step] = {}
        self._over = False
        self._large = large if options.device == "cuda" else []
        self._making: dict[str, subprocess.Popen[bytes]] = {}
        self._machine = machine()

    def left_s(self) -> float:
        return self._end - time.monotonic()

    @property
    def start_s(self) -> float:
        """That servers have to start."""
        return min(_START_S[self.options.device], max(1.0, self.left_s()))

    def run(self, steps: Mapping[str, Callable[[Bench, Step], None]]) -> int:
        """All steps; returns the process's exit status."""
        _check_package()
        print(f"checkpoints: {self._checkpoints}; {self._machine}", flush=True)
        try:
            self._make_ahead()
            for name, do in steps.items():
                self._step(name, do)
        finally:
            for making in self._making.values():
                making.kill()
            self._print()
        return int(
            any(step.status in ("failed", "broken", "unfinished") for step in self.steps.values())
        )

    def checkpoint(self, name: str) -> Path:
        """The folder of a checkpoint; waits where it is being made.

        Raises:
            RuntimeError: it could not be made.
        """
        making = self._making.pop(name, None)
        if making is not None and making.wait(max(1.0, self.left_s())) != 0:
            raise RuntimeError(f"checkpoint {name} could not be made")
        return serve_checkpoints.make(name, self._checkpoints)

    @contextmanager
    def fleet(self, label: str, arms: list[Any], model: str, flags: str) -> Iterator[Fleet]:
        """The servers of some arms, ended afterwards; the ends of their logs are printed if
        what was done with them fails."""
        fleet = Fleet(arms, self.checkpoint(model), flags, self.out / "logs" / label)
        try:
            fleet.start(self.start_s)
            yield fleet
        except Exception:
            print(fleet.tails(), flush=True)
            raise
        finally:
            fleet.stop()

    def part(self, step: Step, fleet: Fleet, title: str, do: Callable[[], None]) -> None:
        """A part of a step, whose failure does not keep the next one from being measured."""
        print(f"--- {title}: {self.left_s():.0f} s left", flush=True)
        try:
            do()
        except Exception as error:
            traceback.print_exc()
            print(fleet.tails(), flush=True)
            step.wrong.append(f"{title}: {type(error).__name__}: {error}"[:4000])
        self.write()

    def _make_ahead(self) -> None:
        """Begin large checkpoints, in processes beside the first step."""
        script = Path(serve_checkpoints.__file__)
        for name in self._large:
            command = [sys.executable, str(script), name, "--folder", str(self._checkpoints)]
            with (self.out / f"checkpoint-{name}.log").open("wb") as log:
                self._making[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def _step(self, name: str, do: Callable[[Bench, Step], None]) -> None:
        step = self.steps[name] = Step()
        begin = time.monotonic()
        print(f"=== {name}: {self.left_s():.0f} s left", flush=True)
        if self._over or self.left_s() < LEAST_S:
            step.status = "skipped"
        else:
            try:
                do(self, step)
            except Exception as error:
                traceback.print_exc()
                step.status = "broken"
                step.wrong.append(f"{type(error).__name__}: {error}"[:4000])
                # Later steps have other flags, and may start.
                self._over = isinstance(error, NothingStartedError) and len(self.steps) == 1
            else:
                step.status = "failed" if step.wrong else "ok"
        step.seconds = time.monotonic() - begin
        self.write()

    def write(self) -> None:
        tables = {
            f"{name}: {title}": rows
            for name, step in self.steps.items()
            for title, rows in step.tables.items()
        }
        told = {
            "part": "serve",
            "headline": ", ".join(f"{name} {step.status}" for name, step in self.steps.items()),
            "machine": self._machine,
            "tables": tables,
            "figures": {
                "hardware": asdict(self.hardware),
                **{name: _told(step) for name, step in self.steps.items()},
            },
        }
        unfinished = self.out / "serve.json.part"
        unfinished.write_text(json.dumps(told, indent=1) + "\n")
        unfinished.replace(self.out / "serve.json")

    def _print(self) -> None:
        for name, step in self.steps.items():
            for title, rows in step.tables.items():
                print(f"\n{name}: {title}\n{aligned(rows)}")
        print()
        for name, step in self.steps.items():
            print(f"{name}: {step.status} in {step.seconds:.0f} s")
            for wrong in step.wrong:
                print(f"    {wrong.splitlines()[0][:200]}")
        sys.stdout.flush()


def _told(step: Step) -> dict[str, Any]:
    return {name: value for name, value in asdict(step).items() if name != "tables"}


def _roomy() -> Path:
    """Memory, where the large checkpoints fit, else the disk."""
    memory = Path("/dev/shm")
    room = shutil.disk_usage(memory).free if memory.is_dir() else 0
    return memory if room > _LARGE_BYTES else Path(tempfile.gettempdir())


def _check_package() -> None:
    """SGLang finds the package by its entry points: without them every arm would be in-tree.

    Raises:
        SystemExit: it is not installed.
    """
    found = [one.value for one in entry_points(group="sglang.srt.plugins")]
    if not any(value.startswith("sglang_epd") for value in found):
        sys.exit(f"sglang-epd is not installed beside SGLang; its plug-ins are {found}")
