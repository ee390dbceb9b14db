"""The machine: accelerators, RDMA devices, ports, proxies, limits, clock."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

from sglang_epd.cli.checks import Finding, fail, note, ok, warn
from sglang_epd.cli.places import accelerators, ask_tool
from sglang_epd.errors import ConfigError

# SGLang's default ports, and the servers that use them.
USUAL_PORTS = {
    30000: "--port",
    8997: "--encoder-bootstrap-port",
    8998: "--disaggregation-bootstrap-port",
}
_FILES = 65_536
_SEES_GPU = "import torch as t; print(t.__version__, t.version.cuda, t.cuda.is_available())"
_TORCH_TIMEOUT_S = 120.0
# As for servers (`platform`): there on a host with the driver, in its containers too.
_DRIVER = Path("/proc/driver/nvidia/version")
# From <sys/timex.h>: the answer of adjtimex while nothing disciplines the clock, and room
# for its structure.
_TIME_ERROR = 5
_TIMEX_BYTES = 512


def devices() -> Iterator[Finding]:
    """Accelerators for models."""
    try:
        found = accelerators()
    except ConfigError as error:
        yield fail("accelerators", str(error), "look at `nvidia-smi`")
        return
    if found:
        yield ok("accelerators", f"{len(found)} NVIDIA GPUs: {', '.join(found)}")
        yield _torch()
        yield from _taken()
        return
    if _DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
        # A container without its tool may have GPUs all the same.
        yield _torch()
    else:
        cores = len(os.sched_getaffinity(0))
        yield note("accelerators", f"no NVIDIA GPU; {cores} cores, if SGLang finds no other device")


def _torch() -> Finding:
    """Whether servers will see the GPUs that the driver's tool has named."""
    try:
        (told,) = ask_tool(sys.executable, "-c", _SEES_GPU, timeout_s=_TORCH_TIMEOUT_S)
    except (ConfigError, ValueError) as error:
        return fail("torch", f"does not say whether it sees a GPU: {error}", "reinstall it")
    version, cuda, sees = told.split()
    if sees == "True":
        return ok("torch", f"{version} sees GPUs")
    found = f"{version} sees no GPU, and servers would run on the CPU"
    if cuda == "None":
        return fail("torch", f"{found}: it is built without CUDA", "install sglang's own torch")
    mend = (
        f"give the container the GPUs; or a driver for CUDA {cuda} (`nvidia-smi` shows up to "
        "which it goes), or another torch"
    )
    return fail("torch", found, mend)


def _taken() -> Iterator[Finding]:
    """GPUs that servers have already, and those that two of them share."""
    servers: dict[str, dict[int, int]] = {}
    try:
        gpus = {uuid: row for *row, uuid in _asked("--query-gpu=index,mig.mode.current,uuid")}
        for uuid, pid, mib in _asked("--query-compute-apps=gpu_uuid,pid,used_memory"):
            of, owner = servers.setdefault(uuid, {}), _server(int(pid))
            # "[N/A]" where the driver does not tell.
            of[owner] = of.get(owner, 0) + (int(mib) if mib.isdecimal() else 0)
    except (ConfigError, ValueError) as error:
        yield note("GPUs", f"nvidia-smi does not tell whose they are: {error}")
        return
    for uuid, of in servers.items():
        # A slice of a card by itself where that is not among the cards.
        index, mig = gpus.get(uuid, (uuid, ""))
        told = ", ".join(f"process {pid} has {mib} MiB" for pid, mib in of.items())
        if mig == "Enabled":
            yield note(f"GPU {index}", f"is cut into slices (MIG): {told}")
        elif len(of) > 1:
            mend = (
                "give each a GPU of its own (CUDA_VISIBLE_DEVICES), or a --mem-fraction-static"
                " that leaves room for the other"
            )
            yield warn(f"GPU {index}", f"is shared: {told}", mend)
        else:
            yield note(f"GPU {index}", f"is taken: {told}", "start others on another GPU")


def _asked(query: str) -> list[list[str]]:
    """The rows of what nvidia-smi answers; no rows where it is not there."""
    tool = shutil.which("nvidia-smi")
    given = [query, "--format=csv,noheader,nounits"]
    return [] if tool is None else [line.split(", ") for line in ask_tool(tool, *given) if line]


