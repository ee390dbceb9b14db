"""Runs one request's items to their end: delivered, or an error for the user.

One HTTP request an encoder carries its share. An item whose encoder failed in a way that
another may cure goes to one that has not had it yet, alone, under the same deadline; one
that all of them have failed waits until an encoder is there or has room again. A failure
by a fault of the user's media is not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.dispatch.policies import ItemCost, Policy, RetryBudget, pause
from sglang_epd.dispatch.pool import Attempt, Health, Pool, Snapshot, View, usable
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EncoderLostError,
    EpdError,
    MediaTooLargeError,
    NamespaceError,
    OverloadedError,
    UnavailableError,
    UnreachableError,
    from_code,
)
from sglang_epd.spans import OFF, Span
from sglang_epd.tally import Tally
from sglang_epd.wire.http import (
    MOST_MB,
    EncodeItem,
    EncodeReply,
    EncodeRequest,
    ItemLayout,
    ItemOutcome,
    ReplyTo,
)
from sglang_epd.wire.messages import DECLINE_TOO_LARGE, DECLINE_UNKNOWN, DECLINE_UNREADABLE

logger = logging.getLogger(__name__)

# So many encoders may fail at an item itself, or end while they have it, before the item is
# taken for the cause.
_MAX_FAULTS = 3
_MOST_ASKER_CHARS = 128
# An encode request has at most so many items, and a request twice as many on their way for each
# encoder: that fills batches, leaves room for others, and is lost where an item is hopeless.
_MOST_ITEMS = 64
_AHEAD = 2 * _MOST_ITEMS
# Items that are described and assigned in one turn of the event loop: with 64 encoders it takes
# 45 ms.
_AT_ONCE = 256
# An encoder that probes find well may fail its requests all the same: after so many returns a
# pause is not cut short by what is heard of it.
_HASTY_RETURNS = 3
# How often another encoder is looked for, when one has taken too long.
_LOOK_S = 0.5
_TOO_LATE = "the request's deadline passed before its media were encoded"


@dataclass
class _Progress:
    """Where one item has been."""

    work: ItemCost
    # The encoders that have had it since it last came back to all of them.
    tried: frozenset[str] = frozenset()
    # The encoders that failed at the item itself, by their own account.
    faults: frozenset[str] = frozenset()
    # A full encoder has refused it since it last waited.
    refused: bool = False
    # How many encoders went away while they had it.
    losses: int = 0
    # How often it came back to encoders that had failed it, and was given to one.
    returns: int = 0
    attempts: int = 0
    # Why it came back last.
    error: EpdError | None = None


@dataclass
class _Run:
    """One request's dispatch, and the layouts of its items."""

    reply_to: ReplyTo
    deadline: float
    progress: dict[int, _Progress]
    note: Callable[[int, str], None]
    span: Span
    asker: str
    layouts: dict[int, ItemLayout] = field(default_factory=dict)
    # The encoders that it was sent to.
    asked: set[str] = field(default_factory=set)
    # When it began to wait for an encoder; None while it has one.
    stranded_at: float | None = None
    # Not made of the ticket: encoders show request ids to any client.
    _name: str = field(default_factory=lambda: secrets.token_hex(8))
    _sent: int = 0

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def next_id(self) -> str:
        self._sent += 1
        return f"{self._name}.{self._sent}"


@dataclass(frozen=True)
class Patience:
    """How long is waited.

    Attributes:
        encoder_s: for an encoder to appear, or to have room, where none is left.
        attempt_s: for one encoder to answer, before others are asked.
    """

    encoder_s: float = 30.0
    attempt_s: float = 60.0


Failure = tuple[EncodeItem, EpdError]


