"""Starts the encoder server; replaces the in-tree `launch_server`.

Leans on SGLang calling `disaggregation.encoder.http_server.launch_server(server_args)`
for `--encoder-only`.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from sglang_epd import emulated, logs, spans
from sglang_epd.cache import EmbeddingCache, UrlMemory
from sglang_epd.checkpoint import processing, served
from sglang_epd.config import PREFIX, Settings, announce
from sglang_epd.encoder import sglang_metrics
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.answering import Answering
from sglang_epd.encoder.app import create_app
from sglang_epd.encoder.memory import give_back_in_time, keep_for_good, keep_large_apart
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.registration import Registration
from sglang_epd.encoder.service import EncoderService
from sglang_epd.encoder.serving import CLOSE_S, DrainingServer, PromptHeads, SeldomMalformed, run
from sglang_epd.encoder.tower import Tower
from sglang_epd.encoder.towers import start_towers, workers
from sglang_epd.encoder.urls import UrlReader
from sglang_epd.errors import ConfigError, ProtocolError
from sglang_epd.machine import decode_mb, share_mb
from sglang_epd.media import FetchingProcess, MediaLimits
from sglang_epd.media.limits import NO_LIMIT
from sglang_epd.namespace import namespace
from sglang_epd.observability.emulation import EmulationMetrics
from sglang_epd.observability.encoder import EncoderMetrics, StoreMetrics
from sglang_epd.spans import OFF, Span
from sglang_epd.store import SharedStore, StoreUrl, open_store, store_url
from sglang_epd.tally import LoopLag
from sglang_epd.transfer import mooncake
from sglang_epd.transfer.sender import Sender
from sglang_epd.transfer.writers import RemoteWriter
from sglang_epd.trust import Trust
from sglang_epd.wire.http import MOST_MB
from sglang_epd.wire.urls import ENCODERS, HTTP, host_port, server_url

if TYPE_CHECKING:
    from sglang_epd.encoder.rpc import RpcServer

logger = logging.getLogger(__name__)

_EXPORT_S = 1.0
_DESCRIPTORS = 65_535
_HOUSEKEEPING_S = 10.0
_CERTIFICATE_S = 30.0
_CACHE_MB = 4096
_BODY_BYTES = 512 << 20


def launch(server_args: Any) -> None:
    """Load the tower, then serve until told to stop."""
    from sglang.srt.runtime_context import (
        get_disagg,
        get_mm,
        get_model,
        get_serving,
        publish,
    )

    started = time.monotonic()
    _allow_descriptors()
    keep_large_apart()
    settings = Settings.from_env()
    _configure_logs(server_args)
    publish(server_args, role="encoder")
    _announce_unread()
    limits = MediaLimits.of(get_mm())
    capacity = cache_bytes(enabled=get_mm().enable_prefix_mm_cache)
    serving = get_serving()
    trust = Trust.of(settings.token, serving)
    # Before the towers, which take long: unusable settings are reported now.
    trust.server_ssl()
    tls = trust.client_ssl()
    front = _Front.of(settings, trust, serving)
    own_url = advertised_url(settings.encoder_advertise_url, front.scheme)
    registries = [
        checked_url("--encoder-register-urls", url) for url in get_disagg().encoder_register_urls
    ]
    metrics = _metrics()
    begin_span = _spans()
    store = _open_store(settings, metrics)

    async def serve() -> None:
        memory_mb = settings.decode_mb or decode_mb(workers=workers())
        options = processing()
        towers, hf_config = await start_towers(
            server_args, limits, memory_mb, _batch(settings).patches
        )
        identity = namespace(
            hf_config, served(whole=settings.fingerprint == "full"), towers[0].dtype, options
        )
        async with AsyncExitStack() as stack:
            fetcher = await stack.enter_async_context(FetchingProcess(limits))
            urls = UrlReader(fetcher, UrlMemory(settings.url_cache_entries), metrics)
            stack.push_async_callback(urls.close)
            engine = mooncake.started(get_disagg().encoder_transfer_backend)
            sender = Sender(
                RemoteWriter(engine) if engine else None,
                share_memory=settings.shared_memory,
            )
            cache = EmbeddingCache(capacity, on_evict=metrics.evicted)
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
                urls=urls,
                sender=sender,
                admission=Admission(settings.encoder_max_items, queue_mb << 20),
                metrics=metrics,
                namespace=identity,
                name=front.name,
            )
            info = {
                "model_path": get_model().model_path,
                "served_model_name": serving.served_model_name,
                "namespace": identity,
                "dtype": towers[0].dtype,
                "modalities": list(towers[0].modalities),
                "encoder_only": True,
                **emulated.mark(),
            }
            answering = Answering(service, metrics, trust, _body_bytes(limits), begin_span)
            rpc_server = front.rpc_server(answering, settings)
            house = _housekeeping(service, sender, towers, metrics, rpc_server)
            config = front.config(create_app(answering, info, towers=towers, lifespan=house), trust)
            if serving.enable_ssl_refresh:
                stack.callback(follow_certificates(config, trust))
            logger.info(
                "Encoder ready in %.1f s at %s: namespace %s, up to %d MiB of media and %d MiB of "
                "embeddings in work",
                time.monotonic() - started,
                front.name,
                identity,
                queue_mb,
                half_mb,
            )
            registration = Registration(
                own_url, registries, namespace=identity, headers=trust.headers(), tls=tls
            )
            await DrainingServer(config, service, registration).serve(front.sockets)

    run(serve())


@dataclass(frozen=True)
class _Front:
    """What listens.

    Attributes:
        scheme: of `--port`.
        name: of the server, its URL.
        http_port: None where nothing listens for HTTP.
    """

    scheme: str
    name: str
    http_port: int | None

    @classmethod
    def of(cls, settings: Settings, trust: Trust, serving: Any) -> _Front:
        """By the flags.

        Raises:
            ConfigError: a setting would have no effect.
        """
        place = host_port(serving.host, serving.port)
        if serving.smg_grpc_mode or serving.grpc_mode:
            return cls("grpc", f"grpc://{place}", settings.encoder_http_port)
        for name in ("encoder_http_port", "encoder_push_networks"):
            if getattr(settings, name):
                raise ConfigError(f"{PREFIX}{name.upper()} is for encoders with --grpc-mode")
        return cls(trust.scheme, f"{trust.scheme}://{place}", serving.port)

    @property
    def sockets(self) -> list[socket.socket] | None:
        """Uvicorn's, beside the port: without one it is there for signals and the lifespan."""
        return [] if self.http_port is None else None

    def config(self, app: FastAPI, trust: Trust) -> uvicorn.Config:
        from sglang.srt.runtime_context import get_observability, get_serving

        return uvicorn.Config(
            app,
            host=get_serving().host,
            port=self.http_port or 0,
            log_level=(get_observability().log_level_http or "warning"),
            access_log=False,
            proxy_headers=False,
            loop="uvloop",
            http=PromptHeads,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=CLOSE_S,
            lifespan="on",
            **tls_options(trust),
        )

    def rpc_server(self, answering: Answering, settings: Settings) -> RpcServer | None:
        if self.scheme != "grpc":
            return None
        from sglang.srt.runtime_context import get_serving

        # gRPC is imported where a flag asks for it.
        from sglang_epd.encoder.rpc import RpcServer
        from sglang_epd.encoder.sglang_rpc import SglangService

        address = host_port(get_serving().host, get_serving().port)
        sglangs = SglangService(answering, settings.encoder_push_networks)
        return RpcServer(answering, address, sglangs)


