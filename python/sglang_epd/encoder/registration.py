"""The encoder's place in the directories of language servers (`--encoder-register-urls`).

A registration is a lease that the encoder renews for as long as it lives, so that a
language server which was restarted knows it again within one heartbeat, and one whose
encoder has died within one lease.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp

from sglang_epd.dispatch.registry import LEASE_S
from sglang_epd.media.resolver import SystemResolver
from sglang_epd.wire.http import open_session

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 2.0
_SHOWN_BYTES = 2048


@dataclass(frozen=True)
class _Outcome:
    """Of one announcement; a change of it is logged.

    Attributes:
        level: of the log.
        text: the outcome.
        refused: no server listens there, so that it costs nothing to try again soon.
    """

    level: int
    text: str
    refused: bool = False


class Registration:
    """One encoder's announcements; use it from one event loop.

    Args:
        url: this encoder's, as language servers reach it.
        registries: where to announce it.
        namespace: this encoder's identity.
        headers: its authentication.
        tls: for registries that are https:// URLs.
        lease_s: how long a language server believes one announcement; a third of it is
            between two of them.
        retry_s: between two tries where no server listens.
    """

    def __init__(
        self,
        url: str,
        registries: Iterable[str],
        *,
        namespace: str,
        headers: dict[str, str],
        tls: ssl.SSLContext,
        lease_s: float = LEASE_S,
        retry_s: float = 1.0,
    ) -> None:
        self._url = url
        self._registries = list(dict.fromkeys(one.rstrip("/") for one in registries))
        self._namespace = namespace
        self._headers = headers
        self._tls = tls
        self._lease_s = lease_s
        self._retry_s = retry_s
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Announce the encoder everywhere, and go on doing so until `leave`."""
        self._session = open_session(self._headers, force_close=True, resolver=SystemResolver())
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._keep(self._session, one), name=f"register at {one}")
            for one in self._registries
        ]

    async def leave(self) -> None:
        """Take the encoder out of all directories; gives up after two seconds."""
        session, self._session = self._session, None
        if session is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with session:
            await asyncio.gather(*(self._leave(session, one) for one in self._registries))

    async def _keep(self, session: aiohttp.ClientSession, registry: str) -> None:
        last: _Outcome | None = None
        while True:
            outcome = await self._announce(session, registry)
            if outcome != last:
                logger.log(outcome.level, "Encoder %s at %s: %s", self._url, registry, outcome.text)
            last = outcome
            pause_s = self._retry_s if outcome.refused else self._lease_s / 3
            # So that a fleet does not come all at once.
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.0))

    async def _announce(self, session: aiohttp.ClientSession, registry: str) -> _Outcome:
        message = {"url": self._url, "namespace": self._namespace, "lease_s": self._lease_s}
        try:
            async with (
                asyncio.timeout(min(_TIMEOUT_S, self._lease_s / 3)),
                session.post(
                    f"{registry}/register_encoder_url",
                    json=message,
                    allow_redirects=False,
                    ssl=self._tls,
                ) as response,
            ):
                status = response.status
                said = (await response.content.read(_SHOWN_BYTES)).decode("utf-8", "replace")
        except TimeoutError:
            return _Outcome(logging.WARNING, "no answer; trying on")
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            return _Outcome(logging.ERROR, f"no TLS connection; trying on: {error}")
        except aiohttp.ClientConnectorError as error:
            unknown = isinstance(error, aiohttp.ClientConnectorDNSError)
            what = "look up its name" if unknown else "connect to it"
            return _Outcome(logging.WARNING, f"cannot {what}; trying on", refused=True)
        except Exception as error:
            return _Outcome(logging.WARNING, f"out of reach ({type(error).__name__}); trying on")
        if status == 200:
            return _Outcome(logging.INFO, "registered")
        # Printable, from any server.
        return _Outcome(logging.ERROR, f"refused with HTTP {status}; trying on: {said!r}")

    async def _leave(self, session: aiohttp.ClientSession, registry: str) -> None:
        try:
            async with (
                asyncio.timeout(_LEAVE_TIMEOUT_S),
                session.delete(
                    f"{registry}/unregister_encoder_url",
                    json={"url": self._url},
                    allow_redirects=False,
                    ssl=self._tls,
                ) as response,
            ):
                status = response.status
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            # Its lease ends there without a word.
            logger.warning("Could not leave %s (%s)", registry, type(error).__name__)
            return
        level = logging.INFO if status == 200 else logging.WARNING
        logger.log(level, "Left %s: HTTP %d", registry, status)
