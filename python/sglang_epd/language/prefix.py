"""Requests whose prompts rest on the prefix cache, on every rank.

Where the layouts of all of a request's items are known, its prompt is laid out, with the
items' keys as their identities, before any embedding is there: the radix tree then says
which items' KV this server has. Those need no embedding; the request waits for the others
only, or for nothing.

Every rank decides by itself, because asking a tree and locking its nodes changes it, and
the trees of ranks that run a request together must stay the same. They decide alike: they
see the same requests in the same tick. Only the rank that leads talks to the receiver.

A match is locked until the prefill has taken it. The locks yield: as soon as a
request is not admitted, or a running one cannot go on, for want of memory, all of them are
let go, because requests that wait must not keep memory from those that could run. So a
match may be lost; then the request is taken out of the queue again, gives up the embeddings that
it has, and goes on when all of its items are there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang_epd.errors import EpdError, MediaError, UnavailableError
from sglang_epd.language import manifest
from sglang_epd.language.assembly import Rows
from sglang_epd.language.backend import Failure, Leader
from sglang_epd.language.relay import Receive
from sglang_epd.wire.messages import Expect, Layout, Settled

if TYPE_CHECKING:  # it imports this module
    from sglang_epd.language.parts import Parts

logger = logging.getLogger(__name__)

_MARK = "_sglang_epd_bare"


@dataclass(eq=False)
class Resting:
    """A request that may need no embeddings.

    Attributes:
        carrier: the request as the scheduler received it; it carries outcomes to the ranks.
        expect: how its items were announced.
        asked: whether its ticket was claimed; a second time takes a new one.
        lost: whether it lost its match; from then on it rests on no other.
    """

    carrier: Any
    expect: Expect
    asked: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Bare:
    """An item of SGLang's without rows; `rows` says where it would have them from."""

    resting: Resting
    rows: Rows


class Tree(Protocol):
    """The part of SGLang's radix tree that is used here."""

    def match(self, request: Any) -> tuple[int, Any]:
        """Tokens of the prompt whose KV is on the device, and the node they end at."""

    def lock(self, node: Any) -> Any: ...

    def unlock(self, lock: Any) -> None: ...


class Queue(Protocol):
    """The part of SGLang's scheduler that is used here."""

    def add(self, request: Any, *, retracted: bool) -> None:
        """Take a request in (again)."""

    def remove(self, request: Any) -> bool:
        """Take one out of the waiting queue; False if it is not there."""

    def waiting(self) -> Collection[str]:
        """Names of all requests that wait to be prefilled, wherever."""

    def discard(self, request: Any) -> None:
        """Give back the memory of a request that will not run."""

    def look_again(self) -> None:
        """Memory has become free without the end of a request."""

    def running(self, request: Any) -> bool:
        """Whether a request is being prefilled, with its KV not all in the tree yet."""

    def holds(self, request: Any) -> bool:
        """Whether a request waits or runs, wherever."""

    def busy(self) -> tuple[bool, bool]:
        """Whether requests wait to be prefilled, or those that decode are to go on for some steps
        after a prefill; whether any decode."""


def mark(output: Any, rows: list[Rows], resting: Resting) -> None:
    """Note in an output's items without rows where their rows would come from.

    On the tensors, which stay with their items through all that SGLang makes of a request.
    """
    for item, its_rows in zip(output.mm_items, rows, strict=True):
        if not len(item.precomputed_embeddings):
            setattr(item.precomputed_embeddings, _MARK, Bare(resting, its_rows))


def bare_items(request: Any) -> list[tuple[Any, Bare]]:
    """A request's items that have no rows."""
    return [(item, note) for item, note in _marked(request) if not len(item.precomputed_embeddings)]


def _marked(request: Any) -> list[tuple[Any, Bare]]:
    """A request's items that had no rows when the prompt was laid out."""
    inputs = request.multimodal_inputs
    if inputs is None:
        return []
    found = []
    for item in inputs.mm_items:
        note = getattr(item.precomputed_embeddings, _MARK, None)
        if note is not None:
            found.append((item, note))
    return found


