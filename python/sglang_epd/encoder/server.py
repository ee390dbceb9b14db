"""Starts the encoder server, and drains it on a signal; replaces the in-tree `launch_server`.

Leans on SGLang calling `disaggregation.encoder.http_server.launch_server(server_args)`
for `--encoder-only`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI

from sglang_epd import logs, spans
from sglang_epd.cache import EmbeddingCache, UrlMemory
from sglang_epd.checkpoint import served
from sglang_epd.config import Settings, announce
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.app import create_app
from sglang_epd.encoder.heads import PromptHeads, SeldomMalformed
from sglang_epd.encoder.memory import give_back, keep_for_good, keep_large_apart
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.registration import Registration
from sglang_epd.encoder.service import EncoderService
from sglang_epd.encoder.tower import Tower
from sglang_epd.encoder.towers import start_towers
from sglang_epd.encoder.urls import UrlReader
from sglang_epd.errors import ConfigError, ProtocolError
from sglang_epd.machine import decode_mb, share_mb
from sglang_epd.media import FetchingThread, MediaLimits
from sglang_epd.namespace import namespace
from sglang_epd.observability.encoder import EncoderMetrics, StoreMetrics
from sglang_epd.spans import OFF, Span
from sglang_epd.store import SharedStore, open_store
from sglang_epd.tally import LoopLag
from sglang_epd.transfer import engines
from sglang_epd.transfer.sender import Sender
from sglang_epd.transfer.writers import RemoteWriter
from sglang_epd.trust import Trust
from sglang_epd.wire.urls import server_url

logger = logging.getLogger(__name__)

# Together less than the 30 s that Kubernetes gives a process to stop.
_DRAIN_S = 24
_CLOSE_S = 3
_EXPORT_S = 1.0
_DESCRIPTORS = 65_535
_HOUSEKEEPING_S = 10.0
_TURNS_UNDER_LOAD = 30
_CACHE_MB = 4096


def launch(server_args: Any) -> None:
    """Load the tower, then serve until told to stop."""
    from sglang.srt.runtime_context import (
        get_disagg,
        get_mm,
        get_model,
        get_observability,
        get_serving,
        publish,
    )

    started = time.monotonic()
    _allow_descriptors()
    keep_large_apart()
    settings = Settings.from_env()
    _configure_logs(server_args, settings)
    publish(server_args, role="encoder")
    announce("encoder", {"--extra-metric-labels": get_observability().extra_metric_labels})
    limits = MediaLimits.from_env(
        hosts=get_mm().allowed_media_domains, url_mb=get_mm().media_url_max_file_size_mb
    )
    capacity = cache_bytes(enabled=get_mm().enable_prefix_mm_cache)
    serving = get_serving()
    trust = Trust.of(settings.token, serving)
    # Before the towers, which take long: unusable settings are reported now.
    trust.server_ssl()
    tls = trust.client_ssl()
    own_url = advertised_url(settings.encoder_advertise_url, trust.scheme)
    registries = [registry_url(url) for url in get_disagg().encoder_register_urls]
    name = f"{trust.scheme}://{serving.host}:{serving.port}"
    metrics = EncoderMetrics()
    begin_span = _spans()
    store = _open_store(settings, metrics)

    async def serve() -> None:
        memory_mb = settings.decode_mb or decode_mb()
        towers, hf_config = await start_towers(server_args, limits, memory_mb)
        checkpoint = served(whole=settings.fingerprint == "full")
        identity = namespace(hf_config, checkpoint, towers[0].dtype)
        async with AsyncExitStack() as stack:
            fetcher = await stack.enter_async_context(FetchingThread(limits))
            urls = _open_urls(fetcher, settings.url_cache_entries, metrics, stack)
            sender = _sender(settings)
            cache = EmbeddingCache(capacity, on_evict=lambda _entry: metrics.cache_evictions.inc())
            metrics.watch(cache)
            if store is not None:
                await store.connect()
            half_mb = share_mb() // 2  # of a language server's share
            queue_mb = settings.encoder_queue_mb or half_mb
            service = EncoderService(
                computations=Computations(
                    towers,
                    cache,
                    metrics,
                    batch=_batch(settings),
                    staged_bytes=half_mb << 20,
                    store=store,
                ),
                fetcher=fetcher,
                sender=sender,
                admission=Admission(settings.encoder_max_items, queue_mb << 20),
                metrics=metrics,
                namespace=identity,
                name=name,
                urls=urls,
            )
            info = {
                "model_path": get_model().model_path,
                "served_model_name": serving.served_model_name,
                "namespace": identity,
                "dtype": towers[0].dtype,
                "modalities": list(towers[0].modalities),
                "encoder_only": True,
            }
            app = create_app(
                service,
                metrics,
                info,
                trust=trust,
                max_body_bytes=settings.max_body_mb << 20,
                lifespan=_housekeeping(service, sender, towers, metrics),
                begin_span=begin_span,
            )
            config = uvicorn.Config(
                app,
                host=serving.host,
                port=serving.port,
                log_level=(get_observability().log_level_http or "warning"),
                access_log=False,
                loop="uvloop",
                http=PromptHeads,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_CLOSE_S,
                lifespan="on",
                **tls_options(trust),
            )
            logger.info(
                "Encoder ready in %.1f s at %s: namespace %s, up to %d MiB of media and %d MiB of "
                "embeddings in work",
                time.monotonic() - started,
                name,
                identity,
                queue_mb,
                half_mb,
            )
            registration = Registration(
                own_url, registries, namespace=identity, headers=trust.headers(), tls=tls
            )
            server = _DrainingServer(config, service, registration)
            try:
                await _serve(server, service.computations.broken)
            finally:
                await registration.leave()

    _run(serve())


def _allow_descriptors() -> None:
    """As many as this user may open, as SGLang's other servers do: hosts that are read from, and
    names that are looked up, may take more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _run(serving: Coroutine[Any, Any, None]) -> None:
    """Have a server run until it has stopped.

    Uvicorn raises the signal that stopped it once more when all is done, and asyncio makes an
    exception of a Ctrl-C, which needs no message.
    """
    import uvloop

    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(serving)


