from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from sglang_epd.cache import LayoutCache
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EpdError,
    MediaError,
    ProtocolError,
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

ITEMS = [EncodeItem(0, "IMAGE", "image 1 of 1", data=b"x")]
TIMEOUT_S = 30.0


class FakeControl:
    """Notes what the scheduler would be told, in order."""

    name = "this tokenizer"

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.endpoint_error: EpdError | None = None
        self.expect_error: EpdError | None = None
        self.news: dict[str, asyncio.Queue[Needed]] = {}
        self.talks = False

    async def endpoint(self, timeout_s: float) -> str:
        assert 0 < timeout_s <= TIMEOUT_S
        if self.endpoint_error:
            raise self.endpoint_error
        return "tcp://receiver:1"

    async def expect(self, message: Expect) -> None:
        if self.expect_error:
            raise self.expect_error
        self.told.append(("expect", message))

    @contextmanager
    def watched(self, ticket: str):
        """The receiver needs nothing but what it is sent, unless a test says otherwise."""
        news = self.news.setdefault(ticket, asyncio.Queue())
        if not self.talks:
            news.put_nowait(Needed(ticket, over=True))
        yield news

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

    async def run(
        self,
        reply_to: ReplyTo,
        items: list[EncodeItem],
        deadline: float,
        note=None,
        span=OFF,
        asker="",
    ) -> dict[int, ItemLayout]:
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


@pytest.fixture
def idle(frontend):
    """Until no request is live any more."""

    async def wait() -> None:
        async with asyncio.timeout(5):
            while len(frontend):
                await asyncio.sleep(0)

    return wait


async def test_a_request_is_announced_then_dispatched(frontend, dispatcher, control, idle):
    expect = frontend.start("rid", ITEMS, consumers=3)
    assert (expect.items, expect.consumers, expect.ttl_s) == (1, 3, TIMEOUT_S)
    assert len(frontend) == 1
    await dispatcher.started.wait()
    ((reply_to, items, deadline),) = dispatcher.runs
    assert reply_to == ReplyTo("tcp://receiver:1", expect.ticket)
    assert items is ITEMS
    assert 0 < deadline - asyncio.get_running_loop().time() <= TIMEOUT_S
    dispatcher.go_on.set()
    await idle()
    assert control.told == [("expect", expect)]


async def test_tickets_cannot_be_guessed_from_one_another(frontend, dispatcher, idle):
    dispatcher.go_on.set()
    tickets = [frontend.start(f"rid{n}", ITEMS, 1).ticket for n in range(50)]
    await idle()
    assert len(set(tickets)) == 50
    assert min(map(len, tickets)) >= 22
    assert not any(f"rid{n}" in ticket for n, ticket in enumerate(tickets))


async def test_a_failure_ends_the_request_with_its_reason(frontend, dispatcher, control, idle):
    dispatcher.error = DeadlineError("too late")
    dispatcher.go_on.set()
    expect = frontend.start("rid", ITEMS, 1)
    await idle()
    assert control.told == [("expect", expect), ("fail", expect.ticket, dispatcher.error)]


async def test_a_surprise_ends_the_request_without_its_details(
    frontend, dispatcher, control, idle, caplog
):
    dispatcher.error = RuntimeError("a secret")
    dispatcher.go_on.set()
    expect = frontend.start("rid", ITEMS, 1)
    await idle()
    (_, (verb, ticket, error)) = control.told
    assert (verb, ticket, type(error)) == ("fail", expect.ticket, EncodeError)
    assert "secret" not in error.message
    assert "a secret" in caplog.text


async def test_without_a_receiver_nothing_is_dispatched(frontend, dispatcher, control, idle):
    control.endpoint_error = UnavailableError("no answer")
    expect = frontend.start("rid", ITEMS, 1)
    await idle()
    assert control.told == [("fail", expect.ticket, control.endpoint_error)]
    assert not dispatcher.runs


async def test_a_cancelled_request_is_cancelled_everywhere(frontend, dispatcher, control, idle):
    expect = frontend.start("rid", ITEMS, 1)
    await dispatcher.started.wait()
    frontend.cancel("rid")
    await idle()
    assert control.told == [("expect", expect), ("cancel", expect.ticket)]


async def test_cancelling_what_is_not_live_does_nothing(frontend, dispatcher, control, idle):
    frontend.cancel("never started")
    dispatcher.go_on.set()
    expect = frontend.start("rid", ITEMS, 1)
    await idle()
    frontend.cancel("rid")
    assert control.told == [("expect", expect)]


