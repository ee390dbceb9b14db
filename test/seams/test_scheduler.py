from __future__ import annotations

from types import SimpleNamespace

import pytest
import zmq

from sglang_epd.plugin import _pull_and_pass_on
from sglang_epd.seams import receiving, scheduler
from sglang_epd.seams.scheduler import SchedulerSeam, create_backend


class FakeLeader:
    """Holds back what is to wait, and lets go what the test says."""

    def __init__(self) -> None:
        self.waiting: list = []
        self.settled: list = []
        self.abandoned: list[str] = []

    def pass_on(self, requests):
        self.waiting += [one for one in requests if one.need_wait_for_mm_inputs]
        settled, self.settled = self.settled, []
        return [*settled, *(one for one in requests if not one.need_wait_for_mm_inputs)]

    def abandon(self, matches) -> None:
        self.abandoned += [one.rid for one in self.waiting if matches(one.rid)]


def request(rid: str, wait: bool | None = True) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, need_wait_for_mm_inputs=wait)


@pytest.fixture
def leader():
    return FakeLeader()


@pytest.fixture
def seam(leader):
    """Of the rank that leads."""
    return SchedulerSeam(SimpleNamespace(), leader)


def pull(seam, pulled):
    """What SGLang broadcasts, when its own method has taken in `pulled`."""
    receiver = SimpleNamespace(mm_receiver=seam)

    def original(request_receiver):
        assert request_receiver is receiver
        return pulled

    return _pull_and_pass_on(original, receiver)


def test_the_leading_rank_holds_back_what_waits(seam, leader):
    waiting, text = request("w"), request("t", None)
    assert pull(seam, [waiting, text]) == [text]
    assert seam.waiting_list == [waiting]
    leader.settled = [waiting]
    assert pull(seam, []) == [waiting]


def test_a_change_of_role_is_noted_where_requests_wait(seam):
    change = SimpleNamespace(new_role="decode", need_wait_for_mm_inputs=None)
    pull(seam, [change])
    assert change.new_role == "decode"
    pull(seam, [request("w"), change])
    assert change.new_role != "decode"


def test_a_rank_that_takes_nothing_in_says_so_still(seam):
    """None tells SGLang's broadcast apart from an empty list."""
    assert pull(SchedulerSeam(SimpleNamespace(), None), None) is None
    assert pull(seam, None) is None
    assert pull(seam, []) == []


@pytest.mark.parametrize(
    ("rid", "abort_all", "abandoned"),
    [("a", False, ["a", "ab"]), ("b", False, ["b"]), ("", True, ["a", "ab", "b"])],
)
def test_an_abort_gives_up_the_requests_and_parts_that_it_names(leader, rid, abort_all, abandoned):
    leader.waiting = [request("a"), request("ab"), request("b")]
    queued: list[str] = []
    named = SimpleNamespace(abort=lambda named: queued.extend(filter(named, ("ab.early-1", "b"))))
    seam = SchedulerSeam(leader=leader, parts=named)
    seam.abort_waiting_requests(SimpleNamespace(rid=rid, abort_all=abort_all))
    assert leader.abandoned == abandoned
    assert queued == [one for one in ("ab.early-1", "b") if abort_all or one.startswith(rid)]


def place(**more: int) -> dict[str, object]:
    """A parallel context; one rank of one, unless `more` says otherwise."""
    sizes = ("tp_size", "dp_size", "pp_size", "nnodes", "attn_tp_size", "attn_cp_size")
    ranks = ("tp_rank", "dp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank")
    context = {**dict.fromkeys(sizes, 1), **dict.fromkeys(ranks, 0), "attn_dp_enabled": False}
    return {**context, **more}


@pytest.fixture
def groups(monkeypatch):
    """The groups of ranks that are made, by this process as rank 3."""
    made: list[list[int]] = []

    def new_group(ranks, *, backend, timeout):
        assert (backend, timeout.total_seconds()) == ("gloo", 300.0)
        made.append(ranks)
        return "group" if 3 in ranks else scheduler.dist.GroupMember.NON_GROUP_MEMBER

    monkeypatch.setattr(scheduler.dist, "new_group", new_group)
    return made


def test_a_later_stage_takes_part_in_nothing(flags, groups, monkeypatch):
    """But in the making of groups, which waits for all ranks."""
    monkeypatch.setattr(receiving, "start", lambda _readers: pytest.fail("a second receiver"))
    monkeypatch.setattr(scheduler.rundir, "secret", lambda: pytest.fail("a claim"))
    monkeypatch.setattr(scheduler.idle.Hosted, "language", False)
    flags(disagg={"disaggregation_mode": "null"}, device={"watchdog_timeout": 300})
    flags(memory={"disable_radix_cache": True})
    for sizes, made in (
        ({"pp_size": 2, "tp_size": 2}, []),
        ({"pp_size": 2, "tp_size": 4, "nnodes": 4}, [[0, 2, 3]]),
    ):
        flags(parallel=place(pp_rank=1, **sizes))
        seam = create_backend(None, SimpleNamespace(tree_cache=None, is_generation=True))
        assert groups == made
        assert scheduler.idle.Hosted.language, "it prefills in the turns of the first stage"
        assert seam.waiting_list == []
        seam.abort_waiting_requests(SimpleNamespace(rid="r", abort_all=True))
        assert pull(seam, pulled := [request("w")]) is pulled