def _give_up(request: Any) -> bool:
    """Drop the embeddings of a request that is to wait: its items may need their memory. Returns
    whether it had any."""
    given = False
    for item, note in _marked(request):
        rows = item.precomputed_embeddings
        if len(rows):
            item.precomputed_embeddings = rows.new_empty((0, *rows.shape[1:]))
            setattr(item.precomputed_embeddings, _MARK, note)
            given = True
    return given


def _alike(one: Layout, other: Layout) -> bool:
    """Whether prompts have the same places for both."""
    return (one.embedding.shape, one.grid) == (other.embedding.shape, other.grid)


def end(item: Any) -> int:
    """How much of the prompt is past an item's last token."""
    return int(max(last for _, last in item.offsets)) + 1


class PrefixGate:
    """Lets requests pass whose items are covered, and holds the others.

    Args:
        tree: this rank's radix tree.
        queue: this rank's scheduler.
        leader: on the rank that leads; None on the others.
        receive: reads the items of a claim.
        parts: parts of prompts, on this rank; None where there are none.
    """

    def __init__(
        self,
        tree: Tree,
        queue: Queue,
        leader: Leader | None,
        receive: Receive,
        parts: Parts | None = None,
    ) -> None:
        self._parts = parts
        self._tree = tree
        self._queue = queue
        self._leader = leader
        self._receive = receive
        self._locks: dict[str, Any] = {}
        # By name: the request, and whether it had been retracted.
        self._parked: dict[str, tuple[Any, bool]] = {}
        self._lost: list[Any] = []
        # Locks were let go since the last tick.
        self._freed = False

    def __len__(self) -> int:
        """Requests that wait for items here."""
        return len(self._parked)

    @property
    def locks(self) -> int:
        """Matches that are held."""
        return len(self._locks)

    def admit(self, request: Any, *, retracted: bool = False) -> bool:
        """Before a request is queued; False if it is held here until its items have landed, or
        is a part of a prompt that is not worth it."""
        if self._parts is not None and (verdict := self._parts.admit(request)) is not None:
            return verdict
        name, bare = manifest.name(request), bare_items(request)
        if not bare:
            self.forgo(name)
            if self._parts is not None:
                # SGLang may have refused it before its items had come.
                self._parts.settle(name)
                self._parts.admit(request)
            return True
        self._unlock(name)
        resting = bare[0][1].resting
        length, node = (0, None) if resting.lost else self._tree.match(request)
        missing = {note.rows.item for item, note in bare if end(item) > length}
        if missing and _give_up(request):
            # On a match again, it might lose that again.
            resting.lost, length = True, 0
            missing = {note.rows.item for _, note in bare_items(request)}
        if length:
            self._locks[name] = self._tree.lock(node)
        self._ask(request, resting, missing)
        if not missing:
            if self._parts is not None:
                # Nothing will be told of its items.
                self._parts.settle(name)
                self._parts.admit(request)
            return True
        self._parked[name] = request, retracted
        return False

    def may_run(self, request: Any, prefix_len: int, batch: Sequence[Any] = ()) -> bool:
        """Before a request is prefilled from `prefix_len` on, with those of a batch; False if it
        has lost its match.

        It is not to be run then, and leaves the queue before the next batch is made. Nor is it
        to be run yet while a part of its prompt is.
        """
        if self._parts is not None and self._parts.holds_back(request, batch):
            return False
        bare = bare_items(request)
        if all(end(item) <= prefix_len for item, _ in bare):
            return True
        bare[0][1].resting.lost = True
        if not any(one is request for one in self._lost):
            self._lost.append(request)
        return False

    def taken(self, request: Any) -> None:
        """The prefill holds the match itself from now on."""
        self._unlock(manifest.name(request))
        if self._parts is not None:
            self._parts.taken(request)

    def gives_way(self, request: Any) -> bool:
        """Whether a request that there is no memory for is a part of a prompt, which leaves the
        queue then: those behind it may be smaller."""
        if self._parts is None or not self._parts.has(request):
            return False
        self._lost.append(request)
        return True

    def let_go(self) -> None:
        """Memory is needed: nothing is locked any more."""
        self._freed = self._freed or bool(self._locks)
        for name in list(self._locks):
            self._unlock(name)

    def tidy(self) -> bool:
        """Once a tick: requests that have lost their match wait here, matches of requests that
        wait nowhere any more are let go, and where memory was refused for want of these the
        scheduler looks again.

        Returns:
            Whether requests had lost their match, or gave way, or locks were let go.
        """
        freed, self._freed = self._freed, False
        if freed:
            self._queue.look_again()
        lost, self._lost = self._lost, []
        for request in lost:
            # Not if it was aborted meanwhile.
            if self._queue.remove(request):
                if self._parts is None or not self._parts.has(request):
                    logger.info("The prefix of %s is gone: its media are sent for", request.rid)
                self._queue.add(request, retracted=False)
        if self._locks:
            live = {*self._queue.waiting(), *self._parked}
            for name in [name for name in self._locks if name not in live]:
                self._unlock(name)
        return freed or bool(lost)

    def forgo(self, name: str) -> None:
        """A request ended before its prefix was asked for."""
        if self._leader is not None:
            self._leader.forgo(name)

    def holds(self, name: str) -> bool:
        """Whether a request of that name waits here."""
        return name in self._parked

    def announced(self, name: str) -> Expect | None:
        """How the items of a request were announced that waits here."""
        parked = self._parked.get(name)
        return None if parked is None else bare_items(parked[0])[0][1].resting.expect

    def resolve(self, name: str, settled: Settled) -> Failure | None:
        """A request's items have landed, or will not: it goes on, or fails."""
        request, retracted = self._parked.pop(name)
        try:
            received = iter(self._receive(settled))
        except EpdError as error:
            return self._fail(request, error)
        embeddings = [None if item is None else next(received).embedding for item in settled.items]
        bare = bare_items(request)
        expect = bare[0][1].resting.expect
        landed = zip(settled.items, expect.keys, expect.layouts, strict=True)
        for item, key, layout in landed:
            # The prompt was laid out for the earlier embeddings at their addresses.
            if item is not None and item.key != key:
                return self._fail(request, MediaError("the request's media changed meanwhile"))
            if item is not None and not _alike(item.layout, layout):
                other = UnavailableError(
                    "an encoder made an embedding of another size than encoders did before, for "
                    "which the prompt was laid out: do they have the same settings of pixels?"
                )
                return self._fail(request, other)
        for item, note in bare:
            whole = embeddings[note.rows.item]
            if whole is not None:
                first = note.rows.first
                item.precomputed_embeddings = whole[first : first + note.rows.count]
                setattr(item.precomputed_embeddings, _MARK, note)
        self._queue.add(request, retracted=retracted)
        return None

    def fail(self, name: str, error: EpdError) -> Failure:
        """A request that waits here cannot go on."""
        request, _ = self._parked.pop(name)
        return self._fail(request, error)

    def _fail(self, request: Any, error: EpdError) -> Failure:
        self._unlock(manifest.name(request))
        self._queue.discard(request)
        return request, error.message, error.http_status

    def _ask(self, request: Any, resting: Resting, missing: set[int]) -> None:
        """Have the missing items sent for, or tell that there are none."""
        again, resting.asked = resting.asked, True
        # SGLang has its own by now. Kept, they would hold each other.
        resting.carrier.mm_inputs = None
        if self._leader is None or (again and not missing):
            return
        every = range(resting.expect.items)
        covered = tuple(number for number in every if number not in missing)
        name = manifest.name(request)
        self._leader.ask(name, resting.carrier, resting.expect, covered, again=again)

    def _unlock(self, name: str) -> None:
        lock = self._locks.pop(name, None)
        if lock is not None:
            self._tree.unlock(lock)
