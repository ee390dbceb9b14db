from __future__ import annotations

import asyncio
import gc
import sys
from collections import defaultdict
from contextlib import contextmanager
from contextvars import ContextVar

import pytest

from sglang_epd import logs
from sglang_epd.cache import LayoutCache
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EpdError,
    MediaError,
    ProtocolError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.language import frontend as frontend_module
from sglang_epd.language.frontend import Frontend
from sglang_epd.language.layouts import Board, Slot
from sglang_epd.spans import OFF
from sglang_epd.tally import Tally
from sglang_epd.wire.http import EncodeItem, ItemLayout, LayoutReply, ReplyTo, decode_body
from sglang_epd.wire.messages import Expect, Layout, Needed, TensorSpec
from spans import said
from waiting import until

ITEMS = [EncodeItem(0, "IMAGE", "image 1 of 1", data=b"x")]
TIMEOUT_S = 30.0


class FakeControl:
    """Notes what the receiver would be told, in order, and says what it needs.

    Attributes:
        talks: whether the test says so; else it needs nothing but what it is sent.
    """

    name = "this tokenizer"

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.endpoint_error: EpdError | None = None
        self.news: defaultdict[str, asyncio.Queue[Needed]] = defaultdict(asyncio.Queue)
        self.talks = False

    def needs(self, ticket: str, *items: int, **more) -> None:
        self.news[ticket].put_nowait(Needed(ticket, items, **more))

    async def endpoint(self, timeout_s: float) -> str:
        assert 0 < timeout_s <= TIMEOUT_S
        if self.endpoint_error:
            raise self.endpoint_error
        return "tcp://receiver:1"

    async def expect(self, message: Expect) -> None:
        self.told.append(("expect", message))

    @contextmanager
    def watched(self, ticket: str):
        if not self.talks:
            self.needs(ticket, over=True)
        yield self.news[ticket]

    async def fail(self, ticket: str, error: EpdError) -> None:
        self.told.append(("fail", ticket, error))

    async def cancel(self, ticket: str) -> None:
        self.told.append(("cancel", ticket))


class FakeDispatcher:
    """Goes on, or fails, when the test says so."""

    def __init__(self, control: FakeControl) -> None:
        self._control = control
        self.runs: list[tuple[ReplyTo, list[EncodeItem], float]] = []
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()
        self.gates: dict[str, asyncio.Event] = {}
        self.error: BaseException | None = None
        self.layouts: dict[int, ItemLayout] = {}
        self.sources: dict[int, str] = {}

    async def run(self, reply_to, items, deadline, note, span=OFF, asker="") -> dict:
        assert self._control.told, "the scheduler is told before any encoder is asked"
        self.runs.append((reply_to, items, deadline))
        self.started.set()
        await self.gates.get(reply_to.ticket, self.go_on).wait()
        if self.error is not None:
            raise self.error
        for item in items:
            note(item.item, self.sources.get(item.item, "computed"))
        return self.layouts


@pytest.fixture
def control():
    return FakeControl()


@pytest.fixture
async def dispatcher(control):
    return FakeDispatcher(control)


@pytest.fixture
def frontend(dispatcher, control):
    return Frontend(dispatcher, control, TIMEOUT_S)


async def idle(frontend) -> None:
    """Until no request is live any more."""
    await until(lambda: not len(frontend))


async def test_a_request_is_announced_then_dispatched(frontend, dispatcher, control):
    expect = frontend.start("rid", ITEMS)
    assert (expect.items, expect.ttl_s) == (1, TIMEOUT_S)
    assert len(frontend) == 1
    await dispatcher.started.wait()
    ((reply_to, items, deadline),) = dispatcher.runs
    assert reply_to == ReplyTo("tcp://receiver:1", expect.ticket)
    assert items is ITEMS
    assert 0 < deadline - asyncio.get_running_loop().time() <= TIMEOUT_S
    dispatcher.go_on.set()
    await idle(frontend)
    frontend.cancel("rid")  # does nothing any more
    assert control.told == [("expect", expect)]


async def test_tickets_cannot_be_guessed_from_one_another(frontend, dispatcher):
    dispatcher.go_on.set()
    tickets = [frontend.start(f"rid{n}", ITEMS).ticket for n in range(50)]
    await idle(frontend)
    assert len(set(tickets)) == 50
    assert min(map(len, tickets)) >= 22
    assert not any(f"rid{n}" in ticket for n, ticket in enumerate(tickets))


FAILURES = [
    (DeadlineError("too late"), "DeadlineError", "too late"),
    (RuntimeError("a secret"), "EncodeError", "the request's media could not be dispatched"),
]


