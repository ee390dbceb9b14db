"""A worker process: builds one rank's engine, then obeys the front.

Started by `crew` as `python -m sglang_epd.encoder.workers.worker FD FRONT`, where FD is its
end of the channel and FRONT the front's process id. It knows nothing of SGLang: the
engine comes from a factory that the front names.

It ends with the front, for any reason: the kernel kills it with the front, and
the end of the channel ends it. Signals to the whole process group are the front's to
answer, so that accepted items can be finished.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pkgutil
import socket
import sys
import traceback
from collections.abc import Coroutine
from typing import Any, NoReturn

from sglang_epd.encoder.memory import give_back_in_time, keep_for_good
from sglang_epd.encoder.tower import Prepared, TowerBrokenError
from sglang_epd.encoder.workers.channel import (
    TO_WORKER,
    Discard,
    Done,
    Embedding,
    Failed,
    Forward,
    Laid,
    Ping,
    Pong,
    Prepare,
    ProfileTower,
    Ready,
    Start,
    write_tensor,
)
from sglang_epd.errors import EncodeError, EpdError
from sglang_epd.processes.forker import depend_on, leave
from sglang_epd.processes.packets import Channel, close_all, read_file, receive_now, send_now

logger = logging.getLogger(__name__)


class Worker:
    """Serves one engine over a channel, until the channel ends.

    Args:
        end: the worker's end.
        engine: an `encoder.tower.Tower`.
        rank: of this worker; only rank 0 sends embeddings.
    """

    def __init__(self, end: socket.socket, engine: Any, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self._items: dict[int, Prepared] = {}
        self._preparing: dict[int, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        # Items that embeddings were made of.
        self.finished = 0
        self._over = asyncio.get_running_loop().create_future()
        self._channel = Channel(end, TO_WORKER, self._received, self._over.set_result)

    async def serve(self, ready: Ready) -> None:
        """Say that the engine is ready; return when the front is gone."""
        self._channel.send(ready)
        await self._over

    def _received(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, Prepare):
            # From here on, and not in the task: one that is cancelled may never begin.
            reading = asyncio.get_running_loop().run_in_executor(None, read_file, fds[0])
            preparing = asyncio.create_task(self._prepare(message, reading))
            self._preparing[message.item] = preparing
            preparing.add_done_callback(lambda _: self._preparing.pop(message.item))
            return
        close_all(fds)
        if isinstance(message, Forward):
            self._run(self._forward(message))
        elif isinstance(message, ProfileTower):
            self._run(self._profile(message))
        elif isinstance(message, Discard):
            self._items.pop(message.item, None)
            if message.item in self._preparing:
                self._preparing[message.item].cancel()
        elif isinstance(message, Ping):
            self._channel.send(Pong())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        running = asyncio.create_task(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _profile(self, message: ProfileTower) -> None:
        try:
            await self._engine.profile(message.asked)
        except Exception as error:
            self._channel.send(_failure(message.call, error))
        else:
            self._channel.send(Done(message.call))

    async def _prepare(self, message: Prepare, reading: asyncio.Future[bytes]) -> None:
        try:
            data = await asyncio.shield(reading)
            prepared = await self._engine.prepare(
                message.modality, data, message.deadline, message.options
            )
            group = repr(prepared.group)
            self._channel.send(Laid(message.call, prepared.layout, prepared.patches, group))
        except Exception as error:
            self._channel.send(_failure(message.call, error))
        else:
            self._items[message.item] = prepared

    async def _forward(self, message: Forward) -> None:
        try:
            batch = [self._items[item] for item in message.items]
            embeddings = await self._engine.forward(batch)
            if self._rank == 0:
                for index, embedding in enumerate(embeddings):
                    fd = await asyncio.to_thread(write_tensor, embedding)
                    spec = batch[index].layout.embedding
                    self._channel.send(Embedding(message.call, index, spec), [fd])
        except Exception as error:
            self._channel.send(_failure(message.call, error))
        else:
            for item in message.items:
                self._items.pop(item, None)
            self.finished += len(message.items)
            self._channel.send(Done(message.call))


def _failure(call: int, error: Exception) -> Failed:
    """The error for the front: one of ours as it is, of any other only its kind.

    Of a broken tower: it ends this process when it hears of that.
    """
    if isinstance(error, TowerBrokenError):
        return Failed(0, type(error).__name__, str(error))
    if isinstance(error, EpdError):
        return Failed(call, error.code, error.message, foreseen=True)
    logger.error("Call %d failed", call, exc_info=error)
    message = f"the encoder failed on this item ({type(error).__name__})"
    return Failed(call, EncodeError.__name__, message)


def main() -> NoReturn:
    fd, front = map(int, sys.argv[1:])
    depend_on(front)
    os.set_inheritable(fd, False)
    try:
        asyncio.run(_serve(socket.socket(fileno=fd)))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


async def _serve(end: socket.socket) -> None:
    try:
        start, _ = receive_now(end, TO_WORKER)
    except EOFError:
        return
    assert isinstance(start, Start)
    try:
        engine = pkgutil.resolve_name(start.factory)(start.options)
        await engine.warm_up()
    except Exception as error:
        # First, as the front kills its workers when it hears of it.
        traceback.print_exception(error)
        send_now(end, Failed(0, type(error).__name__, str(error)))
        leave(1)
    keep_for_good()
    modalities = list(engine.modalities)
    ready = Ready(engine.preparers, engine.depth, engine.dtype, modalities, engine.weights_bytes)
    worker = Worker(end, engine, start.rank)
    # An accelerator takes a second batch while one runs.
    memory = give_back_in_time(lambda: worker.finished, on_cpu=engine.depth == 1)
    tidying = asyncio.create_task(memory, name="give memory back")
    await worker.serve(ready)
    tidying.cancel()
    leave(0)


if __name__ == "__main__":
    main()