class Dispatcher:
    """Spreads items over the encoders that are known at the moment.

    Args:
        client: how an encoder is reached.
        pool: the encoders.
        policy: how items are spread.
        describe: an item's affinity and cost, for the policy.
        learn: called with each layout that an encoder sent.
        patience: how long a request waits for encoders.
        tally: counts events.
        rng: random source of the policy and of pauses.
    """

    def __init__(
        self,
        client: EncoderClient,
        pool: Pool,
        policy: Policy,
        *,
        describe: Callable[[Sequence[EncodeItem]], Sequence[ItemCost]],
        learn: Callable[[EncodeItem, ItemLayout], None] = lambda _item, _layout: None,
        patience: Patience = Patience(),
        tally: Tally | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._pool = pool
        self._policy = policy
        self._describe = describe
        self._learn = learn
        self._patience = patience
        self._tally = tally or Tally()
        self._rng = rng or random.Random()
        self._budget = RetryBudget()

    async def run(
        self,
        reply_to: ReplyTo,
        items: Sequence[EncodeItem],
        deadline: float,
        note: Callable[[int, str], None] = lambda _item, _source: None,
        *,
        span: Span = OFF,
        asker: str = "",
    ) -> dict[int, ItemLayout]:
        """Have every item delivered.

        Args:
            deadline: on the clock of `time.monotonic`.
            note: called for each delivered item with the source of its embedding.
            span: has each encoder's share, and each wait, as a part.
            asker: the request's id, for encoders' logs.

        Returns:
            The layouts by item number, of those items whose encoder sent a valid one.

        Raises:
            EpdError: the user's error; the items not delivered by then
                have been cancelled at their encoders.
        """
        run = _Run(reply_to, deadline, {}, note, span, asker[:_MOST_ASKER_CHARS])
        self._budget.sent(len(items))
        tasks: dict[asyncio.Task[list[Failure]], int] = {}
        begun = 0
        try:
            while tasks or begun < len(items):
                room = self._room(tasks) if begun < len(items) else 0
                if room >= _MOST_ITEMS:
                    part = items[begun : begun + min(room, _AT_ONCE)]
                    begun += len(part)
                    works = self._describe(part)
                    run.progress |= {
                        item.item: _Progress(work) for item, work in zip(part, works, strict=True)
                    }
                    tasks |= self._launch(run, part)
                    await asyncio.sleep(0)
                    continue
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    failures = task.result()
                    del tasks[task]
                    for item, error in failures:
                        run.progress[item.item].error = error
                    if failures:
                        tasks |= self._launch(run, [item for item, _ in failures])
        finally:
            if tasks:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if run.asked:
                self._tally.observe("request_encoders", len(run.asked))
        return run.layouts

    def _room(self, tasks: Mapping[Any, int]) -> int:
        """How many items a request may have on their way beside those of its tasks."""
        return _AHEAD * max(1, len(self._candidates(()))) - sum(tasks.values())

    def _launch(
        self, run: _Run, items: Sequence[EncodeItem]
    ) -> dict[asyncio.Task[list[Failure]], int]:
        """Assign the items; each task has so many, and ends with those that have to be assigned
        again."""
        if run.left_s <= 0:
            raise run.progress[items[0].item].error or DeadlineError(_TOO_LATE)
        shares, stranded = self._assign(run, items)
        tasks = {
            asyncio.create_task(self._serve(run, url, part)): len(part)
            for url, share in shares.items()
            for part in _requests(share)
        }
        # One that encoders failed at is hopeless where one that they had no room for is not.
        alike: defaultdict[type, list[EncodeItem]] = defaultdict(list)
        for item in stranded:
            alike[type(run.progress[item.item].error)].append(item)
        for some in alike.values():
            tasks[asyncio.create_task(self._wait(run, some))] = len(some)
        return tasks

    async def _serve(self, run: _Run, url: str, items: list[EncodeItem]) -> list[Failure]:
        """One encoder's share; those of its items that have to go elsewhere, and why."""
        with run.span.child("epd_dispatch") as span:
            if span:
                _describe(span, run, url, items)
            try:
                failures = self._accept(run, url, items, await self._ask(run, url, items, span))
            except EpdError as error:
                if not error.retry_elsewhere:
                    raise
                # Without its trace, which holds this frame, and the media.
                failures = [(item, error.with_traceback(None)) for item in items]
            if not failures:
                return []
            for item, failure in failures:
                self._note_failure(run, url, item, failure)
            first = failures[0][1]
            if isinstance(first, UnreachableError):
                place = run.reply_to.endpoint.rpartition("@")[2]
                complaint = UnreachableError(
                    f"encoder {url} cannot connect to this server's payload port {place}"
                )
                self._pool.cannot_reach(url, complaint)
            span.fail(first.code, first.message)
            span.note(elsewhere=[item.item for item, _ in failures])
        # Of full encoders there is one line for each refusal, and no news in it.
        level = logging.DEBUG if isinstance(first, OverloadedError) else logging.WARNING
        logger.log(level, "Trying %d items elsewhere: %s", len(failures), first)
        # A full encoder says itself when to come again; the budget is for failures.
        broken = sum(not isinstance(failure, OverloadedError) for _, failure in failures)
        left_s = max(0.0, run.left_s)
        delay_s = self._budget.take(broken, left_s) if broken else 0.0
        if delay_s:
            await asyncio.sleep(min(delay_s, left_s))
        return failures

    async def _wait(self, run: _Run, items: list[EncodeItem]) -> list[Failure]:
        """No encoder is left for these items, which came back for the like reason: wait for one,
        then they begin anew."""
        now = time.monotonic()
        progress = [run.progress[item.item] for item in items]
        reason = progress[0].error
        # For one of them at least.
        faults = frozenset.intersection(*(one.faults for one in progress))
        candidates = self._candidates(faults)
        full = any(one.refused for one in progress)
        if not candidates and (full or isinstance(reason, OverloadedError)):
            full, reason = False, None  # those that were full are gone
        if full:
            run.stranded_at, until = None, run.deadline
        else:
            run.stranded_at = run.stranded_at or now
            until = min(run.stranded_at + self._patience.encoder_s, run.deadline)
        none_left = reason or UnavailableError(self._why_none())
        complaint = self._pool.complaint()
        hopeless = isinstance(reason, EncodeError) and not full
        if complaint is not None or hopeless or now >= until:
            raise complaint or none_left
        self._tally.add("waits")
        returns = max(one.returns for one in progress)
        wait: Callable[[float], Awaitable[None]] = self._pool.changed
        if full:
            wait = partial(self._until_room, faults)
        seconds = pause(returns, self._rng)
        if reason is not None and reason.retry_after_s:
            seconds = reason.retry_after_s * (0.5 + self._rng.random() / 2)
        elif not candidates:
            seconds = until - now
        elif returns >= _HASTY_RETURNS and not full:
            wait = asyncio.sleep
        with run.span.child("epd_wait_for_encoder", items=len(items)):
            await wait(min(seconds, until - now))
        for one in progress:
            one.returns += 1
            one.refused = False
            one.tried = one.faults
        return [(item, none_left) for item in items]

    async def _until_room(self, faults: frozenset[str], seconds: float) -> None:
        """Wait until an encoder is not full, or none is left, or for so long. Whatever else is
        heard of encoders would send all that wait to those that are known to be full."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            await self._pool.changed(left_s)
            views = self._candidates(faults)
            if not views or not all(view.busy for view in views):
                break

    def _why_none(self) -> str:
        known = self._pool.describe()
        if not known:
            return "no encoder is known to this server"
        reasons = "; ".join(f"{one['url']}: {one['state']}, {one['why']}" for one in known[:4])
        return f"none of {len(known)} encoders can be asked ({reasons})"

    def _candidates(self, tried: Collection[str]) -> list[View]:
        return usable(view for view in self._pool.snapshot().encoders if view.url not in tried)

    def _assign(
        self, run: _Run, items: Sequence[EncodeItem]
    ) -> tuple[dict[str, list[EncodeItem]], list[EncodeItem]]:
        """Each item to an encoder that has not had it; and those that are to wait: all have had
        them, or one was full and the rest are known to be."""
        groups: defaultdict[tuple[frozenset[str], bool], list[EncodeItem]] = defaultdict(list)
        for item in items:
            one = run.progress[item.item]
            groups[one.tried, one.refused].append(item)
        shares: defaultdict[str, list[EncodeItem]] = defaultdict(list)
        stranded: list[EncodeItem] = []
        snapshot = self._pool.snapshot()
        for (tried, refused), members in groups.items():
            views = self._candidates(tried)
            # Full ones would each be sent the media, to refuse them.
            if not views or (refused and all(view.busy for view in views)):
                stranded += members
                continue
            works = [run.progress[item.item].work for item in members]
            chosen = self._policy(works, Snapshot(tuple(views), snapshot.turn), self._rng)
            for item, url in zip(members, chosen, strict=True):
                shares[url].append(item)
                run.asked.add(url)
                run.progress[item.item].tried |= {url}
                run.progress[item.item].attempts += 1
        self._pool.assigned(len(items) - len(stranded))
        return shares, stranded

    def _accept(
        self, run: _Run, url: str, items: list[EncodeItem], reply: EncodeReply
    ) -> list[Failure]:
        """Take what an encoder did; the items that it failed at, and why.

        Raises:
            EpdError: of an item that no other encoder can do either.
        """
        run.stranded_at = None
        outcomes = {outcome.item: outcome for outcome in reply.outcomes}
        errors = {item.item: _error_of(url, item, outcomes.get(item.item)) for item in items}
        for error in errors.values():
            if error is not None and not error.retry_elsewhere:
                raise error  # an encoder tells nothing then of those that it gave up
        failures: list[Failure] = []
        for item in items:
            failure = errors[item.item]
            if failure is not None:
                failures.append((item, failure))
                continue
            outcome = outcomes[item.item]
            if outcome.state == "delivered":
                run.note(item.item, outcome.source)
                self._policy.heard(run.progress[item.item].work.key, outcome.source)
            layout = _layout_of(url, item, outcome)
            if layout is not None:
                run.layouts[item.item] = layout
                self._learn(item, layout)
        return failures

    def _note_failure(self, run: _Run, url: str, item: EncodeItem, error: EpdError) -> None:
        """An encoder that failed at an item is not given it again, nor one of another model.

        Raises:
            EpdError: too many encoders failed at it, or ended while they had it.
        """
        self._tally.add("retries", error.code)
        progress = run.progress[item.item]
        progress.refused |= isinstance(error, OverloadedError)
        if isinstance(error, EncodeError | NamespaceError):
            progress.faults |= {url}
        if isinstance(error, EncodeError) and len(progress.faults) >= _MAX_FAULTS:
            raise error
        if isinstance(error, EncoderLostError):
            progress.losses += 1
            if progress.losses >= _MAX_FAULTS:
                raise EncodeError(
                    f"{item.label}: {progress.losses} encoders ended while they had it"
                )

    async def _ask(self, run: _Run, url: str, items: list[EncodeItem], span: Span) -> EncodeReply:
        """The encoder's answer, unless it is given up before.

        Raises:
            UnavailableError: it is out of reach, was found to be silent, or took too long while
                another one could be asked.
        """
        ttl_s = run.left_s
        if ttl_s <= 0:
            raise DeadlineError(_TOO_LATE)
        request = EncodeRequest(
            run.next_id(), self._pool.namespace, ttl_s, run.reply_to, items, run.asker
        )
        span.note(request_id=request.request_id)
        patches = sum(run.progress[item.item].work.patches for item in items)
        with self._pool.attempt(url, patches) as attempt:
            waited_s = min(self._patience.attempt_s, ttl_s + 1.0)
            try:
                async with asyncio.timeout(ttl_s + 1.0) as limit:
                    attempt.lost.add_done_callback(partial(_end, limit))
                    passing = asyncio.create_task(self._pass_over(run, items, waited_s, limit))
                    try:
                        reply = await self._client.encode(url, request, span.headers)
                    finally:
                        passing.cancel()
                _judge(attempt, reply)
                return reply
            except TimeoutError:
                if attempt.lost.done():
                    raise UnavailableError(f"encoder {url} does not answer any more") from None
                raise UnavailableError(
                    f"encoder {url} had no answer within {waited_s:g} s"
                ) from None

    async def _pass_over(
        self, run: _Run, items: list[EncodeItem], after_s: float, limit: asyncio.Timeout
    ) -> None:
        """End the limit of an encoder that has these items, after so long, as soon as one that
        has not had them could take them. Until then it has done more of them than any other."""
        tried = frozenset.intersection(*(run.progress[item.item].tried for item in items))
        while True:
            await asyncio.sleep(after_s)
            views = self._candidates(tried)
            if any(view.state is Health.READY and not view.busy for view in views):
                break
            after_s = _LOOK_S
        limit.reschedule(0.0)


def _judge(attempt: Attempt, reply: EncodeReply) -> None:
    """Note what an answer says of the encoder itself."""
    failed = [from_code(one.code, one.message) for one in reply.outcomes if one.state == "failed"]
    attempt.full = any(isinstance(one, OverloadedError) for one in failed)
    attempt.useless = (
        len(failed) == len(reply.outcomes)
        and not attempt.full
        and all(one.retry_elsewhere for one in failed)
    )


def _requests(share: list[EncodeItem]) -> Iterator[list[EncodeItem]]:
    """An encoder's share, as encode requests."""
    part: list[EncodeItem] = []
    nbytes = 0
    for item in share:
        size = len(item.data or b"")
        if len(part) == _MOST_ITEMS or (part and nbytes + size > MOST_MB << 20):
            yield part
            part, nbytes = [], 0
        part.append(item)
        nbytes += size
    if part:
        yield part


def _end(limit: asyncio.Timeout, _given_up: asyncio.Future[None]) -> None:
    """Nothing is waited for any more."""
    with contextlib.suppress(RuntimeError):  # the answer came in this very turn
        limit.reschedule(0.0)


def _describe(span: Span, run: _Run, url: str, items: list[EncodeItem]) -> None:
    progress = [run.progress[item.item] for item in items]
    span.note(
        encoder=url,
        items=[item.item for item in items],
        patches=int(sum(one.work.patches for one in progress)),
        bytes=sum(len(item.data or b"") for item in items),
        attempt=max(one.attempts for one in progress),
    )


def _layout_of(url: str, item: EncodeItem, outcome: ItemOutcome) -> ItemLayout | None:
    if outcome.layout is None:
        return None
    try:
        told = ItemLayout(outcome.key, outcome.layout)
    except ValueError as error:
        logger.warning("%s: encoder %s told an invalid layout: %s", item.label, url, error)
        return None
    return told if told.layout.modality == item.modality else None


def _error_of(url: str, item: EncodeItem, outcome: ItemOutcome | None) -> EpdError | None:
    if outcome is None:
        return UnavailableError(f"{item.label}: encoder {url} gave no outcome")
    if outcome.state == "failed":
        return from_code(outcome.code, f"{item.label}: {outcome.message}")
    if outcome.state == "declined" and outcome.code == DECLINE_TOO_LARGE:
        return MediaTooLargeError(f"{item.label}: its embedding is larger than this server takes")
    if outcome.state == "declined" and outcome.code == DECLINE_UNKNOWN:
        return EncodeError(f"{item.label}: this server's receiver does not know the request")
    if outcome.state == "declined" and outcome.code == DECLINE_UNREADABLE:
        return EncodeError(f"{item.label}: this server cannot read what encoder {url} told of it")
    # Any other decline: our own receiver has it already or does not want it any more.
    return None
