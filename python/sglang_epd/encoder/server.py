"""Starts the encoder server; takes the place of the in-tree `launch_server`.

Leans on `disaggregation.encoder.http_server.launch_server(server_args)` being what
SGLang calls for `--encoder-only`, and on that module's registration of the encoder at
`--encoder-register-urls`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from sglang_epd.cache import EmbeddingCache
from sglang_epd.config import Settings
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.app import create_app
from sglang_epd.encoder.computations import Computations, Limits
from sglang_epd.encoder.memory import give_back
from sglang_epd.encoder.scheduling import Bounds
from sglang_epd.encoder.service import EncoderService
from sglang_epd.encoder.towers import ServedTower, start_towers
from sglang_epd.errors import ConfigError
from sglang_epd.media import MediaFetcher, MediaLimits
from sglang_epd.namespace import checkpoint_folder, namespace
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.transfer.mooncake import MooncakeEngine
from sglang_epd.transfer.sender import Sender
from sglang_epd.transfer.writers import RemoteWriter

logger = logging.getLogger(__name__)

# Together less than the 30 s that Kubernetes gives a process to stop.
_DRAIN_S = 25
_CLOSE_S = 3
_HOUSEKEEPING_S = 10.0


def launch(server_args: Any) -> None:
    """Load the tower, then serve until told to stop."""
    from sglang.srt.disaggregation.encoder import http_server as in_tree
    from sglang.srt.runtime_context import (
        get_device,
        get_disagg,
        get_mm,
        get_model,
        get_observability,
        get_serving,
        publish,
    )
    from sglang.srt.utils import configure_logger

    started = time.monotonic()
    settings = Settings.from_env()
    limits = MediaLimits.from_env()
    configure_logger(server_args, prefix=" encoder")
    publish(server_args, role="encoder")
    if get_mm().allowed_media_domains and not limits.allowed_domains:
        limits = replace(limits, allowed_domains=tuple(get_mm().allowed_media_domains))

    capacity = cache_bytes(enabled=get_mm().enable_prefix_mm_cache)
    serving = get_serving()
    name = f"http://{serving.host}:{serving.port}"
    metrics = EncoderMetrics()

    async def serve() -> None:
        towers = await start_towers(server_args, limits)
        for tower in towers:
            await tower.warm_up()
        folder = checkpoint_folder(get_model().model_path, get_model().revision)
        identity = namespace(towers[0].hf_config, folder, towers[0].dtype)
        async with MediaFetcher(limits) as fetcher:
            sender = Sender(
                _remote_writer(), checksum=settings.checksum, share_memory=settings.shared_memory
            )
            cache = EmbeddingCache(capacity, on_evict=lambda _entry: metrics.evictions.inc())
            metrics.watch(cache)
            patches = settings.encoder_batch_patches or _batch_patches(get_device().device)
            batch = Bounds(patches, settings.encoder_batch_items)
            service = EncoderService(
                computations=Computations(towers, cache, metrics, Limits(batch=batch)),
                fetcher=fetcher,
                sender=sender,
                admission=Admission(settings.encoder_max_items, settings.encoder_queue_mb << 20),
                metrics=metrics,
                namespace=identity,
                name=name,
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
                token=settings.token,
                max_body_bytes=settings.max_body_mb << 20,
                lifespan=_housekeeping(service, sender, towers),
            )
            config = uvicorn.Config(
                app,
                host=serving.host,
                port=serving.port,
                log_level=(get_observability().log_level_http or "warning"),
                access_log=False,
                loop="uvloop",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_CLOSE_S,
                lifespan="on",
            )
            logger.info(
                "Encoder ready in %.1f s at %s: namespace %s",
                time.monotonic() - started,
                name,
                identity,
            )
            registers = bool(get_disagg().encoder_register_urls)
            leave = in_tree._unregister_encoder_url_from_bootstrap if registers else None
            if registers:
                in_tree._register_encoder_url_with_bootstrap()
            await _DrainingServer(config, service, leave).serve()

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _batch_patches(device: str) -> int:
    """What a forward pass is best made of. A processor computes a patch of a batch that is
    larger than its caches more slowly; an accelerator needs much to be busy."""
    return 2048 if device.startswith("cpu") else 16_384


def _remote_writer() -> RemoteWriter | None:
    """Writes through Mooncake, where that is the transfer backend."""
    from sglang.srt.distributed.parallel_state import get_mooncake_transfer_engine
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().encoder_transfer_backend != "mooncake":
        return None
    # The in-tree encoder, which towers are loaded by, has started it.
    started = get_mooncake_transfer_engine()
    return RemoteWriter(
        MooncakeEngine(started.hostname, engine=started.engine),
        staged=os.environ.get("MC_FORCE_TCP") != "1",
    )


class _DrainingServer(uvicorn.Server):
    """Told to stop, it refuses what is new, finishes what it has, and stops then.

    Meanwhile it answers /health with 503, so that whoever balances load looks elsewhere.
    Told again, it waits no longer.

    Args:
        leave: called in a thread when it is told to stop: takes it out of directories.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: EncoderService,
        leave: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._service = service
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._told:
            super().handle_exit(sig, frame)
            return
        self._told = True

        def begin() -> None:
            self._draining = asyncio.create_task(self._drain(sig, frame))

        self._loop.call_soon_threadsafe(begin)

    async def _drain(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        logger.info("Draining: %d requests in work", self._service.admission.live)
        try:
            async with asyncio.timeout(_DRAIN_S):
                if self._leave is not None:
                    await asyncio.to_thread(self._leave)
                await self._service.wait_idle()
        except TimeoutError:
            logger.warning("%d requests given up", self._service.admission.live)
        super().handle_exit(sig, frame)


def cache_bytes(*, enabled: bool) -> int:
    """Capacity of the embedding cache: `SGLANG_VLM_CACHE_SIZE_MB` (4096), 0 if not enabled.

    Raises:
        ConfigError: the variable is not a whole number of MiB.
    """
    raw = os.environ.get("SGLANG_VLM_CACHE_SIZE_MB", "").strip() or "4096"
    if not enabled:
        return 0
    if not raw.isdecimal():
        raise ConfigError(f"SGLANG_VLM_CACHE_SIZE_MB={raw!r} is not a number of MiB")
    return int(raw) << 20


def _housekeeping(service: EncoderService, sender: Sender, towers: Sequence[ServedTower]) -> Any:
    async def keep_house() -> None:
        tidy_at = service.finished
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            await sender.close_unused()
            if service.idle and service.finished != tidy_at:
                tidy_at = service.finished
                await asyncio.to_thread(give_back)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(keep_house())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await service.computations.close()
            await sender.close()
            await asyncio.gather(*(tower.close() for tower in towers))

    return lifespan
