"""The front's side of worker processes: a tower whose model lives in children.

A `WorkerTower` is T processes, the ranks of one model. Every rank gets the same messages, in
the same order: each prepares every item itself, because a prepared item is SGLang's own
objects, which do not cross processes, and rank 0 answers for all. Ranks meet inside a
batch's collectives, so each runs one batch after the other, and every event that may have left
them out of step there (one failed, one is stuck, one died) ends all of them: a new set is
started in their place. Items prepared in the old one are lost, and their calls raise
`TowerLostError`. A batch that was launched behind the one in which a rank failed is among them:
the other ranks wait in it for collectives that the failed rank has left out.

Owns the processes and the calls in flight in them. Knows nothing of SGLang: the caller
names the function that builds a child.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_epd.encoder.tower import Prepared, ProfileRequest, Tell, TowerLostError
from sglang_epd.encoder.workers.channel import (
    TO_FRONT,
    Discard,
    Done,
    Embedding,
    Failed,
    Forward,
    Laid,
    Ping,
    Prepare,
    ProfileTower,
    Ready,
    Start,
    read_tensor,
)
from sglang_epd.errors import EncodeError, EpdError, from_code
from sglang_epd.processes.packets import Channel, close_all, pair, write_file

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Media up to this are written on the event loop itself.
_SMALL_BYTES = 256 << 10
# The bound of a start, in times of the one before, and at least so many seconds.
_STARTS, _LEAST_START_S = 4.0, 120.0
# The kernel ends a process within that, unless it waits for a device or a file system.
_KILLED_S = 10.0


class TowerStartError(RuntimeError):
    """A tower's workers did not come up; the message says which, and why."""


@dataclass(frozen=True)
class Times:
    """Bounds on a tower's processes, in seconds.

    Attributes:
        start_s: for loading the model and warming it up; when it is started again, four times
            what it took, and two minutes at least, twice as much each time that it takes longer.
        ping_s: how often a worker is asked whether it is there.
        silence_s: a worker that says nothing for so long while it is asked is lost. It
            answers beside its forward passes, so this is not a bound on those.
        ranks_s: how long ranks may take to fail after one of them has.
        stop_s: from the end of the channel to SIGKILL.
        restart_s, restart_most_s: pause before a lost tower is started again; it doubles
            with each failure, up to the second.
    """

    start_s: float = 1800.0
    ping_s: float = 2.0
    silence_s: float = 30.0
    ranks_s: float = 10.0
    stop_s: float = 5.0
    restart_s: float = 1.0
    restart_most_s: float = 60.0