def _server(pid: int) -> int:
    """The launcher of the server that a process belongs to; itself where it has none."""
    found = pid
    while pid > 1:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            # Behind the name, which may have blanks.
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
        except OSError:  # of another namespace, or just ended
            break
        # Not a shell whose script starts several.
        if b"sglang.launch_server" in command.split(b"\0"):
            found = pid
        pid = int(stat.split()[1])
    return found


def rdma(
    root: Path = Path("/sys/class/infiniband"), devices: Path = Path("/dev/infiniband")
) -> Iterator[Finding]:
    """Cards that Mooncake may write through."""
    ports = sorted(root.glob("*/ports/*/state")) if root.is_dir() else []
    if not ports:
        yield note("RDMA", "no device: Mooncake and KV transfer go over TCP")
        return
    states = {f"{path.parts[-4]}/{path.parts[-2]}": _read(path) for path in ports}
    active = [name for name, state in states.items() if "ACTIVE" in state]
    if not active:
        told = ", ".join(f"{name} {state}" for name, state in states.items())
        yield warn("RDMA", f"no port is active: {told}", "look at `ibv_devinfo` and the link")
        return
    yield ok("RDMA", f"active: {', '.join(active)}")
    if "MC_FORCE_TCP" in os.environ:
        yield warn("RDMA", "MC_FORCE_TCP is set, so Mooncake uses TCP", "unset it")
    # A container sees the cards of its host, and not their devices.
    if not any(os.access(one, os.R_OK | os.W_OK) for one in devices.glob("uverbs*")):
        yield warn(
            "RDMA",
            f"no {devices}/uverbs* that may be opened, so Mooncake uses TCP",
            "give the container the devices (--device /dev/infiniband)",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        yield warn(
            "locked memory",
            f"at most {soft >> 20} MiB, and RDMA locks what it registers",
            "ulimit -l unlimited (LimitMEMLOCK=infinity, or the container's IPC_LOCK)",
        )


def ports(wanted: Sequence[int] = ()) -> Iterator[Finding]:
    """Servers can listen where they will be told to.

    Args:
        wanted: instead of SGLang's usual ones.
    """
    free = []
    for port in wanted or USUAL_PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                flag = USUAL_PORTS.get(port, "--port")
                found = f"{port}: {error.strerror}"
                mend = f"`ss -ltnp sport = :{port}` says whose it is; {flag} takes another"
                # A server of this user may hold it already, unless this port was asked for.
                yield (fail if wanted else note)("ports", found, mend)
            else:
                free.append(str(port))
    if free:
        yield ok("ports", f"free: {', '.join(free)}")


def proxies() -> Iterator[Finding]:
    """Servers reach themselves and each other without a proxy."""
    through = getproxies()
    if ("http" in through or "all" in through) and not proxy_bypass("127.0.0.1"):
        yield warn(
            "proxy",
            "SGLang's servers would ask themselves whether they are ready through it, and never be",
            "name 127.0.0.1, localhost and the other servers' hosts in NO_PROXY and no_proxy",
        )


def limits() -> Iterator[Finding]:
    """Bounds that a busy server would meet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        most = "" if hard == resource.RLIM_INFINITY or hard >= _FILES else f" (now at most {hard})"
        yield warn(
            "open files",
            f"at most {soft}; each connection and each embedding under way is one",
            f"ulimit -n {_FILES}{most}, or LimitNOFILE of the unit",
        )
    else:
        yield ok("open files", "no narrow limit")


def clock() -> Iterator[Finding]:
    """Something keeps the clock right; stores and caches judge age by it."""
    libc = ctypes.CDLL(None, use_errno=True)
    told = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if told < 0:
        reason = os.strerror(ctypes.get_errno())
        yield note("clock", f"the kernel does not tell whether it is kept right: {reason}")
    elif told == _TIME_ERROR:
        yield warn(
            "clock",
            "nothing keeps it right, as far as the kernel knows; shared stores and caches of"
            " URLs judge age by it",
            "run chrony or systemd-timesyncd (on the host, for a container)",
        )
    else:
        yield ok("clock", "is kept right")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        return error.strerror or "cannot be read"
