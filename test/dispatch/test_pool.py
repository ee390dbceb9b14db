from __future__ import annotations

import asyncio
import contextlib
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import Clock
from sglang_epd.dispatch.pool import LEASE, STATIC, Health, Pool, Report, View, usable
from sglang_epd.errors import NamespaceError, OverloadedError, TokenError, UnavailableError

A, B = "http://a:1", "http://b:1"


@pytest.fixture
def clock() -> Clock:
    """The pool's."""
    return Clock(100.0)


@pytest.fixture
def pool(clock) -> Pool:
    return Pool("ns", clock)


def join(pool: Pool, *urls: str) -> None:
    """Encoders that have answered."""
    for url in urls:
        pool.add(url)
        pool.heard(url, Report("ns"))


def urls(pool: Pool) -> list[str]:
    return [view.url for view in pool.snapshot().encoders]


def test_a_failed_request_is_a_suspicion_however_often_it_happens(pool):
    asked = []
    join(pool, A)
    pool.listen(asked.append)
    for _ in range(5):
        pool.doubt(A, "reset")
    with pytest.raises(RuntimeError, match="already"):
        pool.listen(asked.append)
    assert pool.state(A) is Health.SUSPECT
    assert asked == [A] * 6, "it is probed at once"


def test_the_end_of_a_lease_leaves_who_is_named_by_a_flag_too(pool, clock):
    pool.add(A)
    pool.register(A, "ns", 10)
    clock.now += 11
    pool.expire()
    assert pool.urls(STATIC) == [A] and pool.urls(LEASE) == []


def test_a_lease_without_an_end_ends_with_an_encoder_that_is_gone_for_good(pool):
    """Of SGLang's own form of registration; its pod may have come back at another address."""
    pool.register(A, "", math.inf)
    pool.heard(A, Report("ns"))
    for _ in range(1799):
        pool.failed(A, "silent")
    pool.expire()
    assert pool.urls() == [A]
    pool.failed(A, "silent")
    pool.expire()
    assert pool.urls() == []


def test_another_model_is_refused_with_both_names(pool):
    with pytest.raises(NamespaceError, match=r"has ns.*other"):
        pool.register(A, "other", 10)
    assert pool.urls() == []
    pool.add(A)
    pool.heard(A, Report("other"))
    assert urls(pool) == []
    assert pool.state(A) is Health.MISFIT
    complaint = pool.complaint()
    assert isinstance(complaint, NamespaceError) and "other" in complaint.message
    pool.add(B)
    assert pool.complaint() is None, "that one may be of this model"
    pool.heard(A, Report("ns"))
    assert urls(pool) == [A, B]


def test_one_of_another_model_that_ends_may_come_back_as_another(pool):
    pool.add(A)
    pool.heard(A, Report("other"))
    assert isinstance(pool.complaint(), NamespaceError)
    for _ in range(3):
        pool.failed(A, "refused")
    assert pool.state(A) is Health.OPEN
    assert pool.complaint() is None, "it is worth waiting for"
    pool.heard(A, Report("other"))
    assert isinstance(pool.complaint(), NamespaceError)


async def test_one_that_refused_the_token_is_left_alone_for_a_while_however_well_it_is(pool, clock):
    join(pool, A, B)
    waiting = asyncio.create_task(pool.changed(60))
    await asyncio.sleep(0)
    with pytest.raises(TokenError), pool.attempt(A, 1):
        raise TokenError("refused")
    await asyncio.wait_for(waiting, 5)
    pool.heard(A, Report("ns"))
    assert pool.state(A) is Health.MISFIT
    assert urls(pool) == [B] and pool.complaint() is None, "B may take it"
    pool.remove(B, STATIC)
    complaint = pool.complaint()
    assert type(complaint) is TokenError and complaint.message == "refused"
    clock.now += 5
    pool.heard(A, Report("ns"))
    assert urls(pool) == [A] and pool.complaint() is None, "it may have another by now"


async def test_load_is_what_it_told_and_what_was_sent_since(pool):
    pool.add(A)
    pool.heard(A, Report("ns", patches_queued=100, patches_per_s=7))
    with pool.attempt(A, 40):
        (view,) = pool.snapshot().encoders
        assert (view.load, view.rate) == (140, 7)
        pool.heard(A, Report("ns", patches_queued=140))
        assert pool.snapshot().encoders[0].load == 140, "not counted twice"
    assert pool.snapshot().encoders[0].load == 100


async def test_one_that_is_full_comes_last_until_its_time_is_over(pool, clock):
    join(pool, A, B)
    full = OverloadedError("full")
    full.retry_after_s = 3
    with pytest.raises(OverloadedError), pool.attempt(A, 1):
        raise full
    assert pool.state(A) is Health.READY, "full is not ill"
    assert [view.url for view in usable(pool.snapshot().encoders)] == [B]
    clock.now += 3
    assert [view.url for view in usable(pool.snapshot().encoders)] == [A, B]


