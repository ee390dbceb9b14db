"""The scheduler processes: requests that wait for their items.

Of the ranks that run a request together, one leads: it takes the request in, claims its
items, and lets it go on, with the outcome written in it, once they are there. SGLang
broadcasts to the other ranks what the leader lets through, as it does with every
request, so all of them see it in the same tick, without a word of their own; each then
reads the items from the memory they landed in. Waiting costs nothing.

A request that may need no embeddings goes through at once: each rank looks into its prefix
cache first (`prefix`), and it is there that it waits, if it has to.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from sglang_epd import logs
from sglang_epd.errors import EncodeError, EpdError, ProtocolError, UnavailableError, from_code
from sglang_epd.language import manifest
from sglang_epd.language.assembly import ReceivedItem
from sglang_epd.spans import OFF, Span
from sglang_epd.transfer.arena import Arena
from sglang_epd.wire import Expect, Laid, Settled, encode_message
from sglang_epd.wire.messages import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

# The receiver ends a request at its deadline. This long after it, it must be dead.
_GRACE_S = 30.0

# Builds a request's mm_inputs from its items.
Assemble = Callable[[Any, Sequence[ReceivedItem]], Any]
# Builds them from its announcement, of items without rows.
LayOut = Callable[[Any, Expect], Any]
# (request, error message, status)
Failure = tuple[Any, str, HTTPStatus]


class ClaimsTickets(Protocol):
    """What a leader needs of the control channel."""

    def claim(
        self, claim: str, expect: Expect, covered: tuple[int, ...] = (), *, prefix: bool = False
    ) -> None: ...

    def again(self, rid: str, expect: Expect) -> None: ...

    def abandon(self, claim: str) -> None: ...

    def take(self) -> list[Settled | Laid]: ...


class HoldsRequests(Protocol):
    """What a backend needs of the requests that wait beside the prefix cache (`prefix`)."""

    def holds(self, rid: str) -> bool: ...

    def resolve(self, rid: str, settled: Settled) -> Failure | None: ...

    def fail(self, rid: str, error: EpdError) -> Failure: ...


class Leader:
    """Holds requests back until their items have landed, or cannot any more.

    Args:
        claims: how tickets are claimed.
        secret: what manifests are signed with.
        prefix: whether the ranks have prefix caches to be asked.
        resume: the span that an announcement tells of.
    """

    def __init__(
        self,
        claims: ClaimsTickets,
        secret: bytes,
        *,
        prefix: bool = False,
        resume: Callable[[str], Span] = lambda _trace: OFF,
    ) -> None:
        self._prefix = prefix
        self._resume = resume
        # Of the claims whose requests are traced: the wait for their items.
        self._spans: dict[str, Span] = {}
        self._claims = claims
        self._secret = secret
        self._waiting: dict[str, Any] = {}
        self._until: dict[str, float] = {}
        # How the requests that wait were announced.
        self._expects: dict[str, Expect] = {}
        self._next_look = 0.0
        self._abandoned: set[str] = set()
        self._names = itertools.count()
        # Claims that need nothing; they settle all the same.
        self._covered: set[str] = set()
        # Requests that the prefix cache is being asked about, by id.
        self._undecided: dict[str, tuple[Expect, float]] = {}

    @property
    def waiting(self) -> list[Any]:
        """The requests that wait."""
        return list(self._waiting.values())

    def pass_on(self, requests: list[Any]) -> list[Any]:
        """Take the requests that wait out of `requests`, add those that have settled.

        Never blocks.
        """
        passed: list[Any] = []
        # These first: an abort among `requests` must find them where they go on.
        for settled in self._claims.take():
            if isinstance(settled, Laid):
                passed += self._on_laid(settled)
                continue
            if settled.claim in self._covered:
                self._covered.remove(settled.claim)
                continue
            self._end_span(settled.claim, settled.code, settled.message)
            request = self._waiting.pop(settled.claim, None)
            if request is None:
                logger.error("The receiver settled a request after it was given up")
                continue
            del self._until[settled.claim], self._expects[settled.claim]
            aborted = settled.claim in self._abandoned
            self._abandoned.discard(settled.claim)
            request.encoder_urls = self._write(_aborted(settled) if aborted else settled)
            passed.append(request)
        for received in requests:
            for request in _split_batch(received):
                if not getattr(request, "need_wait_for_mm_inputs", False) or self._hold(request):
                    passed.append(request)
        return passed + self._given_up(time.monotonic())

    def abandon(self, matches: Callable[[str], bool]) -> None:
        """Stop waiting for the requests whose id matches; they will come as failures."""
        for claim, request in self._waiting.items():
            if matches(request.rid) and claim not in self._abandoned:
                self._abandoned.add(claim)
                self._claims.abandon(claim)

    def _hold(self, request: Any) -> bool:
        """Claim a request's items; True if that has failed already."""
        try:
            expect = manifest.read_expect(request.encoder_urls, self._secret)
        except EpdError as error:
            request.encoder_urls = self._write(Settled("", (), error.code, error.message))
            return True
        if expect.layouts:
            # Every rank asks its prefix cache first.
            self._undecided[request.rid] = expect, time.monotonic() + expect.ttl_s
            return True
        self._claim(request, expect, (), prefix=self._prefix)
        return False

    def _on_laid(self, laid: Laid) -> list[Any]:
        """All layouts of a request that waits have become known: the ranks are to look into
        their prefix caches."""
        request = self._waiting.pop(laid.claim, None)
        if request is None:
            return []
        self._end_span(laid.claim)
        del self._until[laid.claim]
        announced = self._expects.pop(laid.claim)
        expect = msgspec.structs.replace(announced, keys=laid.keys, layouts=laid.layouts)
        if laid.claim in self._abandoned:
            self._abandoned.remove(laid.claim)
            self.ask(request.rid, None, expect, tuple(range(expect.items)), again=False)
            request.encoder_urls = self._write(_aborted(Settled("")))
        elif len(encode_message(expect)) > MAX_HEADER_BYTES:
            # More than a request carries.
            self._claim(request, announced, ())
            return []
        else:
            self._undecided[request.rid] = expect, time.monotonic() + expect.ttl_s
            request.encoder_urls = manifest.write(expect, self._secret)
        return [request]

    def ask(
        self, rid: str, request: Any, expect: Expect, covered: tuple[int, ...], *, again: bool
    ) -> None:
        """Claim what the prefix cache does not cover of a request.

        It comes back with its outcome, unless all is covered.

        Args:
            again: under a new ticket, because the announced one has been claimed.
        """
        self._undecided.pop(rid, None)
        if again:
            expect = msgspec.structs.replace(expect, ticket=secrets.token_urlsafe(16), consumers=1)
            self._claims.again(rid, expect)
        if len(covered) < expect.items:
            self._claim(request, expect, covered, prefix=self._prefix)
            return
        claim = str(next(self._names))
        self._covered.add(claim)
        self._claims.claim(claim, expect, covered, prefix=self._prefix)

    def forgo(self, rid: str) -> None:
        """A request ended before the prefix cache was asked."""
        undecided = self._undecided.pop(rid, None)
        if undecided is not None:
            expect, _ = undecided
            every = tuple(range(expect.items))
            self.ask(rid, None, expect, every, again=False)

    def _claim(
        self, request: Any, expect: Expect, covered: tuple[int, ...], *, prefix: bool = False
    ) -> None:
        claim = str(next(self._names))
        self._waiting[claim] = request
        self._until[claim] = time.monotonic() + expect.ttl_s + _GRACE_S
        self._expects[claim] = expect
        if expect.trace:
            needed = expect.items - len(covered)
            span = self._resume(expect.trace).child("epd_wait_for_items", items=needed)
            self._spans[claim] = span
        self._claims.claim(claim, expect, covered, prefix=prefix)

    def _end_span(self, claim: str, code: str = "", message: str = "") -> None:
        span = self._spans.pop(claim, OFF)
        if code:
            span.fail(code, message)
        span.end()

    def _given_up(self, now: float) -> list[Any]:
        """Requests that the receiver has not settled at their deadline, as it always does."""
        if now < self._next_look:
            return []
        self._next_look = now + 1.0
        for rid in [rid for rid, (_, until) in self._undecided.items() if now >= until]:
            del self._undecided[rid]
        overdue = [claim for claim, until in self._until.items() if now >= until]
        error = UnavailableError("this server's receiver does not answer")
        given_up = []
        for claim in overdue:
            logger.error("No word of the items of %s", self._waiting[claim].rid)
            request = self._waiting.pop(claim)
            del self._until[claim], self._expects[claim]
            self._abandoned.discard(claim)
            # Should it wake after all, nobody is to be handed the items.
            self._claims.abandon(claim)
            request.encoder_urls = self._write(Settled("", (), error.code, error.message))
            self._end_span(claim, error.code, error.message)
            given_up.append(request)
        return given_up

    def _write(self, settled: Settled) -> list[str]:
        return manifest.write(settled, self._secret)


