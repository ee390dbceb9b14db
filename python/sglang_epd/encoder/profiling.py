"""The torch profiler over an encoder's towers, by the routes of SGLang's own encoder.

GET, POST /start_profile    JSON of SGLang's `ProfileReq`, or no body
GET, POST /stop_profile     each rank writes its trace

A trace has what the thread of a rank's tower does, on an accelerator its kernels too. Like
SGLang's, a profiler counts an item as a step, and a trace is
`{profile_prefix}-rank{rank}-{time}.trace.json` in `output_dir`; where there are several towers
`-dp{tower}` follows the prefix. What a `ProfileReq` has beside the fields below is of schedulers,
and SGLang's encoder does not read it either.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from http import HTTPStatus

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from sglang_epd.encoder.tower import ProfileRequest, Tower, TowerLostError
from sglang_epd.errors import EpdError

# SGLang's.
_FOLDER = "SGLANG_TORCH_PROFILER_DIR"
_PREFIX = "encoder"
_MAX_BODY = 1 << 16


def routes(towers: Sequence[Tower]) -> APIRouter:
    """The two routes, for all of these towers at once."""
    router = APIRouter()

    @router.api_route("/start_profile", methods=["GET", "POST"])
    async def start(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY:
                return PlainTextResponse(f"over {_MAX_BODY} bytes\n", HTTPStatus.BAD_REQUEST)
        try:
            asked = msgspec.json.decode(body, type=ProfileRequest | None) if body else None
        except msgspec.MsgspecError as error:
            return PlainTextResponse(f"{error}\n", HTTPStatus.BAD_REQUEST)
        asked = asked or ProfileRequest()
        folder = asked.output_dir or os.environ.get(_FOLDER, "/tmp")
        prefix = asked.profile_prefix or _PREFIX
        each = [
            msgspec.structs.replace(
                asked,
                output_dir=folder,
                profile_prefix=f"{prefix}-dp{tower}" if len(towers) > 1 else prefix,
            )
            for tower in range(len(towers))
        ]
        return await _ask(towers, each, f"Start profiling. output_dir={folder}")

    @router.api_route("/stop_profile", methods=["GET", "POST"])
    async def stop() -> Response:
        return await _ask(towers, [None] * len(towers), "Stop profiling.")

    return router


async def _ask(
    towers: Sequence[Tower], each: Sequence[ProfileRequest | None], done: str
) -> Response:
    asking = (tower.profile(asked) for tower, asked in zip(towers, each, strict=True))
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    lines, status = [], HTTPStatus.OK
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, EpdError):
            code = outcome.http_status
        elif isinstance(outcome, TowerLostError):
            code = HTTPStatus.SERVICE_UNAVAILABLE
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            continue
        status = max(status, code)
        lines.append(f"tower {number}: {outcome}\n")
    return PlainTextResponse("".join(lines) or f"{done}\n", status)
