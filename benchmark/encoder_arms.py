"""The ways to encode that `encoder.py` compares, each behind `Arm`.

`Bare` is a loop in a process of its own. `Ours` and `InTree` are encoder servers, each
with the end of a language server that embeddings are delivered to, in a child process.
A run is over when every request is answered and every embedding lies in that process.
"""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import os
import secrets
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import aiohttp
import psutil
import requests
import zmq

from sglang_epd.cli.processes import ServerProcess, free_port
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.wire.http import EncodeItem, EncodeReply, EncodeRequest, ReplyTo

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
TTL_S = 300.0
_DTYPE = "float32"
_BUDGET_BYTES = 1 << 30
# Only the part that lets SGLang run without an accelerator: its own encoder otherwise.
_PLATFORM_ONLY = {"SGLANG_PLUGINS": "sglang_epd_cpu"}

T = TypeVar("T")


@dataclass
class Run:
    """What one closed loop came to."""

    images: int
    seconds: float
    cpu_s: float
    latencies_s: list[float] = field(repr=False)
    stages_ms: list[dict[str, float]] = field(default_factory=list, repr=False)

    @property
    def rate(self) -> float:
        return self.images / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "seconds": round(self.seconds, 4),
            "server_cpu_s": round(self.cpu_s, 3),
            "latencies_ms": [round(one * 1e3, 2) for one in self.latencies_s],
            "stages_mean_ms": mean_stages(self.stages_ms),
        }


def mean_stages(stages_ms: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for one in stages_ms for name in one})
    return {
        name: round(statistics.fmean(one.get(name, 0.0) for one in stages_ms), 2) for name in names
    }


class Child:
    """A process of this program's and a pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        return self.get()

    def get(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self._pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Arm(ABC):
    """One way to encode."""

    name: str

    @abstractmethod
    async def run(self, pictures: Sequence[bytes], clients: int) -> Run:
        """Encode each picture once, `clients` at a time."""

    @abstractmethod
    def cpu_s(self) -> float:
        """Processor time that the encoding process has taken since it started."""

    @abstractmethod
    def stop(self) -> None: ...


# The bare loop


class Bare(Arm):
    """Decode, preprocess and forward one picture after the other: no server, no delivery.

    `overlapped` prepares the next picture in a thread while the tower runs.
    """

    name = "bare"

    def __init__(
        self, model: str, logs: Path, child: Child | None = None, *, overlapped: bool = False
    ) -> None:
        self.child = child or Child(_bare_loop, model, logs / "bare.log")
        self._overlapped = overlapped
        if overlapped:
            self.name = "bare, next picture prepared meanwhile"

    def wait_ready(self) -> None:
        self.child.get()

    async def run(self, pictures: Sequence[bytes], clients: int = 1) -> Run:
        before = self.cpu_s()
        question = ("run", list(pictures), self._overlapped)
        seconds, latencies, stages = await asyncio.to_thread(self.child.ask, *question)
        return Run(len(pictures), seconds, self.cpu_s() - before, latencies, stages)

    def cpu_s(self) -> float:
        return sum(psutil.Process(self.child.process.pid).cpu_times()[:2])

    def stop(self) -> None:
        self.child.stop()


def _bare_loop(pipe: Connection, model: str, log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(_PLATFORM_ONLY)
    try:
        engine = load(model, "--dtype", _DTYPE)
    except Exception as error:
        pipe.send(error)
        raise
    pipe.send("ready")
    with asyncio.Runner() as runner:
        while True:
            try:
                _, pictures, overlapped = pipe.recv()
            except EOFError:
                os._exit(0)
            loop = _overlapped if overlapped else _sequential
            begin = time.monotonic()
            timed = runner.run(loop(engine, pictures))
            pipe.send((time.monotonic() - begin, *timed))


def load(model: str, *flags: str) -> Any:
    """The engine of an encoder server, in this process."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    from sglang_epd.encoder.model.engine import Engine
    from sglang_epd.machine import decode_mb
    from sglang_epd.media import MediaLimits

    load_plugins()
    words = ["--model-path", model, "--encoder-only", "--port", str(free_port()), *flags]
    server_args = prepare_server_args(words)
    server_args.resolve_once()
    publish(server_args, role="encoder")
    return Engine(server_args, MediaLimits(), decode_mb() << 20)


_Timed = tuple[list[float], list[dict[str, float]]]


async def _sequential(engine: Any, pictures: list[bytes]) -> _Timed:
    latencies, stages = [], []
    for data in pictures:
        begin = time.monotonic()
        prepared = await engine.prepare("IMAGE", data)
        between = time.monotonic()
        await engine.forward([prepared])
        end = time.monotonic()
        latencies.append(end - begin)
        stages.append({"preprocess": (between - begin) * 1e3, "forward": (end - between) * 1e3})
    return latencies, stages