@pytest.mark.parametrize(("error", "code", "message"), FAILURES, ids=["known", "surprise"])
async def test_a_failure_ends_the_request_with_its_reason(
    frontend, dispatcher, control, slot, caplog, error, code, message
):
    """The receiver and the decode server are told; of a surprise without its details."""
    dispatcher.error = error
    dispatcher.go_on.set()
    expect = frontend.start("rid", ITEMS, slot)
    await idle(frontend)
    (_, (verb, ticket, failure)) = control.told
    assert (verb, ticket) == ("fail", expect.ticket)
    assert (failure.code, failure.message) == (code, message)
    assert told(slot).error.code == code
    assert str(error) in caplog.text


async def test_without_a_receiver_nothing_is_dispatched(frontend, dispatcher, control):
    control.endpoint_error = UnavailableError("no answer")
    expect = frontend.start("rid", ITEMS)
    await idle(frontend)
    assert control.told == [("fail", expect.ticket, control.endpoint_error)]
    assert not dispatcher.runs


@pytest.mark.parametrize("begun", [True, False])
async def test_a_cancelled_request_is_cancelled_everywhere_and_no_other(
    frontend, dispatcher, control, slot, begun
):
    first = frontend.start("first", ITEMS, slot)
    if begun:
        await dispatcher.started.wait()
    second = frontend.start("second", ITEMS)
    frontend.cancel("first")
    frontend.cancel("never started")
    dispatcher.go_on.set()
    await idle(frontend)
    assert (("cancel", first.ticket) in control.told) is begun
    assert ("cancel", second.ticket) not in control.told
    assert dispatcher.runs[-1][0].ticket == second.ticket
    assert told(slot).error.code == "RequestCancelledError"


async def test_an_id_that_is_used_again_belongs_to_the_later_request(frontend, dispatcher, control):
    first = frontend.start("rid", ITEMS)
    dispatcher.gates[first.ticket] = asyncio.Event()
    await dispatcher.started.wait()
    dispatcher.started.clear()
    second = frontend.start("rid", ITEMS)
    await dispatcher.started.wait()
    dispatcher.error = EncodeError("x")
    dispatcher.gates[first.ticket].set()
    async with asyncio.timeout(5):
        while ("fail", first.ticket, dispatcher.error) not in control.told:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    frontend.cancel("rid")
    await idle(frontend)
    assert ("cancel", second.ticket) in control.told


async def test_no_connection_keeps_a_requests_media(frontend, dispatcher, monkeypatch):
    """It would for its whole life, where it is opened in a context that has them."""
    media: ContextVar[str] = ContextVar("media")
    media.set("large")
    run, seen = dispatcher.run, []

    def noting(*args, **options):
        seen.append((media.get("none"), logs._request.get()))
        return run(*args, **options)

    monkeypatch.setattr(dispatcher, "run", noting)
    frontend.start("rid", ITEMS)
    dispatcher.go_on.set()
    await idle(frontend)
    assert seen == [("none", "rid")]


async def test_everything_can_be_cancelled_at_once(frontend, dispatcher, control):
    tickets = {frontend.start(rid, ITEMS).ticket for rid in ("a", "b")}
    await dispatcher.started.wait()
    frontend.cancel_all()
    await idle(frontend)
    assert {told[1] for told in control.told if told[0] == "cancel"} == tickets


@pytest.fixture
def slot():
    """Where a decode server is to learn the layouts."""
    return Board().open(7, TIMEOUT_S)


def told(slot: Slot) -> LayoutReply | None:
    assert slot.settled
    return None if slot.body is None else decode_body(slot.body, LayoutReply, 1 << 20)


@pytest.mark.parametrize("known", [True, False])
async def test_the_decode_server_is_told_the_layouts(frontend, dispatcher, slot, described, known):
    dispatcher.layouts = {0: described()} if known else {}
    frontend.start("rid", ITEMS, slot)
    await dispatcher.started.wait()
    assert not slot.settled
    dispatcher.go_on.set()
    await idle(frontend)
    assert told(slot) == (LayoutReply([described()]) if known else None)