async def test_cancelling_one_request_leaves_the_others(frontend, dispatcher, control, idle):
    first = frontend.start("first", ITEMS, 1)
    second = frontend.start("second", ITEMS, 1)
    await dispatcher.started.wait()
    frontend.cancel("first")
    dispatcher.go_on.set()
    await idle()
    told = {(verb, getattr(what, "ticket", what)) for verb, what in control.told}
    assert ("cancel", first.ticket) in told
    assert ("cancel", second.ticket) not in told
    assert len(dispatcher.runs) == 2


async def test_an_id_that_is_used_again_belongs_to_the_later_request(
    frontend, dispatcher, control, idle
):
    first = frontend.start("rid", ITEMS, 1)
    dispatcher.gates[first.ticket] = asyncio.Event()
    await dispatcher.started.wait()
    dispatcher.started.clear()
    second = frontend.start("rid", ITEMS, 1)
    await dispatcher.started.wait()
    dispatcher.error = EncodeError("x")
    dispatcher.gates[first.ticket].set()
    async with asyncio.timeout(5):
        while ("fail", first.ticket, dispatcher.error) not in control.told:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    frontend.cancel("rid")
    await idle()
    assert ("cancel", second.ticket) in control.told


async def test_everything_can_be_cancelled_at_once(frontend, dispatcher, control, idle):
    tickets = {frontend.start(rid, ITEMS, 1).ticket for rid in ("a", "b")}
    await dispatcher.started.wait()
    frontend.cancel_all()
    await idle()
    assert {told[1] for told in control.told if told[0] == "cancel"} == tickets


@pytest.fixture
def slot():
    """Where a decode server is to learn the layouts."""
    return Board().open(7, TIMEOUT_S)


def told(slot: Slot) -> LayoutReply | None:
    assert slot.settled
    return None if slot.body is None else decode_body(slot.body, LayoutReply, 1 << 20)


async def test_the_decode_server_is_told_the_layouts(frontend, dispatcher, idle, slot, described):
    dispatcher.layouts = {0: described()}
    frontend.start("rid", ITEMS, 1, slot)
    await dispatcher.started.wait()
    assert not slot.settled
    dispatcher.go_on.set()
    await idle()
    assert told(slot) == LayoutReply([described()])


async def test_a_layout_that_no_encoder_told_is_unknown(frontend, dispatcher, idle, slot):
    dispatcher.go_on.set()
    frontend.start("rid", ITEMS, 1, slot)
    await idle()
    assert told(slot) is None


@pytest.mark.parametrize(
    ("error", "code"), [(DeadlineError("x"), "DeadlineError"), (RuntimeError("x"), "EncodeError")]
)
async def test_the_decode_server_is_told_of_a_failure(
    frontend, dispatcher, idle, slot, error, code
):
    dispatcher.error = error
    dispatcher.go_on.set()
    frontend.start("rid", ITEMS, 1, slot)
    await idle()
    assert told(slot).error.code == code


@pytest.mark.parametrize("begun", [True, False])
async def test_the_decode_server_is_told_of_a_cancellation(frontend, dispatcher, idle, slot, begun):
    frontend.start("rid", ITEMS, 1, slot)
    if begun:
        await dispatcher.started.wait()
    frontend.cancel("rid")
    await idle()
    assert told(slot).error.code == "RequestCancelledError"


async def test_the_end_of_each_request_is_told(frontend, dispatcher, idle):
    ends: list[tuple[str, str]] = []

    def start(rid: str) -> None:
        frontend.start(rid, ITEMS, 1)
        frontend.ended(rid).add_done_callback(
            lambda ended: ends.append((rid, ended.result().code if ended.result() else ""))
        )

    dispatcher.go_on.set()
    start("delivered")
    await idle()
    dispatcher.error = UnavailableError("none")
    start("failed")
    await idle()
    dispatcher.error = ZeroDivisionError()
    start("surprised")
    await idle()
    dispatcher.go_on.clear()
    dispatcher.started.clear()
    start("cancelled")
    frontend.cancel("cancelled")  # before it began
    start("cancelled later")
    await dispatcher.started.wait()
    frontend.cancel("cancelled later")
    await idle()
    await asyncio.sleep(0)
    assert frontend.ended("cancelled later") is None
    assert ends == [
        ("delivered", ""),
        ("failed", "UnavailableError"),
        ("surprised", "EncodeError"),
        ("cancelled", "RequestCancelledError"),
        ("cancelled later", "RequestCancelledError"),
    ]


def key_of(item: EncodeItem) -> bytes:
    return item.data[:1] * 32 if item.data else b""