class Poller(zmq.Poller):
    """Notes how long it would sleep."""

    def poll(self, timeout=None):
        self.timeout = timeout
        return super().poll(0)


@pytest.mark.parametrize(
    ("due_s", "replicas", "slept_ms"),
    [(None, False, 1000), (0.05, False, 50), (None, True, 10), (0.005, True, 5)],
)
def test_an_idle_scheduler_wakes_for_the_receiver_and_for_a_part_that_pauses(
    due_s, replicas, slept_ms
):
    """And for what another replica has, which waits for it."""
    context = zmq.Context()
    with context.socket(zmq.PAIR) as claims, context.socket(zmq.PAIR) as receiver:
        claims.bind("inproc://claims")
        receiver.connect("inproc://claims")
        sleeper = SimpleNamespace(poller=(poller := Poller()))
        in_parts = None if due_s is None else SimpleNamespace(due_s=lambda: due_s)
        scheduler._wake(sleeper, claims, in_parts, replicas=replicas)
        assert sleeper.poller.poll(1000) == []
        assert poller.timeout == slept_ms
        receiver.send(b"an item has landed")
        assert claims.poll(10_000)
        assert sleeper.poller.poll(1000) == [(claims, zmq.POLLIN)]
    context.term()


def test_a_sleeper_without_a_poller_is_left_alone():
    scheduler._wake(SimpleNamespace(), None, SimpleNamespace(), replicas=True)  # type: ignore[arg-type]


class Gate:
    """Notes when it is tidied."""

    def __init__(self, order: list[str], *, untidy: bool) -> None:
        self._order, self._untidy = order, untidy

    def tidy(self) -> bool:
        self._order.append("tidy")
        return self._untidy


@pytest.mark.parametrize(
    ("heard", "untidy", "told"),
    [([("settle", "r")], False, True), ([], True, True), ([], False, False)],
)
def test_later_stages_are_told_of_parts_ahead_of_a_ticks_requests(heard, untidy, told):
    order: list[str] = []
    text, failure = request("t", None), (request("f"), "error", 500)
    first = SchedulerSeam(
        SimpleNamespace(sort_out=lambda requests: (requests, [failure])),
        gate=Gate(order, untidy=untidy),
        parts=(parts := SimpleNamespace(stages=True, heard=heard)),
    )
    (*before, last), failed = first.process_waiting_requests([text])
    assert (last, failed, parts.heard) == (text, [failure], [])
    assert [one.calls for one in before] == ([heard] if told else [])
    later = SchedulerSeam(
        gate=Gate(order, untidy=False),
        parts=SimpleNamespace(told=lambda calls: order.append(f"told {calls}")),
    )
    for one in before:
        first.hear(one)
        later.hear(one)
    assert order == ["tidy", *(["tidy", f"told {heard}"] if told else [])]


def test_with_one_stage_nothing_is_told(leader):
    seam = SchedulerSeam(
        SimpleNamespace(sort_out=lambda all: (all, [])),
        leader,
        gate=Gate([], untidy=True),
        parts=SimpleNamespace(stages=False, heard=[]),
    )
    assert seam.process_waiting_requests([text := request("t", None)]) == ([text], [])


@pytest.mark.parametrize(("elsewhere", "member"), [(range(2, 4), True), (range(4, 8), False)])
def test_ranks_of_other_hosts_and_the_leading_one_have_a_relay(flags, groups, elsewhere, member):
    flags(device={"watchdog_timeout": 300})
    assert (scheduler._relay(elsewhere) is not None) == member
    assert groups == [[0, *elsewhere]]


def test_on_one_host_no_group_is_made(groups):
    assert scheduler._relay(range(2, 2)) is None
    assert not groups


def test_a_scheduler_whose_role_is_switched_keeps_its_receiver(flags, monkeypatch, seam):
    """SGLang makes one anew, and its request receiver goes on with the first."""
    monkeypatch.setattr(receiving, "start", lambda _readers: pytest.fail("a second receiver"))
    flags(disagg={"disaggregation_mode": "decode"}, parallel=place())
    switched = SimpleNamespace(request_receiver=SimpleNamespace(mm_receiver=seam))
    assert create_backend(None, scheduler=switched) is seam
