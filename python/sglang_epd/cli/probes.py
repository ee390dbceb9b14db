"""Asks servers for their kind, state, queue and hit rate.

Encoders tell by `/v1/status` and `/metrics`, servers of SGLang by `/metrics`, which they
have with `--enable-metrics`, and all of them by `/health`. Encoders at `grpc://` tell by `Status`
and `grpc.health.v1`. None of these wants a token.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from sglang_epd.errors import ConfigError, ProtocolError, UnavailableError
from sglang_epd.logs import clean
from sglang_epd.trust import Trust
from sglang_epd.wire import rpc
from sglang_epd.wire.http import open_session, read_body
from sglang_epd.wire.urls import ENCODERS, server_url

_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20
_MAX_SHOWN = 300
_NO_METRICS = "tells no more; language, prefill and decode servers do with --enable-metrics"
_NO_RPC_METRICS = "tells its hit rate over HTTP, where SGLANG_EPD_ENCODER_HTTP_PORT is set"
# An encoder's works that have not come to the tower yet.
_QUEUED = ("looking", "waiting", "preparing", "ready")
# Items that an encoder, and that a language server, did not have to compute.
_ENCODER_HITS = ("cached", "stored", "coalesced")
_LANGUAGE_HITS = ("kv", "language_cache")
_ROLES = {"unified": "language", "prefill": "prefill", "decode": "decode"}
# Requests that wait in a server of SGLang, for any reason.
_QUEUES = (
    "sglang:num_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)


@dataclass(frozen=True)
class ServerView:
    """One server, as it was found.

    Attributes:
        state: ready, draining or unreachable; of servers that `up` runs, also pending,
            starting, silent, down or failed.
        queued, running: items on an encoder, requests elsewhere; None where the server
            does not tell.
        items, hits: all of the items of media that it was asked for so far, and those that
            it, or the cache beside it, had.
        utilisation: share of the last minute in which an encoder's towers ran.
        namespace: of the embeddings that it makes or takes; empty where it has none.
        encoders: those that a language server knows, by state.
        problem: why there is nothing to tell, or what is broken; empty for none.
        tokenless: whether an encoder takes requests of anyone.
        refused: encode requests that it refused for their token.
        hint: a setting that would make it answer more; empty for none.
    """

    name: str
    role: str
    url: str
    state: str = "unreachable"
    queued: int | None = None
    running: int | None = None
    items: int | None = None
    hits: int | None = None
    utilisation: float | None = None
    tokens_per_s: float | None = None
    namespace: str = ""
    encoders: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    pid: int | None = None
    problem: str = ""
    tokenless: bool = False
    refused: int = 0
    hint: str = ""

    @property
    def trouble(self) -> str:
        """What is wrong with a server that answers; empty for nothing."""
        sends = bool(self.namespace) and self.role != "encoder"
        if self.problem or not sends or self.encoders.get("ready"):
            return self.problem
        states = ", ".join(f"{state}: {number}" for state, number in self.encoders.items())
        return f"sees no encoder that is ready ({states or 'it knows none'})"

    @property
    def hit_rate(self) -> float | None:
        """Share of the items that did not have to be computed; None before the first."""
        return self.hits / self.items if self.items and self.hits is not None else None


@dataclass(frozen=True)
class Target:
    """A server to ask.

    Attributes:
        role: empty where its answers will say.
        told: state, restarts and pid, from the `up` that runs it.
    """

    url: str
    name: str = ""
    role: str = ""
    told: dict[str, Any] = field(default_factory=dict)


def target(url: str) -> Target:
    """A server by its URL as it was typed.

    Raises:
        ConfigError: it is none.
    """
    typed = url if "://" in url else f"http://{url}"
    try:
        return Target(server_url(typed, ENCODERS))
    except ProtocolError as error:
        raise ConfigError(f"{url!r}: {error}") from None


def targets_of(state: dict[str, Any]) -> list[Target]:
    """The servers of a run of `up`."""
    return [
        Target(
            server["url"],
            server["name"],
            server["role"],
            {name: server[name] for name in ("state", "restarts", "pid")},
        )
        for server in state["servers"]
    ]


def ask(targets: Sequence[Target], ca_certs: str = "") -> list[ServerView]:
    """Ask all of them at once; takes a few seconds at most.

    Args:
        ca_certs: whose certificates are believed; empty for those of the system.
    """

    async def ask_all() -> list[ServerView]:
        async with open_session(ssl=Trust(ca_certs=ca_certs).client_ssl()) as session:
            return list(await asyncio.gather(*(_view(session, one) for one in targets)))

    return asyncio.run(ask_all())


async def _view(session: aiohttp.ClientSession, target: Target) -> ServerView:
    view = ServerView(target.name or target.url, target.role or "server", target.url, **target.told)
    if view.state in ("pending", "down", "failed", "stopped"):
        return view
    if target.url.startswith(rpc.SCHEME):
        return await _rpc_view(view)
    asked = ("/health", "/v1/status", "/metrics")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            health, status, metrics = await asyncio.gather(
                *(_get(session, f"{target.url}{path}") for path in asked)
            )
    except (aiohttp.ClientError, OSError, TimeoutError, ssl.SSLError) as error:
        state = view.state if view.state in ("starting", "silent") else "unreachable"
        return replace(view, state=state, problem=_problem(error))
    if health[0] == 200:
        view = replace(view, state="ready")
    elif view.state != "starting":
        view = replace(view, state="silent", problem=f"/health answers {health[0]}")
    try:
        samples = Samples(metrics[1] if metrics[0] == 200 else "")
        told = json.loads(status[1]) if status[0] == 200 else {}
        if isinstance(told, dict) and "encoder" in told:
            return _encoder(view, told, samples)
        if metrics[0] == 404 and view.role != "router":
            view = replace(view, hint=_NO_METRICS)
        return _sglang(view, samples)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return replace(view, problem=_misunderstood(error))


async def _rpc_view(view: ServerView) -> ServerView:
    """An encoder over gRPC; of SGLang's own there is its health alone."""
    # gRPC is imported where an encoder wants it.
    from sglang_epd.dispatch.rpc import Rpc

    channels = Rpc()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if not await channels.healthy(view.url):
                view = replace(view, state="silent", problem="grpc.health.v1 answers NOT_SERVING")
            else:
                view = replace(view, state="ready")
            try:
                told = await channels.status(view.url)
            except UnavailableError as error:
                return replace(view, hint=_plain(error))
        known = _encoder(view, json.loads(told), Samples(""))
        return replace(known, items=None, hits=None, hint=_NO_RPC_METRICS)
    except (UnavailableError, TimeoutError) as error:
        return replace(view, state="unreachable", problem=_problem(error))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return replace(view, problem=_misunderstood(error))
    finally:
        await channels.close()


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    """Status and text of an answer that is not too long."""
    async with session.get(url, allow_redirects=False) as response:
        body = await read_body(response, _MAX_BYTES)
    if len(body) > _MAX_BYTES:
        raise aiohttp.ClientPayloadError(f"{url} answers with more than {_MAX_BYTES} bytes")
    return response.status, body.decode(errors="replace")


