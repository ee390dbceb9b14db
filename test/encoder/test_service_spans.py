"""The trace of an encode request."""

from __future__ import annotations

import asyncio

import pytest

from sglang_epd import spans
from sglang_epd.errors import NamespaceError, UnavailableError
from sglang_epd.wire.messages import DECLINE_CANCELLED, Decline
from spans import is_part_of, said

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def encode(service, recorded):
    async def run(request):
        with spans.begin("epd_encode", {"traceparent": PARENT}) as span:
            return await service.encode(request, span=span)

    return run


async def test_it_has_each_item_and_each_of_its_stages(encode, recorded, asking):
    await encode(asking(b"ab", b"cde"))
    whole = recorded.only("epd_encode")
    assert said(whole) == {"encoder": "http://encoder:1", "request_id": "r1", "items": 2}
    items = recorded.named("epd_item")
    assert all(is_part_of(item, whole) for item in items)
    assert sorted(said(item)["item"] for item in items) == [0, 1]
    (first,) = [item for item in items if said(item)["item"] == 0]
    assert said(first) == {
        "encoder": "http://encoder:1",
        "item": 0,
        "modality": "IMAGE",
        "media": "inline",
        "media_bytes": 2,
        "patches": 12,
        "tokens": 3,
        "bytes": 48,
        "source": "computed",
        "outcome": "delivered",
    }
    stages = [span for span in recorded.ended if is_part_of(span, first)]
    assert {span.name for span in stages} == {
        *("epd_acquire", "epd_wait", "epd_preprocess", "epd_queue", "epd_forward"),
        *("epd_grant", "epd_deliver"),
    }
    for span in stages:
        assert first.start_time <= span.start_time <= span.end_time <= first.end_time
    (sent,) = [span for span in stages if span.name == "epd_deliver"]
    assert said(sent) == {"landing": "inline", "bytes": 48}


async def test_an_item_that_fails_says_why(encode, recorded, fakes, asking):
    fakes.preprocess.failures[b"bad"] = UnavailableError("the receiver is gone")
    fakes.answers[2] = Decline("the-secret-ticket", 2, DECLINE_CANCELLED)
    await encode(asking(b"good", b"bad", b"unwanted"))
    by_item = {said(span)["item"]: span for span in recorded.named("epd_item")}
    assert by_item[0].status.is_unset
    assert by_item[1].status.description == "the receiver is gone"
    told = said(by_item[1])
    assert (told["outcome"], told["error.type"]) == ("failed", "UnavailableError")
    assert [span.name for span in recorded.ended if is_part_of(span, by_item[1])]
    told = said(by_item[2])
    assert (told["outcome"], told["reason"]) == ("declined", DECLINE_CANCELLED)
    assert by_item[2].status.is_unset
    assert not any("the-secret-ticket" in str(span.attributes) for span in recorded.ended)


async def test_who_joins_later_sees_the_shared_stages_from_then_on(
    encode, recorded, fakes, asking, service
):
    fakes.forwarded.hold()
    first = asyncio.create_task(encode(asking(b"same", request_id="r1")))
    await fakes.forwarded.entered.wait()
    second = asyncio.create_task(encode(asking(b"same", request_id="r2")))
    while service.status()["requests"] < 2 or not fakes.acquire.calls[1:]:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    fakes.forwarded.go_on()
    await asyncio.gather(first, second)
    computed, coalesced = recorded.named("epd_item")
    assert [said(item)["source"] for item in (computed, coalesced)] == ["computed", "coalesced"]
    forwards = recorded.named("epd_forward")
    assert is_part_of(forwards[1], coalesced)
    assert forwards[1].start_time >= coalesced.start_time
    assert not [one for one in recorded.named("epd_preprocess") if is_part_of(one, coalesced)]


async def test_a_request_that_is_refused_or_cancelled_says_so(encode, recorded, fakes, asking):
    with pytest.raises(NamespaceError):
        await encode(asking(b"x", namespace="other"))
    assert said(recorded.only("epd_encode"))["error.type"] == "NamespaceError"
    fakes.acquire.hold()
    work = asyncio.create_task(encode(asking(b"x")))
    await fakes.acquire.entered.wait()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert said(recorded.only("epd_item"))["error.type"] == "RequestCancelledError"
    assert said(recorded.only("epd_acquire"))["error.type"] == "RequestCancelledError"
