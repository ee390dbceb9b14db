from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_epd.store.breaker import Breaker, State


def breaker() -> Breaker:
    return Breaker(failures=3, first_pause_s=1.0, longest_pause_s=4.0)


def fail(one: Breaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        assert one.admits(now)
        one.failed(now)


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not():
    one = breaker()
    for _ in range(5):
        fail(one, 0.0, 2)
        assert one.admits(0.0)
        one.succeeded()
    assert one.state is State.CLOSED
    fail(one, 0.0, 3)
    assert one.state is State.OPEN
    assert one.blocks(0.999) and not one.blocks(1.0)
    assert not one.admits(0.999)


def test_after_the_pause_one_call_is_tried_and_the_others_are_not():
    one = breaker()
    fail(one, 0.0, 3)
    assert one.admits(1.0)
    assert one.state is State.HALF_OPEN
    assert not one.admits(1.0)
    one.succeeded()
    assert one.state is State.CLOSED
    assert one.admits(1.0) and one.admits(1.0)


def test_the_pause_doubles_up_to_a_bound_and_begins_anew_after_a_success():
    one, now, pauses = breaker(), 0.0, []
    fail(one, now, 3)
    for _ in range(4):
        began = now
        while not one.admits(now):
            now += 0.25
        pauses.append(now - began)
        one.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    now += 4.0
    assert one.admits(now)
    one.succeeded()
    fail(one, now, 3)
    assert one.admits(now + 1.0)


def test_a_probe_whose_caller_left_makes_room_for_the_next():
    one = breaker()
    fail(one, 0.0, 3)
    assert one.admits(1.0)
    one.left_open()
    assert one.state is State.HALF_OPEN
    assert one.admits(1.0)


def test_calls_of_before_that_end_late_change_nothing_of_an_open_one():
    one = breaker()
    assert one.admits(0.0)
    fail(one, 0.0, 3)
    one.succeeded()
    one.failed(0.5)
    assert one.state is State.OPEN
    assert not one.admits(0.9)
    assert one.admits(1.0)


def test_a_step_that_is_not_in_the_table_raises():
    with pytest.raises(RuntimeError, match="HALF_OPEN"):
        breaker()._enter(State.HALF_OPEN)


class Calls(RuleBasedStateMachine):
    """Whatever the order in which calls end: it is never open for longer than its pause,
    and lets one through at a time while it is in doubt."""

    def __init__(self) -> None:
        super().__init__()
        self.one = breaker()
        self.now = 0.0
        self.out = 0
        self.probes = 0

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def call(self) -> None:
        before = self.one.state
        if self.one.admits(self.now):
            self.out += 1
            assert before is not State.OPEN or self.one.state is State.HALF_OPEN

    @precondition(lambda self: self.out)
    @rule(how=st.sampled_from(("succeeded", "failed", "left_open")))
    def end(self, how: str) -> None:
        self.out -= 1
        if how == "failed":
            self.one.failed(self.now)
        else:
            getattr(self.one, how)()

    @invariant()
    def it_comes_back(self) -> None:
        if self.one.state is State.OPEN:
            assert self.one._open_until - self.now <= 4.0


TestCalls = Calls.TestCase
