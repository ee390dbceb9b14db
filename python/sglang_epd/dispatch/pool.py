"""The pool: the encoders that a language server knows, and the state of each.

Plain data behind a lock: one thread watches encoders (`watcher`), the tokenizer's event
loop sends them work (`dispatcher`).
"""

from __future__ import annotations

import asyncio
import enum
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from sglang_epd.errors import (
    EpdError,
    NamespaceError,
    OverloadedError,
    TokenError,
    UnavailableError,
    UnreachableError,
    from_code,
)


class Health(enum.Enum):
    """Of one encoder, as this server sees it."""

    JOINING = "joining"  # announced, not heard of yet
    READY = "ready"
    SUSPECT = "suspect"  # the last probe or request failed: asked where no other is left
    OPEN = "open"  # failed again: not asked; what it has goes elsewhere, if there is one
    DRAINING = "draining"  # told to stop, or taken out: finishes what it has
    MISFIT = "misfit"  # of another model, refuses the token, or cannot reach this server: not asked
    GONE = "gone"  # its lease or its name's address ended; it may join anew


# (url, from or None, to, why)
OnMove = Callable[[str, Health | None, Health, str], None]
# Ends a wait in some event loop, from any thread.
Wake = Callable[[], object]
_S = Health
_MOVES: dict[Health, frozenset[Health]] = {
    _S.JOINING: frozenset({_S.READY, _S.SUSPECT, _S.DRAINING, _S.MISFIT, _S.GONE}),
    _S.READY: frozenset({_S.SUSPECT, _S.DRAINING, _S.MISFIT, _S.GONE}),
    _S.SUSPECT: frozenset({_S.READY, _S.OPEN, _S.DRAINING, _S.MISFIT, _S.GONE}),
    _S.OPEN: frozenset({_S.READY, _S.DRAINING, _S.MISFIT, _S.GONE}),
    _S.DRAINING: frozenset({_S.READY, _S.SUSPECT, _S.MISFIT, _S.GONE}),
    _S.MISFIT: frozenset({_S.READY, _S.SUSPECT, _S.DRAINING, _S.GONE}),
    _S.GONE: frozenset(),
}
# Where work may go, best first.
_USABLE = (_S.READY, _S.JOINING, _S.SUSPECT)
# Probes in a row that have failed: of about an hour.
_GONE_FAILURES = 1800
# How old an encoder's word on its uptime may be, as it is heard.
_TOLD_S = 2.0
# An encoder that refused this server's token, or cannot connect to its payload port, is not asked
# for so long: probes do not tell when it would take it, or can.
_REFUSED_S = 5.0
# An encoder that failed at all that it was sent, so many times in a row, is passed over for 1 s,
# then for 2, up to 32. Its probes do not tell, and for want of work it would be chosen first.
_MOST_USELESS = 3
# Owners: what keeps an encoder in the pool.
STATIC = "static"
LEASE = "lease"


@dataclass(frozen=True)
class Report:
    """An encoder's own report (`GET /v1/status`).

    Attributes:
        namespace: its identity.
        draining: it takes nothing new.
        patches_queued: patches that wait or run there, of all language servers.
        patches_per_s: its rate; 0 where it has not run anything yet.
        uptime_s: seconds since it was started.
    """

    namespace: str
    draining: bool = False
    patches_queued: float = 0.0
    patches_per_s: float = 0.0
    uptime_s: float = math.inf