def layout_of(item: EncodeItem) -> ItemLayout:
    layout = Layout("IMAGE", TensorSpec("float32", (2, 4)), [[1, 2, 4]])
    return ItemLayout(key_of(item), layout)


@pytest.fixture
def mixed():
    """Two pictures that were seen before, one that was not, and one behind a URL."""
    known = LayoutCache()
    items = [
        *(EncodeItem(n, "IMAGE", f"image {n + 1} of 4", data=b"abc"[n : n + 1]) for n in range(3)),
        EncodeItem(3, "IMAGE", "image 4 of 4", url="http://host/d"),
    ]
    for item in items[:2]:
        known.add(key_of(item), layout_of(item).layout)
    return items, known


async def test_only_what_the_receiver_needs_is_sent(dispatcher, control, idle, mixed):
    items, known = mixed
    control.talks = True
    frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, known)
    dispatcher.layouts = {2: layout_of(items[2])}
    expect = frontend.start("rid", items, 1)
    ended = frontend.ended("rid")
    assert expect.keys == (b"a" * 32, b"b" * 32, b"", b"")
    await dispatcher.started.wait()
    assert dispatcher.runs[0][1] == items[2:], "these cannot be here"
    dispatcher.go_on.set()
    await asyncio.sleep(0.01)
    assert not ended.done(), "the receiver has not said what it needs"
    control.news[expect.ticket].put_nowait(Needed(expect.ticket, (1,)))
    assert await ended is None
    assert [run[1] for run in dispatcher.runs] == [items[2:], items[1:2]]
    assert known.find(b"c" * 32) == layout_of(items[2]).layout, "it was learnt"
    # It had to make room before the scheduler came for it.
    control.news[expect.ticket].put_nowait(Needed(expect.ticket, (0,)))
    control.news[expect.ticket].put_nowait(Needed(expect.ticket, over=True))
    async with asyncio.timeout(5):
        while len(frontend):
            await asyncio.sleep(0)
    assert dispatcher.runs[-1][1] == items[:1]


async def test_nothing_is_sent_of_what_is_here_and_the_decode_server_knows_it(
    dispatcher, control, mixed
):
    items, known = mixed
    control.talks = True
    frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, known)
    board = Board()
    slot = board.open(7, TIMEOUT_S)
    expect = frontend.start("rid", items[:2], 1, slot)
    while expect.ticket not in control.news:
        await asyncio.sleep(0)
    control.news[expect.ticket].put_nowait(Needed(expect.ticket))
    async with asyncio.timeout(5):
        while not slot.settled:
            await asyncio.sleep(0)
    told = decode_body(slot.body, LayoutReply, 1 << 20)
    assert told.items == [layout_of(item) for item in items[:2]]
    assert not dispatcher.runs
    frontend.cancel_all()
    async with asyncio.timeout(5):
        while len(frontend):
            await asyncio.sleep(0)
    assert ("cancel", expect.ticket) in control.told


async def test_everything_is_sent_where_the_receiver_says_nothing(
    dispatcher, control, mixed, monkeypatch
):
    items, known = mixed
    monkeypatch.setattr(frontend_module, "_WORD_TIMEOUT_S", 0.01)
    control.talks = True
    frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, known)
    frontend.start("rid", items[:2], 1)
    async with asyncio.timeout(5):
        await dispatcher.started.wait()
    assert dispatcher.runs[0][1] == items[:2]
    frontend.cancel_all()
    await asyncio.sleep(0.01)


async def test_what_is_needed_later_and_fails_ends_the_request(dispatcher, control, mixed):
    items, known = mixed
    control.talks = True
    frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, known)
    expect = frontend.start("rid", items[:1], 1)
    while expect.ticket not in control.news:
        await asyncio.sleep(0)
    control.news[expect.ticket].put_nowait(Needed(expect.ticket))
    await asyncio.sleep(0.01)
    dispatcher.error = UnavailableError("no encoder")
    dispatcher.go_on.set()
    control.news[expect.ticket].put_nowait(Needed(expect.ticket, (0,)))
    async with asyncio.timeout(5):
        while len(frontend):
            await asyncio.sleep(0)
    assert control.told[-1] == ("fail", expect.ticket, dispatcher.error)