async def test_the_end_of_each_request_is_told(frontend, dispatcher):
    ends: list[tuple[str, str]] = []

    def start(rid: str) -> None:
        frontend.start(rid, ITEMS)
        frontend.underway(rid).add_done_callback(
            lambda ended: ends.append((rid, ended.result().code if ended.result() else ""))
        )

    dispatcher.go_on.set()
    for rid, error in (
        ("delivered", None),
        ("failed", UnavailableError("none")),
        ("surprised", ZeroDivisionError()),
    ):
        dispatcher.error = error
        start(rid)
        await idle(frontend)
    dispatcher.go_on.clear()
    dispatcher.started.clear()
    start("cancelled")
    frontend.cancel("cancelled")  # before it began
    start("cancelled later")
    await dispatcher.started.wait()
    frontend.cancel("cancelled later")
    await idle(frontend)
    await asyncio.sleep(0)
    assert frontend.underway("cancelled later") is None
    assert ends == [
        ("delivered", ""),
        ("failed", "UnavailableError"),
        ("surprised", "EncodeError"),
        ("cancelled", "RequestCancelledError"),
        ("cancelled later", "RequestCancelledError"),
    ]


async def test_a_listener_that_is_cancelled_takes_nothing_along(frontend, dispatcher, control):
    expect = frontend.start("rid", ITEMS)
    frontend.underway("rid").cancel()
    dispatcher.go_on.set()
    await idle(frontend)
    assert control.told == [("expect", expect)]


def key_of(item: EncodeItem) -> bytes:
    return item.data[:1] * 32 if item.data else b""


def layout_of(item: EncodeItem) -> ItemLayout:
    layout = Layout("IMAGE", TensorSpec("float32", (2, 4)), [[1, 2, 4]])
    return ItemLayout(key_of(item), layout)


# Two pictures that were seen before, one that was not, and one behind a URL.
MIXED = [
    *(EncodeItem(n, "IMAGE", f"image {n + 1} of 4", data=b"abc"[n : n + 1]) for n in range(3)),
    EncodeItem(3, "IMAGE", "image 4 of 4", url="http://host/d"),
]


@pytest.fixture
def known():
    known = LayoutCache()
    for item in MIXED[:2]:
        known.add(key_of(item), layout_of(item).layout)
    return known


@pytest.fixture
def asking(dispatcher, control, known):
    """Makes a frontend whose receiver says what it needs."""
    control.talks = True

    def asking(**options) -> Frontend:
        frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, **options)
        frontend._known = known
        return frontend

    return asking


async def test_only_what_the_receiver_needs_is_sent(asking, dispatcher, control, known):
    frontend = asking()
    dispatcher.layouts = {2: layout_of(MIXED[2])}
    expect = frontend.start("rid", MIXED)
    ended = frontend.underway("rid")
    assert expect.keys == (b"a" * 32, b"b" * 32, b"", b"")
    await dispatcher.started.wait()
    assert dispatcher.runs[0][1] == MIXED[2:], "these cannot be here"
    dispatcher.go_on.set()
    await asyncio.sleep(0.01)
    assert not ended.done(), "the receiver has not said what it needs"
    control.needs(expect.ticket, 1)
    assert await asyncio.wait_for(ended, 5) is None
    assert [run[1] for run in dispatcher.runs] == [MIXED[2:], MIXED[1:2]]
    assert known.find(b"c" * 32) == layout_of(MIXED[2]).layout, "it was learnt"
    # It had to make room before the scheduler came for it.
    control.needs(expect.ticket, 0)
    control.needs(expect.ticket, over=True)
    await idle(frontend)
    assert dispatcher.runs[-1][1] == MIXED[:1]


async def test_the_dispatch_of_a_request_that_the_scheduler_has_aborted_ends(
    asking, dispatcher, control
):
    """Another process may have aborted it, of which this one's SGLang does not hear."""
    frontend = asking()
    expect = frontend.start("rid", MIXED)
    ended = frontend.underway("rid")
    await dispatcher.started.wait()
    control.needs(expect.ticket, over=True, aborted=True)
    assert isinstance(await asyncio.wait_for(ended, 5), RequestCancelledError)
    await idle(frontend)
    assert control.told[-1] == ("cancel", expect.ticket)
    assert frontend.account("rid") is None


@pytest.mark.parametrize("sent", [True, False])
async def test_layouts_of_a_request_that_is_given_up_as_its_items_come_are_learnt_anew(
    asking, known, dispatcher, control, sent
):
    """One may have come with another, by which the scheduler has refused the request."""
    frontend = asking()
    expect = frontend.start("rid", MIXED[:2])
    await until(lambda: control.told)
    if sent:
        control.needs(expect.ticket, 0)
        await dispatcher.started.wait()
    frontend.cancel("rid")
    await idle(frontend)
    there = [known.find(key) is not None for key in expect.keys]
    assert there == [not sent] * 2


