from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from clocks import Clock
from sglang_epd.store.backend import (
    Breaker,
    BreakerState,
    LeftAloneError,
    OversizedError,
    StoreError,
    Threads,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def one(clock: Clock) -> Breaker:
    return Breaker("reads", clock)


async def test_a_thread_that_does_not_start_is_started_by_the_next_call(monkeypatch):
    threads, start = Threads("store", 1), threading.Thread.start

    def no_more(_thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(RuntimeError):
        await threads.run(lambda: 1)
    assert await asyncio.wait_for(threads.run(lambda: 2), 5) == 2
    threads.close()


async def ask(one: Breaker, error: Exception | None = None, timeout_s: float = 5.0) -> str:
    """One call, which ends at once; how it ended."""

    async def call() -> None:
        if error is not None:
            raise error

    try:
        await one.ask(call(), timeout_s)
    except LeftAloneError:
        return "left alone"
    except StoreError:
        return "failed"
    return "answered"


async def opened(one: Breaker) -> None:
    for _ in range(5):
        assert await ask(one, StoreError()) == "failed"
    assert one.state is BreakerState.OPEN


async def test_failures_in_a_row_open_it_and_a_success_between_them_does_not(one, clock):
    for answer in (None, OversizedError()):
        for _ in range(4):
            assert await ask(one, StoreError()) == "failed"
        await ask(one, answer)
        assert one.state is BreakerState.CLOSED
    await opened(one)
    clock.now = 0.999
    assert one.blocks
    assert await ask(one) == "left alone"
    clock.now = 1.0
    assert not one.blocks
    assert await ask(one) == "answered"
    assert one.state is BreakerState.CLOSED


async def test_the_pause_doubles_up_to_a_bound_and_begins_anew_after_a_success(one, clock):
    await opened(one)
    pauses = []
    for _ in range(7):
        began = clock.now
        while await ask(one, RuntimeError()) == "left alone":
            clock.now += 0.5
        pauses.append(clock.now - began)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    clock.now += 30.0
    assert await ask(one) == "answered"
    await opened(one)
    clock.now += 1.0
    assert await ask(one) == "answered"


async def test_no_answer_in_time_is_a_failure(one):
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await one.ask(asyncio.sleep(60), 0.001)
    assert one.state is BreakerState.OPEN


class Calls(RuleBasedStateMachine):
    """Whatever the order in which calls end: it is never open for longer than its pause,
    and lets one through at a time while it is in doubt."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.one = Breaker("reads", self.clock)
        self.out: list[tuple[asyncio.Task[None], asyncio.Future[None], bool]] = []

    def teardown(self) -> None:
        while self.out:
            self._end(len(self.out) - 1, "cancelled")
        self.loop.close()

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def call(self) -> None:
        before, blocked = self.one.state, self.one.blocks
        asked = self.loop.create_future()

        async def answer() -> None:
            await asked

        task = self.loop.create_task(self.one.ask(answer(), 1e6))
        self._step()
        assert task.done() == blocked
        if blocked:
            assert isinstance(task.exception(), LeftAloneError)
        else:
            self.out.append((task, asked, before is BreakerState.OPEN))

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 1000), how=st.sampled_from(("answered", "failed", "cancelled")))
    def end(self, index: int, how: str) -> None:
        before = self.one.state
        probe = self._end(index % len(self.out), how)
        if not probe and before is not BreakerState.CLOSED:
            assert self.one.state is before, "a call of before says nothing new"
        elif probe:
            assert self.one.state is (
                BreakerState.CLOSED if how == "answered" else BreakerState.OPEN
            )

    @invariant()
    def it_comes_back(self) -> None:
        probes = [probe for _, _, probe in self.out if probe]
        assert len(probes) == (self.one.state is BreakerState.HALF_OPEN)
        if self.one.state is BreakerState.OPEN:
            assert self.one._open_until - self.clock.now <= 30.0

    def _end(self, index: int, how: str) -> bool:
        task, asked, probe = self.out.pop(index)
        if how == "cancelled":
            task.cancel()
        elif how == "failed":
            asked.set_exception(StoreError("down"))
        else:
            asked.set_result(None)
        self.loop.run_until_complete(asyncio.wait([task]))
        assert task.cancelled() == (how == "cancelled")
        assert how == "cancelled" or (task.exception() is None) == (how == "answered")
        return probe

    def _step(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))


TestCalls = Calls.TestCase


async def test_a_call_that_was_given_up_before_it_began_keeps_nothing():
    """Without waiting for a collection of cycles."""
    threads, mount = Threads("mount", 1), threading.Event()
    hanging = asyncio.create_task(threads.run(mount.wait))
    await asyncio.sleep(0)
    embedding = type("Embedding", (), {"write": lambda self: None})()
    kept = weakref.ref(embedding)
    gc.disable()
    try:
        waiting = asyncio.create_task(threads.run(embedding.write))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting, embedding
        assert kept() is None
    finally:
        gc.enable()
        mount.set()
        await hanging
        threads.close()
