from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_epd.encoder.pipeline.scheduling import BatchBounds, FairQueue, Job, Utilisation

FOREVER = 1e12
ONE = BatchBounds(patches=1, items=1)
ANY = BatchBounds(patches=1 << 30, items=1 << 30)
NO_RATE = 0.0


def job(owner: str = "r", cost: float = 1.0, deadline: float = FOREVER, **more) -> Job:
    return Job(owner, cost, deadline, **more)


def filled(*jobs: Job) -> FairQueue:
    queue = FairQueue()
    for one in jobs:
        queue.push(one)
    return queue


def take(
    queue: FairQueue,
    bounds: BatchBounds = ONE,
    *,
    now: float = 0.0,
    rate: float = NO_RATE,
    room: float = math.inf,
) -> list[Job]:
    return queue.take(now, bounds, rate, room)


def order(queue: FairQueue, bounds: BatchBounds = ONE, **more) -> list[Job]:
    """All jobs in the order of their turns."""
    taken: list[Job] = []
    while batch := take(queue, bounds, **more):
        taken += batch
    return taken


# Fairness


def test_alone_a_request_goes_in_its_own_order():
    jobs = [job(cost=n + 1.0) for n in range(5)]
    assert order(filled(*jobs)) == jobs


@pytest.mark.parametrize("cost", [1.0, 7.0])
def test_single_images_take_turns_with_a_request_of_64(cost):
    """However many wait before it, a single image waits for one or two of them."""
    queue = filled(*(job("large", cost=7.0) for _ in range(64)))
    for number in range(20):
        take(queue)
        single = job(f"single {number}", cost=cost)
        queue.push(single)
        waited = 0
        while take(queue) != [single]:
            waited += 1
        assert waited <= 1


@pytest.mark.parametrize("clients", [1, 4])
def test_clients_with_single_images_do_not_starve_a_request_of_64(clients):
    """Each has another as soon as the last one was taken. The large request has all of the
    tower when it would have had 64 turns, had it been one of so many."""
    queue = filled(*(job("large") for _ in range(64)))
    for client in range(clients):
        queue.push(job(f"{client} first"))
    taken: list[Job] = []
    while sum(one.owner == "large" for one in taken) < 64:
        taken += take(queue)
        if taken[-1].owner != "large":
            queue.push(job(f"{taken[-1].owner[0]} {len(taken)}"))
    assert 64 + 60 * clients <= len(taken) <= 64 + 64 * (clients + 1)


def test_what_is_asked_for_decides_and_not_in_how_many_items():
    dear = [job("dear", cost=100.0) for _ in range(3)]
    cheap = [job("cheap", cost=10.0) for _ in range(29)]
    assert order(filled(*dear, *cheap)) == cheap + dear
    many = [job("many", cost=10.0) for _ in range(31)]
    assert order(filled(*many, *dear)) == dear + many


def test_two_requests_do_not_wait_for_each_others_last_image():
    jobs = [job(owner) for _ in range(4) for owner in ("a", "b")]
    assert [one.owner for one in order(filled(*jobs))] == ["a"] * 4 + ["b"] * 4


def test_who_was_served_before_is_not_behind_for_it():
    queue = FairQueue()
    for _ in range(50):
        queue.push(job("busy"))
        take(queue)
    ours = [[job(owner) for _ in range(4)] for owner in ("busy", "idle before")]
    assert order(filled(*ours[0], *ours[1])) == ours[0] + ours[1]
    queue.push(waits := job("waits", cost=9.0))
    for one in (*ours[0], *ours[1]):
        queue.push(one)
    assert order(queue) == [*ours[0], *ours[1], waits]


def test_a_request_that_is_nearly_done_is_not_passed_by_one_that_comes():
    queue = filled(*(job("first") for _ in range(4)), *(job("other", cost=2.0) for _ in range(4)))
    firsts = [take(queue)[0] for _ in range(2)]
    # Of four turns each of the two has had one; the other's end is at eight.
    last = [job("late") for _ in range(4)]
    for one in last:
        queue.push(one)
    assert [one.owner for one in firsts] == ["first"] * 2
    assert [one.owner for one in order(queue)] == ["first"] * 2 + ["late"] * 4 + ["other"] * 4


def test_what_will_not_be_done_does_not_count():
    gone = [job("a", cost=5.0, deadline=1.0) for _ in range(4)]
    queue = filled(*gone, last := job("a", cost=5.0), job("b", cost=6.0))
    assert queue.first(0.0, NO_RATE) is not last
    queue.take_expired(1.0)
    assert take(queue, now=1.0) == [last]


def test_an_urgent_job_does_not_set_others_back():
    """Its turn was far away; who comes now is not behind everything until there."""
    queue = filled(*(job("large", deadline=100.5) for _ in range(200)))
    take(queue, rate=1.0)
    queue.push(single := job("single"))
    taken = [take(queue)[0] for _ in range(3)]
    assert single in taken


costs = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=10)


