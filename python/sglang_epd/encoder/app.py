"""The encoder's HTTP routes.

POST /v1/encode            encode and deliver (msgpack body, see `wire.http`); a client that leaves
                           cancels its request
GET /health                200 while the server takes work; 503 while it drains, or no tower works
GET /v1/status             queues, rates, cache, JSON
GET /v1/recent             the last items: their requests, outcomes and timings, JSON
DELETE /v1/cache           drop what is kept of embeddings
DELETE /v1/urls            forget which content URLs had
GET /v1/info               model, namespace, modalities, JSON (also /model_info)
GET /metrics               Prometheus
/start_profile, /stop_profile: see `encoder.profiling`

Everything under /v1/encode, /v1/recent, /v1/cache and /v1/urls, and the profiler, wants the
shared token, or SGLang's `--api-key`, when one is set.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sglang_epd.encoder import profiling
from sglang_epd.encoder.answering import Answering
from sglang_epd.encoder.tower import Tower


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

    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @app.get("/v1/status")
    async def status(request: Request) -> JSONResponse:
        return JSONResponse(answering.status(request.headers))

    @guarded.get("/v1/recent")
    async def recent() -> JSONResponse:
        return JSONResponse(service.recent())

    @guarded.delete("/v1/cache")
    async def clear_cache() -> Response:
        return JSONResponse({"dropped": service.computations.cache.clear()})

    @guarded.delete("/v1/urls")
    async def clear_urls() -> Response:
        return JSONResponse({"dropped": service.urls.forget()})

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
