"""What a comparison has measured: raw, typed, and enough to write its page anew."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from comparison.arms import Arm
from comparison.figures import Goodput, Limits, Run, percentile
from comparison.schedule import Round, Spent
from comparison.workloads import ScaleName, Workload
from sglang_epd.errors import ConfigError

_PACKAGES = ("sglang", "torch", "transformers", "sglang-router", "sglang-epd")
# Log-probabilities of the same answer differ by so much at most (float32).
CLOSE = 1e-3


class Search(msgspec.Struct, frozen=True):
    """What one search for goodput found."""

    arm: str
    workload: str
    round: int
    limits: Limits
    found: Goodput


class Question(msgspec.Struct, frozen=True):
    """One answer that is compared with the baseline's.

    Attributes:
        failure: why there is none; empty where there is.
    """

    arm: str
    workload: str
    round: int
    number: int
    tokens: list[str] = []
    logprobs: list[float] = []
    failure: str = ""

    def gap(self, other: Question) -> float:
        """Largest difference of log-probabilities; infinite where tokens differ or fail."""
        if self.failure or other.failure or self.tokens != other.tokens or not self.tokens:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(mine - theirs) for mine, theirs in pairs)


class Start(msgspec.Struct, frozen=True):
    """One start of an arm.

    Attributes:
        seconds: until all of its servers were ready.
        load: the machine's load average before that: what others do.
    """

    arm: str
    round: int
    seconds: float
    commands: list[str]
    load: float | None = None


class Results(msgspec.Struct):
    """Everything.

    Attributes:
        command: that made it.
        machine: its words by name; `load` is the load average when it began.
        arms: the first is the baseline.
        planned: the rounds that were begun, or are to be.
        done: arm and round of what was run to its end.
        finished: nothing is missing.
        note: what the reader has to know of this run.
        notes: servers that ended, and what was left out.
        spent: what the minutes were spent on.
        read: what a person sees in it, written into the JSON by hand.
    """

    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model: str
    flags: str
    scale: ScaleName
    seed: int
    cores: list[int]
    gpus: list[int]
    client_cores: list[int]
    arms: list[Arm]
    workloads: list[Workload]
    note: str = ""
    minutes: float = 0.0
    planned: list[Round] = []
    done: list[tuple[str, int]] = []
    finished: bool = True
    spent: list[Spent] = []
    starts: list[Start] = []
    runs: list[Run] = []
    searches: list[Search] = []
    questions: list[Question] = []
    notes: list[str] = []
    read: str = ""

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    def arm(self, name: str) -> Arm:
        return next(one for one in self.arms if one.name == name)

    @property
    def rounds(self) -> int:
        """That have begun."""
        begun = [one.round for one in self.starts] + [one.round for one in self.runs]
        return 1 + max(begun, default=0)

    def forget_unfinished(self) -> None:
        """Drop what was measured of arms that were not run to the end of a round."""
        done = set(self.done)
        for name in ("starts", "runs", "searches", "questions", "spent"):
            kept = [one for one in getattr(self, name) if (one.arm, one.round) in done]
            setattr(self, name, kept)

    def limits(self, workload: Workload, number: int) -> Limits | None:
        """What has to hold for goodput in a round: multiples of what the baseline needed in
        it, one request at a time. None where it failed, or goodput is not asked for.
        """
        looked_for = workload.scale(self.scale).goodput
        key = (self.baseline.name, workload.name, number, 0, False)
        for run in self.runs:
            if key == (run.arm, run.workload, run.round, run.rate, run.probe) and looked_for:
                if run.failed:
                    return None
                ttft_ms = looked_for.ttft * percentile(run.ttfts_ms(), 0.5)
                return Limits(ttft_ms, looked_for.tpot * percentile(run.tpots_ms(), 0.5))
        return None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        partial = path.with_suffix(".partial")
        partial.write_bytes(data + b"\n")
        partial.replace(path)


def load(path: Path) -> Results:
    """What `Results.save` wrote.

    Raises:
        ConfigError: it is something else.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path.name}: {error}") from None
    if not results.arms or not results.workloads:
        raise ConfigError(f"{path.name}: no arms or no workloads")
    return results


def machine() -> dict[str, Any]:
    """Of this one, what figures depend on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    words: dict[str, Any] = {
        "cores": os.cpu_count(),
        "processor": model,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        cards = subprocess.run(query, check=True, capture_output=True, text=True, timeout=30)
        words["gpus"] = cards.stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        pass  # a machine without them
    return words


def versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}