@settings(max_examples=100)
@given(st.lists(costs, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_nobody_ends_later_than_with_an_equal_share(requests, random):
    """Of those that are here together, in whatever order their items came."""
    jobs = [job(str(owner), cost) for owner, of in enumerate(requests) for cost in of]
    random.shuffle(jobs)
    ended: dict[str, float] = {}
    done = 0.0
    for taken in order(filled(*jobs)):
        done += taken.cost
        ended[taken.owner] = done
    totals = [sum(of) for of in requests]
    for owner, total in enumerate(totals):
        shared = sum(min(total, other) for other in totals)
        assert ended[str(owner)] <= shared


# Deadlines


def test_who_would_be_late_goes_first():
    late = job("late", deadline=3.5)
    queue = filled(*(job("early") for _ in range(3)), job("early"), late)
    queue.push(job("another"))
    assert take(queue, rate=1.0, now=2.0) == [late]


def test_the_earliest_deadline_goes_first_among_those_who_would_be_late():
    patient = [job(f"patient {n}", cost=0.5) for n in range(10)]
    later, sooner = job("later", deadline=3.9), job("sooner", deadline=2.9)
    queue = filled(*patient, later, sooner)
    assert order(queue, rate=1.0)[:2] == [sooner, later]


def test_who_is_in_time_anyway_waits_for_his_turn():
    queue = filled(first := job("a", deadline=50.0), job("b", deadline=40.0))
    assert take(queue, rate=1.0) == [first]


def test_who_would_be_late_anyway_goes_before_nobody():
    queue = filled(first := job("a"), job("hopeless", cost=10.0, deadline=5.0))
    assert take(queue, rate=1.0) == [first]


def test_nobody_is_urgent_before_the_rate_is_known():
    queue = filled(first := job("a"), job("b", deadline=1.5))
    assert take(queue, rate=NO_RATE) == [first]


def test_the_first_small_one_may_be_asked_for():
    large, small, later = job("a", 1, large=True), job("b", 5), job("c", 9)
    queue = filled(large, later, small)
    assert queue.first(0.0, NO_RATE) is large
    assert queue.first(0.0, NO_RATE, large=False) is small
    queue.begin([small])
    assert order(queue) == [large, later]
    assert queue.first(0.0, NO_RATE, large=False) is None


def test_what_is_begun_counts_as_what_is_taken():
    begun, taken = (filled(job("a", 4), job("b", 6), job("a", 4)) for _ in range(2))
    begun.begin([begun.first(0.0, NO_RATE)])
    take(taken)
    assert [one.owner for one in order(begun)] == [one.owner for one in order(taken)]
    assert begun._virtual == taken._virtual


def test_the_expired_are_not_returned_but_taken_out():
    gone, still = job("a", deadline=1.0), job("b", deadline=2.0)
    queue = filled(gone, still)
    assert take(queue, ANY, now=1.0) == [still]
    assert list(queue) == [gone]
    assert take(queue, now=1.0) == []
    assert queue.take_expired(0.99) == []
    assert queue.take_expired(1.0) == [gone]
    assert len(queue) == 0 and queue.cost == 0


# Batches


def test_a_batch_is_bounded_in_patches_and_items():
    jobs = [job(cost=4.0) for _ in range(5)]
    queue = filled(*jobs)
    assert take(queue, BatchBounds(patches=11, items=10)) == jobs[:2]
    assert take(queue, BatchBounds(patches=100, items=2)) == jobs[2:4]


def test_one_item_may_have_more_patches_than_a_batch():
    jobs = [large, small] = [job(cost=100.0), job(cost=1.0)]
    assert order(queue := filled(*jobs), BatchBounds(patches=10, items=10)) == [large, small]
    assert not len(queue)


def test_smaller_ones_fill_a_batch_and_the_larger_is_next():
    jobs = [first, large, small] = [job(cost=6.0), job(cost=8.0), job(cost=4.0)]
    queue = filled(*jobs)
    assert take(queue, BatchBounds(patches=10, items=10)) == [first, small]
    assert take(queue, BatchBounds(patches=10, items=10)) == [large]


def test_only_one_group_is_run_together():
    jobs = [job(group="image"), job(group="audio"), job(group="image")]
    queue = filled(*jobs)
    assert take(queue, ANY) == [jobs[0], jobs[2]]
    assert take(queue, ANY) == [jobs[1]]


def test_who_is_alone_is_alone():
    jobs = [job(), job(alone=True), job(), job(alone=True)]
    queue = filled(*jobs)
    assert take(queue, ANY) == [jobs[0], jobs[2]]
    assert take(queue, ANY) == [jobs[1]]
    assert take(queue, ANY) == [jobs[3]]


def test_memory_bounds_a_batch_and_nobody_smaller_overtakes():
    jobs = [job(nbytes=4), job(nbytes=4), job(nbytes=1)]
    queue = filled(*jobs)
    assert take(queue, ANY, room=3) == []
    assert take(queue, ANY, room=5) == [jobs[0]], "or the second might wait for ever"
    assert take(queue, ANY, room=5) == jobs[1:]


def test_the_parked_wait_and_keep_their_turn():
    jobs = [job("a", parked=True), job("b"), job("c")]
    queue = filled(*jobs)
    assert take(queue) == [jobs[1]]
    jobs[0].parked = False
    assert take(queue) == [jobs[0]]
    jobs[2].parked = True
    assert take(queue) == []
    assert len(queue) == 1


# Bookkeeping


def test_a_job_waits_once():
    queue = filled(one := job())
    with pytest.raises(ValueError, match="waits already"):
        queue.push(one)
    queue.remove(one)
    with pytest.raises(KeyError):
        queue.remove(one)
    queue.push(one)
    assert one in queue and len(queue) == 1


def test_its_cost_is_that_of_who_waits():
    queue = filled(one := job(cost=3.0), job(cost=4.0))
    assert queue.cost == 7.0
    queue.remove(one)
    assert queue.cost == 4.0
    take(queue)
    assert queue.cost == 0.0


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0)])
def test_a_batch_has_room_for_something(bounds):
    with pytest.raises(ValueError, match="at least"):
        BatchBounds(*bounds)


