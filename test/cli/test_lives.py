from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.cli.lives import Life, Restarts, State

BOUNDS = Restarts(most=3, within_s=100, first_s=1, longest_s=3, silences=2)


def ready() -> Life:
    life = Life(BOUNDS)
    life.started()
    life.answered(True)
    assert life.state is State.READY
    return life


def test_what_ends_before_it_was_ready_is_given_up():
    life = Life(BOUNDS)
    assert life.due(0)
    life.started()
    life.answered(False)
    assert life.state is State.STARTING
    life.ended(5)
    assert life.state is State.FAILED
    assert not life.due(1e9)


def test_what_dies_is_started_again_after_longer_and_longer_pauses():
    life, pauses = ready(), []
    for now in (10.0, 20.0, 30.0):
        life.ended(now)
        pauses.append(life.wait_s(now))
        assert not life.due(now)
        assert life.due(now + pauses[-1])
        life.started()
        life.answered(now != 20.0)  # one that fails to come up
    assert pauses == [1, 2, 3]
    assert life.restarts == 3
    life.ended(40)
    assert life.state is State.FAILED


def test_old_deaths_are_forgotten():
    life = ready()
    for now in range(0, 5000, 200):
        life.ended(now)
        assert life.wait_s(now) == 1
        life.started()
        life.answered(True)


def test_a_server_that_answers_no_more_is_silent_until_it_does():
    life = ready()
    life.answered(False)
    assert life.state is State.READY
    life.answered(False)
    assert life.state is State.SILENT
    assert life.running
    life.answered(True)
    assert life.state is State.READY
    life.answered(False)
    assert life.state is State.READY


def test_a_step_that_is_not_in_the_table_is_a_defect():
    life = Life(BOUNDS)
    with pytest.raises(AssertionError, match="pending -> down"):
        life._was_ready = True
        life.ended(0)


@given(st.lists(st.sampled_from(["start", "yes", "no", "end", "wait"]), max_size=60))
def test_it_is_never_started_twice_or_more_often_than_allowed(events):
    life, now, starts = Life(BOUNDS), 0.0, 0
    for event in events:
        if event == "wait":
            now += 1
        elif event == "start" and life.due(now):
            life.started()
            starts += 1
        elif event == "end" and life.running:
            life.ended(now)
        elif event in ("yes", "no"):
            life.answered(event == "yes")
        assert life.running == (life.state in (State.STARTING, State.READY, State.SILENT))
    assert starts <= 1 + BOUNDS.most
