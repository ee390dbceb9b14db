"""Hooks on SGLang's tokenizer manager: requests that begin, end, or lose their client.

Each finds the receiver through `manager.mm_receiver`, which only a language server has
(`seams/tokenizer.py`), and passes straight through without one; `made`, `begun` and `noted` are
those of decode servers, too. Leans on
`managers.tokenizer_manager.TokenizerManager`: on `init_disaggregation`, which makes the last
of its parts (the multimodal processor is there before it; it makes the bootstrap server of a
prefill server and then the multimodal receiver), on `_init_req_state(obj, request)`, which
`generate_request` calls with the HTTP request (None of one that did not come over HTTP), and on
`abort_request(rid)`; the live requests are in its `rid_to_state`. An `HTTPException` that is raised
there is answered with its status, of a chat in a stream too; in a stream of `/generate` a
`ValueError` is an event with its `status_code`, or 400.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from sglang_epd.errors import EpdError
from sglang_epd.tally import LoopLag

_LOOK_S = 0.5
# Of these SGLang reads the first chunk before it answers a stream with any status.
_PRIMED = ("/v1/chat/completions", "/v1/completions", "/invocations")
# The `fastapi.Request` that the current task serves.
_http: ContextVar[Any] = ContextVar("sglang_epd_http", default=None)


def after(method: str) -> Callable[..., None]:
    """A hook that calls `receiver.method(*args)` when SGLang's own has returned.

    Args:
        method: of the receiver, or of a part of it that may be None (`part.method`).
    """

    def hook(_result: Any, manager: Any, *args: Any, **options: Any) -> None:
        if (ours := _find(manager, method)) is not None:
            ours(*args, **options)

    return hook


def around(method: str) -> Callable[..., Any]:
    """A hook that calls `receiver.method(original, manager, *args)` in place of SGLang's own."""

    def hook(original: Callable[..., Any], manager: Any, *args: Any, **options: Any) -> Any:
        ours = _find(manager, method)
        if ours is None:
            return original(manager, *args, **options)
        return ours(original, manager, *args, **options)

    return hook


def _find(manager: Any, method: str) -> Any:
    found = getattr(manager, "mm_receiver", None)
    for name in method.split("."):
        if found is None:
            return None
        found = getattr(found, name)
    return found


def made(_result: None, manager: Any, **_options: Any) -> None:
    """After `init_disaggregation`.

    Raises:
        ConfigError: the model cannot have its encoder apart, and why.
    """
    from sglang.srt.runtime_context import get_disagg

    from sglang_epd.seams import decode

    disagg = get_disagg()
    if disagg.language_only:
        manager.mm_receiver.attach(manager)
    elif disagg.disaggregation_mode == "decode":
        decode.set_up(manager)


class Watched:
    """In this process.

    Attributes:
        lag: measures a decode server's event loop.
    """

    lag: LoopLag | None = None


def begun(result: None, manager: Any, *args: Any, **options: Any) -> None:
    """After `auto_create_handle_loop`, in the event loop that SGLang serves requests in."""
    after("begun")(result, manager, *args, **options)
    if Watched.lag is not None:
        Watched.lag.start()


def noted(_result: Any, _manager: Any, _obj: Any, request: Any = None) -> None:
    """After `_init_req_state`: the copies of a sampled request come without the HTTP request, in
    the same task."""
    if request is not None:
        _http.set(request)


def client() -> Any:
    """The HTTP request that the current task serves; None where it serves none."""
    return _http.get()


class StreamError(ValueError):
    """The end of a stream, in an event.

    Attributes:
        status_code: the event's code.
        detail: its message.
    """

    def __init__(self, error: EpdError) -> None:
        super().__init__(error.message)
        self.status_code, self.detail = int(error.http_status), error.message


def refuse(request: Any, error: EpdError) -> NoReturn:
    """End a request that has no answer yet, in `_tokenize_one_request`.

    Raises:
        fastapi.HTTPException: with the status and message for the user.
        StreamError: the same, of a stream of which an event is the first word.
    """
    from fastapi import HTTPException

    http = client()
    streams = getattr(request, "stream", False)
    if streams and (http is None or not http.url.path.endswith(_PRIMED)):
        raise StreamError(error) from None
    raise HTTPException(error.http_status, error.message) from None


@asynccontextmanager
async def aborted_when_left(
    manager: Any, obj: Any, http: Any, abort: Callable[[str], Any] | None = None
) -> AsyncIterator[None]:
    """Around a request's answers: it is aborted soon after its client has left.

    SGLang asks for a client every 4 s, and of a body of more than 64 KiB, which an image is,
    uvicorn has stopped reading: the first question has it read on, and only the second, 8 s
    after the beginning, finds that the client is gone. By then encoders have encoded media that
    no client waits for. Here the server's next word on the connection is waited for, which costs
    the event loop less than to ask again and again.

    Args:
        http: the client's request; None where there is none to leave.
        abort: is given its id; SGLang's by default, which aborts a request once, and one that it
            has not sent to a scheduler not at all.
    """
    if http is None or getattr(obj, "background", False):
        yield
        return

    async def look() -> None:
        if hasattr(http, "receive"):
            while (await http.receive())["type"] != "http.disconnect":
                pass
        else:  # of SGLang's gRPC server beside that of HTTP
            while not await http.is_disconnected():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(_LOOK_S)
        # The end of its answer is an end of the connection too. Schedulers abort all requests
        # whose ids begin with this one, and with several tokenizer workers they are told even of
        # one that is over.
        if obj.rid in manager.rid_to_state:
            (abort or manager.abort_request)(obj.rid)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        # An error's trace would hold this frame, and so the request with its media.
        await asyncio.wait([looking])