@dataclass(frozen=True)
class Rank:
    """How one worker is started: plain data for the factory, and the whole environment."""

    options: dict[str, Any]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class WorkerTower:
    """A tower in worker processes (`encoder.tower.Tower`).

    Use it from one event loop, whose thread must live as long as the workers: the kernel
    kills them when the thread that started them ends.

    Args:
        name: how messages call it.
        factory: `module:function`, called in each worker with its rank's options;
            returns a Tower that also has `warm_up()`.
        ranks: one a worker; called before each start, so that a restart may take another port.
    """

    def __init__(
        self,
        name: str,
        factory: str,
        ranks: Callable[[], Sequence[Rank]],
        *,
        times: Times | None = None,
    ) -> None:
        self.name = name
        self.restarts = 0
        # Known when the workers are ready.
        self.depth = 1
        self.dtype = ""
        self.modalities: tuple[str, ...] = ()
        self.weights_bytes = 0
        self.preparers = 0
        self._factory = factory
        self._ranks = ranks
        self._times = times or Times()
        self._start_s = self._times.start_s
        self._crew: _Crew | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether it takes calls now; False from a loss until it is up again."""
        return self._crew is not None and not self._crew.lost.done()

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker processes, by rank; empty while there are none."""
        return () if self._crew is None else self._crew.pids

    async def start(self) -> None:
        """Start the workers; return when all are loaded and warm.

        Raises:
            TowerStartError: one of them failed, died, or took longer than `start_s`.
        """
        assert self._keeper is None, "started already"
        await self._bring_up()
        self._keeper = asyncio.create_task(self._keep_up())

    async def close(self) -> None:
        """End the workers; calls under way raise TowerLostError.

        Returns when the processes are gone. Doing so again does nothing.
        """
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._crew is not None:
            await self._crew.close(self._times.stop_s)
            self._crew = None

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Mapping[str, Any] | None = None,
    ) -> Prepared:
        crew = self._living()
        fd = write_file(data) if len(data) <= _SMALL_BYTES else await _write_in_thread(data)
        try:
            return await crew.prepare(modality, fd, deadline, dict(options or {}))
        finally:
            os.close(fd)

    async def forward(
        self, batch: Sequence[Prepared], tell: Tell | None = None
    ) -> list[torch.Tensor]:
        crew = self._living()
        handles = [prepared.content for prepared in batch]
        if any(handle.crew is not crew for handle in handles):
            raise TowerLostError(f"{self.name} was started again since it prepared these")
        return await crew.forward([handle.item for handle in handles])

    def discard(self, prepared: Prepared) -> None:
        handle = prepared.content
        assert isinstance(handle, _Handle)
        handle.crew.discard(handle.item)

    async def profile(self, asked: ProfileRequest | None) -> None:
        await self._living().profile(asked)

    def _living(self) -> _Crew:
        if self._crew is None:
            raise TowerLostError(f"{self.name} is not running")
        return self._crew

    async def _bring_up(self) -> None:
        crew = _Crew(self.name, self._times)
        began = time.monotonic()
        try:
            ready = await crew.start(self._ranks(), self._factory, self._start_s)
        except BaseException as error:
            if time.monotonic() - began >= self._start_s:
                # It may take longer than it did: of a cold cache, say.
                self._start_s = min(2 * self._start_s, self._times.start_s)
            statuses = await crew.close(0.0)
            if isinstance(error, TowerLostError):
                raise TowerStartError(f"{self.name}: {error} (exit {statuses})") from None
            raise
        took = time.monotonic() - began
        self._start_s = min(self._times.start_s, max(_LEAST_START_S, _STARTS * took))
        self.dtype, self.modalities = ready.dtype, tuple(ready.modalities)
        self.weights_bytes = ready.weights_bytes
        self.preparers, self.depth = ready.preparers, ready.depth
        self._crew = crew

    async def _keep_up(self) -> None:
        pause = self._times.restart_s
        while True:
            assert self._crew is not None
            began = time.monotonic()
            reason = await self._crew.watch()
            logger.error("%s is lost: %s", self.name, reason)
            statuses = await self._crew.close(0.0)
            logger.error("%s: its workers ended with %s", self.name, statuses)
            if time.monotonic() - began > self._times.restart_most_s:
                pause = self._times.restart_s
            self._crew = None
            while self._crew is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._times.restart_most_s)
                try:
                    await self._bring_up()
                except Exception as error:
                    expected = isinstance(error, TowerStartError)
                    logger.error(
                        "%s cannot be started again: %s", self.name, error, exc_info=not expected
                    )
            self.restarts += 1
            logger.info("%s is up again: pids %s", self.name, self.pids)


@dataclass(frozen=True)
class _Handle:
    """A prepared item in the front."""

    crew: _Crew
    item: int