def _metrics() -> EncoderMetrics:
    metrics = EncoderMetrics()
    metrics.beside = sglang_metrics.create(metrics.registry)
    if (accelerator := emulated.accelerator()) is not None:
        accelerator.listen = EmulationMetrics(metrics.registry).count
    return metrics


def _allow_descriptors() -> None:
    """As many as this user may open, as SGLang's other servers do: hosts that are read from, and
    names that are looked up, may take more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _announce_unread() -> None:
    """Flags of SGLang's that mean nothing here are named at start-up."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    flags = {
        "--pp-size": parallel.pp_size > 1,
        "--attn-dp-size": parallel.attn_dp_size > 1,
    }
    announce("encoder", flags)


def _configure_logs(server_args: Any) -> None:
    from sglang.srt.utils import configure_logger

    configure_logger(server_args, prefix=" encoder")
    logs.install()
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


def _body_bytes(limits: MediaLimits) -> int:
    """The largest encode request that is taken: a language server sends `MOST_MB` of several items,
    or one item."""
    largest = 0 if limits.max_bytes == NO_LIMIT else limits.max_bytes
    return max(_BODY_BYTES, largest + (MOST_MB << 20))


def _open_store(settings: Settings, metrics: EncoderMetrics) -> SharedStore | None:
    typed = _store_url(settings)
    if not typed:
        return None
    observer = StoreMetrics(metrics.registry)
    store = open_store(
        typed,
        token=settings.token,
        timeout_s=settings.store_timeout_ms / 1e3,
        observer=observer.observe,
    )
    observer.watch(store)
    return store


