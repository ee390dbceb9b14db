"""This package's own work for a picture, by process, without SGLang and without a model.

An encoder's HTTP server, queues and payload channel, with a tower that takes no time; a tokenizer
process's plans, announcements and dispatch; a receiver, and the claims of a scheduler. Sockets,
bodies and memory are those of servers. The rest, which any design has to do, is left out:
decoding and cutting pictures, the tower, and all of SGLang.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import resource
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
from encoder_arms import Child
from host_queues import HOST, TTL_S, Tower
from pictures import jpeg

if TYPE_CHECKING:
    from sglang_epd.language.frontend import Frontend

PROCESSES = ("tokenizer", "encoder", "receiver and scheduler")
# Patches of a picture, as a processor of Qwen3-VL cuts it.
GRIDS = {"448": (28, 28), "1080p": (68, 120)}
_NAMESPACE = "hollow"
_SECRET = bytes(32)
_WARM_S = 0.5


class Own(msgspec.Struct, frozen=True):
    """A closed loop of requests.

    Attributes:
        width: of an embedding's row.
        cpu_ms: processor milliseconds an image, of `PROCESSES`.
    """

    size: str
    pictures: int
    width: int
    clients: int
    rate: float
    cpu_ms: list[float]


def own_work(width: int, size: str, *, rounds: int, seconds: float) -> list[Own]:
    """What a picture costs, alone and with three others in a request.

    Args:
        size: of GRIDS.
    """
    import uvloop

    with tempfile.TemporaryDirectory(prefix="sglang-epd-host-") as folder:
        children = [Child(_encoder, width, size), Child(_scheduler, folder)]
        try:
            measuring = _measure(
                Path(folder), children, width, size, rounds=rounds, seconds=seconds
            )
            return uvloop.run(measuring)
        finally:
            for child in children:
                child.stop()


def own_rows(found: Sequence[Own]) -> Iterator[list[str]]:
    """A table of medians of rounds."""
    yield ["pictures", "row of an embedding", "clients", "images/s", *PROCESSES]
    for cell in dict.fromkeys((one.size, one.pictures, one.width, one.clients) for one in found):
        some = [one for one in found if (one.size, one.pictures, one.width, one.clients) == cell]
        middle = sorted(some, key=lambda one: sum(one.cpu_ms))[len(some) // 2]
        size, pictures, width, clients = cell
        row = [f"{pictures} x {size}", str(width), str(clients), f"{middle.rate:.0f}"]
        yield row + [f"{ms:.2f}" for ms in middle.cpu_ms]


def _spent_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _encoder(pipe: Connection, width: int, size: str) -> None:
    """Sends its URL, then processor seconds when asked."""
    import uvloop

    uvloop.run(_serve(pipe, width, size))


async def _serve(pipe: Connection, width: int, size: str) -> None:
    import uvicorn

    from sglang_epd.cache import EmbeddingCache, UrlMemory
    from sglang_epd.encoder.admission import Admission
    from sglang_epd.encoder.answering import Answering
    from sglang_epd.encoder.app import create_app
    from sglang_epd.encoder.pipeline.computations import Computations
    from sglang_epd.encoder.pipeline.scheduling import BatchBounds
    from sglang_epd.encoder.service import EncoderService
    from sglang_epd.encoder.serving import PromptHeads
    from sglang_epd.encoder.urls import UrlReader
    from sglang_epd.media import MediaLimits
    from sglang_epd.media.fetching import FetchingProcess
    from sglang_epd.observability.encoder import EncoderMetrics
    from sglang_epd.transfer.sender import Sender
    from sglang_epd.trust import Trust

    metrics, cache = EncoderMetrics(), EmbeddingCache(256 << 20)
    service = EncoderService(
        computations=Computations(
            [Tower(width, GRIDS[size])], cache, metrics, batch=BatchBounds(16_384, 32)
        ),
        # It is not begun: media come inline.
        urls=UrlReader(FetchingProcess(MediaLimits()), UrlMemory(1), metrics),
        sender=Sender(),
        admission=Admission(1024, 1 << 30),
        metrics=metrics,
        namespace=_NAMESPACE,
        name="encoder",
    )
    app = create_app(Answering(service, metrics, Trust(), 1 << 30), {})
    listening = socket.create_server((HOST, 0))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=PromptHeads,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            lifespan="off",
        )
    )

    def answer() -> None:
        while not _answered(pipe):
            pass
        server.should_exit = True

    threading.Thread(target=answer, daemon=True).start()
    pipe.send(f"http://{HOST}:{listening.getsockname()[1]}")
    await server.serve([listening])


def _answered(pipe: Connection) -> bool:
    """Tell processor seconds so far, when asked; whether the asker has left."""
    try:
        pipe.recv()
    except EOFError:
        return True
    pipe.send(_spent_s())
    return False


def _scheduler(pipe: Connection, folder: str) -> None:
    """Runs a receiver, and claims the items of all requests that are sent to it."""
    import zmq

    from sglang_epd.language import manifest
    from sglang_epd.language.backend import Leader
    from sglang_epd.spans import OFF
    from sglang_epd.transfer.control import Claims
    from sglang_epd.transfer.receiver import Receiver

    path = Path(folder)
    receiver = Receiver(HOST, HOST, path / "control", budget_bytes=1 << 30)
    receiver.start()
    claims = Claims(path / "control")
    arena = claims.connect(10.0)
    leader = Leader(claims, _SECRET, prefix=True, resume=lambda _trace: OFF)
    context = zmq.Context()
    requests, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    requests.bind(f"ipc://{folder}/requests")
    answers.connect(f"ipc://{folder}/answers")
    poller = zmq.Poller()
    for one in (requests, claims.socket, pipe.fileno()):
        poller.register(one, zmq.POLLIN)
    pipe.send("ready")
    while True:
        ready = dict(poller.poll())
        if pipe.fileno() in ready and _answered(pipe):
            break
        come = []
        while requests.poll(0):
            come.append(requests.recv_pyobj())
        for request in leader.pass_on(come):
            settled = manifest.read_settled(request.encoder_urls, _SECRET)
            assert not settled.code, settled
            arena.receive(settled, 0)  # and drop them
            answers.send_string(request.rid)
    receiver.stop()


async def _measure(
    folder: Path, children: Sequence[Child], width: int, size: str, *, rounds: int, seconds: float
) -> list[Own]:
    found, tokenizer = [], _Tokenizer(folder, size)
    url, _ = [child.get() for child in children]
    async with tokenizer.asking(url):
        for _, pictures, clients in itertools.product(range(rounds), (1, 4), (1, 8)):
            await tokenizer.loop(pictures, clients, time.monotonic() + _WARM_S)
            before = [await asyncio.to_thread(child.ask) for child in children]
            mine, begin = _spent_s(), time.monotonic()
            images, making_s = await tokenizer.loop(pictures, clients, begin + seconds)
            mine, took = _spent_s() - mine - making_s, time.monotonic() - begin
            after = [await asyncio.to_thread(child.ask) for child in children]
            spent = [mine, *(b - a for a, b in zip(before, after, strict=True))]
            each = [1e3 * one / images for one in spent]
            found.append(Own(size, pictures, width, clients, images / took, each))
    return found


class _Tokenizer:
    """What a tokenizer process does with requests, and a socket to the scheduler."""

    def __init__(self, folder: Path, size: str) -> None:
        import zmq
        import zmq.asyncio

        self._folder = folder
        self._size = size
        self._context = zmq.asyncio.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.connect(f"ipc://{folder}/requests")
        self._answers = self._context.socket(zmq.PULL)
        self._answers.bind(f"ipc://{folder}/answers")
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._frontend: Frontend

    @asynccontextmanager
    async def asking(self, url: str) -> AsyncIterator[None]:
        """While an encoder is up at that URL."""
        from sglang_epd.dispatch.client import EncoderClient
        from sglang_epd.dispatch.dispatcher import Dispatcher
        from sglang_epd.dispatch.policies import policy
        from sglang_epd.dispatch.pool import Pool, Report
        from sglang_epd.dispatch.work import Costs, describe
        from sglang_epd.language.frontend import Frontend
        from sglang_epd.language.planner import content_key
        from sglang_epd.transfer.control import Control

        pool, costs = Pool(_NAMESPACE), Costs()
        pool.add(url)
        pool.heard(url, Report(_NAMESPACE))
        control, reading = Control(self._folder / "control"), asyncio.create_task(self._read())
        async with EncoderClient() as client:
            self._frontend = Frontend(
                Dispatcher(
                    client,
                    pool,
                    policy("affinity"),
                    describe=lambda items: describe(items, costs),
                    learn=costs.learn,
                ),
                control,
                TTL_S,
                key=lambda item: content_key(item, _NAMESPACE),
                ask_prefix=True,
            )
            yield
            # Encoders' answers come after the scheduler's.
            while len(self._frontend):  # noqa: ASYNC110  the frontend has no event for it
                await asyncio.sleep(0.01)
        reading.cancel()
        control.close()
        self._context.destroy(linger=0)

    async def loop(self, pictures: int, clients: int, until: float) -> tuple[int, float]:
        """Images that were asked for, and processor seconds that it took to make them."""
        asked, making_s = 0, 0.0

        async def client() -> None:
            nonlocal asked, making_s
            while time.monotonic() < until:
                begin = time.thread_time()
                new = [_new(self._size) for _ in range(pictures)]
                making_s += time.thread_time() - begin
                await self._ask(new)
                asked += pictures

        await asyncio.gather(*(client() for _ in range(clients)))
        return asked, making_s

    async def _ask(self, pictures: Sequence[str]) -> None:
        from sglang_epd.language import manifest
        from sglang_epd.language.planner import plan

        rid = secrets.token_hex(8)
        prompt = SimpleNamespace(image_data=pictures, video_data=None, audio_data=None)
        announced = manifest.write(self._frontend.start(rid, plan(prompt)), _SECRET)
        request = SimpleNamespace(rid=rid, encoder_urls=announced, need_wait_for_mm_inputs=True)
        end = self._ended[rid] = asyncio.get_running_loop().create_future()
        await self._requests.send_pyobj(request)
        await end

    async def _read(self) -> None:
        while True:
            self._ended.pop(await self._answers.recv_string()).set_result(None)


@cache
def _picture(size: str) -> bytes:
    return jpeg(size, 0)


def _new(size: str) -> str:
    """A picture that no cache has, as a data URL."""
    data, note = _picture(size), secrets.token_bytes(16)
    data = data[:2] + b"\xff\xfe" + (2 + len(note)).to_bytes(2) + note + data[2:]
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
