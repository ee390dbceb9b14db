from __future__ import annotations

from array import array
from http import HTTPStatus
from types import SimpleNamespace

import pytest

from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    MediaError,
    RequestCancelledError,
    _tree,
)
from sglang_epd.language import manifest
from sglang_epd.language.backend import Backend
from sglang_epd.transfer.ledger import ReceivedItem, Settled
from sglang_epd.wire import Expect

EXPECT = Expect("ticket", 1, 1, 60.0)
ITEMS = (ReceivedItem(b"k" * 32, None, None),)


class FakeReceiver:
    def __init__(self) -> None:
        self.claims: dict[str, Expect] = {}
        self.abandoned: list[str] = []
        self.settled: list[Settled] = []
        self.alive = True

    def claim(self, rid: str, expect: Expect) -> None:
        assert rid not in self.claims, "each claim has a name of its own"
        self.claims[rid] = expect

    def abandon(self, rid: str) -> None:
        self.abandoned.append(rid)

    def take_settled(self) -> list[Settled]:
        taken, self.settled = self.settled, []
        return taken

    def settle(self, number: int, error: EpdError | None = None) -> None:
        rid = list(self.claims)[number]
        self.settled.append(Settled(rid, error=error) if error else Settled(rid, ITEMS))


@pytest.fixture
def receiver():
    return FakeReceiver()


@pytest.fixture
def assembled():
    """What `assemble` is called with; it may be made to raise."""
    return SimpleNamespace(calls=[], error=None)


@pytest.fixture
def backend(receiver, assembled):
    def assemble(request, items):
        assembled.calls.append((request, items))
        if assembled.error:
            raise assembled.error
        return SimpleNamespace(input_ids=[1, 2, 3])

    return Backend(receiver, assemble, abortable=lambda r: f"abort {r.rid}", max_wait_s=60.0)


def request(rid: str = "rid", expect: Expect = EXPECT, input_ids=None) -> SimpleNamespace:
    return SimpleNamespace(
        rid=rid, encoder_urls=manifest.write(expect), input_ids=input_ids, mm_inputs=None
    )


def test_a_request_waits_until_its_items_are_there(backend, receiver, assembled):
    waiting = request()
    assert backend.wait(waiting) is None
    assert backend.waiting == [waiting]
    assert list(receiver.claims.values()) == [EXPECT]
    assert backend.poll() == ([], [])

    receiver.settle(0)
    assert backend.poll() == ([waiting], [])
    assert assembled.calls == [(waiting, ITEMS)]
    assert waiting.input_ids == array("q", [1, 2, 3])
    assert waiting.mm_inputs.input_ids == [1, 2, 3]
    assert backend.waiting == []
    assert backend.poll() == ([], [])


def test_the_samples_of_a_request_wait_by_themselves(backend, receiver):
    samples = [request() for _ in range(3)]
    for sample in samples:
        backend.wait(sample)
    receiver.settle(1)
    ready, failed = backend.poll()
    assert ready == [samples[1]] and ready[0] is samples[1]
    assert not failed
    assert len(backend.waiting) == 2


@pytest.mark.parametrize("encoder_urls", [None, [], ["http://encoder:1"], ["é"], [7]])
def test_a_request_without_a_manifest_fails_at_once(backend, receiver, encoder_urls):
    forged = request()
    forged.encoder_urls = encoder_urls
    abort, message, status = backend.wait(forged)
    assert (abort, status) == ("abort rid", HTTPStatus.BAD_REQUEST)
    assert "manifest" in message or "message" in message
    assert forged.input_ids == array("q")
    assert not receiver.claims
    assert not backend.waiting


def test_nobody_waits_longer_than_our_tokenizer_would(backend, receiver):
    assert backend.wait(request(expect=Expect("t", 1, 1, 60.1)))[2] is HTTPStatus.BAD_REQUEST
    assert not receiver.claims


@pytest.mark.parametrize("kind", _tree(EpdError))
def test_every_error_has_a_status_that_sglang_can_send(backend, receiver, kind):
    backend.wait(request())
    receiver.settle(0, kind("what went wrong"))
    ready, ((abort, message, status),) = backend.poll()
    assert not ready
    assert (abort, message) == ("abort rid", "what went wrong")
    assert isinstance(status, HTTPStatus)
    expected = HTTPStatus.BAD_REQUEST if kind is RequestCancelledError else kind.status
    assert status == expected


def test_a_failure_of_a_request_with_token_ids_keeps_them(backend, receiver):
    waiting = request(input_ids=array("q", [5]))
    backend.wait(waiting)
    receiver.settle(0, DeadlineError("late"))
    backend.poll()
    assert waiting.input_ids == array("q", [5])


def test_media_that_do_not_match_the_prompt_fail_that_request_only(backend, receiver, assembled):
    backend.wait(request("bad"))
    backend.wait(request("good"))
    assembled.error = MediaError("1 placeholder for 2 images")
    receiver.settle(0)
    ready, failed = backend.poll()
    assert (ready, failed) == ([], [("abort bad", "1 placeholder for 2 images", HTTPStatus(400))])
    assembled.error = None
    receiver.settle(1)
    assert [ready.rid for ready in backend.poll()[0]] == ["good"]


def test_a_surprise_in_a_processor_fails_that_request_only(backend, receiver, assembled, caplog):
    backend.wait(request())
    assembled.error = KeyError("a secret")
    receiver.settle(0)
    ready, ((_, message, status),) = backend.poll()
    assert not ready
    assert status is HTTPStatus.INTERNAL_SERVER_ERROR
    assert "secret" not in message
    assert "a secret" in caplog.text


def test_abandoned_requests_are_those_that_match(backend, receiver):
    for rid in ("a-1", "a-2", "b"):
        backend.wait(request(rid))
    backend.abandon(lambda rid: rid.startswith("a"))
    assert receiver.abandoned == list(receiver.claims)[:2]
    # They come back as failures when the receiver has let them go.
    assert len(backend.waiting) == 3
    receiver.settle(0, RequestCancelledError("the request was aborted"))
    ready, failed = backend.poll()
    assert not ready
    assert [abort for abort, _, _ in failed] == ["abort a-1"]


def test_a_settlement_of_nobody_is_passed_over(backend, receiver):
    receiver.settled.append(Settled("0:gone", ITEMS))
    assert backend.poll() == ([], [])


def test_nobody_waits_for_a_receiver_that_has_ended(backend, receiver):
    backend.wait(request())
    receiver.alive = False
    ready, [(_, message, status)] = backend.poll()
    assert (ready, status) == ([], HTTPStatus.SERVICE_UNAVAILABLE)
    assert "receiver" in message
    assert backend.waiting == []