class View(NamedTuple):
    """One encoder in a snapshot.

    Attributes:
        url: how it is reached, without a slash at its end.
        state: as seen at the snapshot.
        load: patches before something new would run there.
        rate: patches a second; 0 where unknown.
        busy: it refused work for being full, or failed at all that it was sent, and is passed
            over for a while.
    """

    url: str
    state: Health = Health.READY
    load: float = 0.0
    rate: float = 0.0
    busy: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The encoders that may be asked now, in a lasting order.

    Attributes:
        encoders: all of them; `usable` tells the best.
        turn: items that have been assigned by this server so far.
    """

    encoders: tuple[View, ...]
    turn: int = 0


@dataclass(eq=False)
class Attempt:
    """One request to an encoder.

    Attributes:
        lost: done, in its loop, when the encoder is given up meanwhile.
        full: it was answered that there was no room for some items.
        useless: it was answered, and the encoder had failed at all items.
    """

    lost: asyncio.Future[None]
    full: bool = False
    useless: bool = False


@dataclass
class _Encoder:
    url: str
    state: Health = Health.JOINING
    why: str = "not heard of yet"
    owners: set[str] = field(default_factory=set)
    lease_until: float = 0.0
    failures: int = 0
    # Why it cannot do this server's work, however well it is; and until when its refusal counts.
    misfit: EpdError | None = None
    refused_until: float = 0.0
    report: Report | None = None
    busy_until: float = 0.0
    # Answers in a row by which it had failed at all items.
    useless: int = 0
    # Patches that this server has sent there and not heard of; and so at the last report.
    outstanding: float = 0.0
    reported_at: float = 0.0
    # The requests that it has: when each was sent, and its patches.
    attempts: dict[Wake, tuple[float, float]] = field(default_factory=dict)

    def lease_s(self, now: float) -> float | None:
        """The rest of its lease; None where it has none, or one that never ends."""
        left = self.lease_until - now
        return round(left, 1) if LEASE in self.owners and left < math.inf else None

    def load(self) -> float:
        queued = self.report.patches_queued if self.report else 0.0
        return max(self.outstanding, queued + self.outstanding - self.reported_at)


class Pool:
    """Encoders by URL.

    Args:
        namespace: this server's encoder identity; encoders of another are not used.
        on_move: told of each change of a state, with the lock held: for logs and metrics.
    """

    def __init__(
        self,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
        on_move: OnMove = lambda *_: None,
    ) -> None:
        self.namespace = namespace
        self._clock = clock
        self._on_move = on_move
        self._lock = threading.RLock()
        self._encoders: dict[str, _Encoder] = {}
        self._turn = 0
        # In the order in which they came.
        self._waiters: dict[Wake, None] = {}
        self._probe: Callable[[str], None] | None = None

    def listen(self, probe: Callable[[str], None]) -> None:
        """Have encoders probed, those that are known first.

        Args:
            probe: called with a URL, from any thread, when that is to be probed now.

        Raises:
            RuntimeError: another listens already.
        """
        if self._probe is not None:
            raise RuntimeError("the pool's encoders are probed already")
        self._probe = probe
        for url in self.urls():
            probe(url)

    def look(self, url: str) -> None:
        """Have an encoder probed now."""
        if self._probe is not None:
            self._probe(url)

    # Its owners.

    def add(self, url: str, owner: str = STATIC) -> None:
        """An encoder that `owner` vouches for; known ones get one owner more."""
        with self._lock:
            self._join(url).owners.add(owner)
        self.look(url)

    def remove(self, url: str, owner: str) -> None:
        """`owner` does not vouch for it any more; without an owner it is gone, when it has finished
        what it has. Until then it is watched."""
        with self._lock:
            encoder = self._encoders.get(url)
            if encoder is None:
                return
            encoder.owners.discard(owner)
            if not encoder.owners:
                self._take_out(encoder)

    def register(self, url: str, namespace: str, lease_s: float) -> None:
        """An encoder announces itself, or renews its lease (infinite: until it leaves, or cannot be
        reached for about an hour).

        Args:
            namespace: its identity; empty where it does not say.

        Raises:
            NamespaceError: it is another encoder than this server needs.
        """
        if namespace and namespace != self.namespace:
            raise NamespaceError.between(self.namespace, namespace)
        with self._lock:
            encoder = self._join(url)
            encoder.owners.add(LEASE)
            encoder.lease_until = self._clock() + lease_s
            doubtful = encoder.state is not _S.READY
        if doubtful:
            self.look(encoder.url)

    def expire(self) -> None:
        """Let go of those whose lease has ended, or that never end it and are gone for good."""
        with self._lock:
            now = self._clock()
            for encoder in list(self._encoders.values()):
                endless = encoder.lease_until == math.inf
                gone = endless and encoder.failures >= _GONE_FAILURES
                ended = gone or now >= encoder.lease_until
                if LEASE in encoder.owners and ended:
                    self.remove(encoder.url, LEASE)

    def urls(self, owner: str | None = None) -> list[str]:
        """All that are known, or those that `owner` vouches for."""
        with self._lock:
            return [
                one.url for one in self._encoders.values() if owner is None or owner in one.owners
            ]

    # How they are

    def heard(self, url: str, report: Report) -> None:
        """Note an answered probe."""
        with self._lock:
            encoder = self._encoders.get(url)
            if encoder is None:
                return
            encoder.failures = 0
            self._lose_those_before(encoder, self._clock() - report.uptime_s - _TOLD_S)
            encoder.report, encoder.reported_at = report, encoder.outstanding
            encoder.misfit = misfit = self._misfit(encoder, report)
            if encoder.state is _S.OPEN:
                encoder.busy_until, encoder.useless = 0.0, 0  # it may be another process
            draining = report.draining or not encoder.owners
            state = _S.DRAINING if draining else _S.MISFIT if misfit else _S.READY
            self._move(encoder, state, misfit.message if misfit else "")
            if not encoder.owners and not encoder.attempts:
                self._take_out(encoder)

    def failed(self, url: str, why: str) -> None:
        """Note a probe that found the encoder out of reach or silent, and why."""
        with self._lock:
            encoder = self._encoders.get(url)
            if encoder is None:
                return
            encoder.failures += 1
            if encoder.state is _S.SUSPECT and encoder.failures > 1:
                # What it was says nothing of what comes back at its address.
                encoder.misfit = None
                self._move(encoder, _S.OPEN, why)
            elif encoder.state is not _S.OPEN:
                self._move(encoder, _S.SUSPECT, why)
            encoder.why = why

    def doubt(self, url: str, why: str) -> None:
        """Note a request that failed there: others come first until a probe has found it well."""
        with self._lock:
            encoder = self._encoders.get(url)
            if encoder is not None and encoder.state in (_S.READY, _S.JOINING):
                self._move(encoder, _S.SUSPECT, why)
        self.look(url)

    def cannot_reach(self, url: str, error: UnreachableError) -> None:
        """Note that an encoder cannot connect to this server's payload port."""
        with self._lock:
            if encoder := self._encoders.get(url):
                self._refused(encoder, error)

    def snapshot(self) -> Snapshot:
        """Encoders that may be asked."""
        with self._lock:
            now = self._clock()
            views = [
                View(
                    one.url,
                    one.state,
                    one.load(),
                    one.report.patches_per_s if one.report else 0.0,
                    now < one.busy_until,
                )
                for one in self._encoders.values()
                if one.owners and one.state in _USABLE and one.misfit is None
            ]
            return Snapshot(tuple(views), self._turn)

    def assigned(self, items: int) -> None:
        """So many items were spread (`Snapshot.turn`)."""
        with self._lock:
            self._turn += items

    def state(self, url: str) -> Health:
        """Of one encoder; GONE where it is not known."""
        with self._lock:
            encoder = self._encoders.get(url)
            return encoder.state if encoder else Health.GONE

    def describe(self) -> list[dict[str, object]]:
        """All of them, for people."""
        with self._lock:
            now = self._clock()
            return [
                {
                    "url": one.url,
                    "state": one.state.value,
                    "why": one.misfit.message if one.misfit else one.why,
                    "owners": sorted(one.owners),
                    "lease_s": one.lease_s(now),
                    "patches": round(one.load()),
                    "requests": len(one.attempts),
                    "busy": now < one.busy_until,
                }
                for one in self._encoders.values()
            ]

    def complaint(self) -> EpdError | None:
        """Why all encoders are unusable, if waiting will not change it."""
        with self._lock:
            misfits = [one.misfit for one in self._encoders.values() if one.owners]
        lasting = [one for one in misfits if one and not isinstance(one, UnreachableError)]
        if not misfits or len(lasting) < len(misfits):
            return None
        return from_code(lasting[0].code, lasting[0].message)

    # Work for them

    @contextmanager
    def attempt(self, url: str, patches: float) -> Iterator[Attempt]:
        """Around one request of so many patches to an encoder, from the running loop."""
        lost, lose = _sign()
        attempt = Attempt(lost)
        with self._lock:
            encoder = self._encoders.get(url)
            if encoder is None or encoder.state is _S.OPEN:
                _give(lost)
            else:
                encoder.attempts[lose] = self._clock(), patches
                encoder.outstanding += patches
        try:
            yield attempt
        except BaseException as error:
            self._ended(url, lose, error)
            raise
        full = OverloadedError("no room for some items") if attempt.full else None
        self._ended(url, lose, full, useless=attempt.useless)

    async def changed(self, seconds: float) -> None:
        """Return when an encoder has come, gone, changed its state or got room, or after
        `seconds`. Room wakes one of the waiting callers, any other change all of them."""
        told, tell = _sign()
        with self._lock:
            self._waiters[tell] = None
        try:
            await asyncio.wait((told,), timeout=seconds)
        finally:
            with self._lock:
                self._waiters.pop(tell, None)

    def _misfit(self, encoder: _Encoder, report: Report) -> EpdError | None:
        if report.namespace != self.namespace:
            return NamespaceError.between(self.namespace, report.namespace)
        lasting = isinstance(encoder.misfit, TokenError | UnreachableError)
        return encoder.misfit if lasting and self._clock() < encoder.refused_until else None

    def _refused(self, encoder: _Encoder, error: EpdError) -> None:
        if encoder.state in (*_USABLE, _S.MISFIT):
            # Without its trace.
            encoder.misfit = from_code(error.code, error.message)
            encoder.refused_until = self._clock() + _REFUSED_S
            self._move(encoder, _S.MISFIT, error.message)
        self.look(encoder.url)

    def _join(self, url: str) -> _Encoder:
        encoder = self._encoders.get(url)
        if encoder is None:
            encoder = self._encoders[url] = _Encoder(url)
            self._on_move(url, None, encoder.state, "")
            self._tell()
        return encoder

    def _move(self, encoder: _Encoder, state: Health, why: str) -> None:
        encoder.why = why
        if state is encoder.state:
            return
        if state not in _MOVES[encoder.state]:
            raise AssertionError(f"{encoder.url}: {encoder.state.value} to {state.value}")
        old, encoder.state = encoder.state, state
        self._on_move(encoder.url, old, state, why)
        if state is _S.GONE:
            del self._encoders[encoder.url]
        self._tell()
        if state is _S.OPEN and not encoder.owners:
            _lose(encoder)
        self._take_elsewhere()

    def _lose_those_before(self, encoder: _Encoder, started: float) -> None:
        """What was sent to a process that is no more: nothing may ever come on the connections of
        a machine that was reset."""
        for lose, (sent, _) in list(encoder.attempts.items()):
            if sent < started:
                self._forget(encoder, lose)
                lose()

    def _forget(self, encoder: _Encoder, attempt: Wake) -> None:
        _, patches = encoder.attempts.pop(attempt)
        left = encoder.outstanding - patches
        encoder.outstanding = max(0.0, left) if encoder.attempts else 0.0

    def _take_elsewhere(self) -> None:
        """A silent encoder keeps its items until there is an elsewhere: if all are silent, the
        fault is rather this server's, or the network's."""
        if any(one.state is _S.READY for one in self._encoders.values()):
            for one in self._encoders.values():
                if one.state is _S.OPEN:
                    _lose(one)

    def _take_out(self, encoder: _Encoder) -> None:
        """An encoder without owners goes, once it has finished what it has."""
        if not encoder.attempts:
            self._move(encoder, _S.GONE, "taken out")
        elif encoder.state is _S.OPEN:
            _lose(encoder)
        else:
            self._move(encoder, _S.DRAINING, "taken out")

    def _tell(self) -> None:
        for tell in self._waiters:
            tell()

    def _ended(
        self,
        url: str,
        attempt: Wake,
        error: BaseException | None,
        *,
        useless: bool = False,
    ) -> None:
        with self._lock:
            encoder = self._encoders.get(url)
            if encoder is None or attempt not in encoder.attempts:
                return
            self._forget(encoder, attempt)
            now = self._clock()
            if useless and now >= encoder.busy_until:
                encoder.useless += 1
                if encoder.useless >= _MOST_USELESS:
                    longer = min(encoder.useless - _MOST_USELESS, 5)
                    encoder.busy_until = now + 2.0**longer
            elif error is None and not useless:
                encoder.busy_until, encoder.useless = 0.0, 0
            if error is None and now >= encoder.busy_until:
                tell = next(iter(self._waiters), None)
                if tell is not None:
                    del self._waiters[tell]
                    tell()
            elif isinstance(error, OverloadedError):
                encoder.busy_until = now + (error.retry_after_s or 1.0)
            elif isinstance(error, NamespaceError | TokenError):
                self._refused(encoder, error)
            elif isinstance(error, UnavailableError):
                self.doubt(url, error.message)
            if not encoder.owners and not encoder.attempts:
                self._take_out(encoder)


def _sign() -> tuple[asyncio.Future[None], Wake]:
    """A future, and what gives its result from any thread."""
    loop = asyncio.get_running_loop()
    sign: asyncio.Future[None] = loop.create_future()
    return sign, partial(loop.call_soon_threadsafe, _give, sign)


def _give(sign: asyncio.Future[None]) -> None:
    if not sign.done():
        sign.set_result(None)


def usable(views: Iterable[View]) -> list[View]:
    """The best of these: ready ones that are not full, then full ones, joining, suspect."""
    ranked: dict[tuple[int, bool], list[View]] = {}
    for view in views:
        ranked.setdefault((_USABLE.index(view.state), view.busy), []).append(view)
    return ranked[min(ranked)] if ranked else []


def _lose(encoder: _Encoder) -> None:
    for lose in encoder.attempts:
        lose()