def _store_url(settings: Settings) -> str:
    """The URL of the shared store; empty for none."""
    from sglang.srt.runtime_context import get_mm

    if not get_mm().enable_mm_global_cache:
        return settings.store
    if settings.store:
        logger.info("SGLANG_EPD_STORE names the store, --enable-mm-global-cache does not")
        return settings.store
    url = store_url(os.environ)
    logger.info("--enable-mm-global-cache is SGLANG_EPD_STORE=%s", StoreUrl.parse(url).shown)
    return url


def _on_cpu() -> bool:
    from sglang.srt.runtime_context import get_device

    return str(get_device().device).startswith("cpu")


def _batch(settings: Settings) -> BatchBounds:
    """The size of a forward pass, as typed or the best one. A processor computes a patch of a
    batch that is larger than its caches more slowly; an accelerator needs much to be busy, so
    that small pictures may be many."""
    patches, items = (2048, 32) if _on_cpu() else (16_384, 128)
    return BatchBounds(
        settings.encoder_batch_patches or patches, settings.encoder_batch_items or items
    )


def checked_url(flag: str, typed: str, *schemes: str) -> str:
    """A server's URL that was typed.

    Args:
        schemes: that it may have, in place of HTTP's.

    Raises:
        ConfigError: it is none.
    """
    try:
        return server_url(typed, schemes or HTTP)
    except ProtocolError as error:
        raise ConfigError(f"{flag} {typed!r}: {error}") from None


def advertised_url(typed: str, scheme: str) -> str:
    """How language servers reach this encoder: as typed, or by its host and port.

    Args:
        typed: `SGLANG_EPD_ENCODER_ADVERTISE_URL`; empty where it is not set.
        scheme: `http`, `https` or `grpc`.

    Raises:
        ConfigError: the flag is no server's URL.
    """
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

    if typed:
        return checked_url("SGLANG_EPD_ENCODER_ADVERTISE_URL", typed, *ENCODERS)
    host, port = get_serving().host, get_serving().port
    if not host or host in ("0.0.0.0", "::"):
        host = get_local_ip_auto(host)
    return str(NetworkAddress(host, port).to_url(scheme))


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


def follow_certificates(
    config: uvicorn.Config, trust: Trust, every_s: float = _CERTIFICATE_S
) -> Callable[[], object]:
    """Have new connections get the certificate that is in its files by then.

    Args:
        every_s: between two looks at the files.

    Returns:
        What ends it.
    """
    stamp = trust.stamp()
    config.load()
    assert config.ssl is not None, "SGLang refuses the flag where there is no certificate"
    renewing = _renew(config.ssl, trust, stamp, every_s)
    return asyncio.create_task(renewing, name="certificate").cancel


async def _renew(
    context: ssl.SSLContext, trust: Trust, stamp: tuple[tuple[int, int], ...], every_s: float
) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            if (now := trust.stamp()) != stamp:
                trust.load(context)
                stamp = now
                logger.info("New connections get the new certificate")
        except (OSError, ConfigError) as error:
            logger.warning("The certificate stays as it is: %s", error)


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
    rpc_server: RpcServer | None = None,
) -> Any:
    async def keep_house() -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            try:
                await sender.close_unused()
            except Exception:
                logger.exception("Connections that are not used stay open for now")

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        keep_for_good()
        memory = give_back_in_time(lambda: service.finished, on_cpu=_on_cpu())
        tasks = [asyncio.create_task(keep_house()), asyncio.create_task(memory)]
        metrics.watch_towers(lambda: [tower.alive for tower in towers])
        lag = LoopLag(metrics.loop_lag_seconds.observe)
        lag.start()
        if rpc_server is not None:
            await rpc_server.start()
        try:
            yield
        finally:
            if rpc_server is not None:
                await rpc_server.stop(CLOSE_S)
            lag.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.computations.close()
            if service.computations.store is not None:
                await service.computations.store.close()
            await sender.close()
            await asyncio.gather(*(tower.close() for tower in towers))

    return lifespan
