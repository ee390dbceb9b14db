"""Keeps a language server's pool of encoders true, in a thread of its own.

So that encoders can join and are judged while the tokenizer's event loop is busy. The
thread owns the registration endpoint (`registry`), the probes (`prober`), the names
(`names`) and the ends of leases. It decides nothing: the pool does.

Of a server's tokenizer processes, each of which has a pool, one holds the registration
port. The others ask it every second for the encoders it knows, and the first to see it gone takes
its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import secrets
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp import web

from sglang_epd.dispatch.names import Names, Resolve
from sglang_epd.dispatch.pool import LEASE, Pool
from sglang_epd.dispatch.prober import Pace, Prober
from sglang_epd.dispatch.registry import LEASE_S, Registry, Siblings
from sglang_epd.errors import ConfigError, EpdError, UnavailableError
from sglang_epd.media.resolver import SystemResolver
from sglang_epd.tally import LoopLag
from sglang_epd.trust import Trust
from sglang_epd.wire.http import open_session, read_body
from sglang_epd.wire.urls import host_port

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 15.0
_CLOSE_TIMEOUT_S = 5.0
# Of connections to the port.
_IDLE_S = 20.0
_RESOLVER_THREADS = 8
_MAX_LIST_BYTES = 4 << 20


@dataclass(frozen=True)
class Rhythm:
    """Periods of the tasks beside probing, in seconds.

    Attributes:
        expire: between two looks at the leases.
        names: between two look-ups of each name.
        follow: between two questions to the process that holds the port.
        certificate: between two looks at the certificate's files.
    """

    expire: float = 0.5
    names: float = 5.0
    follow: float = 1.0
    certificate: float = 30.0


class _Known(msgspec.Struct):
    url: str
    owners: list[str]
    lease_s: float | None = None


class _Listing(msgspec.Struct):
    encoders: list[_Known]
    proof: str = ""


class Watcher:
    """One thread, from `start` to `close`.

    Args:
        static_urls: encoders that do not register.
        host, port: where they register; 0 for any free port.
        trust: accepted tokens, and the certificate to listen with.
        secret: that only this server's processes share; empty where there is no other
            tokenizer process that could hold the port.
        resolve: how names are looked up, in place of the system's resolver.
        observe_lag: called with the lag of the thread's event loop (`lag`).
    """

    def __init__(
        self,
        pool: Pool,
        static_urls: Iterable[str],
        host: str,
        port: int,
        trust: Trust,
        *,
        secret: bytes = b"",
        resolve: Resolve | None = None,
        pace: Pace | None = None,
        rhythm: Rhythm = Rhythm(),
        observe_lag: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._lag = LoopLag(observe_lag)
        self._pool = pool
        self._static_urls = list(static_urls)
        self._host = host
        self.port = port
        self._trust = trust
        self._siblings = Siblings(secret) if secret else None
        self._resolve = resolve
        self._pace = pace or Pace()
        self._rhythm = rhythm
        self._thread = threading.Thread(target=self._run, name="encoder watcher", daemon=True)
        self._started: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._runner: web.AppRunner | None = None
        # The port's context, and the stamp of the files that its certificate is from.
        self._tls: ssl.SSLContext | None = None
        self._stamp: tuple[tuple[int, int], ...] = ()

    def start(self) -> None:
        """Begin; returns when encoders can register.

        Raises:
            ConfigError: the port cannot be had, or a URL or certificate cannot be used.
        """
        self._thread.start()
        try:
            self._started.result(_START_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(
                f"{self._what()} did not start within {_START_TIMEOUT_S:g} s"
            ) from None

    def close(self) -> None:
        """End; registrations stay in the pool as they are."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            if self._started.done():
                logger.exception("Encoders are not watched any more")
                return
            self._started.set_exception(error)

    async def _main(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        resolver = SystemResolver(_RESOLVER_THREADS)
        async with contextlib.AsyncExitStack() as stack:
            self._lag.start()
            stack.callback(self._lag.stop)
            stack.push_async_callback(resolver.close)
            session = await stack.enter_async_context(open_session(resolver=resolver))
            stack.push_async_callback(self._stop_listening)
            if not await self._listen():
                try:
                    await self._follow(session)
                except UnavailableError as error:
                    raise ConfigError(f"{self._what()}: the port is in use ({error})") from None
            prober = Prober(self._pool, session, self._trust.client_ssl(), self._pace)
            stack.push_async_callback(prober.close)

            def probe(url: str) -> None:
                # The loop may end in this moment, and then no look-up follows.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(prober.doubt, url)

            self._pool.listen(probe)
            try:
                names = Names(self._pool, self._static_urls, self._resolve or _system(resolver))
            except ValueError as error:
                raise ConfigError(f"--encoder-urls: {error}") from None
            await names.refresh()
            self._started.set_result(None)
            await self._watch(names, session)

    async def _stop_listening(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _watch(self, names: Names, session: aiohttp.ClientSession) -> None:
        async def expire() -> None:
            self._pool.expire()

        async def follow() -> None:
            if self._runner is not None:
                return
            try:
                await self._follow(session)
            except UnavailableError as error:
                if not await self._listen():
                    logger.warning("%s: %s", self._what(), error)

        rhythm = self._rhythm
        tasks = [
            asyncio.create_task(_repeat("leases", rhythm.expire, expire)),
            asyncio.create_task(_repeat("names", rhythm.names, names.refresh)),
            asyncio.create_task(_repeat("registrations", rhythm.follow, follow)),
            asyncio.create_task(_repeat("certificate", rhythm.certificate, self._renew)),
        ]
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # The port, and the process that holds it.

    async def _listen(self) -> bool:
        """Hold the port from now on; False if another process does.

        Raises:
            ConfigError: it cannot be had at all.
        """
        registry = Registry(self._pool, self._trust, self._siblings)
        runner = web.AppRunner(
            registry.app(), access_log=None, shutdown_timeout=1.0, keepalive_timeout=_IDLE_S
        )
        await runner.setup()
        stamp = self._trust.stamp() if self._trust.certfile else ()
        tls = self._trust.server_ssl()
        site = web.TCPSite(runner, self._host, self.port, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"{self._what()}: {error}") from None
        self._runner, self._tls, self._stamp = runner, tls, stamp
        self.port = runner.addresses[0][1]
        logger.info("Encoders register at %s", self._address(self._host))
        return True

    async def _renew(self) -> None:
        """Encoders connect anew for each renewal: they would all be lost with a certificate that
        has expired."""
        if self._tls is not None and (stamp := self._trust.stamp()) != self._stamp:
            self._trust.load(self._tls)
            self._stamp = stamp
            logger.info("The registration port has a new certificate")

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        """Take over the encoders that the process with the port knows.

        Raises:
            UnavailableError: it does not answer, or is not of this server.
        """
        if self._siblings is None:
            raise UnavailableError("by another server")
        nonce = secrets.token_hex(16)
        url = self._address(_reachable(self._host)) + "/list_encoder_urls"
        try:
            async with (
                asyncio.timeout(2.0),
                session.get(
                    url,
                    headers={"Authorization": self._siblings.shows(nonce)},
                    allow_redirects=False,
                    # The proof identifies it; the certificate is for the host's name.
                    ssl=False,
                ) as response,
            ):
                body = await read_body(response, _MAX_LIST_BYTES)
            listing = msgspec.json.decode(body, type=_Listing)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"no answer there: {type(error).__name__}") from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise UnavailableError("by another server") from None
        if not secrets.compare_digest(listing.proof.encode(), self._siblings.proof(nonce).encode()):
            raise UnavailableError("by another server")
        self._mirror(listing)

    def _mirror(self, listing: _Listing) -> None:
        registered = {one.url: one for one in listing.encoders if LEASE in one.owners}
        for url, one in registered.items():
            # Long enough to take the port over and hear of the encoder again.
            lease_s = math.inf if one.lease_s is None else max(one.lease_s, LEASE_S)
            self._pool.register(url, "", lease_s)
        for url in set(self._pool.urls(LEASE)) - set(registered):
            self._pool.remove(url, LEASE)

    def _what(self) -> str:
        return f"--encoder-bootstrap-port {self.port} at {self._host}"

    def _address(self, host: str) -> str:
        return f"{self._trust.scheme}://{host_port(host, self.port)}"


async def _repeat(what: str, pause_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """Run again and again; a run that fails is logged and done again."""
    while True:
        await asyncio.sleep(pause_s)
        try:
            await act()
        except EpdError as error:
            logger.error("Watching encoders, %s: %s", what, error)
        except Exception:
            logger.exception("Watching encoders, %s", what)


def _system(resolver: SystemResolver) -> Resolve:
    async def resolve(host: str, port: int) -> list[str]:
        # `Names` keeps the addresses that it knows, and says so.
        return [str(location[0]) for *_, location in await resolver.ask(host, port)]

    return resolve


def _reachable(host: str) -> str:
    """An address that a server which listens at `host` answers at."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host or socket.gethostname()
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return str(address)
