"""The scheduler processes: requests that wait for their items.

Of the ranks that run a request together, one leads: it takes the request in, claims its
items, and lets it go on, with the outcome written in it, once they are there. SGLang
broadcasts the leader's requests to the other ranks, as it does with every
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
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_epd import logs
from sglang_epd.errors import (
    EncodeError,
    EpdError,
    ProtocolError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.language import manifest
from sglang_epd.language.relay import Receive, RelayError
from sglang_epd.spans import OFF, Span
from sglang_epd.transfer.arena import ReceivedItem
from sglang_epd.transfer.control import GRACE_S, Claims
from sglang_epd.wire.http import ItemLayout
from sglang_epd.wire.messages import (
    MAX_HEADER_BYTES,
    Arrived,
    AskPrefix,
    Beginning,
    Expect,
    Settled,
    encode_message,
)

if TYPE_CHECKING:  # they import this module
    from sglang_epd.language.early import Early, Prompt
    from sglang_epd.language.parts import Parts
    from sglang_epd.language.prefix import PrefixGate

logger = logging.getLogger(__name__)

# Builds a request's mm_inputs from its items.
Assemble = Callable[[Any, Sequence[ReceivedItem]], Any]
# Builds them from its announcement, of items without rows.
LayOut = Callable[[Any, Expect], Any]
# Builds them of a part's items, some of which have no rows; the announcement has the latter.
LayOutPart = Callable[[Any, Sequence[ReceivedItem | ItemLayout], Expect | None], Any]
# In the id of a part of a prompt, behind its request's.
PART = ".early-"
# In SGLang's words.
_TURN_REFUSED = Settled("", (), "ProtocolError", "Streaming session already has an active request.")
# (request, error message, status)
Failure = tuple[Any, str, HTTPStatus]


@dataclass
class _Claim:
    """A claim that a leader waits for."""

    # None if it needs nothing; its claim settles all the same.
    request: Any
    expect: Expect
    until: float
    # If it may be prefilled in parts.
    prompt: Prompt | None = None
    # Whether the request's ids have its items' tokens already.
    laid: bool = False
    # The wait for its items.
    span: Span = OFF
    abandoned: bool = False

    def end(self, code: str = "", message: str = "") -> None:
        if code:
            self.span.fail(code, message)
        self.span.end()


class Leader:
    """Holds requests back until their items have landed, or cannot any more.

    Args:
        claims: how tickets are claimed.
        secret: the key that signs manifests.
        prefix: whether the ranks have prefix caches to be asked.
        resume: the span that an announcement tells of.
        early: has prompts prefilled in parts; None where that is off.
        streams: tells of the id of a session whether it is a streaming one.
    """

    def __init__(
        self,
        claims: Claims,
        secret: bytes,
        *,
        prefix: bool,
        resume: Callable[[str], Span],
        early: Early | None = None,
        streams: Callable[[str], bool] = lambda _session: False,
    ) -> None:
        self.early = early
        self._streams = streams
        self._prefix = prefix
        self._resume = resume
        self._claims = claims
        self._secret = secret
        self._names = itertools.count()
        self._open: dict[str, _Claim] = {}
        # Requests that failed before their claims settled.
        self._late: dict[str, Any] = {}
        # Of requests that the prefix cache is being asked about, by name: how they were
        # announced, their deadline, and their prompts.
        self._undecided: dict[str, tuple[Expect, float, Prompt | None]] = {}
        self._next_look = 0.0

    @property
    def waiting(self) -> list[Any]:
        """The requests that wait."""
        return [claim.request for claim in self._open.values() if claim.request is not None]

    def load(self) -> tuple[int, int]:
        """How many requests wait, and the tokens of their prompts, as far as they are known."""
        claims = [claim for claim in self._open.values() if claim.request is not None]
        layouts = [one for claim in claims if not claim.laid for one in claim.expect.layouts]
        texts = sum(len(claim.request.input_ids or ()) for claim in claims)
        return len(claims), texts + sum(one.tokens for one in layouts)

    def pass_on(self, requests: list[Any]) -> list[Any]:
        """Take the requests that wait out of `requests`, add those that have settled.

        Never blocks.
        """
        passed: list[Any] = []
        # These first: an abort among `requests` must find them where they go on.
        for settled in self._claims.take():
            if self.early is not None and self.early.hear(settled):
                continue
            assert not isinstance(settled, Arrived), "only early claims are told of items"
            claim = self._open.pop(settled.claim, None)
            if self.early is not None:
                self.early.leave(settled.claim)
            if claim is None:
                request = self._late.pop(settled.claim, None)
                if request is not None and isinstance(settled, Settled) and settled.items:
                    # Its client has an answer. All ranks read its items, and drop them.
                    passed.append(self._carry(request, _aborted(settled)))
            elif claim.request is None:
                continue  # it needed nothing
            elif isinstance(settled, AskPrefix):
                passed += self._on_laid(claim, settled)
            else:
                claim.end(settled.code, settled.message)
                outcome = _aborted(settled) if claim.abandoned else settled
                passed.append(self._carry(claim.request, outcome))
        for received in requests:
            passed += filter(self._goes_on, _split_batch(received))
        if self.early is not None:
            passed += self.early.take()
        return passed + self._given_up(time.monotonic())

    def _goes_on(self, request: Any) -> bool:
        """Whether a request waits for nothing, or has failed already."""
        if manifest.waits(request):
            return self._hold(request)
        if self._overtakes(request):
            request.need_wait_for_mm_inputs = True
            self._carry(request, _TURN_REFUSED)
        return True

    def _overtakes(self, request: Any) -> bool:
        """Whether an earlier turn of a request's streaming session waits here. SGLang takes one
        turn at a time, and has not seen that one."""
        session = _session(request)
        return (
            session is not None
            and self._streams(session)
            and any(
                claim.request is not None
                and not claim.abandoned
                and _session(claim.request) == session
                for claim in self._open.values()
            )
        )

    def abandon(self, matches: Callable[[str], bool]) -> None:
        """Stop waiting for the requests whose id matches; they will come as failures."""
        for name, claim in self._open.items():
            if claim.request is not None and not claim.abandoned and matches(claim.request.rid):
                claim.abandoned = True
                self._claims.abandon(name)
                if self.early is not None:
                    self.early.leave(name)

    def _hold(self, request: Any) -> bool:
        """Claim a request's items; True if that has failed already."""
        try:
            expect = manifest.read_announced(manifest.carried(request), self._secret)
        except EpdError as error:
            self._carry(request, Settled("", (), error.code, error.message))
            return True
        if isinstance(expect, Settled):
            return True
        if self._overtakes(request):
            self._claim(None, expect, tuple(range(expect.items)), None)
            self._carry(request, _TURN_REFUSED)
            return True
        if getattr(request, "session_params", None) is not None:
            # Its prompt begins with another turn's: the prefix cache, and a part, would have
            # only its own, and the next turn is to find its items.
            self._claim(request, expect, (), None)
            return False
        prompt = None if self.early is None else self.early.read(request, expect)
        if expect.layouts:
            # Every rank asks its prefix cache first.
            self._undecided[manifest.name(request)] = (
                expect,
                time.monotonic() + expect.ttl_s,
                prompt,
            )
            return True
        self._claim(request, expect, (), prompt, prefix=self._prefix)
        return False

    def _on_laid(self, claim: _Claim, laid: AskPrefix) -> list[Any]:
        """All layouts of a request that waits have become known: the ranks are to look into
        their prefix caches."""
        request = claim.request
        claim.end()
        expect = msgspec.structs.replace(claim.expect, keys=laid.keys, layouts=laid.layouts)
        if claim.abandoned:
            self.ask(manifest.name(request), None, expect, tuple(range(expect.items)), again=False)
            return [self._carry(request, _aborted(Settled("")))]
        if len(encode_message(expect)) > MAX_HEADER_BYTES:
            # More than a request carries.
            self._claim(request, claim.expect, (), claim.prompt)
            return []
        self._undecided[manifest.name(request)] = (
            expect,
            time.monotonic() + expect.ttl_s,
            claim.prompt,
        )
        return [self._carry(request, expect)]

    def ask(
        self, name: str, request: Any, expect: Expect, covered: tuple[int, ...], *, again: bool
    ) -> None:
        """Claim the items that the prefix cache does not cover of a request, under a new ticket
        where the announced one has been claimed (`again`).

        It comes back with its outcome, unless all is covered.

        Args:
            request: comes back with the outcome; None where there is none to wait.
            expect: its announcement.
            covered: numbers of items that the prefix cache covers.
        """
        *_, prompt = self._undecided.pop(name, (None,))
        if again:
            expect = msgspec.structs.replace(expect, ticket=secrets.token_urlsafe(16))
            self._claims.again(request.rid, expect)
        needs = len(covered) < expect.items
        waits = request if needs else None
        self._claim(waits, expect, covered, prompt, prefix=self._prefix, laid=True)

    @property
    def undecided(self) -> set[str]:
        """Names of requests that the prefix cache has yet to be asked about."""
        return set(self._undecided)

    def forgo(self, name: str) -> None:
        """A request ended before the prefix cache was asked."""
        undecided = self._undecided.pop(name, None)
        if undecided is not None:
            expect, *_ = undecided
            every = tuple(range(expect.items))
            self.ask(name, None, expect, every, again=False)

    def _claim(
        self,
        request: Any,
        expect: Expect,
        covered: tuple[int, ...],
        prompt: Prompt | None,
        *,
        prefix: bool = False,
        laid: bool = False,
    ) -> None:
        name = str(next(self._names))
        until = time.monotonic() + expect.ttl_s + GRACE_S
        claim = _Claim(request, expect, until, prompt, laid)
        if expect.trace and request is not None:
            needed = expect.items - len(covered)
            claim.span = self._resume(expect.trace).child("epd_wait_for_items", items=needed)
        self._open[name] = claim
        early = False
        if self.early is not None and request is not None and prompt is not None:
            self.early.follow(name, request, expect, covered, prompt=prompt, span=claim.span)
            early = True
        self._claims.claim(name, expect, covered, prefix=prefix, early=early)

    def _given_up(self, now: float) -> list[Any]:
        """Requests that the receiver has not settled at their deadline, as it always does."""
        if now < self._next_look:
            return []
        self._next_look = now + 1.0
        for name in [name for name, (_, until, _) in self._undecided.items() if now >= until]:
            del self._undecided[name]
        error = UnavailableError("this server's receiver does not answer")
        given_up = []
        for name, claim in list(self._open.items()):
            if now < claim.until:
                continue
            del self._open[name]
            # Should it wake after all, it must not get the items.
            self._claims.abandon(name)
            if self.early is not None:
                self.early.leave(name)
            claim.end(error.code, error.message)
            if claim.request is not None:
                logger.error("No word of the items of %s", claim.request.rid)
                self._late[name] = claim.request
                outcome = Settled("", (), error.code, error.message)
                given_up.append(self._carry(claim.request, outcome))
        return given_up

    def _carry(self, request: Any, message: Settled | Expect) -> Any:
        """The request, with a message for the ranks in it."""
        manifest.carry(request, manifest.write(message, self._secret))
        return request


