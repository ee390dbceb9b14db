"""Servers that run: reachable, of one namespace, of one token, of one time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime

import aiohttp

from sglang_epd.cli.checks import Finding, fail, note, ok, warn
from sglang_epd.cli.probes import ServerView, Target, ask
from sglang_epd.errors import EpdError
from sglang_epd.trust import Trust
from sglang_epd.wire import rpc
from sglang_epd.wire.http import open_session, read_body

_TIMEOUT_S = 5.0
_MOST_STATUS_BYTES = 1 << 20
_UNREADABLE = ValueError, TypeError, KeyError
# Requests carry the seconds that are left, not a time; shared stores do compare times.
_SKEW_S = 5.0
_LEFT_OUT = "another token or model, or a firewall before this server's payload port"


def servers(targets: Sequence[Target], token: str, ca_certs: str = "") -> Iterator[Finding]:
    """Faults of servers that requests from here can find.

    Args:
        token: is shown to encoders, and so to any server behind these URLs; empty for none.
    """
    views = ask(targets, ca_certs)
    for view in views:
        if view.state == "ready" and not view.trouble:
            yield ok(view.name, f"{view.role}, ready")
        else:
            yield fail(view.name, f"{view.state} {view.trouble}".strip(), _mend(view))
        if view.hint and view.role != "encoder":
            yield note(view.name, view.hint)
        if misfits := view.encoders.get("misfit", 0):
            found = f"leaves {misfits} encoders out"
            yield warn(view.name, found, f"{_LEFT_OUT}; its log says which, and why")
    yield from _namespaces({view.name: view.namespace for view in views if view.namespace})
    yield from _tokens(views, token)
    encoders = [view.url for view in views if view.role == "encoder"]
    tokenless = {view.url for view in views if view.tokenless}
    for url, admitted, skew_s in asyncio.run(_knock(encoders, token, ca_certs)):
        if admitted is False:
            mend = "give this shell the encoder's SGLANG_EPD_TOKEN (or --api-key)"
            found = "does not take this shell's" if token else "wants one, and this shell has none"
            yield fail("token", f"{url} {found}", mend)
        elif admitted and not (token and url in tokenless):
            yield ok("token", f"{url} takes {'it' if token else 'requests without one'}")
        if skew_s is not None and abs(skew_s) > _SKEW_S:
            found = f"{url} is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
            yield warn("clock", found, "have both hosts keep time (chrony, systemd-timesyncd)")


def _mend(view: ServerView) -> str:
    if view.state == "draining":
        return "it ends when it has done its work; start another one"
    if "vision towers" in view.problem:
        return "a worker is started again by itself; if it is not, look at its log and its GPU"
    if view.state in ("ready", "silent"):
        return f"its log says why: it starts, or is of another version; for encoders, {_LEFT_OUT}"
    if "ertificate" in view.problem or "SSL" in view.problem:
        return "https:// or http://? Else look at its certificate's name and dates (--ssl-ca-certs)"
    return "is it started, and does a firewall or a NetworkPolicy let this host through?"


def _tokens(views: Sequence[ServerView], token: str) -> Iterator[Finding]:
    """Encoders that lack the token, and those whose language servers lack it."""
    for view in views:
        if view.tokenless and token:
            mend = "start it with this shell's SGLANG_EPD_TOKEN"
            yield warn("token", f"{view.url} has none: any host that reaches it may use it", mend)
        if view.refused:
            found = f"{view.url} has refused {view.refused} requests that lacked its token"
            mend = "start the language servers that ask it with its SGLANG_EPD_TOKEN"
            yield warn("token", found, mend)


def _namespaces(found: dict[str, str]) -> Iterator[Finding]:
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} {namespace}" for name, namespace in found.items())
        mend = "give all of them one checkpoint, --dtype, --quantization and version of sglang-epd"
        yield fail("namespace", f"not all hold the same encoder: {told}", mend)
    elif found:
        yield ok("namespace", f"{next(iter(found.values()))} on {len(found)} servers")


async def _knock(
    urls: Sequence[str], token: str, ca_certs: str
) -> list[tuple[str, bool | None, float | None]]:
    """Of each encoder: whether it would take requests from here, and its clock against ours."""
    trust = Trust(token, ca_certs=ca_certs)
    headers, tls = trust.headers(), trust.client_ssl()
    async with open_session(headers, ssl=tls) as session:

        async def knock(url: str) -> tuple[str, bool | None, float | None]:
            if url.startswith(rpc.SCHEME):
                return url, await _knock_by_rpc(url, headers), None
            try:
                # Not an encode request: it would count among those that were refused.
                async with (
                    asyncio.timeout(_TIMEOUT_S),
                    session.get(f"{url}/v1/status", allow_redirects=False) as answer,
                ):
                    if answer.status != 200:
                        return url, None, None  # it came and went
                    told = json.loads(await read_body(answer, _MOST_STATUS_BYTES))
                    return url, told["authorised"], _skew_s(answer.headers.get("Date", ""))
            except (aiohttp.ClientError, OSError, TimeoutError, *_UNREADABLE):
                return url, None, None  # reported above

        return list(await asyncio.gather(*map(knock, urls)))


async def _knock_by_rpc(url: str, headers: Mapping[str, str]) -> bool | None:
    from sglang_epd.dispatch.rpc import Rpc

    channels = Rpc()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return bool(json.loads(await channels.status(url, headers))["authorised"])
    except (EpdError, TimeoutError, *_UNREADABLE):
        return None  # reported above
    finally:
        await channels.close()


def _skew_s(date: str) -> float | None:
    """How far a server's clock is ahead of ours; None where it does not tell."""
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
