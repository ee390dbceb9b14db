"""The scheduler process: requests that wait for their items.

SGLang's scheduler calls `process_waiting_requests` once a tick with what it received
and goes on with what comes back. Waiting costs it nothing: the receiver thread does
the receiving, and wakes it when something settled.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang_epd.errors import EncodeError, EpdError, ProtocolError, UnavailableError
from sglang_epd.language import manifest
from sglang_epd.transfer.ledger import ReceivedItem, Settled
from sglang_epd.transfer.receiver import Receiver

logger = logging.getLogger(__name__)

# Builds a request's mm_inputs from its items.
Assemble = Callable[[Any, tuple[ReceivedItem, ...]], Any]
# (request, error message, status)
Failure = tuple[Any, str, HTTPStatus]


class Backend:
    """Holds the scheduler's requests until their items are there.

    Args:
        receiver: the thread that gets them.
        assemble: makes `mm_inputs` of a request and its items.
        abortable: makes the object that the scheduler aborts a request by.
        max_wait_s: a manifest that asks to wait longer is not our tokenizer's.
    """

    def __init__(
        self,
        receiver: Receiver,
        assemble: Assemble,
        abortable: Callable[[Any], Any],
        max_wait_s: float,
    ) -> None:
        self._max_wait_s = max_wait_s
        self._receiver = receiver
        self._assemble = assemble
        self._abortable = abortable
        self._waiting: dict[str, Any] = {}
        self._claims = itertools.count()

    @property
    def waiting(self) -> list[Any]:
        """The requests that wait."""
        return list(self._waiting.values())

    def wait(self, request: Any) -> Failure | None:
        """Hold a request until its items are there; returns its failure if they never can be."""
        try:
            expect = manifest.read(request.encoder_urls)
            # The manifest's field is part of SGLang's API, so a user may have forged it.
            if not expect.ttl_s <= self._max_wait_s:
                raise ProtocolError("the request carries another server's manifest")
        except EpdError as error:
            return self._failure(request, error)
        claim = f"{next(self._claims)}:{request.rid}"
        self._waiting[claim] = request
        self._receiver.claim(claim, expect)
        return None

    def abandon(self, matches: Callable[[str], bool]) -> None:
        """Stop waiting for the requests whose id matches; they come back as failures."""
        for claim, request in self._waiting.items():
            if matches(request.rid):
                self._receiver.abandon(claim)

    def poll(self) -> tuple[list[Any], list[Failure]]:
        """Requests that can go on, and those that cannot; never blocks."""
        ready: list[Any] = []
        failed: list[Failure] = []
        settled_now = self._receiver.take_settled()
        if self._waiting and not self._receiver.alive:
            # It survives what messages do to it; should it end all the same, nobody
            # must wait for it.
            ended = UnavailableError("this server's receiver has ended")
            settled_now = [Settled(claim, error=ended) for claim in self._waiting]
        for settled in settled_now:
            request = self._waiting.pop(settled.rid, None)
            if request is None:
                continue
            error = settled.error or self._complete(request, settled)
            if error is None:
                ready.append(request)
            else:
                failed.append(self._failure(request, error))
        return ready, failed

    def _complete(self, request: Any, settled: Settled) -> EpdError | None:
        try:
            mm_inputs = self._assemble(request, settled.items)
        except EpdError as error:
            return error
        except Exception:
            # Whatever a model's processor makes of one prompt ends that request only.
            logger.exception("Could not lay out the prompt of %s", request.rid)
            return EncodeError("the prompt could not be laid out with its media")
        request.mm_inputs = mm_inputs
        request.input_ids = array("q", mm_inputs.input_ids)
        return None

    def _failure(self, request: Any, error: EpdError) -> Failure:
        # The scheduler's output path needs token ids, of which a prompt that was never
        # laid out may have none.
        if request.input_ids is None:
            request.input_ids = array("q")
        try:
            status = HTTPStatus(error.status)
        except ValueError:  # 499 is not in the standard library's list
            status = HTTPStatus.BAD_REQUEST
        return self._abortable(request), error.message, status