async def test_what_an_earlier_request_has_learnt_of_fetched_media_is_known(dispatcher, control):
    """Another for the same items fetches them only where it has to."""
    url = [EncodeItem(0, "IMAGE", "image 1 of 1", url="https://host/a.png")]
    frontend, known = Frontend(dispatcher, control, TIMEOUT_S), {}
    dispatcher.layouts = {0: ItemLayout(b"k" * 32, layout_of(MIXED[0]).layout)}
    dispatcher.go_on.set()
    first = frontend.start("first", url, known=known)
    await idle(frontend)
    assert (first.keys, known) == ((), dispatcher.layouts)
    control.talks = True
    second = frontend.start("second", url, known=known)
    assert second.keys == (b"k" * 32,)
    control.needs(second.ticket, over=True)
    await idle(frontend)
    assert len(dispatcher.runs) == 1


async def test_a_request_that_no_scheduler_asks_for_is_over_at_its_deadline(
    dispatcher, control, monkeypatch
):
    """All was delivered, and the receiver ends it."""
    monkeypatch.setattr("sglang_epd.language.frontend._GRACE_S", 0.0)
    control.talks = True
    dispatcher.go_on.set()
    frontend = Frontend(dispatcher, control, 1.0)
    frontend.start("rid", ITEMS)
    await idle(frontend)
    assert [told for told, *_ in control.told] == ["expect"]


async def test_a_request_is_under_way_with_its_first_item(asking, dispatcher, control):
    frontend = asking(first_item=True)
    expect = frontend.start("rid", MIXED)
    underway = frontend.underway("rid")
    assert expect.waits
    await dispatcher.started.wait()
    assert not underway.done()
    control.needs(expect.ticket, begun=True)
    assert await asyncio.wait_for(underway, 5) is None
    assert [run[1] for run in dispatcher.runs] == [MIXED[2:]], "it says nothing of the others"
    control.needs(expect.ticket, 0, 1)
    dispatcher.go_on.set()
    control.needs(expect.ticket, over=True)
    await idle(frontend)
    assert [run[1] for run in dispatcher.runs] == [MIXED[2:], MIXED[:2]]


async def test_nothing_is_sent_of_what_is_here_and_the_decode_server_knows_it(
    asking, dispatcher, control, slot
):
    frontend = asking()
    expect = frontend.start("rid", MIXED[:2], slot)
    control.needs(expect.ticket)
    await until(lambda: slot.settled)
    assert told(slot).items == [layout_of(item) for item in MIXED[:2]]
    assert not dispatcher.runs
    frontend.cancel_all()
    await idle(frontend)
    assert ("cancel", expect.ticket) in control.told


async def test_everything_is_sent_where_the_receiver_says_nothing(asking, dispatcher, monkeypatch):
    monkeypatch.setattr(frontend_module, "_WORD_TIMEOUT_S", 0.01)
    frontend = asking()
    frontend.start("rid", MIXED[:2])
    async with asyncio.timeout(5):
        await dispatcher.started.wait()
    assert dispatcher.runs[0][1] == MIXED[:2]
    frontend.cancel_all()
    await idle(frontend)


async def test_what_is_on_its_way_is_not_sent_again_when_the_receiver_says_so_late(
    asking, dispatcher, control, monkeypatch
):
    """A scheduler in a long pass claims late: it does not know of what went meanwhile."""
    monkeypatch.setattr(frontend_module, "_WORD_TIMEOUT_S", 0.01)
    frontend = asking()
    expect = frontend.start("rid", MIXED[:2])
    await asyncio.wait_for(dispatcher.started.wait(), 5)
    control.needs(expect.ticket, 0, 1)
    await asyncio.sleep(0.01)
    assert len(dispatcher.runs) == 1
    # One of them had to make room again.
    control.needs(expect.ticket, 1)
    dispatcher.go_on.set()
    control.needs(expect.ticket, over=True)
    await idle(frontend)
    assert [run[1] for run in dispatcher.runs] == [MIXED[:2], MIXED[1:2]]


async def test_what_is_needed_later_and_fails_ends_the_request(asking, dispatcher, control):
    frontend = asking()
    expect = frontend.start("rid", MIXED[:1])
    control.needs(expect.ticket)
    await asyncio.sleep(0.01)
    dispatcher.error = UnavailableError("no encoder")
    dispatcher.go_on.set()
    control.needs(expect.ticket, 0)
    await idle(frontend)
    assert control.told[-1] == ("fail", expect.ticket, dispatcher.error)


async def test_an_encoder_that_tells_another_key_is_not_believed(
    asking, dispatcher, control, known
):
    control.talks = False
    frontend = asking()
    dispatcher.layouts = {0: ItemLayout(b"z" * 32, layout_of(MIXED[2]).layout)}
    dispatcher.go_on.set()
    frontend.start("rid", [EncodeItem(0, "IMAGE", "image 1 of 1", data=b"c")])
    await idle(frontend)
    assert known.find(b"z" * 32) is None