async def _overlapped(engine: Any, pictures: list[bytes]) -> _Timed:
    latencies = []
    begin = time.monotonic()
    coming = asyncio.create_task(engine.prepare("IMAGE", pictures[0]))
    for following in [*pictures[1:], None]:
        prepared = await coming
        began, begin = begin, time.monotonic()
        if following is not None:
            coming = asyncio.create_task(engine.prepare("IMAGE", following))
        await engine.forward([prepared])
        latencies.append(time.monotonic() - began)
    return latencies, []


# Servers


class Server(Arm):
    """An encoder server and the process that its embeddings are delivered to."""

    env: ClassVar[dict[str, str]]

    def __init__(
        self,
        model: str,
        logs: Path,
        receiver: Child,
        *,
        cache: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        command += ["--encoder-only", "--dtype", _DTYPE, "--port", str(port)]
        command += ["--log-level", "warning"]
        if cache:
            command += ["--enable-prefix-mm-cache"]
        self._receiver = receiver
        self._delivered = 0
        self.server = ServerProcess(
            self.name,
            command,
            log_path=logs / f"{self.name}-{port}.log",
            ready_url=self.ready_url,
            env={**os.environ, **self.env, **(env or {})},
        )
        self.server.start()

    @property
    def ready_url(self) -> str:
        return f"{self.url}/health"

    def wait_ready(self) -> None:
        """Wait until the server takes requests.

        Raises:
            ServerError: it ended, or was not ready in time.
        """
        self.endpoint: str = self._receiver.get()
        self.server.wait_ready(START_TIMEOUT_S)

    async def run(self, pictures: Sequence[bytes], clients: int) -> Run:
        self._delivered += len(pictures)
        stages: list[dict[str, float]] = []
        async with self.asker(len(pictures)) as ask:

            async def one(data: bytes) -> None:
                stages.append(await ask(data))

            before, begin = self.cpu_s(), time.monotonic()
            latencies = await closed_loop(pictures, clients, one)
            answered = time.monotonic()
            arrived = await asyncio.to_thread(self._receiver.ask, "await", self._delivered)
        seconds = max(answered, arrived) - begin
        return Run(len(pictures), seconds, self.cpu_s() - before, latencies, stages)

    @abstractmethod
    def asker(self, count: int) -> Any:
        """A context whose value encodes and delivers one picture, `count` times."""

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.server.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.tree())

    def stop(self) -> None:
        self.server.stop()
        self._receiver.stop()


async def closed_loop(
    work: Sequence[T], clients: int, do: Callable[[T], Awaitable[None]]
) -> list[float]:
    """Do each piece of work, `clients` at a time; the seconds that each took."""
    coming = iter(work)
    latencies: list[float] = []

    async def client() -> None:
        for one in coming:
            begin = time.monotonic()
            await do(one)
            latencies.append(time.monotonic() - begin)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return latencies


