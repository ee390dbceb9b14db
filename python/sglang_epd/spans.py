"""Parts of a request's trace, as whoever works for a request sees them.

Who does something for a request is handed a span, and makes children of it for what it does.
Where the request is traced that is one of `observability.tracing`; everywhere else it is
`OFF`: false, the same object for all, without a child, and nothing is imported for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

_NO_HEADERS: Mapping[str, str] = {}


class Span:
    """A span of nobody's trace. Leaving it as a context ends it, with the error if any."""

    __slots__ = ()

    def __bool__(self) -> bool:
        """Whether anybody will see it; what only a span needs is not computed otherwise."""
        return False

    @property
    def headers(self) -> Mapping[str, str]:
        """What another process continues the trace by: W3C's `traceparent` and `tracestate`."""
        return _NO_HEADERS

    def child(self, name: str, *, began: float | None = None, **attributes: Any) -> Span:
        """A part of this span.

        Args:
            began: seconds of `time.perf_counter`; now unless given.
            attributes: as of `note`.
        """
        return self

    def note(self, **attributes: Any) -> None:
        """Say something of it: texts, numbers, truths and lists of them. None is left out."""

    def event(self, name: str) -> None:
        """Say that something happened now."""

    def fail(self, code: str, message: str = "") -> None:
        """Say that it failed.

        Args:
            code: of a bounded set, as the error classes of `errors`.
        """

    def end(self, at: float | None = None) -> None:
        """It is over; calls after the first do nothing.

        Args:
            at: seconds of `time.perf_counter`; now unless given.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is kept of the error."""


OFF = Span()
