"""Runs one request's items to their end: delivered, or an error for the user.

One HTTP request an encoder carries its share. An item whose encoder failed in a way
that another may cure is sent to one that has not had it yet, alone, under the same
deadline; what the user's media did wrong is not tried again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.dispatch.policies import Policy
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EpdError,
    MediaTooLargeError,
    UnavailableError,
    from_code,
)
from sglang_epd.wire import EncodeItem, EncodeRequest, ItemLayout, ItemOutcome, ReplyTo
from sglang_epd.wire.messages import DECLINE_TOO_LARGE, DECLINE_UNKNOWN

logger = logging.getLogger(__name__)


@dataclass
class _Run:
    """One request's dispatch: where it goes, which encoders each item has been to, and
    what was learnt of the items."""

    reply_to: ReplyTo
    deadline: float
    tried: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    layouts: dict[int, ItemLayout] = field(default_factory=dict)
    # Not made of the ticket: encoders show request ids to anybody who asks.
    _name: str = field(default_factory=lambda: secrets.token_hex(8))
    _sent: int = 0

    def next_id(self) -> str:
        self._sent += 1
        return f"{self._name}.{self._sent}"


class Dispatcher:
    """Spreads items over the encoders that are known at the moment.

    Args:
        client: how an encoder is reached.
        urls: the pool; read at each attempt, so that it may change.
        policy: how items are spread.
        namespace: this server's encoder identity, checked by every encoder.
        rng: random source of the policy.
    """

    def __init__(
        self,
        client: EncoderClient,
        urls: Callable[[], Sequence[str]],
        policy: Policy,
        namespace: str,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._urls = urls
        self._policy = policy
        self._namespace = namespace
        self._rng = rng or random.Random()

    async def run(
        self, reply_to: ReplyTo, items: Sequence[EncodeItem], deadline: float
    ) -> dict[int, ItemLayout]:
        """Have every item delivered.

        Args:
            deadline: on the clock of `time.monotonic`.

        Returns:
            The layouts by item number, of those items whose encoder told a valid one.

        Raises:
            EpdError: what the user is to be told; the items not delivered by then
                have been cancelled at their encoders.
        """
        run = _Run(reply_to, deadline)
        await self._spread(run, items, None)
        return run.layouts

    async def _spread(
        self, run: _Run, items: Sequence[EncodeItem], last_error: EpdError | None
    ) -> None:
        """Assign the items and see every share to its end; the first error ends them all."""
        shares = self._assign(run, items, last_error)
        tasks = [asyncio.create_task(self._serve(run, url, share)) for url, share in shares.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, run: _Run, url: str, items: list[EncodeItem]) -> None:
        """One encoder's share; what it could not serve goes elsewhere at once."""
        failures = await self._send(run, url, items)
        if failures:
            await self._spread(run, [item for item, _ in failures], failures[0][1])

    def _assign(
        self, run: _Run, items: Sequence[EncodeItem], last_error: EpdError | None
    ) -> dict[str, list[EncodeItem]]:
        """Each item to an encoder that has not had it."""
        urls = list(dict.fromkeys(self._urls()))
        groups: defaultdict[tuple[str, ...], list[EncodeItem]] = defaultdict(list)
        for item in items:
            tried = run.tried[item.item]
            groups[tuple(url for url in urls if url not in tried)].append(item)
        shares: defaultdict[str, list[EncodeItem]] = defaultdict(list)
        for left, members in groups.items():
            if not left:
                raise last_error or UnavailableError("no encoder is known to this server")
            for item, url in zip(members, self._policy(members, left, self._rng), strict=True):
                shares[url].append(item)
                run.tried[item.item].add(url)
        return shares

    async def _send(
        self, run: _Run, url: str, items: list[EncodeItem]
    ) -> list[tuple[EncodeItem, EpdError]]:
        """One share to one encoder; returns the items to try elsewhere, with the reason."""
        ttl_s = run.deadline - time.monotonic()
        if ttl_s <= 0:
            raise DeadlineError("the request's deadline passed before its media were encoded")
        request_id = run.next_id()
        request = EncodeRequest(request_id, self._namespace, ttl_s, run.reply_to, items)
        try:
            reply = await self._client.encode(url, request)
        except EpdError as error:
            if not error.retry_elsewhere:
                raise
            logger.warning("Trying %d items of %s elsewhere: %s", len(items), request_id, error)
            return [(item, error) for item in items]
        outcomes = {outcome.item: outcome for outcome in reply.outcomes}
        failures: list[tuple[EncodeItem, EpdError]] = []
        for item in items:
            outcome = outcomes.get(item.item)
            failure = _error_of(url, item, outcome)
            if failure is None:
                assert outcome is not None
                layout = _layout_of(url, item, outcome)
                if layout is not None:
                    run.layouts[item.item] = layout
                continue
            if not failure.retry_elsewhere:
                raise failure
            logger.warning("Trying %s of %s elsewhere: %s", item.label, request_id, failure)
            failures.append((item, failure))
        return failures


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
    # Any other decline: our own receiver has it already or does not want it any more.
    return None
