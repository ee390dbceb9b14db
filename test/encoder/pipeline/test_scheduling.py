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
    ahead_s: float = 0.0,
) -> list[Job]:
    return queue.take(now, bounds, rate, room, ahead_s=ahead_s)


class Plain:
    """The order of a queue by its definition: all jobs are looked at each time."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.ends: dict[str, tuple[float, int]] = {}
        self.virtual = 0.0

    def push(self, job: Job) -> None:
        end, number = self.ends.get(job.owner, (0.0, job.number))
        self.ends[job.owner] = max(self.virtual, end) + job.cost, number
        self.jobs.append(job)

    def remove(self, job: Job) -> None:
        end, number = self.ends[job.owner]
        self.ends[job.owner] = end - job.cost, number
        self._take(job, 0.0)

    def begin(self, job: Job) -> None:
        self._take(job, job.cost / len({job.owner for job in self.jobs}))

    def _take(self, job: Job, done: float) -> None:
        self.jobs.remove(job)
        self.virtual = self.virtual + done if self.jobs else 0.0
        waiting = {job.owner for job in self.jobs}
        self.ends = {
            owner: end
            for owner, end in self.ends.items()
            if waiting and (end[0] > self.virtual or owner in waiting)
        }

    def first(self, now: float, *, large: bool) -> Job | None:
        may = [
            job
            for job in self.jobs
            if not job.parked and job.deadline > now and (large or not job.large)
        ]
        return min(may, key=lambda job: (self.ends[job.owner], job.place, job.number), default=None)


def order(queue: FairQueue, bounds: BatchBounds = ONE, **more) -> list[Job]:
    """All jobs in the order of their turns."""
    taken: list[Job] = []
    while batch := take(queue, bounds, **more):
        taken += batch
    return taken


@given(st.randoms(use_true_random=False), st.integers(1, 6), st.integers(0, 400))
def test_the_first_is_who_would_be_first_among_all(random, owners, steps):
    queue, plain, now = FairQueue(), Plain(), 0.0
    for _ in range(steps):
        did = random.random()
        if did < 0.5 or not plain.jobs:
            new = job(
                random.choice("abcdef"[:owners]),
                random.choice((0.5, 1.0, 3.0)),
                now + random.choice((1.0, 50.0, FOREVER)),
                place=random.randrange(3),
                large=random.random() < 0.3,
                parked=random.random() < 0.2,
            )
            queue.push(new)
            plain.push(new)
        elif did < 0.6:
            gone = random.choice(plain.jobs)
            queue.remove(gone)
            plain.remove(gone)
        elif did < 0.7:
            hurried = random.choice(plain.jobs)
            hurried.deadline = min(hurried.deadline, now + 2.0)
            queue.hurry(hurried)
        elif did < 0.8:
            now += random.random()
            expired = queue.take_expired(now)
            assert {*expired} == {one for one in plain.jobs if one.deadline <= now}
            for one in expired:
                plain.remove(one)
        elif did < 0.9:
            one = random.choice(plain.jobs)
            one.parked = not one.parked
        elif (one := plain.first(now, large=True)) is not None:
            queue.begin([one])
            plain.begin(one)
        for large in (True, False):
            assert queue.first(now, NO_RATE, large=large) is plain.first(now, large=large)


class Unseen(dict[Job, None]):
    def __iter__(self):
        raise AssertionError("all jobs are looked at")


@pytest.mark.parametrize("owners", [1, 10, 1000])
def test_a_job_is_found_without_a_look_at_all(owners):
    queue = filled(*(job(f"r{number % owners}") for number in range(1000)))
    queue._jobs = Unseen(queue._jobs)
    for number in range(100):
        queue.begin([queue.first(0.0, 1.0)])
        queue.push(job(f"s{number}"))
        assert queue.take_expired(0.0) == []


# Fairness


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("a1 a2 a3", "a1 a2 a3"),  # alone in its own order
        ("a1 b1 a1 b1 a1 b1", "a1 a1 a1 b1 b1 b1"),  # none waits for the other's last item
        ("a9 a9 b1 b1 b1", "b1 b1 b1 a9 a9"),  # what is asked for decides
        ("a1 a1 a1 a1 a1 b4", "b4 a1 a1 a1 a1 a1"),  # and not in how many items
    ],
)
def test_those_who_would_be_done_first_with_equal_shares_are_first(asked, expected):
    jobs = [job(one[0], cost=float(one[1])) for one in asked.split()]
    assert " ".join(f"{one.owner}{one.cost:.0f}" for one in order(filled(*jobs))) == expected


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


@pytest.mark.parametrize(
    ("first", "second", "rate", "order_of_both"),
    [
        ({}, {"deadline": 1.5}, 1.0, "second first"),  # it would be late
        ({"deadline": 2.5}, {"deadline": 1.5}, 1.0, "second first"),  # and then the other is not
        ({"deadline": 1.9}, {"deadline": 1.5}, 1.0, "first second"),  # and the other would be then
        ({"deadline": 50.0}, {"deadline": 40.0}, 1.0, "first second"),  # both are in time
        ({}, {"cost": 10.0, "deadline": 5.0}, 1.0, "first second"),  # it is late anyway
        ({}, {"deadline": 1.5}, NO_RATE, "first second"),
    ],
)
def test_a_job_that_would_be_late_in_its_turn_goes_first(first, second, rate, order_of_both):
    queue = filled(job("first", **first), job("second", **second))
    assert [one.owner for one in order(queue, rate=rate)] == order_of_both.split()


def test_of_several_that_would_be_late_the_earliest_deadline_is_first():
    jobs = [job("a"), job("b"), job("c", deadline=2.5), job("d", deadline=1.5)]
    assert [one.owner for one in order(filled(*jobs), rate=1.0)] == ["d", "c", "a", "b"]


@pytest.mark.parametrize(("deadline", "first"), [(4.5, "early"), (3.5, "late"), (1.5, "late")])
def test_a_request_that_cannot_be_done_whole_is_behind_all_others(deadline, first):
    early = [job("early", deadline=deadline) for _ in range(4)]
    late = [job("late", cost=5.0) for _ in range(2)]
    queue = filled(*early, *late)
    assert queue.first(0.0, 1.0).owner == first
    assert next(one.owner for one in order(queue, rate=1.0)) == first


def test_what_is_ahead_counts():
    queue = filled(job("a", deadline=3.0), job("b"))
    assert queue.first(0.0, 1.0, ahead_s=2.0).owner == "a"
    assert queue.first(0.0, 1.0, ahead_s=2.1).owner == "b"
    assert take(queue, rate=1.0, ahead_s=2.1)[0].owner == "b"
    assert take(queue, rate=1.0, ahead_s=2.1)[0].owner == "a", "nothing else is to be done"


def test_what_comes_too_late_takes_no_place_in_a_batch():
    queue = filled(job("a", deadline=0.5), job("b", deadline=9.0), job("c"))
    assert [one.owner for one in take(queue, ANY, rate=1.0)] == ["b", "c"]
    assert [one.owner for one in take(queue, ANY, rate=1.0)] == ["a"]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 9), st.integers(1, 40)), max_size=30
    ),
    st.sampled_from([0.0, 2.5]),
)
def test_requests_that_are_begun_in_their_order_end_in_time(asked, ahead_s):
    """However many there are. If there is none, none would do so alone."""
    queue = filled(*(job(owner, float(cost), float(until)) for owner, cost, until in asked))
    in_time, late = queue._order(0.0, 1.0, ahead_s)
    assert sorted(map(id, (*in_time, *late))) == sorted(map(id, queue))
    done_at = ahead_s
    for one in in_time:
        done_at += one.cost
        assert done_at <= one.deadline
    assert {one.owner for one in in_time}.isdisjoint(one.owner for one in late)
    assert queue.first(0.0, 1.0, ahead_s=ahead_s) is next(iter(in_time or late), None)
    if late and not in_time:
        costs = {one.owner: 0.0 for one in late}
        for one in late:
            costs[one.owner] += one.cost
        assert all(
            ahead_s + costs[owner] > min(one.deadline for one in late if one.owner == owner)
            for owner in costs
        )


def test_the_first_small_one_may_be_asked_for():
    large, small, later = job("a", 1, large=True), job("b", 5), job("c", 9)
    queue = filled(large, later, small)
    assert queue.first(0.0, NO_RATE) is large
    assert queue.first(0.0, NO_RATE, large=False) is small
    queue.begin([small])
    assert order(queue) == [large, later]
    assert queue.first(0.0, NO_RATE, large=False) is None


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


@pytest.mark.parametrize(
    ("jobs", "bounds", "batches"),
    [
        ([{"cost": 4}] * 5, (11, 10), [[0, 1], [2, 3], [4]]),
        ([{"cost": 4}] * 5, (100, 2), [[0, 1], [2, 3], [4]]),
        ([{"cost": 100}, {}], (10, 10), [[0], [1]]),  # one item may have more patches
        ([{"cost": 6}, {"cost": 8}, {"cost": 4}], (10, 10), [[0, 2], [1]]),
        ([{"group": "a"}, {"group": "b"}, {"group": "a"}], (10, 10), [[0, 2], [1]]),
        ([{}, {"alone": True}, {}, {"alone": True}], (10, 10), [[0, 2], [1], [3]]),
    ],
)
def test_what_runs_together(jobs, bounds, batches):
    queue = filled(*(made := [job(**one) for one in jobs]))
    for batch in batches:
        assert take(queue, BatchBounds(*bounds)) == [made[number] for number in batch]
    assert not len(queue)


@pytest.mark.parametrize(
    ("owners", "cost", "idle", "first"),
    [
        ("aaaa", 4, True, 1),
        ("aaaa", 4, False, 2),  # the tower is busy anyhow
        ("abaa", 4, True, 2),  # others wait too
        ("aaaa", 3, True, 3),  # three fit: a pass of one is as slow as one of three
        ("a", 4, True, 1),
    ],
)
def test_an_idle_tower_begins_with_one_large_item_of_a_request(owners, cost, idle, first):
    queue = filled(*(job(owner, cost, place=place) for place, owner in enumerate(owners)))
    bounds = BatchBounds(patches=9, items=9)
    assert len(queue.take(0.0, bounds, NO_RATE, math.inf, idle=idle)) == first


def test_memory_bounds_a_batch_and_nobody_smaller_overtakes():
    jobs = [job(nbytes=4), job(nbytes=4), job(nbytes=1)]
    queue = filled(*jobs)
    assert take(queue, ANY, room=3) == []
    assert take(queue, ANY, room=5) == [jobs[0]], "or the second might wait for ever"
    assert take(queue, ANY, room=5) == jobs[1:]


def test_jobs_that_are_not_to_be_taken_yet_stop_no_others():
    jobs = [job(place=place) for place in range(3)]
    queue = filled(*jobs)
    assert queue.take(0.0, ANY, NO_RATE, math.inf, without=[jobs[1]]) == [jobs[0], jobs[2]]
    assert queue.take(0.0, ANY, NO_RATE, math.inf, without=[jobs[1]]) == []
    assert take(queue) == [jobs[1]]


# Bookkeeping


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
def test_the_first_is_the_one_that_is_taken_and_may_be_begun(rate: float) -> None:
    jobs = [(f"r{n % 3}", 3 + n % 4, 100.0 - 12 * n) for n in range(8)]
    queue, begun = (filled(*(job(*one) for one in jobs)) for _ in range(2))
    while queue:
        first = queue.first(0.0, rate)
        assert take(queue, rate=rate) == [first]
        again = begun.first(0.0, rate)
        assert (again.owner, again.deadline) == (first.owner, first.deadline)
        begun.begin([again])


def test_it_is_a_share_of_the_last_minute():
    utilisation = Utilisation(towers=2)
    assert utilisation.share(now=100.0) == 0
    utilisation.note(100.0, 130.0)
    utilisation.note(100.0, 130.0)
    assert utilisation.share(now=130.0) == pytest.approx(0.5)
    assert utilisation.share(now=175.0) == pytest.approx(0.25), "half of it is too long ago"
    assert utilisation.share(now=200.0) == 0
    assert Utilisation(towers=1).share(now=0.0) == 0
    utilisation.note(200.0, 300.0)
    utilisation.note(150.0, 300.0)
    assert utilisation.share(now=300.0) == 1, "never more than all of it"