async def test_one_that_fails_at_all_it_is_sent_comes_last_for_a_while(pool, clock):
    def best():
        return [view.url for view in usable(pool.snapshot().encoders)]

    async def answered(useless):
        with pool.attempt(A, 1) as attempt:
            attempt.useless = useless

    join(pool, A, B)
    for useless in (True, True, False, True, True):
        await answered(useless)
        assert best() == [A, B], "not three in a row"
    for seconds in (1, 2, 4, 8, 16, 32, 32):
        await answered(True)
        clock.now += seconds - 0.1
        assert best() == [B]
        clock.now += 0.1
        assert best() == [A, B], "it is tried again"
    await answered(False)
    await answered(True)
    assert best() == [A, B]


async def test_one_that_had_no_room_for_some_items_is_full(pool, clock):
    join(pool, A, B)
    waiting = asyncio.create_task(pool.changed(30))
    await asyncio.sleep(0)
    with pool.attempt(A, 1) as attempt:
        attempt.full = True
    assert [view.url for view in usable(pool.snapshot().encoders)] == [B]
    await asyncio.sleep(0.01)
    assert not waiting.done(), "no room is none to tell of"
    waiting.cancel()
    clock.now += 1
    assert [view.url for view in usable(pool.snapshot().encoders)] == [A, B]


async def test_the_only_encoder_keeps_what_it_has_until_there_is_another(pool):
    join(pool, A)
    with pool.attempt(A, 1) as attempt:
        for _ in range(3):
            pool.failed(A, "silent")
        await asyncio.sleep(0)
        assert pool.state(A) is Health.OPEN and not attempt.lost.done()
        pool.add(B)
        pool.heard(B, Report("another model"))
        await asyncio.sleep(0)
        assert not attempt.lost.done(), "that is no elsewhere"
        pool.heard(B, Report("ns"))
        await asyncio.wait_for(attempt.lost, 2)


@pytest.mark.parametrize("silent", [True, False])
async def test_what_an_encoder_had_that_was_started_again_is_lost_with_it(pool, clock, silent):
    """Its machine is, and nothing comes on the old connections. There may be no other one."""
    pool.add(A)
    pool.heard(A, Report("ns", uptime_s=50.0))
    with pool.attempt(A, 7) as old:
        clock.now += 20
        pool.heard(A, Report("ns", uptime_s=70.0))
        if silent:
            for _ in range(3):
                pool.failed(A, "silent")
        await asyncio.sleep(0)
        assert not old.lost.done()
        clock.now += 10
        pool.heard(A, Report("ns", uptime_s=4.0))
        await asyncio.wait_for(old.lost, 2)
        assert pool.snapshot().encoders[0].load == 0
        with pool.attempt(A, 5) as new:
            pool.heard(A, Report("ns", uptime_s=4.0))
            await asyncio.sleep(0)
            assert not new.lost.done() and pool.snapshot().encoders[0].load == 5
    assert pool.state(A) is Health.READY
    assert pool.snapshot().encoders[0].load == 0


async def test_one_that_was_taken_out_and_started_again_is_gone(pool, clock):
    pool.add(A)
    pool.heard(A, Report("ns"))
    with pool.attempt(A, 7):
        pool.remove(A, STATIC)
        assert pool.state(A) is Health.DRAINING
        clock.now += 20
        pool.heard(A, Report("ns", uptime_s=1.0))
    assert pool.state(A) is Health.GONE and not pool.urls()


def test_an_encoder_that_renews_its_lease_is_not_gone_for_good(pool):
    pool.register(A, "", 15.0)
    for _ in range(2000):
        pool.failed(A, "silent")
    pool.expire()
    assert pool.urls() == [A]


async def test_an_error_of_an_attempt_that_was_lost_is_no_doubt_of_what_was_started(pool, clock):
    pool.add(A)
    pool.heard(A, Report("ns"))
    with contextlib.suppress(UnavailableError), pool.attempt(A, 7):
        clock.now += 20
        pool.heard(A, Report("ns", uptime_s=1.0))
        raise UnavailableError("it does not answer any more")
    assert pool.state(A) is Health.READY


async def test_one_that_takes_its_leave_finishes_what_it_has(pool):
    for url in (A, B):
        pool.register(url, "ns", 10)
        pool.heard(url, Report("ns"))
    with pool.attempt(A, 1) as attempt:
        pool.remove(A, LEASE)
        await asyncio.sleep(0)
        assert urls(pool) == [B] and not attempt.lost.done()
    assert pool.state(A) is Health.GONE


async def test_a_fault_of_many_at_once_is_counted_as_few(pool, clock):
    join(pool, A, B)
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(pool.attempt(A, 1)).useless = True
    assert [view.url for view in usable(pool.snapshot().encoders)] == [B]
    clock.now += 1
    assert [view.url for view in usable(pool.snapshot().encoders)] == [A, B]
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(pool.attempt(A, 1)).useless = True
    for _ in range(2):
        pool.failed(A, "silent")
    pool.heard(A, Report("ns"))
    assert [view.url for view in usable(pool.snapshot().encoders)] == [A, B], "it was started anew"


async def test_requests_that_come_back_wake_those_who_wait_though_they_failed(pool):
    join(pool, A)
    waiting = asyncio.create_task(pool.changed(30))
    await asyncio.sleep(0)
    with pool.attempt(A, 1) as attempt:
        attempt.useless = True
    await asyncio.wait_for(waiting, 2)