class Backend:
    """Turns the leader's requests into requests that can run; one on every rank.

    Args:
        receive: reads the items of a claim.
        rank: this rank's number, in traces.
        assemble: makes `mm_inputs` of a request and its items.
        abortable: makes the object that the scheduler aborts a request by.
        lay_out: makes `mm_inputs` of a request that the prefix cache is to be asked about.
        gate: where such requests wait; None where no prefix cache is asked.
        secret: the key that signs manifests.
        span_of: the span of a request.
        parts: the parts of prompts on this rank; None where there are none.
        lay_out_part: makes `mm_inputs` of one.
    """

    def __init__(
        self,
        receive: Receive,
        rank: int,
        *,
        assemble: Assemble,
        abortable: Callable[[Any], Any],
        secret: bytes,
        lay_out: LayOut,
        gate: PrefixGate | None,
        span_of: Callable[[Any], Span],
        parts: Parts | None = None,
        lay_out_part: LayOutPart | None = None,
    ) -> None:
        self._span_of = span_of
        self._lay_out = lay_out
        self._lay_out_part = lay_out_part
        self._parts = parts
        self._gate = gate
        self._secret = secret
        self._receive = receive
        self._rank = rank
        self._assemble = assemble
        self._abortable = abortable
        # Requests of which a part could not be laid out.
        self._surprising: set[str] = set()

    def sort_out(self, requests: list[Any]) -> tuple[list[Any], list[Failure]]:
        """The requests that can go on, and those that cannot."""
        ready: list[Any] = []
        failed: list[Failure] = []
        for request in requests:
            if not manifest.waits(request):
                ready.append(request)
                continue
            if (part := self._read_part(request)) is not None:
                ready += self._complete_part(request, part)
                continue
            if self._gate is not None and self._gate.holds(manifest.name(request)):
                failure = self._resolve(request, self._gate)
            else:
                span = self._span_of(request).child("epd_assemble", rank=self._rank)
                with logs.about(request.rid), span:
                    failure = self._complete(request)
                    if failure is not None:
                        span.fail(failure[2].name)
                if failure is None:
                    ready.append(request)
                    self._note_laid_out(manifest.name(request))
                elif self._gate is not None:
                    self._gate.forgo(manifest.name(request))
            if failure is not None:
                failed.append(failure)
                self._surprising.discard(manifest.name(request))
                if self._parts is not None:
                    self._parts.forget(manifest.name(request))
        return ready, failed

    def _read_part(self, request: Any) -> Beginning | None:
        if self._parts is None or PART not in request.rid:
            return None
        try:
            message = manifest.read(manifest.carried(request), self._secret)
        except EpdError:
            return None  # a user's own id, and fails as another
        return message if isinstance(message, Beginning) else None

    def _complete_part(self, request: Any, part: Beginning) -> list[Any]:
        """The request, ready to run; nothing where it cannot."""
        assert self._parts is not None
        assert self._lay_out_part is not None
        if part.of:
            self._parts.expect(request.rid, part.of, part.least)
        expect = self._gate.announced(part.of) if self._gate is not None else None
        try:
            received = iter(self._receive(Settled("", part.landed)))
            if not part.of:
                return []  # what was read is dropped
            items: list[ReceivedItem | ItemLayout] = []
            for number, landed in zip(part.items, part.landed, strict=True):
                if landed is not None:
                    items.append(next(received))
                elif expect is not None:
                    items.append(ItemLayout(expect.keys[number], expect.layouts[number]))
                else:
                    raise RequestCancelledError("its request has ended")
            if items:
                request.mm_inputs = self._lay_out_part(request, items, expect)
                request.input_ids = array("q", request.mm_inputs.input_ids)
            return [request]
        except EpdError as error:
            # Its request goes on without it, and fails itself if the media are to blame.
            logger.info("A part of %s is not prefilled early: %s", part.of, error.message)
        except Exception:
            logger.exception("A part of %s cannot be laid out", part.of)
            # Its prompt may be to blame, as far as that has not been laid out.
            self._surprising.add(part.of)
            if expect is not None:
                self._note_laid_out(part.of)
        if part.of:
            self._parts.fail(request.rid)
        return []

    def _note_laid_out(self, name: str) -> None:
        """A whole prompt could be laid out."""
        if self._parts is not None and name in self._surprising:
            self._surprising.discard(name)
            self._parts.broken = True
            logger.error("No prompt is prefilled early any more: parts cannot be laid out")

    def _resolve(self, request: Any, gate: PrefixGate) -> Failure | None:
        name = manifest.name(request)
        if self._parts is not None:
            self._parts.settle(name)
        try:
            settled = manifest.read_settled(manifest.carried(request), self._secret)
        except EpdError as error:
            return gate.fail(name, error)
        return gate.resolve(name, settled)

    def _complete(self, request: Any) -> Failure | None:
        try:
            message = manifest.read(manifest.carried(request), self._secret)
            if isinstance(message, Expect):
                mm_inputs = self._lay_out(request, message)
            elif isinstance(message, Settled):
                if self._parts is not None:
                    self._parts.settle(manifest.name(request))
                # Dropped at the end of this call unless the request's inputs keep them.
                items = self._receive(message)
                if getattr(request, "session_params", None) is not None:
                    # A session keeps them until it is closed, and others wait for that memory.
                    items = [one.copied() for one in items]
                mm_inputs = self._assemble(request, items)
            else:
                raise ProtocolError("the request carries something else than an outcome")
        except EpdError as error:
            # Never the error itself: its trace holds the frames that hold the items, and
            # a frame that held it would close the circle.
            return self._failure(request, error)
        except RelayError:
            raise
        except Exception:
            # A model's processor that fails on one prompt ends that request only.
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


def _session(request: Any) -> str | None:
    return getattr(getattr(request, "session_params", None), "id", None)


def _split_batch(received: Any) -> list[Any]:
    """A batch with members that wait, or are turns of sessions, is taken apart, so that each goes
    on by itself."""
    batch = getattr(received, "batch", None)
    if batch and any(manifest.waits(one) or _session(one) is not None for one in batch):
        return list(batch)
    return [received]


def _aborted(settled: Settled) -> Settled:
    """The outcome of a request that was aborted when its items were on their way."""
    if settled.code:
        return settled
    return Settled(settled.claim, settled.items, "RequestCancelledError", "the request was aborted")
