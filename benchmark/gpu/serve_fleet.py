"""Arms whose servers share one GPU, all up together, and what `nvidia-smi` sees of them."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from comparison.arms import Arm, Place, Running, Server

from sglang_epd.cli.processes import ServerError, ServerProcess, stop_all

_TAIL_LINES = 60
_SAMPLE_MS = 100


@dataclass(frozen=True)
class Hardware:
    """What every server is started with, the same in all arms.

    Attributes:
        device: "cuda" or "cpu".
        attention: `--attention-backend` of language models; SGLang's choice where empty.
        tower_attention: `--mm-attention-backend`; SGLang's choice where empty.
        graphs: whether CUDA graphs of decode are captured, as SGLang does unless told.
        flags: added to every server's command line.
    """

    device: str = "cuda"
    attention: str = "fa3"
    tower_attention: str = ""
    graphs: bool = True
    flags: str = ""

    def of_servers(self, dtype: str, max_tokens: int) -> str:
        """Flags of every server.

        The KV cache is bounded by its tokens. A share of the memory would be a share of
        the memory that happens to be free while several servers start.
        """
        flags = f"--dtype {dtype} --max-total-tokens {max_tokens} --enable-metrics"
        if self.device == "cuda":
            flags += " --mem-fraction-static 0.95 --sampling-backend pytorch"
            flags += " --grammar-backend none --mm-feature-transport cpu"
            flags += f" --attention-backend {self.attention}" if self.attention else ""
            backend = self.tower_attention
            flags += f" --mm-attention-backend {backend}" if backend else ""
            if self.graphs:
                flags += " --cuda-graph-max-bs-decode 8 --disable-prefill-cuda-graph"
            else:
                flags += " --disable-decode-cuda-graph --disable-prefill-cuda-graph"
        return f"{flags} {self.flags}".strip()


_SMALL_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "512"}
_OURS = {
    **_SMALL_CACHE,
    "SGLANG_EPD_MEDIA_ALLOWED_NETWORKS": "127.0.0.0/8",
    "SGLANG_EPD_REQUEST_TIMEOUT_S": "60",
}
# Encoders make pixels where one server on a GPU does.
GPU_PIXELS = {"SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU": "1"}
EARLY_OFF = "early off"
BY_IPC = "one, CUDA IPC"
_CACHE = "--enable-prefix-mm-cache"
_TO_TOKENIZER = "--encoder-transfer-backend zmq_to_tokenizer"


def one_server(*, caches: bool) -> Arm:
    """One server that encodes, prefills and decodes.

    Args:
        caches: whether it keeps prefixes and embeddings; a reference recomputes.
    """
    env = _SMALL_CACHE if caches else {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
    flags = "" if caches else "--disable-radix-cache"
    servers = [Server(role="server", flags=flags)]
    return Arm(name="one", title="one server", family="colocated", servers=servers, env=env)


def as_sglang_sets_it_up() -> Arm:
    """One server as SGLang sets Qwen3-VL up on Hopper GPUs where no flag says otherwise: features
    by CUDA IPC, and no embedding kept."""
    flags, env = "--mm-feature-transport cuda_ipc", {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
    servers = [Server(role="server", flags=flags)]
    return Arm(name=BY_IPC, title=BY_IPC, family="colocated", servers=servers, env=env)


def in_tree(pixels: dict[str, str] | None = None) -> Arm:
    """SGLang's own EPD, which delivers to the scheduler.

    Args:
        pixels: added to the encoder's environment.
    """
    servers = [Server(role="encoder", flags=_CACHE, env=pixels or {}), Server(role="language")]
    env = {"SGLANG_EPD": "off", **_SMALL_CACHE}
    return Arm(name="in-tree", title="in-tree EPD", family="in-tree", servers=servers, env=env)


def ours(
    pixels: dict[str, str] | None = None, *, to_tokenizer: bool = False, early: bool = True
) -> Arm:
    """This package.

    Args:
        pixels: added to the encoder's environment.
        to_tokenizer: with a second language server, to whose tokenizer the same encoder
            delivers; clients ask the other one.
        early: whether a prompt's part is prefilled before its last image is there.
    """
    second = [Server(role="language", flags=_TO_TOKENIZER)] if to_tokenizer else []
    encoder = Server(role="encoder", flags=_CACHE, env=pixels or {})
    servers = [encoder, *second, Server(role="language")]
    name = "sglang-epd" if early else EARLY_OFF
    env = _OURS if early else _OURS | {"SGLANG_EPD_PREFILL_EARLY": "off"}
    return Arm(name=name, title=name, family="sglang-epd", servers=servers, env=env)


class NothingStartedError(ServerError):
    """No arm started: what keeps all of them from it will not be better a minute later."""


@dataclass
class Fleet:
    """The servers of some arms, with one checkpoint.

    Attributes:
        seconds: from the start of all servers until an arm's were ready, by arm.
        failures: of arms that did not start: why, with the end of the server's log.
    """

    arms: list[Arm]
    model: Path
    flags: str
    logs: Path
    running: dict[str, Running] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        place = Place(cores=sorted(os.sched_getaffinity(0)))
        for arm in self.arms:
            running = Running(arm, str(self.model), self.flags, place, self.logs)
            for server in running.servers:
                # Every server has all cores: there is nothing to pin.
                server.command = server.command[server.command.index(sys.executable) :]
            self.running[arm.name] = running

    @property
    def servers(self) -> list[ServerProcess]:
        return [server for running in self.running.values() for server in running.servers]

    @property
    def not_started(self) -> list[str]:
        return [f"{arm} did not start" for arm in self.failures]

    def start(self, timeout_s: float) -> None:
        """Start all servers side by side. An arm that does not start is ended and left out.

        Raises:
            NothingStartedError: no arm started.
        """
        for server in self.servers:
            server.start()
        end = time.monotonic() + timeout_s
        with ThreadPoolExecutor(len(self.running)) as pool:
            started = {
                name: pool.submit(self._wait, running, end)
                for name, running in self.running.items()
            }
        for name, seconds in started.items():
            try:
                self.seconds[name] = seconds.result()
                print(f"{name}: ready in {self.seconds[name]:.1f} s", flush=True)
            except ServerError as error:
                self.failures[name] = str(error)
                print(f"{name} did not start: {error}", flush=True)
                stop_all(self.running.pop(name).servers, grace_s=2.0)
        if not self.running:
            raise NothingStartedError("no arm started")

    @staticmethod
    def _wait(running: Running, end: float) -> float:
        begin = time.monotonic()
        for server in running.servers:
            try:
                server.wait_ready(max(1.0, end - time.monotonic()))
            except ServerError as error:
                told = str(error).partition(" The end of ")[0]
                raise ServerError(f"{told}\n{server.tail(_TAIL_LINES)}") from None
        return time.monotonic() - begin

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def end(self, name: str) -> None:
        """Stop an arm's servers, if it is there."""
        if running := self.running.pop(name, None):
            stop_all(running.servers, grace_s=4.0)

    def keep_metrics(self) -> None:
        """Write what every server says at `/metrics` beside its log."""
        for server in self.servers:
            url = server.ready_url.removesuffix("/health") + "/metrics"
            with urllib.request.urlopen(url, timeout=20) as answer:
                server.log_path.with_suffix(".metrics").write_bytes(answer.read())

    def tails(self) -> str:
        """The end of every server's log."""
        return "\n".join(f"--- {one.log_path}\n{one.tail(_TAIL_LINES)}" for one in self.servers)

    def stop(self) -> None:
        stop_all(self.servers, grace_s=4.0)


class GpuWatch:
    """Samples of `nvidia-smi` while it is entered; none on a machine without it.

    Attributes:
        samples: times on the clock of `time.monotonic`, per cent of the time in which some
            kernel ran, MiB in use.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GpuWatch:
        query = "--query-gpu=utilization.gpu,memory.used"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        command.append(f"--loop-ms={_SAMPLE_MS}")
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            return self
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def busy_percent(self, begin: float, end: float) -> float | None:
        """Mean between two times; None without samples."""
        found = [busy for at, busy, _ in self.samples if begin <= at <= end]
        return statistics.fmean(found) if found else None

    def memory_mib(self) -> float | None:
        """The most that was in use."""
        return max((memory for _, _, memory in self.samples), default=None)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split(",")
            if len(words) == 2 and all(word.strip().isdecimal() for word in words):
                self.samples.append((time.monotonic(), float(words[0]), float(words[1])))
