from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.dispatch.decider import (
    START_PATCHES_PER_S,
    Knobs,
    Link,
    LinkCost,
    LocalQueue,
    LocalRate,
    decide,
)
from sglang_epd.dispatch.policies import ItemCost
from sglang_epd.dispatch.pool import Health, Snapshot, View

LINK = LinkCost(round_trip_s=0.01, bytes_per_s=1e9)
KNOBS = Knobs(bytes_per_patch=1000.0, interference=2.0)


def works(*patches: float) -> list[ItemCost]:
    return [ItemCost(bytes([index]), size) for index, size in enumerate(patches)]


def pool(*views: View) -> Snapshot:
    return Snapshot(views)


def encoder(name: str = "a", **changes) -> View:
    return View(f"http://{name}:1", **{"state": Health.READY, "rate": 1000.0, **changes})


def test_a_small_image_is_not_worth_the_round_trip():
    local = LocalRate(1000.0)
    small = decide(works(2), pool(encoder()), local, KNOBS, LINK)
    assert (small.where, small.why) == ("local", "cost")
    assert small.local_s == pytest.approx(0.004)
    assert small.remote_s == pytest.approx(0.002 + 0.01 + 2e-6)
    large = decide(works(1000), pool(encoder()), local, KNOBS, LINK)
    assert (large.where, large.why) == ("remote", "cost")
    assert large.remote_s == pytest.approx(1.0 + 0.01 + 0.001)
    assert large.compute_s == pytest.approx(1.0)


def test_the_queue_of_either_side_counts():
    work, free = works(100), LocalRate(1000.0)
    loaded = pool(encoder(load=10_000.0))
    assert decide(work, pool(encoder()), free, KNOBS, LINK).where == "remote"
    assert decide(work, loaded, free, KNOBS, LINK).where == "local"
    queued = LocalRate(1000.0, queued=10_000.0)
    assert decide(work, loaded, queued, KNOBS, LINK).where == "remote"


def test_the_slowest_share_decides():
    """Two equal items on two encoders take as long as one; on a loaded one they wait."""
    both = decide(works(500, 500), pool(encoder("a"), encoder("b")), None, KNOBS, LINK)
    assert both.compute_s == pytest.approx(0.5)
    one = decide(works(500, 500), pool(encoder("a"), encoder("b", load=1e6)), None, KNOBS, LINK)
    assert one.compute_s == pytest.approx(1.0)
    faster = decide(works(500, 500), pool(encoder("a"), encoder("b", rate=1e5)), None, KNOBS, LINK)
    assert faster.compute_s == pytest.approx(0.01)


def test_slow_wires_keep_media_here():
    slow = LinkCost(0.01, bytes_per_s=1e5)
    assert decide(works(100), pool(encoder()), LocalRate(1000.0), KNOBS, slow).where == "local"


@pytest.mark.parametrize(
    ("knobs", "snapshot", "why"),
    [
        (Knobs(encode=False), pool(encoder()), "off"),
        (Knobs(), pool(), "no_encoder"),
        (Knobs(), pool(encoder(state=Health.SUSPECT)), "no_encoder"),
        (Knobs(), pool(encoder(state=Health.JOINING)), "no_encoder"),
        (Knobs(), pool(encoder(busy=True)), "busy"),
        (Knobs(min_patches=1e9), pool(encoder()), "small"),
        (Knobs(min_items=3), pool(encoder()), "few"),
    ],
)
def test_what_is_set_or_missing_comes_before_the_costs(knobs, snapshot, why):
    decision = decide(works(1e6, 1e6), snapshot, LocalRate(1.0), knobs, LINK)
    assert (decision.where, decision.why) == ("local", why)


@pytest.mark.parametrize("knobs", [Knobs(encode=False), Knobs(min_patches=1e9)])
@pytest.mark.parametrize("snapshot", [pool(), pool(encoder(busy=True)), pool(encoder())])
def test_without_a_tower_there_is_no_choice(knobs, snapshot):
    decision = decide(works(10), snapshot, None, knobs, LINK)
    assert (decision.where, decision.why) == ("remote", "no_tower")
    assert decision.local_s == math.inf


def test_one_item_that_is_large_enough_takes_the_others_along():
    knobs = Knobs(min_patches=100)
    decision = decide(works(5, 100), pool(encoder(rate=1e9)), LocalRate(1.0), knobs, LINK)
    assert (decision.where, decision.why) == ("remote", "cost")


