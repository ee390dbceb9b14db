"""Where encoders announce themselves: SGLang's routes, with leases and a token.

POST /register_encoder_url      {"url", "namespace"?, "lease_s"?}: join, or renew the lease
DELETE /unregister_encoder_url  {"url"}: leave
GET /list_encoder_urls          {"encoder_urls": [...], "encoders": [...]}
GET /health                     200

400  the message cannot be understood
401  the token is missing or wrong
409  the encoder has another identity than this server needs
413  the message is over 64 KiB
503  too many encoders are registered

A registration without `lease_s` is SGLang's own form, sent once: it holds until its
encoder leaves, or cannot be reached for about an hour. All others end with their lease.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import time

import msgspec
from aiohttp import web

from sglang_epd.dispatch.pool import LEASE, Pool
from sglang_epd.errors import NamespaceError, ProtocolError
from sglang_epd.trust import Trust
from sglang_epd.wire.urls import ENCODERS, server_url

logger = logging.getLogger(__name__)

LEASE_S = 15.0
_LEASES_S = 2.0, 300.0
_MAX_BODY_BYTES = 64 << 10
_MAX_NAMESPACE = 256
_MAX_ENCODERS = 1024
_BODY_TIMEOUT_S = 5.0
_REFUSED_LOG_S = 10.0
# In front of a sibling's proof, where others show "Bearer".
_SIBLING = b"Sibling "


class _Registration(msgspec.Struct):
    url: str
    namespace: str = ""
    lease_s: float | None = None


class Siblings:
    """How tokenizer workers of one server know each other.

    One of them holds the registration port and the others ask it. Their proof is good
    for one question, and the answer proves that it comes from the same server.

    Args:
        secret: that only this server's processes share.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def shows(self, nonce: str) -> str:
        """The `Authorization` header of a question."""
        return f"{_SIBLING.decode()}{nonce} {self._code('asks', nonce)}"

    def proof(self, nonce: str) -> str:
        """The fields of the answer to that question."""
        return self._code("answers", nonce)

    def nonce(self, authorization: bytes) -> str | None:
        """Of a sibling's question; None if it is none."""
        if not authorization.startswith(_SIBLING) or not authorization.isascii():
            return None
        nonce, _, code = authorization.removeprefix(_SIBLING).decode().partition(" ")
        expected = self._code("asks", nonce)
        return nonce if hmac.compare_digest(code, expected) else None

    def _code(self, what: str, nonce: str) -> str:
        text = f"epd discovery: {what} {nonce}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


class Registry:
    """Handles the routes; use it from one event loop.

    Args:
        pool: hears of encoders.
        trust: tokens that encoders show.
        siblings: the server's other tokenizer workers, if it may have any.
    """

    def __init__(self, pool: Pool, trust: Trust, siblings: Siblings | None = None) -> None:
        self._pool = pool
        self._trust = trust
        self._siblings = siblings
        self._refused_at = -math.inf

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/register_encoder_url", self._register)
        app.router.add_delete("/unregister_encoder_url", self._unregister)
        app.router.add_get("/list_encoder_urls", self._list)
        app.router.add_get("/health", self._health)
        return app

    async def _register(self, request: web.Request) -> web.Response:
        try:
            asked = await self._read(request)
            url = server_url(asked.url, ENCODERS)
            lease_s = _lease_s(asked)
        except ProtocolError as error:
            return _error(400, error.message)
        known = self._pool.urls(LEASE)
        if url not in known and len(known) >= _MAX_ENCODERS:
            return _error(503, f"{_MAX_ENCODERS} encoders are registered; no more are taken")
        try:
            self._pool.register(url, asked.namespace, lease_s)
        except NamespaceError as error:
            return _error(409, error.message)
        if url not in known:
            logger.info("Encoder %s has registered", url)
        return web.json_response({"lease_s": lease_s if math.isfinite(lease_s) else None})

    async def _unregister(self, request: web.Request) -> web.Response:
        try:
            url = server_url((await self._read(request)).url, ENCODERS)
        except ProtocolError as error:
            return _error(400, error.message)
        if url in self._pool.urls(LEASE):
            logger.info("Encoder %s has left", url)
            self._pool.remove(url, LEASE)
        return web.json_response({})

    async def _list(self, request: web.Request) -> web.Response:
        shown = _authorization(request)
        nonce = self._siblings.nonce(shown) if self._siblings else None
        if nonce is None:
            self._authenticate(request)
        encoders = self._pool.describe()
        body = {"encoder_urls": [one["url"] for one in encoders], "encoders": encoders}
        if self._siblings is not None and nonce is not None:
            body["proof"] = self._siblings.proof(nonce)
        return web.json_response(body)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    def _authenticate(self, request: web.Request) -> None:
        if self._trust.admits(_authorization(request)):
            return
        now = time.monotonic()
        if now - self._refused_at >= _REFUSED_LOG_S:
            self._refused_at = now
            logger.warning("Refused %s of %s: no valid token", request.path, request.remote)
        raise web.HTTPUnauthorized(
            headers={"WWW-Authenticate": "Bearer"},
            text='{"error": "the token (SGLANG_EPD_TOKEN or --api-key) is missing or wrong"}',
            content_type="application/json",
        )

    async def _read(self, request: web.Request) -> _Registration:
        """Authenticate the sender, then read and decode the body.

        Raises:
            ProtocolError: it is no registration, or does not end.
            web.HTTPException: its sender may not, or it is too large.
        """
        self._authenticate(request)
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                return msgspec.json.decode(await request.read(), type=_Registration)
        except TimeoutError:
            raise ProtocolError(f"the message took longer than {_BODY_TIMEOUT_S:g} s") from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the message is not a registration: {error}") from None


def _lease_s(asked: _Registration) -> float:
    if len(asked.namespace) > _MAX_NAMESPACE or not asked.namespace.isprintable():
        raise ProtocolError(f"a namespace is at most {_MAX_NAMESPACE} printable characters")
    if asked.lease_s is None:
        # Of an encoder of ours with an identity and without a lease.
        return LEASE_S if asked.namespace else math.inf
    least, most = _LEASES_S
    if not least <= asked.lease_s <= most:
        raise ProtocolError(f"a lease is {least:g} to {most:g} s, not {asked.lease_s:g}")
    return asked.lease_s


def _authorization(request: web.Request) -> bytes:
    # The bytes as they came.
    return request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
