from __future__ import annotations

import itertools

import pytest

from encoder.towers import FakeTower
from sglang_epd.encoder.pipeline.scheduling import BatchBounds, Job
from sglang_epd.encoder.pipeline.work import Lane, Work, WorkState

BATCH = BatchBounds(patches=10, items=3)
LEGAL = {
    WorkState.LOOKING: "WAITING DONE FAILED",
    WorkState.WAITING: "PREPARING FAILED",
    WorkState.PREPARING: "READY WAITING FAILED",
    WorkState.READY: "RUNNING DORMANT WAITING FAILED",
    WorkState.RUNNING: "DONE WAITING FAILED",
    WorkState.DORMANT: "WAITING FAILED",
    WorkState.DONE: "",
    WorkState.FAILED: "",
}


def work(state: WorkState = WorkState.WAITING, **job) -> Work:
    made = Work(b"key", "IMAGE", b"data", Job("r", 1.0, 0.0, **job), state=state)
    made.job.content = made
    return made


@pytest.fixture
async def lane() -> Lane:
    return Lane(FakeTower())


@pytest.mark.parametrize(("old", "new"), list(itertools.product(WorkState, WorkState)))
def test_only_the_steps_in_the_picture_are_taken(old, new):
    one = work(old)
    if new.name in LEGAL[old].split():
        one.enter(new)
        assert one.state is new
    else:
        with pytest.raises(RuntimeError, match="->"):
            one.enter(new)
        assert one.state is old


def test_the_time_in_a_state_adds_up_over_its_visits():
    one = work()
    for state in (WorkState.PREPARING, WorkState.WAITING, WorkState.PREPARING, WorkState.READY):
        one.enter(state)
    assert set(one.ms) == {"wait", "preprocess"}


async def test_a_lane_is_full_of_what_is_ready_and_being_prepared(lane):
    lane.preparing = 1
    lane.ready.push(Job("r", 1.0, 0.0))
    assert not lane.full(BATCH)
    lane.ready.push(Job("r", 1.0, 0.0))
    assert lane.full(BATCH), "three items"
    lane.preparing = 0
    assert not lane.full(BATCH)
    lane.ready.push(Job("r", 8.0, 0.0))
    assert lane.full(BATCH), "ten patches"


async def test_a_lane_is_filled_for_each_batch_that_its_tower_would_take(lane):
    lane.tower.depth = 2
    lane.preparing = 5
    assert not lane.full(BATCH), "two batches"
    lane.preparing = 6
    assert lane.full(BATCH)
    lane.preparing, lane.batches = 3, 1
    assert lane.full(BATCH), "one runs already"
    lane.batches = 2
    assert lane.full(BATCH), "one ahead of both"


async def test_a_batch_is_complete_if_nothing_is_prepared_that_would_fit_in(lane):
    lane.typical = 4.0
    lane.ready.push(Job("r", 6.0, 0.0))
    assert lane.has_batch(BATCH)
    lane.preparing = 1
    assert not lane.has_batch(BATCH)
    lane.ready.push(Job("r", 1.0, 0.0, parked=True))
    assert not lane.has_batch(BATCH)
    lane.ready.push(Job("r", 1.0, 0.0))
    assert lane.has_batch(BATCH), "seven patches, and four would be too many"
    lane.typical = 1.0
    assert not lane.has_batch(BATCH)
    lane.ready.push(Job("r", 1.0, 0.0))
    assert lane.has_batch(BATCH), "three items"


async def test_what_is_parked_fills_a_lane_only_where_it_is_asked(lane):
    for _ in range(3):
        lane.ready.push(Job("r", 1.0, 0.0, parked=True))
    assert not lane.full(BATCH)
    assert lane.full(BATCH, parked=True)
    assert lane.empty


@pytest.mark.parametrize(
    ("state", "parked", "isolated"),
    [
        (WorkState.PREPARING, False, True),
        (WorkState.READY, False, True),
        (WorkState.READY, True, False),
        (WorkState.RUNNING, False, True),
        (WorkState.DORMANT, False, False),
        (WorkState.FAILED, False, False),
    ],
)
async def test_a_suspect_has_its_lane_to_itself_while_it_is_on_its_way(
    lane, state, parked, isolated
):
    assert not lane.isolated
    lane.suspect = suspect = work(state, parked=parked)
    assert not lane.isolated, "it is on no lane"
    suspect.lane = lane
    assert lane.isolated == isolated
