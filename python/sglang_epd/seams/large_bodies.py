"""Requests of many parts: validated up to their first fault; those of many media are laid out
one at a time.

SGLang tries a part of a chat message as each kind of part of each kind of message, and each attempt
is an error with its input. So 4,096 empty parts, a body of 16 KB, stopped a server for 1.9 s and
were answered with 143 MB. The first bad element of a list is enough to refuse a body.

SGLang validates a body in the event loop that all requests share, and lays its prompt out in
threads that share the interpreter with that loop: 150 ms of processor time for 4,096 media.
Twenty such requests at once leave the loop a twentieth of the interpreter. One at a time, with
a rest after each that is as long as it took, they have half of a tokenizer process at most.

Leans on `entrypoints.http_server`: each route reads its body with `await ORJSONRequest.json()`,
in the task that serves the request, which keeps what it parsed in `_json`;
`get_global_state()` has the tokenizer manager; and `app` has all routes when the module is
imported. And on FastAPI, whose routes validate with `body_field._type_adapter`, a
`pydantic.TypeAdapter`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextvars import ContextVar
from typing import Any

from sglang_epd.errors import (
    EpdError,
    MediaTooLargeError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.wire.messages import MAX_ITEMS

logger = logging.getLogger(__name__)

# So many take a tokenizer process about 7 ms.
MANY_MEDIA = 128
# As many media as a request may have, a text before each, and a conversation.
MOST_PARTS = 2 * MAX_ITEMS + 1024
LONGEST_WAIT_S = 10.0
MOST_WAITING = 256
# Lists whose elements are validated, laid out or planned one by one.
_LISTS = ("messages", "image_data", "video_data", "audio_data")
# Those with conversations.
_TEXTS = ("messages", "input")
_MEDIA = ("image", "video", "audio")
_RESPONSES = "/responses"
_DECISIONS = "/decisions"
# Of a schema: what is no schema, and is not to be copied.
_VALUES = frozenset({"default", "expected", "metadata", "serialization"})

_turn: ContextVar[_Turn | None] = ContextVar("sglang_epd_turn", default=None)


async def read(original: Any, request: Any) -> Any:
    """Around `ORJSONRequest.json`.

    Raises:
        fastapi.HTTPException: the body has more parts than any request needs, or it has many
            media and too many others wait for their turn.
    """
    from fastapi import HTTPException
    from sglang.srt.entrypoints.http_server import get_global_state

    body = await original(request)
    seam = getattr(get_global_state().tokenizer_manager, "mm_receiver", None)
    if seam is None or _turn.get() is not None:
        return body
    parts, media = count_parts(body, request.url.path)
    if parts <= MOST_PARTS and media <= MANY_MEDIA:
        return body
    room = body.get("bootstrap_room")
    # Parsed, it has ten times its size: it waits as bytes.
    del body, request._json
    try:
        if parts > MOST_PARTS:
            raise MediaTooLargeError(
                f"a request has at most {MOST_PARTS} messages, parts and media"
            )
        await seam.turns.take(request)
    except EpdError as error:
        seam.refused(room, error)
        raise HTTPException(error.http_status, error.message) from None
    return await original(request)


class Turns:
    """One turn for all large requests of a tokenizer process, first come, first served."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def take(self, request: Any) -> None:
        """Wait for a turn, which lasts until `end`, or the end of the request.

        Raises:
            EpdError: too many others wait, or the client has left.
        """
        busy = UnavailableError(
            "large requests wait for each other on this server; try again later"
        )
        if self._waiting >= MOST_WAITING:
            raise busy
        self._waiting += 1
        try:
            # From now on uvicorn reads on, and hears when the client leaves.
            await request.is_disconnected()
            async with asyncio.timeout(LONGEST_WAIT_S):
                await self._lock.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self._waiting -= 1
        turn = _Turn(self._lock)
        _turn.set(turn)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _task: turn.end())
        if await request.is_disconnected():
            raise RequestCancelledError("the client has left")

    def end(self) -> None:
        """The current request, if it has the turn, is laid out."""
        if turn := _turn.get():
            turn.end()


class _Turn:
    """Holds the lock until `end`, and as long again, so that others have half of the time."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        self._ended = False

    def end(self) -> None:
        """May be called again."""
        if not self._ended:
            self._ended = True
            self._loop.call_later(self._loop.time() - self._begin, self._lock.release)


def count_parts(body: Any, path: str) -> tuple[int, int]:
    """Elements of the lists in a parsed body that SGLang takes one by one, and how many of them are
    media; counts to MOST_PARTS and stops soon after.

    Args:
        path: of the route; where it is not the Responses API's, `input` may be tokens, or texts.
    """
    if not isinstance(body, dict):
        return 0, 0
    given = body.get("input")
    has_media = isinstance(given, list) and given and isinstance(given[0], dict)
    names = (*_LISTS, "input") if path.endswith(_RESPONSES) or has_media else _LISTS
    parts = media = _of_decisions(body) if path.endswith(_DECISIONS) else 0
    within = [(body.get(name), name in _TEXTS) for name in names]
    while within and parts <= MOST_PARTS:
        value, texts = within.pop()
        if isinstance(value, list):
            parts += len(value)
            if parts > MOST_PARTS:
                break
            media += sum(_is_medium(one) if texts else not isinstance(one, list) for one in value)
            within += [(one, texts) for one in value]
        elif isinstance(value, dict):
            within += [(one, texts) for one in value.values()]
    return parts, media


def _of_decisions(body: dict[str, Any]) -> int:
    """SGLang makes a prompt with all images for each question."""
    images, questions = body.get("images"), body.get("questions")
    if isinstance(images, list) and isinstance(questions, list | dict):
        return len(images) * len(questions)
    return 0


def _is_medium(part: Any) -> bool:
    """Whether an element of a conversation is one, by its type or a field; others are messages,
    texts and calls, which colocated servers lay out beside others, however many."""
    if not isinstance(part, dict):
        return False
    # A field without a value says nothing: SDKs write all that they know.
    names = [name for name, value in part.items() if value is not None]
    kind = part.get("type")
    names += [kind] if isinstance(kind, str) else []
    return any(word in name for name in names for word in _MEDIA)


def stop_at_the_first_error() -> None:
    """In this process, if it has SGLang's HTTP server."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    for route in server.app.routes if server is not None else ():
        if (field := getattr(route, "body_field", None)) is None:
            continue
        try:
            adapter = field._type_adapter
            make = type(adapter.validator)
            # Models have validators of their own, which would be taken for those made here.
            adapter.validator = make(_stopping(adapter.core_schema), _use_prebuilt=False)
        except (AttributeError, TypeError) as error:
            logger.warning("Errors in bodies of %s may be long answers: %s", route.path, error)


def _stopping(schema: Any) -> Any:
    """A copy of a core schema whose lists stop at their first error."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_stopping, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    # The fields of a model are a mapping of their names, and none of its values is a string.
    values = _VALUES if isinstance(kind, str) else ()
    copy = {name: one if name in values else _stopping(one) for name, one in schema.items()}
    return copy | {"fail_fast": True} if kind == "list" else copy