@dataclass
class _Call:
    """Something asked of all ranks: done when each has answered, or the crew is lost."""

    done: asyncio.Future[None]
    embeddings: list[torch.Tensor | None] = field(default_factory=list)
    answers: dict[int, Laid | Done | Failed] = field(default_factory=dict)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def failures(self) -> list[Failed]:
        """In the order of ranks."""
        return [answer for _, answer in sorted(self.answers.items()) if isinstance(answer, Failed)]

    def end(self, error: Exception | None = None) -> None:
        for timer in self.timers:
            timer.cancel()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class _Crew:
    """The processes of a tower, from their start to their loss.

    Attributes:
        lost: done, with the reason, when they are of no use any more.
    """

    def __init__(self, name: str, times: Times) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._times = times
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._ready: dict[int, Ready] = {}
        self._up: asyncio.Future[None] = self._loop.create_future()
        # Pings since each rank last said anything.
        self._unheard: Counter[int] = Counter()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    async def start(self, ranks: Sequence[Rank], factory: str, limit_s: float) -> Ready:
        """Start the processes; rank 0's description, when all ranks are ready.

        Args:
            limit_s: that they may take.

        Raises:
            OSError: a process could not be started.
            TowerLostError: one is not ready and will not be.
        """
        for number, rank in enumerate(ranks):
            self._spawn(number, rank, factory)
        signs: list[asyncio.Future[Any]] = [self._up, self.lost]
        await asyncio.wait(signs, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._up.done():
            self.lose(f"not ready after {limit_s:.0f} s")
        if self.lost.done():
            raise TowerLostError(self.lost.result())
        held = sum(ready.weights_bytes for ready in self._ready.values())
        return msgspec.structs.replace(self._ready[0], weights_bytes=held)

    async def watch(self) -> str:
        """Ask the workers whether they are there, until they are lost; the reason."""
        allowed = max(1, round(self._times.silence_s / self._times.ping_s))
        while True:
            # Counted in pings, not by a clock: after a pause of this process the answers
            # of the workers are waiting to be read.
            await asyncio.wait([self.lost], timeout=self._times.ping_s)
            if self.lost.done():
                return self.lost.result()
            for rank, channel in enumerate(self._channels):
                if self._unheard[rank] >= allowed:
                    self.lose(f"rank {rank} has not answered for {self._times.silence_s:g} s")
                    break
                self._unheard[rank] += 1
                if not channel.unsent:
                    channel.send(Ping())

    async def prepare(
        self, modality: str, fd: int, deadline: float, options: dict[str, Any]
    ) -> Prepared:
        """Prepare the media in a file, which stays the caller's, on all ranks."""
        number = next(self._numbers)
        call = _Call(self._loop.create_future())
        try:
            asked = Prepare(number, number, modality, deadline, options)
            await self._ask(call, number, asked, fd)
            if call.failures:
                raise from_code(call.failures[0].code, call.failures[0].message)
            laid = [answer for answer in call.answers.values() if isinstance(answer, Laid)]
            if any(other != laid[0] for other in laid):
                raise EncodeError("the tower's ranks prepared this item differently")
        except BaseException:
            self.discard(number)
            raise
        return Prepared(laid[0].layout, laid[0].patches, laid[0].group, _Handle(self, number))

    async def forward(self, items: list[int]) -> list[torch.Tensor]:
        """Run items on all ranks, behind the batches that are under way."""
        number = next(self._numbers)
        call = _Call(self._loop.create_future(), [None] * len(items))
        await self._ask(call, number, Forward(number, items))
        failures = call.failures
        if failures:
            alike = len(failures) == len(self._channels) and all(f.foreseen for f in failures)
            if len(self._channels) > 1 and not alike:
                # A wrong embedding would be worse than a restart.
                self.lose(f"its ranks may be out of step: {failures[0].message}")
            raise from_code(failures[0].code, failures[0].message)
        embeddings = [made for made in call.embeddings if made is not None]
        if len(embeddings) != len(items):
            raise EncodeError(f"{len(embeddings)} embeddings came for {len(items)} items")
        return embeddings

    async def profile(self, asked: ProfileRequest | None) -> None:
        """Begin to profile on all ranks, or end it."""
        number = next(self._numbers)
        call = _Call(self._loop.create_future())
        await self._ask(call, number, ProfileTower(number, asked))
        if call.failures:
            raise from_code(call.failures[0].code, call.failures[0].message)

    def discard(self, item: int) -> None:
        """Forget an item; one that is not there is none."""
        for channel in self._channels:
            channel.send(Discard(item))

    def lose(self, reason: str) -> None:
        """Give the crew up: kill its processes, and fail its calls."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        for process in self._processes:
            process.kill()
        self._end_calls(reason)

    async def close(self, grace_s: float) -> list[int]:
        """End the processes, by force after `grace_s`; their exit statuses."""
        for channel in self._channels:
            channel.close()
        if not self.lost.done():
            self.lost.set_result("closed")
            self._end_calls("closed")
        return await asyncio.gather(
            *(asyncio.to_thread(_end, process, grace_s) for process in self._processes)
        )

    def _end_calls(self, reason: str) -> None:
        for call in list(self._calls.values()):
            call.end(TowerLostError(f"{self._name} is lost: {reason}"))

    def _spawn(self, rank: int, start: Rank, factory: str) -> None:
        front, worker = pair()
        with worker:
            command = [sys.executable, "-P", "-m", "sglang_epd.encoder.workers.worker"]
            try:
                process = subprocess.Popen(
                    [*command, str(worker.fileno()), str(os.getpid())],
                    pass_fds=(worker.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=dict(start.env),
                )
            except BaseException:
                front.close()
                raise
        self._processes.append(process)
        channel = Channel(
            front,
            TO_FRONT,
            lambda message, fds: self._received(rank, message, fds),
            lambda reason: self.lose(f"rank {rank} (pid {process.pid}): {reason}"),
        )
        self._channels.append(channel)
        channel.send(Start(factory, start.options, rank))

    async def _ask(self, call: _Call, number: int, message: Any, fd: int | None = None) -> None:
        """Say `message` to all ranks and wait for their answers."""
        if self.lost.done():
            raise TowerLostError(f"{self._name} is lost: {self.lost.result()}")
        self._calls[number] = call
        try:
            # All at once, so that every rank hears the same in the same order.
            for channel in self._channels:
                channel.send(message, () if fd is None else (os.dup(fd),))
            await call.done
        finally:
            call.end()
            del self._calls[number]

    def _received(self, rank: int, message: Any, fds: list[int]) -> None:
        self._unheard[rank] = 0
        if isinstance(message, Embedding):
            self._take(message, fds)
            return
        close_all(fds)
        if isinstance(message, Ready):
            self._ready[rank] = message
            if len(self._ready) == len(self._channels):
                self._up.set_result(None)
        elif isinstance(message, Failed) and message.call == 0:
            self.lose(f"rank {rank}: {message.code}: {message.message}")
        elif isinstance(message, Laid | Done | Failed):
            self._answered(rank, message)

    def _take(self, message: Embedding, fds: list[int]) -> None:
        call = self._calls.get(message.call)
        if call is None or message.index >= len(call.embeddings):
            close_all(fds)
            return
        try:
            call.embeddings[message.index] = read_tensor(fds[0], message.spec)
        except (OSError, RuntimeError, EpdError) as error:
            self.lose(f"an embedding cannot be read: {error}")

    def _answered(self, rank: int, answer: Laid | Done | Failed) -> None:
        call = self._calls.get(answer.call)
        if call is None:
            return
        call.answers[rank] = answer
        if len(call.answers) == len(self._channels):
            call.end()
        elif isinstance(answer, Failed) and call.embeddings and len(call.failures) == 1:
            # The others may be waiting for it inside a collective, for good.
            late = f"rank {rank} failed, and others did not within {self._times.ranks_s:g} s"
            call.timers.append(self._loop.call_later(self._times.ranks_s, self.lose, late))


async def _write_in_thread(data: bytes) -> int:
    """As `write_file`, which a cancelled call leaves nothing of."""
    writing = asyncio.get_running_loop().run_in_executor(None, write_file, data)
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(_close_written)
        raise


def _close_written(writing: asyncio.Future[int]) -> None:
    if not writing.cancelled() and not writing.exception():
        os.close(writing.result())


def _end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.wait(_KILLED_S)
    except subprocess.TimeoutExpired:
        logger.error("pid %d outlives SIGKILL: its device, or a file system, hangs", process.pid)
        return -signal.SIGKILL
