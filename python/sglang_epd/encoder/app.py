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

Everything under /v1/encode, /v1/cache and /v1/urls wants the shared token, or SGLang's
`--api-key`, when one is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect

from sglang_epd import logs
from sglang_epd.encoder.service import EncoderService, Room
from sglang_epd.errors import EpdError, MediaTooLargeError, OverloadedError, UnavailableError
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.spans import OFF, Span
from sglang_epd.trust import Trust
from sglang_epd.wire.http import (
    CONTENT_TYPE,
    EncodeReply,
    EncodeRequest,
    ErrorReply,
    decode_body,
    encode_body,
)

logger = logging.getLogger(__name__)

# nginx's "client closed request"; the client is gone, but logs and metrics have it.
_CLIENT_CLOSED = 499
# How long nothing may come of a body that is not all here, and how long all of it may take:
# its bytes are in work from the beginning, and an asker that was stopped never says so.
_SILENCE_S = 20.0
_BODY_S = 300.0
# Entries listed by GET /v1/cache and GET /v1/urls.
_MAX_SHOWN = 1000


def create_app(
    service: EncoderService,
    metrics: EncoderMetrics,
    info: dict[str, Any],
    *,
    trust: Trust,
    max_body_bytes: int,
    lifespan: Any = None,
    begin_span: Callable[[Mapping[str, str]], Span] = lambda _headers: OFF,
) -> FastAPI:
    """Build the application.

    Args:
        info: the answer of /v1/info.
        trust: accepted tokens; without one all requests are.
        max_body_bytes: larger encode requests are refused with 413.
        begin_span: begins the span of an encode request, by its headers.
    """
    app = FastAPI(
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # FastAPI's own: spans of its own kind, for every request of any client.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        exception_handlers={401: _unauthorised},
    )

    def authorised(request: Request) -> bool:
        # The bytes as they came.
        return trust.admits(request.headers.get("authorization", "").encode("latin-1"))

    async def authorise(request: Request) -> None:
        if not authorised(request):
            raise HTTPException(401)

    guarded = APIRouter(dependencies=[Depends(authorise)])

    async def encode(request: Request) -> Response:
        with metrics.request_seconds.time():
            if authorised(request):
                with begin_span(request.headers) as span:
                    response = await _serve(request, service, metrics, max_body_bytes, span)
            else:
                response = Response(status_code=401)
        metrics.requests.labels(str(response.status_code)).inc()
        return response

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
        if authorised(request):
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
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.include_router(guarded)
    return app


async def _unauthorised(_request: Request, _error: Exception) -> Response:
    return Response(status_code=401)


async def _serve(
    request: Request,
    service: EncoderService,
    metrics: EncoderMetrics,
    max_body_bytes: int,
    span: Span,
) -> Response:
    try:
        with service.receiving() as room:
            body = await _read_body(request, max_body_bytes, room)
            asked = decode_body(body, EncodeRequest, max_body_bytes)
            del body
            with logs.about(asked.asker or asked.request_id):
                reply = await _until_disconnected(request, service, asked, room, span)
    except EpdError as error:
        logger.warning("Refused an encode request: %s (%s)", error, error.code)
        span.fail(error.code, error.message)
        metrics.refusals.labels(error.code).inc()
        return _refusal(error, service.retry_after_s)
    except ClientDisconnect:  # before all of the body was here
        reply = None
    if reply is None:
        span.fail("RequestCancelledError", "the asker left")
        return Response(status_code=_CLIENT_CLOSED)
    return Response(encode_body(reply), media_type=CONTENT_TYPE)


async def _read_body(request: Request, max_bytes: int, room: Room) -> bytearray:
    announced = request.headers.get("content-length", "")
    expected = int(announced) if announced.isdecimal() else 0
    if expected > max_bytes:
        raise MediaTooLargeError(f"encode request over {max_bytes} bytes")
    room.take(expected)
    body = bytearray()
    clock = asyncio.get_running_loop().time
    until = clock() + _BODY_S
    try:
        async with asyncio.timeout(_SILENCE_S) as patience:
            async for chunk in request.stream():
                taken = max(expected, len(body))
                body += chunk
                if len(body) > max_bytes:
                    raise MediaTooLargeError(f"encode request over {max_bytes} bytes")
                if len(body) > taken:
                    room.take(len(body) - taken)
                patience.reschedule(min(clock() + _SILENCE_S, until))
    except TimeoutError:
        raise UnavailableError("the rest of the encode request did not come") from None
    return body


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


async def _until_disconnected(
    request: Request, service: EncoderService, asked: EncodeRequest, room: Room, span: Span
) -> EncodeReply | None:
    """Run the request; None if the client left, or cancelled it, before it was done."""
    encoding = service.encode(asked, room, span)
    work = asyncio.create_task(encoding, name=f"encode {asked.request_id}")

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not work.cancelled():
            raise
        return None
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


def _refusal(error: EpdError, retry_after_s: float) -> Response:
    headers = {}
    if isinstance(error, OverloadedError | UnavailableError):
        headers["Retry-After"] = f"{retry_after_s:.0f}"
    body = encode_body(ErrorReply(error.code, error.message))
    return Response(body, status_code=error.status, headers=headers, media_type=CONTENT_TYPE)
