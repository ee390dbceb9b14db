from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace

import pytest

from sglang_epd.seams.scheduler import SchedulerSeam, _reachable_address, _split_batch


class FakeBackend:
    def __init__(self) -> None:
        self.waiting: list = []
        self.failures: dict = {}
        self.settled: tuple[list, list] = ([], [])
        self.abandoned: list[str] = []

    def wait(self, request):
        self.waiting.append(request)
        return self.failures.get(request.rid)

    def poll(self):
        settled, self.settled = self.settled, ([], [])
        return settled

    def abandon(self, matches) -> None:
        self.abandoned += [request.rid for request in self.waiting if matches(request.rid)]


def request(rid: str, wait: bool | None = True) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, need_wait_for_mm_inputs=wait)


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def seam(backend):
    return SchedulerSeam(backend)


def test_only_requests_that_wait_are_held(seam, backend):
    waiting, text, control = request("w"), request("t", None), SimpleNamespace()
    assert seam.process_waiting_requests([waiting, text, control]) == ([text, control], [])
    assert seam.waiting_list == [waiting]


def test_what_settled_goes_on_after_what_came(seam, backend):
    backend.settled = ([request("ready")], [("abort", "late", HTTPStatus.GATEWAY_TIMEOUT)])
    backend.failures["bad"] = ("abort bad", "no manifest", HTTPStatus.BAD_REQUEST)
    new = request("new", False)
    ready, failed = seam.process_waiting_requests([request("bad"), new])
    assert [r.rid for r in ready] == ["new", "ready"]
    assert [message for _, message, _ in failed] == ["no manifest", "late"]


def test_a_batch_whose_members_wait_is_taken_apart(seam, backend):
    members = [request("a"), request("b", False)]
    ready, _ = seam.process_waiting_requests([SimpleNamespace(batch=members)])
    assert (ready, backend.waiting) == ([members[1]], [members[0]])


@pytest.mark.parametrize("batch", [[], [request("a", False), request("b", None)]])
def test_any_other_batch_stays_together(batch):
    received = SimpleNamespace(batch=batch)
    assert _split_batch(received) == [received]


@pytest.mark.parametrize(
    ("rid", "abort_all", "abandoned"),
    [("a", False, ["a", "ab"]), ("b", False, ["b"]), ("", True, ["a", "ab", "b"])],
)
def test_an_abort_gives_up_the_requests_that_it_names(seam, backend, rid, abort_all, abandoned):
    backend.waiting = [request("a"), request("ab"), request("b")]
    seam.abort_waiting_requests(SimpleNamespace(rid=rid, abort_all=abort_all))
    assert backend.abandoned == abandoned


LOCAL, REMOTE = "http://127.0.0.1:1", "http://10.0.0.2:1"


@pytest.mark.parametrize(
    ("host", "urls", "address"),
    [
        ("10.0.0.1", [REMOTE], "10.0.0.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("[fd00::1]", [REMOTE], "fd00::1"),
        ("127.0.0.1", [LOCAL], "127.0.0.1"),
        ("localhost", [LOCAL], "127.0.0.1"),
        ("::1", [LOCAL], "::1"),
        ("127.0.0.1", [LOCAL, REMOTE], "found"),
        ("127.0.0.1", [], "found"),  # encoders that register may be anywhere
        ("0.0.0.0", [LOCAL], "found"),
        ("::", [], "found"),
        ("", [], "found"),
        (None, [REMOTE], "found"),
    ],
)
def test_encoders_are_told_an_address_they_can_reach(sglang, monkeypatch, host, urls, address):
    monkeypatch.setattr(sglang("utils.network"), "get_local_ip_auto", lambda: "found")
    assert _reachable_address(host, urls) == address