jobs_of_any_kind = st.builds(
    Job,
    owner=st.sampled_from("abc"),
    cost=st.integers(0, 20).map(float),
    deadline=st.sampled_from([5.0, 10.0, 20.0, FOREVER]),
    nbytes=st.integers(0, 10),
    group=st.sampled_from(["image", "audio"]),
    alone=st.booleans(),
    parked=st.booleans(),
)


@settings(max_examples=150)
@given(
    st.lists(jobs_of_any_kind, max_size=25),
    st.integers(1, 30),
    st.integers(1, 5),
    st.sampled_from([NO_RATE, 1.0, 10.0]),
    st.integers(10, 40),
    st.randoms(use_true_random=False),
)
def test_nothing_is_lost_or_returned_twice_and_no_bound_is_broken(
    jobs: list[Job],
    patches: int,
    items: int,
    rate: float,
    room: int,
    random: random.Random,
):
    queue = FairQueue()
    coming, waiting = jobs[::-1], set()
    bounds = BatchBounds(patches, items)
    now, spare = 0.0, 200
    while coming or waiting:
        spare -= 1
        assert spare, "it ends"
        step = random.random()
        if coming and step < 0.5:
            queue.push(one := coming.pop())
            waiting.add(one)
        elif waiting and step < 0.6:
            queue.remove(one := random.choice(list(queue)))
            waiting.remove(one)
        elif step < 0.7:
            now += 1.0
            expired = set(queue.take_expired(now))
            assert expired == {one for one in waiting if one.deadline <= now}
            waiting -= expired
        elif waiting and step < 0.8:
            one = random.choice(list(queue))
            one.parked = not one.parked
        else:
            batch = take(queue, bounds, now=now, rate=rate, room=room)
            ready = [one for one in waiting if not one.parked and one.deadline > now]
            # Whoever has room has a batch: each job fits the room by itself.
            assert bool(batch) == bool(ready)
            assert set(batch) <= set(ready) and len(set(batch)) == len(batch) <= items
            assert sum(one.nbytes for one in batch) <= room
            if len(batch) > 1:
                assert sum(one.cost for one in batch) <= patches
                assert len({one.group for one in batch}) == 1
                assert not any(one.alone for one in batch)
            waiting -= set(batch)
        assert set(queue) == waiting
        assert len(queue) == len(waiting)
        assert queue.cost == sum(one.cost for one in waiting)
        for parked in [one for one in waiting if not coming and one.parked]:
            parked.parked = False


@pytest.mark.parametrize("rate", [0.0, 1.0, 2.0, 100.0])
def test_the_first_is_the_one_that_is_taken(rate: float) -> None:
    queue = FairQueue()
    for number in range(8):
        deadline = 100.0 - 12 * number
        queue.push(Job(owner=f"r{number % 3}", cost=3 + number % 4, deadline=deadline))
    while queue:
        first = queue.first(0.0, rate)
        assert queue.take(0.0, BatchBounds(patches=1, items=1), rate, float("inf")) == [first]


def test_it_is_a_share_of_the_last_minute():
    utilisation = Utilisation(towers=2)
    assert utilisation.share(now=100.0) == 0
    utilisation.note(100.0, 130.0)
    utilisation.note(100.0, 130.0)
    assert utilisation.share(now=130.0) == pytest.approx(0.5)
    assert utilisation.share(now=175.0) == pytest.approx(0.25), "half of it is too long ago"
    assert utilisation.share(now=200.0) == 0


def test_it_is_never_more_than_all_of_it():
    utilisation = Utilisation(towers=1)
    utilisation.note(0.0, 100.0)
    utilisation.note(50.0, 100.0)
    assert utilisation.share(now=100.0) == 1
