"""Whose request a log line is about.

Code that works for a request names it once (`about`), and every line that this package's loggers
write in that task, or in tasks that it begins, says whose it is, behind the message. SGLang's
loggers, and the format that it gives its lines, are left as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OURS = "sglang_epd"
_MOST_CHARS = 64
_MOST_LINE_CHARS = 8192
_request: ContextVar[str] = ContextVar("sglang_epd_request", default="")
_item: ContextVar[int | None] = ContextVar("sglang_epd_item", default=None)


@contextmanager
def about(request: str, item: int | None = None) -> Iterator[None]:
    """Log lines written in this context, by tasks begun in it as well, name this request.

    Args:
        request: its id, which a user may have chosen; empty for none.
        item: one of its items.
    """
    whose, which = _request.set(clean(request)), _item.set(item)
    try:
        yield
    finally:
        _request.reset(whose)
        _item.reset(which)


def subject() -> str:
    """The request that lines written here name; empty for none."""
    return _request.get()


def install() -> None:
    """Have this process's own loggers say whose request a line is about."""
    ours = logging.getLogger(_OURS)
    if not any(isinstance(handler, _Annotator) for handler in ours.handlers):
        ours.addHandler(_Annotator())


class _Annotator(logging.Handler):
    """Writes nothing: makes a record one line and adds to it, before SGLang's handlers see it.

    User-chosen text, such as a request's id, begins no line and moves no cursor, wherever it
    is part of. A traceback, which quotes the messages of errors, is indented instead.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = clean(record.getMessage(), _MOST_LINE_CHARS)
        except (TypeError, ValueError):  # the formatter reports it
            return
        request, item = _request.get(), _item.get()
        if request and request not in message:
            which = "" if item is None else f" item {item}"
            message += f" [request {request}{which}]"
        record.msg, record.args = message, ()
        if record.exc_info:
            told = logging.Formatter().formatException(record.exc_info)
            lines = (clean(line, _MOST_LINE_CHARS) for line in told.splitlines())
            record.exc_text = "\n".join(f"  {line}" for line in lines)


def clean(text: str, most: int = _MOST_CHARS) -> str:
    """A text without characters that could begin a line of its own."""
    shown = text[:most]
    if shown.isprintable():
        return shown
    return "".join(mark if mark.isprintable() else "?" for mark in shown)
