"""Which accelerators, or which cores, each server of a topology gets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_epd.errors import ConfigError

_ASK_TIMEOUT_S = 20.0
# With fewer each, servers that take turns are better off with all of them.
_LEAST_CORES = 2
_TENSOR = ("--tp", "--tp-size", "--tensor-parallel-size")
_PIPELINE = ("--pp-size", "--pipeline-parallel-size")
_DATA = ("--dp", "--dp-size", "--data-parallel-size")


@dataclass(frozen=True)
class Place:
    """Devices of one server.

    Attributes:
        shown: for people; empty where it shares all with the others.
        prefix: words before its command.
    """

    shown: str = ""
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()


def devices_of(flags: Sequence[str]) -> int:
    """How many accelerators a server with these SGLang flags runs on.

    Raises:
        ConfigError: a number is none.
    """
    ranks = _number(flags, _TENSOR) * _number(flags, _PIPELINE)
    # With data-parallel attention the replicas are among the tensor-parallel ranks.
    return ranks if "--enable-dp-attention" in flags else ranks * _number(flags, _DATA)


def _number(flags: Sequence[str], names: Sequence[str]) -> int:
    value = "1"
    for index, word in enumerate(flags):
        name, sign, given = word.partition("=")
        if name in names:
            value = given if sign else "".join(flags[index + 1 : index + 2])
            if not value.isdecimal() or not int(value):
                raise ConfigError(f"{name} {value!r} is not a number of ranks")
    return int(value)


def accelerators() -> list[str]:
    """The machine's NVIDIA GPUs, as `CUDA_VISIBLE_DEVICES` names them; none on a CPU.

    Raises:
        ConfigError: the driver's tool is there and does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in map(str.strip, visible.split(",")) if name and name != "-1"]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        found = ask_tool(tool, "--query-gpu=index", "--format=csv,noheader")
        if not all(map(str.isdecimal, found)):
            raise ConfigError(f"nvidia-smi: {' '.join(found)}")
    except ConfigError as error:
        raise ConfigError(f"{error.message}; name the GPUs with --gpus") from None
    return found


def ask_tool(tool: str, *given: str, timeout_s: float = _ASK_TIMEOUT_S) -> list[str]:
    """The lines that a program answers.

    Raises:
        ConfigError: it does not answer.
    """
    try:
        asked = subprocess.run(
            [tool, *given], capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{Path(tool).name}: {error}") from None
    return asked.stdout.splitlines()


class Gpus:
    """Deals GPUs out in order, by names as in `CUDA_VISIBLE_DEVICES`; one that is listed twice
    is shared.

    Numbers are those of nvidia-smi, unless the environment says how CUDA counts, or has chosen
    among the GPUs already: by itself CUDA counts the fastest first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._dealt = 0

    def __call__(self, number: int) -> Place:
        """The next GPUs.

        Raises:
            ConfigError: there are not so many left.
        """
        mine = self._names[self._dealt : self._dealt + number]
        self._dealt += number
        if len(mine) < number or len(set(mine)) < number:
            raise ConfigError(
                f"--gpus {','.join(self._names)} is too short for this topology, which needs"
                f" {self._dealt} or more; list one twice to have two servers share it (and bound"
                " the memory of both by their flags), or ask for fewer servers"
            )
        env = {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        if not {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"} & os.environ.keys():
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        return Place(f"GPU {','.join(mine)}", env)


class Cores:
    """Deals the cores of a machine without accelerators out, an equal share for each server.

    Where there are too few for that, or `taskset` is missing, all servers share all.

    Args:
        env: of each server.
    """

    def __init__(
        self, cores: Sequence[int], servers: int, env: Mapping[str, str] | None = None
    ) -> None:
        self._env = dict(env or {})
        share = len(cores) // servers
        pinned = share >= _LEAST_CORES and shutil.which("taskset") is not None
        self._share = share if pinned else 0
        self._left = list(cores)

    def __call__(self, _number: int) -> Place:
        """The next share, for any number of ranks."""
        if not self._share:
            return Place(env=self._env)
        listed = ",".join(map(str, self._left[: self._share]))
        del self._left[: self._share]
        return Place(f"cores {listed}", self._env, ("taskset", "-c", listed))