class Backend:
    """Turns what a leader has passed on into requests that can run; one on every rank.

    Args:
        arena: where items landed.
        reader: this rank's number among those that read the arena.
        assemble: makes `mm_inputs` of a request and its items.
        abortable: makes the object that the scheduler aborts a request by.
        lay_out: makes `mm_inputs` of a request that the prefix cache is to be asked about.
        gate: where such requests wait; None where none do.
        secret: what manifests are signed with.
        span_of: the span of a request.
    """

    def __init__(
        self,
        arena: Arena,
        reader: int,
        *,
        assemble: Assemble,
        abortable: Callable[[Any], Any],
        secret: bytes,
        lay_out: LayOut | None = None,
        gate: HoldsRequests | None = None,
        span_of: Callable[[Any], Span] = lambda _request: OFF,
    ) -> None:
        self._span_of = span_of
        self._lay_out = lay_out
        self._gate = gate
        self._secret = secret
        self._arena = arena
        self._reader = reader
        self._assemble = assemble
        self._abortable = abortable

    def sort_out(self, requests: list[Any]) -> tuple[list[Any], list[Failure]]:
        """The requests that can go on, and those that cannot."""
        ready: list[Any] = []
        failed: list[Failure] = []
        for request in requests:
            if not getattr(request, "need_wait_for_mm_inputs", False):
                ready.append(request)
                continue
            if self._gate is not None and self._gate.holds(request.rid):
                failure = self._resolve(self._gate, request)
            else:
                span = self._span_of(request).child("epd_assemble", rank=self._reader)
                with logs.about(request.rid), span:
                    failure = self._complete(request)
                    if failure is not None:
                        span.fail(failure[2].name, failure[1])
                if failure is None:
                    ready.append(request)
            if failure is not None:
                failed.append(failure)
        return ready, failed

    def _resolve(self, gate: HoldsRequests, request: Any) -> Failure | None:
        """The outcome of a request that is in the scheduler already."""
        try:
            settled = manifest.read_settled(request.encoder_urls, self._secret)
        except EpdError as error:
            return gate.fail(request.rid, error)
        return gate.resolve(request.rid, settled)

    def _complete(self, request: Any) -> Failure | None:
        try:
            message = manifest.read(request.encoder_urls, self._secret)
            if isinstance(message, Expect) and self._lay_out is not None:
                mm_inputs = self._lay_out(request, message)
            elif isinstance(message, Settled):
                # Dropped at the end of this call unless the request's inputs keep them.
                items = [
                    ReceivedItem(item.key, item.layout, self._arena.read(item, self._reader))
                    for item in message.items
                    if item is not None
                ]
                if message.code:
                    return self._failure(request, from_code(message.code, message.message))
                mm_inputs = self._assemble(request, items)
            else:
                raise ProtocolError("the request carries something else than an outcome")
        except EpdError as error:
            # Never the error itself: its trace holds the frames that hold the items, and
            # a frame that held it would close the circle.
            return self._failure(request, error)
        except Exception:
            # Whatever a model's processor makes of one prompt ends that request only.
            logger.exception("Could not lay out the prompt of %s", request.rid)
            surprise = EncodeError("the prompt could not be laid out with its media")
            return self._failure(request, surprise)
        request.mm_inputs = mm_inputs
        request.input_ids = array("q", mm_inputs.input_ids)
        return None

    def _failure(self, request: Any, error: EpdError) -> Failure:
        # The scheduler's output path needs token ids, of which a prompt that was never
        # laid out may have none.
        if request.input_ids is None:
            request.input_ids = array("q")
        return self._abortable(request), error.message, error.http_status


def _split_batch(received: Any) -> list[Any]:
    """A batch whose members wait is taken apart, so that each goes on by itself."""
    batch = getattr(received, "batch", None)
    if batch and any(getattr(member, "need_wait_for_mm_inputs", False) for member in batch):
        return list(batch)
    return [received]


def _aborted(settled: Settled) -> Settled:
    """The outcome of a request that was aborted when its items were on their way."""
    if settled.code:
        return settled
    return Settled(settled.claim, settled.items, "RequestCancelledError", "the request was aborted")