class Ours(Server):
    """This package's encoder server; embeddings land as `landing` says."""

    name = "sglang-epd"
    env: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        model: str,
        logs: Path,
        *,
        landing: str = "shared",
        cache: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        if landing == "socket":
            env = {"SGLANG_EPD_SHARED_MEMORY": "off", **(env or {})}
            self.name = "sglang-epd, socket"
        super().__init__(model, logs, Child(_language_server), cache=cache, env=env)

    def wait_ready(self) -> None:
        super().wait_ready()
        info = requests.get(f"{self.url}/v1/info", timeout=10).json()
        self.namespace: str = info["namespace"]

    def tickets(self, items: Sequence[int]) -> list[str]:
        """Tickets that the language server's end waits for, each for so many items."""
        tickets = [secrets.token_hex(8) for _ in items]
        self._receiver.ask("expect", list(zip(tickets, items, strict=True)))
        return tickets

    def abandon(self, tickets: Sequence[str]) -> None:
        """What the dispatcher does for requests that no encoder served."""
        self._receiver.ask("abandon", [(ticket, 0) for ticket in tickets])

    def request(self, ticket: str, items: Sequence[bytes | str]) -> EncodeRequest:
        """A request for these items; a string is a URL."""
        return EncodeRequest(
            secrets.token_hex(8),
            self.namespace,
            TTL_S,
            ReplyTo(self.endpoint, ticket),
            [
                EncodeItem(
                    number,
                    "IMAGE",
                    f"image {number + 1} of {len(items)}",
                    data=item if isinstance(item, bytes) else None,
                    url=item if isinstance(item, str) else None,
                )
                for number, item in enumerate(items)
            ],
        )

    def asker(self, count: int) -> Any:
        return _OurAsker(self, self.tickets([1] * count))

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics, by name with labels."""
        text = requests.get(f"{self.url}/metrics", timeout=10).text
        samples = (line.rpartition(" ") for line in text.splitlines() if line[:1] != "#")
        return {name: float(value) for name, _, value in samples}


class _OurAsker:
    def __init__(self, arm: Ours, tickets: list[str]) -> None:
        self._arm = arm
        self._tickets = iter(tickets)
        self._client = EncoderClient()

    async def __aenter__(self) -> Callable[[bytes], Awaitable[dict[str, float]]]:
        await self._client.__aenter__()
        return self._ask

    async def __aexit__(self, *reason: Any) -> None:
        await self._client.__aexit__(*reason)

    async def _ask(self, data: bytes) -> dict[str, float]:
        request = self._arm.request(next(self._tickets), [data])
        reply: EncodeReply = await self._client.encode(self._arm.url, request)
        (outcome,) = reply.outcomes
        if outcome.state != "delivered":
            raise RuntimeError(f"{outcome.state}: {outcome.code} {outcome.message}")
        return outcome.ms


def _language_server(pipe: Connection) -> None:
    """Claims the tickets it is told, looks at each embedding where it landed, lets it go."""
    from sglang_epd.transfer.control import Claims
    from sglang_epd.transfer.receiver import Receiver
    from sglang_epd.wire.messages import Expect, Settled

    control = Path(tempfile.mkdtemp(prefix="sglang-epd-bench-")) / "control"
    receiver = Receiver(HOST, HOST, control, budget_bytes=_BUDGET_BYTES)
    receiver.start()
    claims = Claims(control)
    arena = claims.connect(10.0)
    pipe.send(receiver.endpoint)

    def take() -> int:
        landed = 0
        for settled in claims.take():
            assert isinstance(settled, Settled), settled
            for item in settled.items:
                assert item is not None, settled
                embedding = arena.read(item, 0)
                assert embedding.shape == item.layout.embedding.shape
                assert embedding[-1].isfinite().all()
                del embedding
            landed += not settled.code
        return landed

    def on_question(question: tuple[Any, ...]) -> Any:
        kind, tickets = question
        for ticket, items in tickets:
            if kind == "expect":
                claims.claim(ticket, Expect(ticket, items, TTL_S))
            else:
                claims.abandon(ticket)
        return len(tickets)

    _receive(pipe, claims.socket, take, on_question)


def _receive(
    pipe: Connection,
    socket: zmq.Socket,
    take: Callable[[], int],
    on_question: Callable[[tuple[Any, ...]], Any],
) -> None:
    """Take what arrives, and answer the parent; to `await` when that many have arrived."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    arrived, awaited, last = 0, None, 0.0
    while True:
        ready = dict(poller.poll(1000))
        if socket in ready:
            taken = take()
            if taken:
                arrived, last = arrived + taken, time.monotonic()
        if pipe.fileno() in ready:
            try:
                question = pipe.recv()
            except EOFError:
                os._exit(0)
            if question[0] == "await":
                awaited = question[1]
            else:
                pipe.send(on_question(question))
        if awaited is not None and arrived >= awaited:
            awaited = None
            pipe.send(last)


class InTree(Server):
    """SGLang's own encoder server, asked and listened to as its language server does."""

    name = "in-tree"
    env = _PLATFORM_ONLY

    def __init__(self, model: str, logs: Path, *, cache: bool = False) -> None:
        super().__init__(model, logs, Child(_in_tree_language_server), cache=cache)

    def asker(self, count: int) -> Any:
        return _InTreeAsker(self.url, self.endpoint)


class _InTreeAsker:
    def __init__(self, url: str, endpoint: str) -> None:
        self._url = url
        self._endpoint = endpoint

    async def __aenter__(self) -> Callable[[bytes], Awaitable[dict[str, float]]]:
        # One session for all, where its language server opens one a request.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TTL_S),
        )
        return self._ask

    async def __aexit__(self, *_reason: Any) -> None:
        await self._session.close()

    async def _ask(self, data: bytes) -> dict[str, float]:
        request_id = f"{secrets.token_hex(16)}_local_part_0"
        encode = {
            "mm_items": ["data:image/jpeg;base64," + base64.b64encode(data).decode()],
            "num_parts": 1,
            "part_idx": 0,
            "req_id": request_id,
            "modality": "IMAGE",
            "prefill_host": HOST,
            "embedding_port": None,
        }
        where = {
            "req_id": request_id,
            "receive_count": 1,
            "receive_url": self._endpoint,
            "modality": "IMAGE",
        }
        await asyncio.gather(
            self._post("encode", encode), self._post("scheduler_receive_url", where)
        )
        return {}

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        async with self._session.post(f"{self._url}/{path}", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"/{path}: HTTP {response.status} {await response.text()}")
            await response.read()


def _in_tree_language_server(pipe: Connection) -> None:
    from sglang.srt.disaggregation.encoder.receiver import EmbeddingData, WaitingZmqRequest
    from sglang.srt.utils.common import safe_pickle_loads

    with zmq.Context() as context, context.socket(zmq.PULL) as puller:
        port = puller.bind_to_random_port(f"tcp://{HOST}")
        pipe.send(f"{HOST}:{port}")

        def take() -> int:
            landed = 0
            while True:
                try:
                    parts = puller.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return landed
                data: EmbeddingData = safe_pickle_loads(parts[0].buffer)
                assert data.error_msg is None, data.error_msg
                WaitingZmqRequest._extract_embedding_from_buffer(None, data, parts)
                assert data.embedding[-1].isfinite().all()
                landed += 1

        _receive(pipe, puller, take, lambda question: None)