async def _serve(server: _DrainingServer, broken: asyncio.Event) -> None:
    ending = asyncio.create_task(_end_if_broken(server, broken))
    try:
        await server.serve()
    finally:
        ending.cancel()
    if server.broken:
        _end(1)


async def _end_if_broken(server: _DrainingServer, broken: asyncio.Event) -> NoReturn:
    """End a process with a broken tower; its supervisor starts a new one."""
    await broken.wait()
    logger.critical("This encoder ends, because its vision tower is broken")
    server.leave_broken()
    await asyncio.sleep(_DRAIN_S + 2 * _CLOSE_S)
    _end(1)  # something hangs that the device has to do with


def _end(status: int) -> NoReturn:
    """At once: a thread that is stuck in a forward pass would be waited for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _configure_logs(server_args: Any, settings: Settings) -> None:
    from sglang.srt.utils import configure_logger

    configure_logger(server_args, prefix=" encoder")
    logs.install(settings.log_format, "encoder")
    logging.getLogger("uvicorn.error").addFilter(SeldomMalformed())


def _spans() -> Callable[[Mapping[str, str]], Span]:
    """The beginning of an encode request's span, by its headers.

    With `--enable-trace` OpenTelemetry is set up as SGLang's servers do.

    Raises:
        RuntimeError: it is not installed.
    """
    from sglang.srt.runtime_context import get_observability

    told = get_observability()
    if not told.enable_trace:
        return lambda _headers: OFF
    from sglang.srt.observability.trace import get_global_trace_level, process_tracing_init

    endpoint, modules = told.otlp_traces_endpoint, told.trace_modules
    process_tracing_init(endpoint, told.otlp_service_name, trace_modules=modules)
    # Later than the provider's own, so before it.
    atexit.register(spans.close, _EXPORT_S)
    if get_global_trace_level() <= 0 or "request" not in modules.split(","):
        return lambda _headers: OFF
    return partial(spans.begin, "epd_encode")


def _open_urls(
    fetcher: FetchingThread, entries: int, metrics: EncoderMetrics, stack: AsyncExitStack
) -> UrlReader | None:
    """The memory of URLs, closed with `stack`; None where it has no entries."""
    if not entries:
        return None
    urls = UrlReader(fetcher, UrlMemory(entries), metrics)
    stack.push_async_callback(urls.close)
    return urls


def _open_store(settings: Settings, metrics: EncoderMetrics) -> SharedStore | None:
    if not settings.store:
        return None
    observer = StoreMetrics(metrics.registry)
    store = open_store(
        settings.store,
        token=settings.token,
        timeout_s=settings.store_timeout_ms / 1e3,
        observer=observer.observe,
    )
    observer.watch(store)
    return store


def _batch(settings: Settings) -> BatchBounds:
    """The size of a forward pass, as typed or the best one. A processor computes a patch of a
    batch that is larger than its caches more slowly; an accelerator needs much to be busy, so
    that small pictures may be many."""
    from sglang.srt.runtime_context import get_device

    on_cpu = get_device().device.startswith("cpu")
    patches, items = (2048, 32) if on_cpu else (16_384, 128)
    return BatchBounds(
        settings.encoder_batch_patches or patches, settings.encoder_batch_items or items
    )


def _sender(settings: Settings) -> Sender:
    from sglang.srt.runtime_context import get_disagg

    engine = engines.started(get_disagg().encoder_transfer_backend)
    return Sender(
        RemoteWriter(engine) if engine else None,
        checksum=settings.checksum,
        share_memory=settings.shared_memory,
    )


class _DrainingServer(uvicorn.Server):
    """Stops on a signal: refuses new requests, finishes accepted ones, and ends.

    Meanwhile it answers /health with 503, so that load balancers look elsewhere.
    After a second signal it waits no longer.

    Attributes:
        broken: it stops because its tower is broken.

    Args:
        registration: begins when the server listens, and ends with the signal.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: EncoderService,
        registration: Registration | None = None,
    ) -> None:
        super().__init__(config)
        self._service = service
        self._registration = registration
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._told = False
        self.broken = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Not earlier: a language server asks a registered encoder at once. Not after a signal.
        if self.started and self._registration is not None and not self._told:
            self._registration.start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._told:
            super().handle_exit(sig, frame)
            return
        self._told = True

        def begin() -> None:
            self._draining = asyncio.create_task(self._drain(sig, frame))

        self._loop.call_soon_threadsafe(begin)

    def leave_broken(self) -> None:
        """Stop as on a signal, with accepted items going elsewhere, and an error for its end."""
        self.broken = True
        self.handle_exit(signal.SIGTERM, None)

    async def _drain(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        logger.info("Draining: %d requests in work", self._service.admission.live)
        try:
            async with asyncio.timeout(_DRAIN_S):
                if self._registration is not None:
                    await self._registration.leave()
                await self._service.wait_idle()
        except TimeoutError:
            logger.warning("%d requests given up", self._service.admission.live)
        if self.broken:
            self.should_exit = True  # a signal would be how it ends
        else:
            super().handle_exit(sig, frame)


def advertised_url(typed: str, scheme: str) -> str:
    """How language servers reach this encoder: as typed, or by its host and port.

    Raises:
        ConfigError: the flag is no server's URL.
    """
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

    if typed:
        return _checked("SGLANG_EPD_ENCODER_ADVERTISE_URL", typed)
    host, port = get_serving().host, get_serving().port
    if not host or host in ("0.0.0.0", "::"):
        host = get_local_ip_auto(host)
    return str(NetworkAddress(host, port).to_url(scheme))


def registry_url(typed: str) -> str:
    """One of `--encoder-register-urls`.

    Raises:
        ConfigError: it is no server's URL.
    """
    return _checked("--encoder-register-urls", typed)


def _checked(flag: str, typed: str) -> str:
    try:
        return server_url(typed)
    except ProtocolError as error:
        raise ConfigError(f"{flag} {typed!r}: {error}") from None


def tls_options(trust: Trust) -> dict[str, Any]:
    """Uvicorn's options for the server's certificate."""
    if not trust.certfile:
        return {}
    return {
        "ssl_certfile": trust.certfile,
        "ssl_keyfile": trust.keyfile,
        "ssl_keyfile_password": trust.keyfile_password or None,
        "ssl_ca_certs": trust.ca_certs or None,
    }


def cache_bytes(*, enabled: bool) -> int:
    """Capacity of the embedding cache: `SGLANG_VLM_CACHE_SIZE_MB` (4096), 0 if not enabled.

    Raises:
        ConfigError: the variable is not a whole number of MiB.
    """
    raw = os.environ.get("SGLANG_VLM_CACHE_SIZE_MB", "").strip() or "0"
    if not enabled:
        return 0
    if not raw.isdecimal():
        raise ConfigError(f"SGLANG_VLM_CACHE_SIZE_MB={raw!r} is not a number of MiB")
    # SGLang writes a 0 there for Qwen3-VL on Hopper GPUs, whatever the flag says.
    return (int(raw) or _CACHE_MB) << 20


def _housekeeping(
    service: EncoderService,
    sender: Sender,
    towers: Sequence[Tower],
    metrics: EncoderMetrics,
) -> Any:
    from sglang.srt.runtime_context import get_device

    on_cpu = get_device().device.startswith("cpu")

    async def keep_house() -> None:
        tidy_at = finished = service.finished
        for turn in itertools.count(1):
            await asyncio.sleep(_HOUSEKEEPING_S)
            await sender.close_unused()
            # On an accelerator the next item would wait for new pages (`keep_freed`), and all
            # that needs memory for this: not between two requests.
            quiet, finished = service.finished == finished, service.finished
            due = on_cpu or quiet or turn % _TURNS_UNDER_LOAD == 0
            if finished != tidy_at and due:
                tidy_at = finished
                await asyncio.to_thread(give_back)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        keep_for_good()
        task = asyncio.create_task(keep_house())
        lag = LoopLag(metrics.loop_lag_seconds.observe)
        lag.start()
        try:
            yield
        finally:
            lag.stop()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await service.computations.close()
            if service.computations.store is not None:
                await service.computations.store.close()
            await sender.close()
            await asyncio.gather(*(tower.close() for tower in towers))

    return lifespan