class Samples:
    """The values of a `/metrics` page."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [one for family in families for one in family.samples]

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums for each value of a label; nothing where there is no such value."""
        sums: dict[str, float] = {}
        for one in self._samples:
            if one.name == name:
                value = one.labels.get(label, "")
                sums[value] = sums.get(value, 0.0) + one.value
        return sums

    def sum(self, name: str, label: str = "", among: Sequence[str] = ()) -> float | None:
        """The sum over all labels, or those with one of these values; None if there is none."""
        sums = self.by(name, label)
        if not sums:
            return None
        return sum(value for told, value in sums.items() if not label or told in among)

    def only(self, label: str, name: str = "") -> str:
        """The value that a label has wherever it is; empty where there are none, or several."""
        named = (one for one in self._samples if name in ("", one.name))
        values = {one.labels[label] for one in named if label in one.labels}
        return values.pop() if len(values) == 1 else ""


def _encoder(view: ServerView, told: dict[str, Any], samples: Samples) -> ServerView:
    queue, lookups = told["queue"], "sglang:epd_encoder_lookups_total"
    towers = told.get("towers", ())
    lost = sum(not tower["alive"] for tower in towers)
    if lost and not view.problem:
        view = replace(view, problem=f"{lost} of {len(towers)} vision towers do not work")
    return replace(
        view,
        role="encoder",
        state="draining" if told["state"] == "draining" else view.state,
        # It answers /health with 503 then.
        problem="" if told["state"] == "draining" else view.problem,
        queued=sum(int(queue[name]) for name in _QUEUED),
        running=int(queue["running"]),
        items=int(samples.sum(lookups) or 0),
        hits=int(samples.sum(lookups, "source", _ENCODER_HITS) or 0),
        utilisation=float(told["utilisation"]),
        namespace=_plain(told["namespace"]),
        # None was shown a token here.
        tokenless=told.get("authorised") is True,
        refused=int(samples.sum("sglang:epd_encoder_requests_total", "status", ("401",)) or 0),
    )


def _sglang(view: ServerView, samples: Samples) -> ServerView:
    # A scheduler that has not had a request yet tells nothing of its queues.
    running = samples.sum("sglang:num_running_reqs")
    queues = [number for name in _QUEUES if (number := samples.sum(name)) is not None]
    namespace = samples.only("namespace", "sglang:epd_dispatch_namespace")
    engine = samples.only("engine_type")
    role = _ROLES.get(engine, "server") if namespace or engine != "unified" else "server"
    items = samples.sum("sglang:epd_dispatch_items_total")
    hits = samples.sum("sglang:epd_dispatch_items_total", "source", _LANGUAGE_HITS)
    return replace(
        view,
        role=view.role if view.role != "server" else role,
        running=None if running is None else int(running),
        queued=int(sum(queues)) if queues else None,
        items=None if items is None else int(items),
        hits=None if hits is None else int(hits),
        # SGLang leaves it as it was when the last request has ended.
        tokens_per_s=0.0 if running == 0 else samples.sum("sglang:gen_throughput"),
        namespace=_plain(namespace),
        encoders={
            _plain(state): int(number)
            for state, number in samples.by("sglang:epd_dispatch_encoders", "state").items()
            if number
        },
    )


def _problem(error: Exception) -> str:
    return _plain(f"{type(error).__name__}: {error}".rstrip(": "))


def _misunderstood(error: Exception) -> str:
    return _plain(f"its answers cannot be understood: {error}")


def _plain(text: object) -> str:
    """A foreign text, as it may be shown on a terminal."""
    return clean(str(text), _MAX_SHOWN)
