"""The encoder's HTTP routes.

POST /v1/encode            encode and deliver (msgpack body, see `wire.http`)
DELETE /v1/encode/{id}     cancel a live request
GET /health                200 while the server takes work; 503 while it drains, or no tower works
GET /v1/status             queues, rates, cache, JSON; with the token the last items too
GET /v1/cache              the entries of the embedding cache, JSON
DELETE /v1/cache[/{key}]   drop all of them, or one
GET /v1/urls               the URLs whose content is known, JSON
DELETE /v1/urls[/{name}]   forget all of them, or one
GET /v1/info               model, namespace, modalities, JSON (also /model_info)
GET /metrics               Prometheus
/start_profile, /stop_profile: see `encoder.profiling`

Everything under /v1/encode, /v1/cache and /v1/urls, and the profiler, wants the shared token, or
SGLang's `--api-key`, when one is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sglang_epd.encoder import profiling
from sglang_epd.encoder.answering import Answering
from sglang_epd.encoder.service import EncoderService
from sglang_epd.encoder.tower import Tower

# Entries listed by GET /v1/cache and GET /v1/urls.
_MAX_SHOWN = 1000


class _Http:
    """An encode request over HTTP; an `Exchange`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.headers = request.headers

    def pieces(self) -> AsyncIterator[bytes]:
        return self._request.stream()

    async def gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


def create_app(
    answering: Answering,
    info: dict[str, Any],
    *,
    towers: Sequence[Tower] = (),
    lifespan: Any = None,
) -> FastAPI:
    """Build the application.

    Args:
        answering: of encode requests; its service and metrics are shown, by its token.
        info: the answer of /v1/info.
        towers: are profiled.
    """
    service = answering.service
    app = FastAPI(
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # FastAPI's own: spans of its own kind, for every request of any client.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        exception_handlers={401: _unauthorised},
    )

    async def authorise(request: Request) -> None:
        if not answering.authorised(request.headers):
            raise HTTPException(401)

    guarded = APIRouter(dependencies=[Depends(authorise)])

    async def encode(request: Request) -> Response:
        return await answering.answer(_Http(request))

    # Without FastAPI's dependencies and validation, which cost as much as reading the body.
    app.add_route("/v1/encode", encode, methods=["POST"])

    @guarded.delete("/v1/encode/{request_id}")
    async def cancel(request_id: str) -> Response:
        return Response(status_code=204 if service.cancel(request_id) else 404)

    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @app.get("/v1/status")
    async def status(request: Request) -> JSONResponse:
        state = {**service.status(), "tasks": len(asyncio.all_tasks())}
        if answering.authorised(request.headers):
            state["recent"] = service.recent()
        return JSONResponse(state)

    @guarded.get("/v1/cache")
    async def cache() -> Response:
        return JSONResponse(_cache_contents(service))

    @guarded.delete("/v1/cache")
    async def clear_cache() -> Response:
        return JSONResponse({"dropped": service.computations.cache.clear()})

    @guarded.delete("/v1/cache/{key}")
    async def drop_from_cache(key: str) -> Response:
        with contextlib.suppress(ValueError):
            if service.computations.cache.drop(bytes.fromhex(key)):
                return Response(status_code=204)
        return Response(status_code=404)

    @guarded.get("/v1/urls")
    async def urls() -> Response:
        return JSONResponse(_known_urls(service))

    @guarded.delete("/v1/urls")
    async def clear_urls() -> Response:
        return JSONResponse({"dropped": service.urls.memory.clear()})

    @guarded.delete("/v1/urls/{name}")
    async def drop_url(name: str) -> Response:
        with contextlib.suppress(ValueError):
            if service.urls.memory.drop(bytes.fromhex(name)):
                return Response(status_code=204)
        return Response(status_code=404)

    @app.get("/v1/info")
    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> JSONResponse:
        return JSONResponse(info)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(answering.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    guarded.include_router(profiling.routes(towers))
    app.include_router(guarded)
    return app


async def _unauthorised(_request: Request, _error: Exception) -> Response:
    return Response(status_code=401)


def _cache_contents(service: EncoderService) -> dict[str, Any]:
    cache = service.computations.cache
    shown = itertools.islice(cache.entries(), _MAX_SHOWN)
    return {
        **service.computations.status()["cache"],
        "shown": [
            {
                "key": entry.key.hex(),
                "modality": entry.layout.modality,
                "grid": entry.layout.grid,
                "tokens": entry.layout.tokens,
                "bytes": entry.nbytes,
                "pins": entry.pins,
                "uses": entry.uses,
            }
            for entry in shown
        ],
    }


def _known_urls(service: EncoderService) -> dict[str, Any]:
    memory = service.urls.memory
    now = time.monotonic()
    return {
        "entries": len(memory),
        "capacity": memory.capacity,
        "shown": [
            {
                "name": name.hex(),
                "url": known.shown,
                "digest": known.digest.hex(),
                "bytes": known.nbytes,
                "fresh_s": round(max(0.0, known.trail.fresh_until - now), 1),
                "redirects": len(known.trail.steps) - 1,
                "uses": known.uses,
            }
            for name, known in itertools.islice(memory.entries(), _MAX_SHOWN)
        ],
    }
