from __future__ import annotations

import pytest

from encoder.towers import FakeTower
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.pipeline.work import Lane, Work, WorkState

BATCH = BatchBounds(patches=10, items=3)


def work(state: WorkState = WorkState.WAITING, cost: float = 1.0, **job) -> Work:
    made = {"key": b"key", "modality": "IMAGE", "data": b"data", "state": state}
    return Work("r", cost, 0.0, **(made | job))


@pytest.fixture
async def lane() -> Lane:
    return Lane(FakeTower())


@pytest.mark.parametrize(
    ("old", "new"),
    [("WAITING", "READY"), ("READY", "DONE"), ("DORMANT", "RUNNING"), ("DONE", "WAITING")],
)
def test_a_step_that_is_not_in_the_picture_is_not_taken(old, new):
    one = work(WorkState[old])
    with pytest.raises(RuntimeError, match="->"):
        one.enter(WorkState[new])
    assert one.state is WorkState[old]


def test_the_time_in_a_state_is_a_stage_at_each_visit():
    one = work()
    for state in (WorkState.PREPARING, WorkState.WAITING, WorkState.PREPARING, WorkState.READY):
        one.enter(state)
    assert [name for name, _, _ in one.stages] == ["wait", "preprocess"] * 2
    assert all(began <= ended for _, began, ended in one.stages)


@pytest.mark.parametrize(
    ("preparing", "ready", "depth", "batches", "full"),
    [
        (1, [1], 1, 0, False),
        (1, [1, 1], 1, 0, True),  # three items
        (0, [1, 1], 1, 0, False),
        (0, [1, 1, 8], 1, 0, True),  # ten patches
        (5, [], 2, 0, False),  # two batches
        (6, [], 2, 0, True),
        (3, [], 2, 1, True),  # one runs already
        (3, [], 2, 2, True),  # one ahead of both
    ],
)
async def test_a_lane_is_filled_for_each_batch_that_its_tower_would_take(
    lane, preparing, ready, depth, batches, full
):
    lane.tower.depth, lane.batches = depth, batches
    lane.preparing = {work() for _ in range(preparing)}
    for cost in ready:
        lane.ready.push(work(cost=cost))
    assert lane.full(BATCH) == full


async def test_a_batch_is_complete_if_nothing_is_prepared_that_would_fit_in(lane):
    lane.typical["IMAGE"] = 4.0
    lane.ready.push(work(cost=6.0))
    assert lane.has_batch(BATCH)
    lane.preparing = {work()}
    assert not lane.has_batch(BATCH)
    lane.ready.push(work(parked=True))
    assert not lane.has_batch(BATCH)
    lane.ready.push(work())
    assert lane.has_batch(BATCH), "seven patches, and four would be too many"
    lane.typical["IMAGE"] = 1.0
    assert not lane.has_batch(BATCH)
    lane.ready.push(work())
    assert lane.has_batch(BATCH), "three items"


async def test_large_items_in_preparation_are_no_batch_for_small_ones(lane):
    lane.preparing = {work(large=True) for _ in range(3)}
    assert lane.full(BATCH)
    assert not lane.full(BATCH, large=False)
    assert lane.has_place(large=False)
    assert not lane.has_place(large=True), "the last of four is for small ones"
    lane.preparing, lane.tower.preparers = set(), 1
    assert lane.has_place(large=True)


async def test_videos_in_preparation_are_no_batch_and_say_nothing_of_images(lane):
    """Preparing one takes longer than its passes: a tower would wait for one after the other."""
    video, image = work(modality="VIDEO", large=True), work()
    lane.note_prepared(video, 75_000, 1.0)
    lane.preparing = {image, video, work(modality="VIDEO", large=True)}
    assert lane.expected([image]) == 1.0
    assert lane.expected([video]) > BATCH.patches
    assert not lane.full(BATCH)
    assert not lane.full(BATCH, large=False)


async def test_what_is_parked_fills_a_lane_only_where_it_is_asked(lane):
    for _ in range(3):
        lane.ready.push(work(parked=True))
    assert not lane.full(BATCH)
    assert lane.full(BATCH, parked=True)
    assert lane.empty


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("where", ["preparing", "ready", "running"])
async def test_an_item_that_is_to_be_alone_has_its_lane_while_it_is_on_its_way(lane, where, parked):
    add = lane.ready.push if where == "ready" else getattr(lane, where).add
    add(work(parked=parked))
    assert not lane.isolated
    add(work(alone=True, parked=parked))
    assert lane.isolated == (where != "ready" or not parked)