async def test_an_encoder_that_tells_another_key_is_not_believed(dispatcher, control, idle, mixed):
    items, known = mixed
    frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, known)
    dispatcher.layouts = {0: ItemLayout(b"z" * 32, layout_of(items[2]).layout)}
    dispatcher.go_on.set()
    frontend.start("rid", [EncodeItem(0, "IMAGE", "image 1 of 1", data=b"c")], 1)
    async with asyncio.timeout(5):
        while len(frontend):
            await asyncio.sleep(0)
    assert known.find(b"z" * 32) is None


async def test_where_items_came_from_is_counted_and_told(dispatcher, control, mixed):
    items, known = mixed
    control.talks = True
    tally = Tally()
    frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, known, tally=tally)
    dispatcher.sources = {2: "cached", 3: "coalesced"}
    dispatcher.go_on.set()
    expect = frontend.start("rid", items, 1)
    await dispatcher.started.wait()
    assert frontend.account("rid") is None
    control.news[expect.ticket].put_nowait(Needed(expect.ticket))
    last = Needed(expect.ticket, over=True, covered=1, cached=1)
    control.news[expect.ticket].put_nowait(last)
    async with asyncio.timeout(5):
        while len(frontend):
            await asyncio.sleep(0)
    sources = {"kv": 1, "language_cache": 1, "encoder_cache": 1, "coalesced": 1}
    assert frontend.account("rid") == sources
    assert tally.counts == {("items", source): items for source, items in sources.items()}


async def test_requests_may_rest_on_the_prefix_cache_if_all_their_layouts_are_known(
    dispatcher, control, mixed, monkeypatch
):
    items, known = mixed
    monkeypatch.setattr(frontend_module, "_WORD_TIMEOUT_S", 0.01)
    control.talks = True
    frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, known, ask_prefix=True)
    some = frontend.start("some", items, 1)
    assert some.keys
    assert not some.layouts
    every = frontend.start("every", items[:2], 1)
    assert every.layouts == tuple(layout_of(item).layout for item in items[:2])
    assert every.announcer == control.name
    while every.ticket not in control.news:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    sent = {run[0].ticket for run in dispatcher.runs}
    assert every.ticket not in sent, "the scheduler may take longer"
    # It had them, and lost them.
    again = Expect("again", 2, 1, TIMEOUT_S, every.keys, every.layouts)
    frontend.again("every", items[:2], again)
    while "again" not in control.news:
        await asyncio.sleep(0)
    control.news["again"].put_nowait(Needed("again", (0, 1)))
    dispatcher.go_on.set()
    async with asyncio.timeout(5):
        while dispatcher.runs[-1][0].ticket != "again":
            await asyncio.sleep(0)
    with pytest.raises(ProtocolError):
        frontend.again("every", items[1:3], again)
    with pytest.raises(ProtocolError):
        frontend.again("every", items[:1], again)
    # Its key was told by an encoder.
    fetched = Expect("fetched", 1, 1, TIMEOUT_S, (b"d" * 32,), every.layouts[:1])
    frontend.again("fetched", items[3:], fetched)
    frontend.cancel_all()
    await asyncio.sleep(0.01)


async def test_a_request_whose_media_fail_is_counted_by_what_failed(dispatcher, control, recorded):
    tally = Tally()
    frontend = Frontend(dispatcher, control, TIMEOUT_S, tally=tally)
    dispatcher.error = MediaError("image 1 of 1: cut off")
    dispatcher.go_on.set()
    items = [EncodeItem(0, "IMAGE", "image 1 of 1", data=b"c")]
    expect = frontend.start("rid", items, 1, parent=recorded.root)
    async with asyncio.timeout(5):
        while len(frontend):
            await asyncio.sleep(0)
    assert tally.counts["failures", "MediaError"] == 1
    span = recorded.only("epd_media")
    assert said(span) == {"items": 1, "known": 0, "error.type": "MediaError"}
    assert f"{span.context.span_id:016x}" in expect.trace


async def test_what_an_encoder_says_of_its_own_is_no_label_of_ours(dispatcher, control, mixed):
    items, known = mixed
    control.talks = True
    tally = Tally()
    frontend = Frontend(dispatcher, control, TIMEOUT_S, key_of, known, tally=tally)
    dispatcher.sources = {2: "words of a stranger", 3: ""}
    dispatcher.go_on.set()
    expect = frontend.start("rid", items, 1)
    await dispatcher.started.wait()
    control.news[expect.ticket].put_nowait(Needed(expect.ticket))
    control.news[expect.ticket].put_nowait(Needed(expect.ticket, over=True))
    async with asyncio.timeout(5):
        while len(frontend):
            await asyncio.sleep(0)
    assert frontend.account("rid") == {"computed": 2}
    assert tally.counts == {("items", "computed"): 2}