@pytest.mark.parametrize(
    ("told", "here", "sources"),
    [
        (
            {2: "cached", 3: "coalesced"},
            {"covered": 1, "cached": 1},
            {"kv": 1, "language_cache": 1, "encoder_cache": 1, "coalesced": 1},
        ),
        # Two that were delivered turn out to be covered.
        (
            {2: "cached", 3: "computed"},
            {"covered": 4},
            {"kv": 2, "encoder_cache": 1, "computed": 1},
        ),
        # An encoder's own words are no label of a metric.
        ({2: "words of a stranger", 3: ""}, {}, {"computed": 2}),
    ],
)
async def test_where_items_came_from_is_counted_and_told(
    asking, dispatcher, control, told, here, sources
):
    tally = Tally()
    frontend = asking(tally=tally)
    dispatcher.sources = told
    dispatcher.go_on.set()
    expect = frontend.start("rid", MIXED)
    await dispatcher.started.wait()
    assert frontend.account("rid") is None
    control.needs(expect.ticket)
    control.needs(expect.ticket, over=True, **here)
    await idle(frontend)
    assert frontend.account("rid") == sources
    assert tally.counts == {("items", source): items for source, items in sources.items()}


@pytest.mark.parametrize("here", [False, True])
async def test_an_earlier_request_of_the_same_id_is_not_told_of(asking, dispatcher, control, here):
    frontend = asking()
    dispatcher.go_on.set()
    expect = frontend.start("rid", MIXED)
    control.needs(expect.ticket, over=True)
    await idle(frontend)
    assert frontend.account("rid")
    if here:
        frontend.encoded_here("rid", 1)
    else:
        frontend.start("rid", MIXED)
    assert frontend.account("rid") is None


async def test_requests_may_rest_on_the_prefix_cache_if_all_their_layouts_are_known(
    asking, dispatcher, control, monkeypatch
):
    monkeypatch.setattr(frontend_module, "_WORD_TIMEOUT_S", 0.01)
    frontend = asking(ask_prefix=True)
    some = frontend.start("some", MIXED)
    assert some.keys
    assert not some.layouts
    every = frontend.start("every", MIXED[:2])
    assert every.layouts == tuple(layout_of(item).layout for item in MIXED[:2])
    assert every.announcer == control.name
    await asyncio.sleep(0.05)
    sent = {run[0].ticket for run in dispatcher.runs}
    assert every.ticket not in sent, "the scheduler may take longer"
    # It had them, and lost them.
    again = Expect("again", 2, TIMEOUT_S, every.keys, every.layouts)
    frontend.again("every", MIXED[:2], again)
    control.needs("again", 0, 1)
    dispatcher.go_on.set()
    await until(lambda: dispatcher.runs[-1][0].ticket == "again")
    for others in (MIXED[1:3], MIXED[:1]):
        with pytest.raises(ProtocolError):
            frontend.again("every", others, again)
    # Its key was told by an encoder.
    fetched = Expect("fetched", 1, TIMEOUT_S, (b"d" * 32,), every.layouts[:1])
    frontend.again("fetched", MIXED[3:], fetched)
    frontend.cancel_all()
    await idle(frontend)


async def test_a_request_whose_media_fail_is_counted_by_what_failed(dispatcher, control, recorded):
    tally = Tally()
    frontend = Frontend(dispatcher, control, TIMEOUT_S, tally=tally)
    dispatcher.error = MediaError("image 1 of 1: cut off")
    dispatcher.go_on.set()
    expect = frontend.start("rid", ITEMS, parent=recorded.root)
    await idle(frontend)
    assert tally.counts["failures", "MediaError"] == 1
    span = recorded.only("epd_media")
    assert said(span) == {"items": 1, "known": 0, "error.type": "MediaError"}
    assert f"{span.context.span_id:016x}" in expect.trace


async def test_the_media_of_a_request_that_failed_are_gone_with_it(frontend, dispatcher, control):
    """Without waiting for a collection of cycles."""
    media = bytes([1, 2, 3]) * 1000
    before = sys.getrefcount(media)
    dispatcher.error = DeadlineError("too late")
    dispatcher.go_on.set()
    gc.disable()
    try:
        frontend.start("rid", [EncodeItem(0, "IMAGE", "image 1 of 1", data=media)])
        await idle(frontend)
        dispatcher.error = None
        dispatcher.runs.clear()
        control.told.clear()
        assert sys.getrefcount(media) == before
    finally:
        gc.enable()
