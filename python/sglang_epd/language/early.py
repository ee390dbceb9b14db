"""Which part of a prompt to prefill while its later items are still being encoded, and when, on
the rank that leads.

A prompt is prefilled up to the first row that is missing, in the order of the prompt, whenever
that is worth a forward pass; `parts` says when it is, and has what becomes of it on the ranks. At
most one part of a request is in flight.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_epd.language import manifest
from sglang_epd.language.backend import PART
from sglang_epd.language.parts import Parts
from sglang_epd.spans import OFF, Span
from sglang_epd.transfer.control import Claims
from sglang_epd.wire import messages as wire


@dataclass(frozen=True)
class Prompt:
    """A prompt with one placeholder an item.

    Attributes:
        ids: its token ids.
        places: where the placeholders are, in ascending order.
        items: the number of the item of each.
    """

    ids: array[int]
    places: tuple[int, ...]
    items: tuple[int, ...]

    def end(self, count: int) -> int:
        """How many ids come before the item that follows the first `count` ones, without a mark
        that may open it."""
        place = self.places[count]
        after = self.places[count - 1] + 1 if count else 0
        return max(place - 1, after)


@dataclass(frozen=True)
class _Reach:
    """How far a prompt may be prefilled: up to the item that follows the first `count` ones, or
    up to the last row that is there of the item `begun`, the last of those; -1 for none."""

    count: int
    begun: int = -1


@dataclass
class _Followed:
    """A claim whose prompt may be prefilled in parts."""

    claim: str
    request: Any
    ticket: str
    prompt: Prompt
    span: Span
    covered: frozenset[int]
    # Tokens of the items that have landed or are covered, by number.
    tokens: dict[int, int]
    # Tokens that are there of items that are landing.
    begun: dict[int, int] = field(default_factory=dict)
    # Tokens that a part has ended at, whatever became of it.
    done: int = 0
    in_flight: bool = False
    # When an item landed that no part has, while another encoder was to send one; 0 if none has.
    paused: float = 0.0
    # New tokens that the next part is run for.
    least: int = 1
    # Of the part in flight.
    trace: Span = field(default=OFF)
    # How many items have landed before the first that has not, when `leading` was last asked, and
    # their tokens.
    _leading: int = 0
    led: int = 0

    def leading(self) -> int:
        """How many items have landed before the first that has not."""
        items = self.prompt.items
        while self._leading < len(items) and items[self._leading] in self.tokens:
            self.led += self.tokens[items[self._leading]]
            self._leading += 1
        return self._leading

    def reach(self) -> _Reach:
        count = self.leading()
        following = self.prompt.items[count : count + 1]
        if following and following[0] in self.begun:
            return _Reach(count + 1, following[0])
        return _Reach(count)

    def end(self, reach: _Reach) -> int:
        """Ids of the prompt so far, of which each item has one."""
        if reach.begun >= 0:
            return self.prompt.places[reach.count - 1] + 1
        return self.prompt.end(reach.count)

    def length(self, reach: _Reach) -> int:
        """Tokens of the prompt so far."""
        begun = self.begun[reach.begun] if reach.begun >= 0 else 0
        return self.end(reach) - reach.count + self.led + begun


class Early:
    """Makes parts of the prompts whose items land one after the other.

    Args:
        claims: how items are had before the others.
        parts: what becomes of parts on this rank.
        read: a request's prompt; None where it is not to be prefilled in parts.
        make: a request for the KV of a prompt's beginning, like another request, with an id and
            token ids of its own.
        secret: the key that signs manifests.
    """

    def __init__(
        self,
        claims: Claims,
        parts: Parts,
        *,
        read: Callable[[Any, wire.Expect], Prompt | None],
        make: Callable[[Any, str, array[int]], Any],
        secret: bytes,
    ) -> None:
        self.read = read
        self._claims = claims
        self._parts = parts
        self._make = make
        self._secret = secret
        self._names = itertools.count()
        self._followed: dict[str, _Followed] = {}
        # Of them, those that may have a part to prefill; and those whose part was too small.
        self._stirred: dict[str, None] = {}
        self._small: dict[str, None] = {}
        # New tokens that a part had to have when they were last looked at.
        self._least = 0
        # When the next one of them is due that pauses; infinite without one.
        self._due = math.inf
        # By the name that their items were asked for under: the claim, its request, and how far
        # they reach.
        self._asked: dict[str, tuple[_Followed, _Reach]] = {}
        # Parts whose items are here, in the same way, with where those have landed.
        self._ready: list[tuple[_Followed, _Reach, tuple[wire.Landed | None, ...]]] = []

    def follow(
        self,
        claim: str,
        request: Any,
        expect: wire.Expect,
        covered: tuple[int, ...],
        *,
        prompt: Prompt,
        span: Span,
    ) -> None:
        """From now on the request of a claim may be prefilled in parts."""
        known = {number: expect.layouts[number].tokens for number in covered}
        one = _Followed(
            claim,
            request,
            expect.ticket,
            prompt,
            span,
            frozenset(covered),
            known,
            # Of a claim that gave way to this one.
            in_flight=self._parts.alive(manifest.name(request)),
        )
        self._followed[claim] = one
        self._stirred[claim] = None
        count = one.leading()
        # The text behind the last covered item may not be covered.
        if count:
            one.done = one.end(_Reach(count - 1)) - (count - 1) + one.led

    def leave(self, claim: str) -> None:
        """A claim is over."""
        one = self._followed.pop(claim, None)
        self._stirred.pop(claim, None)
        self._small.pop(claim, None)
        if one is not None:
            one.trace.end()

    def hear(self, message: wire.Message) -> bool:
        """Take what concerns parts; False if a message of the receiver does not."""
        if isinstance(message, wire.Arrived):
            if (one := self._followed.get(message.claim)) is not None:
                (one.tokens if message.whole else one.begun)[message.item] = message.tokens
                if message.elsewhere:
                    one.paused = one.paused or time.monotonic()
                self._stirred[one.claim] = None
            return True
        if not isinstance(message, wire.Settled) or message.claim not in self._asked:
            return False
        one, reach = self._asked.pop(message.claim)
        if message.code:
            one.in_flight = False
        else:
            self._ready.append((one, reach, message.items))
        return True

    def take(self) -> list[Any]:
        """The parts that are to be prefilled from now on, as requests for all ranks."""
        self._due = math.inf
        # Ranks know nothing yet of a part that is ready: its request would have another one.
        if not self._ready and (self._stirred or self._small):
            self._look()
        ready, self._ready = self._ready, []
        return [self._begin(*part) for part in ready]

    def due_s(self) -> float:
        """Seconds until a part may be due that pauses now; infinite without one."""
        return max(0.0, self._due - time.monotonic())

    def _look(self) -> None:
        least = self._parts.least()
        if least is None:
            return
        if least < self._least:
            self._stirred |= self._small
            self._small.clear()
        self._least = least
        for claim in list(self._stirred):
            self._consider(self._followed[claim], least)

    def _consider(self, one: _Followed, least: int) -> None:
        if one.in_flight:
            if any(asked is one for asked, _ in self._asked.values()):
                return
            if self._parts.alive(manifest.name(one.request)):
                return
            one.in_flight = False
            one.trace.end()
        if one.leading() == len(one.prompt.items):
            del self._stirred[one.claim]
            return
        reach = one.reach()
        length = one.length(reach)
        if length - one.done < least:
            del self._stirred[one.claim]  # until another item lands
            self._small[one.claim] = None
            return
        if one.paused:
            # If another encoder's item lands right behind, a part without it costs more than it
            # gains.
            due = one.paused + self._parts.pause_s()
            if due > time.monotonic():
                self._due = min(self._due, due)
                return
            one.paused = 0.0
        one.least = least
        one.done, one.in_flight = length, True
        needed = tuple(sorted(set(one.prompt.items[: reach.count]) - one.covered))
        if not needed:
            self._ready.append((one, reach, (None,) * len(one.prompt.items)))
            return
        name = f"part {next(self._names)}"
        self._asked[name] = one, reach
        self._claims.take_part(one.ticket, one.claim, name, needed, reach.begun)

    def _begin(self, one: _Followed, reach: _Reach, landed: tuple[wire.Landed | None, ...]) -> Any:
        """A part. Where its request is over, every rank has to give the items back: such a part
        says no request."""
        ids = one.prompt.ids[: one.end(reach)]
        items = tuple(sorted(one.prompt.items[: reach.count]))
        # SGLang aborts requests by the beginnings of their ids.
        rid = f"{one.request.rid}{PART}{secrets.token_hex(4)}"
        part = self._make(one.request, rid, ids)
        of = ""
        if one.claim in self._followed:
            of = manifest.name(one.request)
            one.trace = one.span.child("epd_prefill_early", items=reach.count, tokens=one.done)
        carried = wire.Beginning(of, items, tuple(landed[item] for item in items), one.least)
        manifest.carry(part, manifest.write(carried, self._secret))
        return part