async def test_the_only_one_that_is_silent_and_taken_out_gives_up_what_it_has(pool):
    """No answer comes any more, from whatever is at its address."""
    pool.register(A, "ns", 10)
    pool.heard(A, Report("ns"))
    for silent_first in (True, False):
        pool.register(A, "ns", 10)
        pool.heard(A, Report("ns"))
        with pool.attempt(A, 1) as attempt:
            if not silent_first:
                pool.remove(A, LEASE)
            for _ in range(2):
                pool.failed(A, "silent")
            await asyncio.sleep(0)
            assert attempt.lost.done() is not silent_first
            if silent_first:
                pool.remove(A, LEASE)
            await asyncio.wait_for(attempt.lost, 2)
        assert pool.state(A) is Health.GONE


async def test_one_that_was_taken_out_by_mistake_is_told_of_when_it_is_back(pool):
    pool.register(A, "ns", 10)
    pool.heard(A, Report("ns"))
    with pool.attempt(A, 1):
        pool.remove(A, LEASE)
        pool.heard(A, Report("ns"))
        assert pool.state(A) is Health.DRAINING and not urls(pool)
        waiting = asyncio.create_task(pool.changed(30))
        await asyncio.sleep(0)
        pool.register(A, "ns", 10)
        pool.heard(A, Report("ns"))
        await asyncio.wait_for(waiting, 2)
        assert urls(pool) == [A]


async def test_one_that_took_its_leave_and_falls_silent_gives_up_what_it_has(pool):
    """As one whose machine is taken away."""
    for url in (A, B):
        pool.register(url, "ns", 10)
        pool.heard(url, Report("ns"))
    with pool.attempt(A, 1) as attempt:
        pool.remove(A, LEASE)
        for _ in range(2):
            pool.failed(A, "silent")
        await asyncio.wait_for(attempt.lost, 2)
        pool.register(A, "ns", 10)
        assert urls(pool) == [B]
        pool.heard(A, Report("ns"))
        assert urls(pool) == [A, B], "it may come back"
    assert pool.state(A) is Health.READY


async def test_an_attempt_learns_that_its_encoder_is_given_up_from_any_thread(pool):
    join(pool, A, B)
    with pool.attempt(A, 1) as attempt:
        pool.failed(A, "silent")
        await asyncio.sleep(0)
        assert not attempt.lost.done()
        thread = threading.Thread(target=pool.failed, args=(A, "silent"))
        thread.start()
        await asyncio.wait_for(attempt.lost, 2)
        thread.join()
    with pool.attempt(A, 1) as late:
        assert late.lost.done(), "nothing is sent to one that is given up"


async def test_those_who_wait_are_told_of_a_change_and_one_of_them_of_room(pool):
    join(pool, A)
    waiting = [asyncio.create_task(pool.changed(30)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pool.attempt(A, 1):
        pass
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False, False]
    pool.failed(A, "silent")
    await asyncio.wait_for(asyncio.gather(*waiting), 2)


async def test_who_stops_waiting_is_not_woken(pool):
    gone = asyncio.create_task(pool.changed(30))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    left = asyncio.create_task(pool.changed(30))
    await asyncio.sleep(0)
    pool.add(A)
    with pytest.raises(UnavailableError), pool.attempt(A, 1):
        raise UnavailableError("reset")
    await asyncio.wait_for(left, 2)
    await asyncio.wait_for(pool.changed(0.01), 2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.sampled_from(
                ["add", "register", "heard", "misfit", "drain", "failed", "doubt", "expire"]
            ),
            st.floats(0, 20),
        ),
        max_size=60,
    )
)
def test_no_order_of_events_breaks_the_table(events):
    now = 0.0
    known: dict[str, Health] = {}

    def on_move(url: str, old: Health | None, new: Health, _why: str) -> None:
        assert known.get(url) is old
        known[url] = new
        if new is Health.GONE:
            del known[url]

    pool = Pool("ns", lambda: now, on_move)
    for url, event, seconds in events:
        match event:
            case "add":
                pool.add(url)
            case "register":
                pool.register(url, "", 10)
            case "heard" | "drain":
                pool.heard(url, Report("ns", draining=event == "drain"))
            case "misfit":
                pool.heard(url, Report("other"))
            case "failed":
                pool.failed(url, "no")
            case "doubt":
                pool.doubt(url, "no")
            case "expire":
                now += seconds
                pool.expire()
                pool.remove(url, STATIC)
        assert set(known) == set(pool.urls())
        assert all(pool.state(one) is state for one, state in known.items())


def test_the_best_are_those_that_are_ready_and_not_full():
    ready, busy = View(A, Health.READY), View(B, Health.READY, busy=True)
    everything = [View("d", Health.SUSPECT), View("c", Health.JOINING), busy, ready]
    best = []
    while found := usable(everything):
        best.append([view.url for view in found])
        everything = [view for view in everything if view not in found]
    assert best == [[A], [B], ["c"], ["d"]]
