"""Asks encoders how they are, and tells the pool.

One task an encoder. None is given up: one that is out of reach is asked on, less often.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from sglang_epd.dispatch.pool import Health, Pool, Report
from sglang_epd.errors import UnavailableError
from sglang_epd.wire import rpc
from sglang_epd.wire.http import read_body

if TYPE_CHECKING:
    from sglang_epd.dispatch.rpc import Rpc

logger = logging.getLogger(__name__)

_MAX_STATUS_BYTES = 256 << 10


@dataclass(frozen=True)
class Pace:
    """When encoders are asked, in seconds.

    Attributes:
        steady: between two questions to an encoder that is well, give or take a fifth.
        doubtful: while it is not known how it is.
        least: between any two questions, however many doubts there are.
        timeout: an answer that has not come by then does not count.
        doubtful_timeout: the same of one that failed the question before.
        most: the pause grows up to this while it is out of reach.
    """

    steady: float = 1.0
    doubtful: float = 0.1
    least: float = 0.05
    timeout: float = 1.0
    doubtful_timeout: float = 0.5
    most: float = 2.0


class _Tower(msgspec.Struct):
    alive: bool = True


class _Status(msgspec.Struct):
    """The fields of `GET /v1/status` that are used."""

    namespace: str
    state: str
    towers: list[_Tower] = []
    uptime_s: float = math.inf
    patches_queued: float = 0.0
    patches_per_s: float = 0.0


class _BadStatusError(Exception):
    """An answer is not the status of an encoder that can work; says why."""


class Prober:
    """Use it from one event loop.

    Args:
        session: how encoders are reached; the caller's.
    """

    def __init__(
        self,
        pool: Pool,
        session: aiohttp.ClientSession,
        tls: ssl.SSLContext,
        pace: Pace = Pace(),
    ) -> None:
        self._pool = pool
        self._session = session
        self._tls = tls
        self._pace = pace
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._doubts: dict[str, asyncio.Event] = {}
        self._rpc: Rpc | None = None
        self._closed = False

    def doubt(self, url: str) -> None:
        """Ask this encoder now; from now on, if it was not asked before."""
        task = self._tasks.get(url)
        if self._closed:
            return
        if task is not None and not task.done():
            self._doubts[url].set()
            return
        self._doubts[url] = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._watch(url), name=f"probe {url}")
        self._tasks[url] = task
        task.add_done_callback(lambda done: self._ended(url, done))

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._rpc is not None:
            await self._rpc.close()

    def _ended(self, url: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(url) is task:
            del self._tasks[url], self._doubts[url]
        if not task.cancelled() and task.exception() is not None:
            logger.error("The probes of %s failed", url, exc_info=task.exception())
            # They begin anew, after a pause: a fault that lasts would be logged without one.
            asyncio.get_running_loop().call_later(self._pace.most, self.doubt, url)

    async def _watch(self, url: str) -> None:
        doubt = self._doubts[url]
        pause_s = self._pace.doubtful
        while self._pool.state(url) is not Health.GONE:
            doubt.clear()
            await self._probe(url)
            pause_s = self._pause_s(self._pool.state(url), pause_s)
            await asyncio.sleep(self._pace.least)
            try:
                async with asyncio.timeout(max(0.0, pause_s - self._pace.least)):
                    await doubt.wait()
            except TimeoutError:
                continue

    def _pause_s(self, state: Health, last_s: float) -> float:
        if state is Health.OPEN:
            return min(last_s * 2, self._pace.most)
        if state in (Health.READY, Health.DRAINING, Health.MISFIT):
            # So that the servers of a fleet do not ask in step.
            return self._pace.steady * random.uniform(0.8, 1.2)
        return self._pace.doubtful

    async def _probe(self, url: str) -> None:
        doubted = self._pool.state(url) is Health.SUSPECT
        limit_s = self._pace.doubtful_timeout if doubted else self._pace.timeout
        try:
            async with asyncio.timeout(limit_s):
                report = await self._ask(url)
        except TimeoutError:
            self._pool.failed(url, f"no answer within {limit_s:g} s")
        except (_BadStatusError, UnavailableError) as error:
            self._pool.failed(url, str(error))
        except aiohttp.ClientConnectorDNSError:
            self._pool.failed(url, "its name has no address")
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            self._pool.failed(url, f"no TLS connection: {error}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._pool.failed(url, f"out of reach ({type(error).__name__})")
        else:
            self._pool.heard(url, report)

    async def _ask(self, url: str) -> Report:
        # Without the token, which is for encode requests.
        if url.startswith(rpc.SCHEME):
            if self._rpc is None:
                from sglang_epd.dispatch.rpc import Rpc

                self._rpc = Rpc()
            return read_status(await self._rpc.status(url))
        async with self._session.get(
            f"{url}/v1/status", allow_redirects=False, ssl=self._tls
        ) as response:
            if response.status != 200:
                raise _BadStatusError(
                    f"answers HTTP {response.status} to /v1/status: is it a sglang-epd encoder?"
                )
            body = await read_body(response, _MAX_STATUS_BYTES)
        if len(body) > _MAX_STATUS_BYTES:
            raise _BadStatusError("its status does not end")
        return read_status(body)


def read_status(body: bytes) -> Report:
    """An encoder's answer.

    Raises:
        _BadStatusError: it is none, or says that no tower works.
    """
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise _BadStatusError("its status cannot be read: is it a sglang-epd encoder?") from None
    figures = status.patches_queued, status.patches_per_s
    sensible = all(math.isfinite(one) and one >= 0 for one in figures)
    sensible = sensible and status.uptime_s >= 0 and len(status.namespace) <= 256
    if status.state not in ("ready", "draining") or not sensible:
        raise _BadStatusError("its status makes no sense: is it a sglang-epd encoder?")
    if status.towers and not any(tower.alive for tower in status.towers):
        raise _BadStatusError("none of its towers works")
    return Report(status.namespace, status.state == "draining", *figures, status.uptime_s)
