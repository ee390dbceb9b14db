from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_epd.plugin import _pull_and_pass_on
from sglang_epd.seams.scheduler import SchedulerSeam


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


def test_a_rank_that_takes_nothing_in_says_so_still(seam):
    """None tells SGLang's broadcast apart from an empty list."""
    assert pull(SchedulerSeam(SimpleNamespace(), None), None) is None
    assert pull(seam, None) is None
    assert pull(seam, []) == []


@pytest.mark.parametrize(
    ("rid", "abort_all", "abandoned"),
    [("a", False, ["a", "ab"]), ("b", False, ["b"]), ("", True, ["a", "ab", "b"])],
)
def test_an_abort_gives_up_the_requests_that_it_names(seam, leader, rid, abort_all, abandoned):
    leader.waiting = [request("a"), request("ab"), request("b")]
    seam.abort_waiting_requests(SimpleNamespace(rid=rid, abort_all=abort_all))
    assert leader.abandoned == abandoned