def test_a_full_encoder_is_not_counted_on():
    snapshot = pool(encoder("a", busy=True, rate=1e9), encoder("b", rate=10.0))
    assert decide(works(100), snapshot, None, KNOBS, LINK).compute_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("encoders", "local", "rate"),
    [
        # Nobody knows: both are taken to be alike.
        ([0.0, 0.0], 0.0, START_PATCHES_PER_S),
        ([0.0], 500.0, 500.0),
        ([0.0, 4000.0, 2000.0], 500.0, 3000.0),
    ],
)
def test_an_unknown_rate_is_that_of_others(encoders, local, rate):
    views = [
        encoder(str(index), rate=known, load=0.0 if not known else 1e9)
        for index, known in enumerate(encoders)
    ]
    decision = decide(works(rate), pool(*views), LocalRate(local), KNOBS, LINK)
    assert decision.compute_s == pytest.approx(1.0)
    alike = decide(works(600), pool(encoder(rate=3000.0)), LocalRate(), KNOBS, LINK)
    assert alike.local_s == pytest.approx(0.4)


@given(
    st.lists(st.floats(0, 1e6), max_size=20),
    st.lists(
        st.builds(
            View,
            st.text("abc", min_size=1, max_size=3),
            st.sampled_from(Health),
            st.floats(0, 1e7),
            st.one_of(st.just(0.0), st.floats(1e-3, 1e7)),
            st.booleans(),
        ),
        max_size=5,
        unique_by=lambda view: view.url,
    ),
    st.one_of(st.none(), st.builds(LocalRate, st.floats(1e-3, 1e7), st.floats(0, 1e7))),
)
def test_it_never_fails_and_its_choice_is_the_cheaper_one(patches, views, local):
    decision = decide(works(*patches), Snapshot(tuple(views)), local, KNOBS, LINK)
    usable = any(view.state is Health.READY and not view.busy for view in views)
    assert decision.where == "remote" if local is None else True
    assert math.isfinite(decision.remote_s) == usable
    if decision.why == "cost":
        cheaper = "local" if decision.local_s < decision.remote_s else "remote"
        assert decision.where == cheaper
    elif local is not None:
        assert not usable


def test_the_link_is_learnt():
    rng = random.Random(7)
    link = Link()
    for _ in range(300):
        nbytes = rng.choice([1e5, 1e6, 3e7])
        link.learn(nbytes, (0.05 + nbytes / 2e7) * rng.uniform(0.9, 1.1), 0.0)
    cost = link.cost(0.0)
    assert cost.round_trip_s == pytest.approx(0.05, rel=0.4)
    assert cost.bytes_per_s == pytest.approx(2e7, rel=0.2)


def test_the_link_starts_where_it_is_told():
    cost = Link(LinkCost(0.5, 1e7)).cost(0.0)
    assert cost.round_trip_s == pytest.approx(0.5)
    assert cost.bytes_per_s == pytest.approx(1e7)


def test_requests_of_one_size_teach_their_round_trip():
    link = Link()
    for _ in range(500):
        link.learn(1e6, 0.2, 0.0)
    cost = link.cost(0.0)
    assert cost.round_trip_s + 1e6 / cost.bytes_per_s == pytest.approx(0.2, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 1e10), st.floats(-10, 1e4)), max_size=50))
def test_whatever_is_measured_the_link_stays_within_bounds(measured):
    link = Link()
    for nbytes, seconds in measured:
        link.learn(nbytes, seconds, 0.0)
    cost = link.cost(0.0)
    assert 1e-4 <= cost.round_trip_s <= 10.0
    assert 0.99e6 <= cost.bytes_per_s <= 1.01e12


def test_one_request_that_met_a_pause_changes_little():
    link = Link()
    for _ in range(20):
        link.learn(1e6, 0.006, 0.0)
    before = link.cost(0.0).round_trip_s
    link.learn(1e6, 60.0, 0.0)
    assert link.cost(0.0).round_trip_s < 2 * before
    for _ in range(50):
        link.learn(1e6, 60.0, 0.0)
    assert link.cost(0.0).round_trip_s == 10.0, "but several do"


def test_what_nothing_went_through_for_a_minute_is_forgotten():
    """Else a link that was slow once would never be tried again."""
    link = Link()
    for _ in range(50):
        link.learn(1e6, 5.0, 1000.0)
    assert link.cost(1059.0).round_trip_s > 1.0
    assert link.cost(1061.0).round_trip_s == pytest.approx(LinkCost().round_trip_s)


def test_the_queue_here_drains_by_itself():
    queue = LocalQueue()
    queue.add(1000.0, now=100.0, rate=500.0)
    assert queue.patches(100.0, 500.0) == 1000.0
    assert queue.patches(101.0, 500.0) == 500.0
    queue.add(250.0, now=101.0, rate=500.0)
    assert queue.patches(102.0, 500.0) == 250.0
    assert queue.patches(1e6, 500.0) == 0.0
    # A clock that stands still drains nothing.
    queue.add(10.0, now=1e6, rate=500.0)
    assert queue.patches(1e6, 500.0) == 10.0
