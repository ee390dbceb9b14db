from __future__ import annotations

import asyncio
import gc
import json
import time

import pytest
import torch

from sglang_epd.encoder import service as service_module
from sglang_epd.errors import (
    DuplicateError,
    MediaError,
    MediaTooLargeError,
    NamespaceError,
    OverloadedError,
    UnavailableError,
)
from sglang_epd.wire import Decline, Payload
from sglang_epd.wire.messages import DECLINE_CANCELLED, DECLINE_DUPLICATE, KEY_BYTES

STAGES = ["acquire", "preprocess", "offered", "forwarded", "delivered"]
PATIENCE_S = 5.0


@pytest.fixture
def at_rest(service, count):
    """Nothing is live and nothing is held: the next request goes through."""

    def check() -> None:
        assert (service.status()["requests"], service.status()["items"]) == (0, 0)
        assert count("items_in_work") == 0
        assert not service._turn.locked()
        assert service._ahead._value == service_module._PREPARED_AHEAD

    return check


async def entered(stage) -> None:
    await asyncio.wait_for(stage.entered.wait(), PATIENCE_S)


async def test_an_item_goes_through_its_stages(service, fakes, asking, count, at_rest):
    reply = await service.encode(asking(b"ab"))
    assert (reply.request_id, reply.encoder) == ("r1", "http://encoder:1")
    (outcome,) = reply.outcomes
    assert (outcome.item, outcome.state, outcome.code, outcome.tokens) == (0, "delivered", "", 3)
    (offer,) = fakes.offers
    assert (offer.ticket, offer.item, offer.nbytes) == ("the-secret-ticket", 0, 48)
    assert len(offer.key) == KEY_BYTES
    assert offer.layout.tokens == 3
    ((endpoint, payload, embedding),) = fakes.payloads
    assert (endpoint, payload) == ("tcp://receiver:1", Payload("the-secret-ticket", 0, 77))
    assert torch.equal(embedding, torch.full((3, 4), 2.0))
    assert {"acquire", "preprocess", "forward", "grant", "deliver"} <= set(outcome.ms)
    assert all(ms >= 0 for ms in outcome.ms.values())
    assert count("items_total", modality="IMAGE", outcome="delivered") == 1
    assert count("delivered_bytes_total") == 48
    assert count("stage_seconds_count", stage="forward") == 1
    at_rest()


async def test_outcomes_come_in_the_order_of_the_items(service, asking):
    reply = await service.encode(asking(b"1", b"2", b"3", b"4", b"5"))
    assert [outcome.item for outcome in reply.outcomes] == [0, 1, 2, 3, 4]


async def test_the_key_depends_on_content_options_and_namespace(service, fakes, asking):
    await service.encode(asking(b"same", b"same", b"other"))
    await service.encode(asking(b"same", detail="high"))
    await service.encode(asking(b"same"))
    service.namespace = "another"
    await service.encode(asking(b"same", namespace="another"))
    keys = {}
    for offer, name in zip(fakes.offers, ("a", "a", "other", "high", "a", "another"), strict=True):
        keys.setdefault(name, set()).add(offer.key)
    assert all(len(found) == 1 for found in keys.values())
    assert len(set.union(*keys.values())) == 4


async def test_the_tower_does_one_item_at_a_time(service, fakes, asking):
    await service.encode(asking(*(bytes([n]) for n in range(8))))
    assert len(fakes.forwarded.calls) == 8
    assert fakes.most_at_once == 1


async def test_a_burst_does_not_hold_all_its_pixels(service, fakes, asking):
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(*(bytes([n]) for n in range(8)))))
    await entered(fakes.forwarded)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(fakes.acquire.calls) == 8
    assert len(fakes.preprocess.calls) == service_module._PREPARED_AHEAD
    fakes.forwarded.go_on()
    assert len((await work).outcomes) == 8
    assert len(fakes.preprocess.calls) == 8


async def test_the_offer_is_out_before_the_forward_begins(service, fakes, asking):
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(b"x")))
    await entered(fakes.forwarded)
    await entered(fakes.offered)
    assert not fakes.payloads
    fakes.forwarded.go_on()
    await work


@pytest.mark.parametrize("stage", ["acquire", "preprocess", "forwarded"])
@pytest.mark.parametrize(
    ("error", "code"),
    [(MediaError("cannot be decoded"), "MediaError"), (RuntimeError("a secret"), "EncodeError")],
)
async def test_an_item_fails_alone(service, fakes, asking, count, at_rest, stage, error, code):
    getattr(fakes, stage).failures[b"bad"] = error
    reply = await service.encode(asking(b"good", b"bad", b"also good"))
    assert [outcome.state for outcome in reply.outcomes] == ["delivered", "failed", "delivered"]
    assert reply.outcomes[1].code == code
    assert "secret" not in reply.outcomes[1].message
    assert len(fakes.payloads) == 2
    assert count("failures_total", code=code) == 1
    assert count("items_total", modality="IMAGE", outcome="failed") == 1
    at_rest()


async def test_an_item_that_cannot_be_delivered_fails_alone(service, fakes, asking, at_rest):
    fakes.delivered.failures[0] = UnavailableError("gone")
    reply = await service.encode(asking(b"1", b"2"))
    assert [(o.state, o.code) for o in reply.outcomes] == [
        ("failed", "UnavailableError"),
        ("delivered", ""),
    ]
    at_rest()


async def test_an_item_declined_before_its_turn_is_never_encoded(
    service, fakes, asking, count, at_rest
):
    fakes.forwarded.hold()
    fakes.answers[1] = Decline("the-secret-ticket", 1, DECLINE_CANCELLED)
    work = asyncio.create_task(service.encode(asking(b"first", b"second")))
    await entered(fakes.forwarded)
    async with asyncio.timeout(PATIENCE_S):
        while len(fakes.offered.calls) < 2:
            await asyncio.sleep(0)
    fakes.forwarded.go_on()
    reply = await work
    assert fakes.forwarded.calls == [b"first"]
    assert [(o.state, o.code) for o in reply.outcomes] == [
        ("delivered", ""),
        ("declined", DECLINE_CANCELLED),
    ]
    assert count("items_total", modality="IMAGE", outcome="declined") == 1
    at_rest()


async def test_an_item_declined_after_its_forward_is_not_sent(service, fakes, asking, at_rest):
    fakes.offered.hold()
    fakes.answers[0] = Decline("the-secret-ticket", 0, DECLINE_DUPLICATE)
    work = asyncio.create_task(service.encode(asking(b"x")))
    await entered(fakes.forwarded)
    fakes.offered.go_on()
    (outcome,) = (await work).outcomes
    assert (outcome.state, outcome.code) == ("declined", DECLINE_DUPLICATE)
    assert not fakes.payloads
    at_rest()


async def test_an_offer_that_fails_before_the_turn_saves_the_forward(
    service, fakes, asking, at_rest
):
    fakes.forwarded.hold()
    fakes.answers[1] = UnavailableError("cannot dial the reply endpoint")
    work = asyncio.create_task(service.encode(asking(b"first", b"second")))
    await entered(fakes.forwarded)
    async with asyncio.timeout(PATIENCE_S):
        while len(fakes.offered.calls) < 2:
            await asyncio.sleep(0)
    fakes.forwarded.go_on()
    reply = await work
    assert fakes.forwarded.calls == [b"first"]
    assert reply.outcomes[1].code == "UnavailableError"
    at_rest()


async def test_no_failed_offer_is_left_unobserved(service, fakes, asking, at_rest):
    """Both the offer and the forward fail: the loop has nothing to complain of."""
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: complaints.append(what))
    fakes.answers[0] = UnavailableError("x")
    fakes.forwarded.failures[b"x"] = MediaError("y")
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(b"x")))
    await entered(fakes.forwarded)
    fakes.forwarded.go_on()
    assert (await work).outcomes[0].state == "failed"
    # The errors' traces hold the frames, and with them the offer's task.
    fakes.answers.clear()
    fakes.forwarded.failures.clear()
    del work
    gc.collect()
    assert not complaints
    at_rest()


@pytest.mark.parametrize("stage", STAGES)
async def test_the_deadline_ends_an_item_in_any_stage(
    service, fakes, asking, count, at_rest, stage
):
    getattr(fakes, stage).hold()
    started = time.monotonic()
    (outcome,) = (await service.encode(asking(b"x", ttl_s=0.05))).outcomes
    assert (outcome.state, outcome.code) == ("failed", "DeadlineError")
    assert 0.04 <= time.monotonic() - started < 2
    assert count("failures_total", code="DeadlineError") == 1
    at_rest()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_request_is_cancelled_in_any_stage(service, fakes, asking, count, at_rest, stage):
    held = getattr(fakes, stage)
    held.hold()
    before = asyncio.all_tasks()
    work = asyncio.create_task(service.encode(asking(b"x", b"y")))
    await entered(held)
    assert service.cancel("r1")
    with pytest.raises(asyncio.CancelledError):
        await work
    assert count("items_total", modality="IMAGE", outcome="cancelled") == 2
    assert not fakes.payloads
    assert asyncio.all_tasks() == before, "nothing runs on"
    at_rest()
    held.go_on()
    (outcome,) = (await service.encode(asking(b"z"))).outcomes
    assert outcome.state == "delivered"


async def test_an_offer_does_not_outlive_its_cancelled_item(service, fakes, asking, at_rest):
    fakes.offered.hold()
    fakes.forwarded.hold()
    before = asyncio.all_tasks()
    work = asyncio.create_task(service.encode(asking(b"x")))
    await entered(fakes.offered)
    await entered(fakes.forwarded)
    assert service.cancel("r1")
    with pytest.raises(asyncio.CancelledError):
        await work
    assert asyncio.all_tasks() == before
    at_rest()


async def test_an_item_is_cancelled_while_it_waits_for_the_tower(service, fakes, asking, at_rest):
    fakes.forwarded.hold()
    first = asyncio.create_task(service.encode(asking(b"first")))
    await entered(fakes.forwarded)
    second = asyncio.create_task(service.encode(asking(b"second", request_id="r2")))
    async with asyncio.timeout(PATIENCE_S):
        while len(fakes.offered.calls) < 2:
            await asyncio.sleep(0)
    assert service.cancel("r2")
    with pytest.raises(asyncio.CancelledError):
        await second
    fakes.forwarded.go_on()
    assert (await first).outcomes[0].state == "delivered"
    assert fakes.forwarded.calls == [b"first"]
    at_rest()


async def test_there_is_nothing_to_cancel_before_and_after(service, asking):
    assert not service.cancel("r1")
    await service.encode(asking(b"x"))
    assert not service.cancel("r1")


async def test_an_id_is_live_once(service, fakes, asking, at_rest):
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(b"x")))
    await entered(fakes.forwarded)
    with pytest.raises(DuplicateError, match="r1"):
        await service.encode(asking(b"y"))
    fakes.forwarded.go_on()
    await work
    assert (await service.encode(asking(b"y"))).outcomes[0].state == "delivered"
    at_rest()


async def test_another_namespace_is_refused_showing_both(service, fakes, asking, at_rest):
    with pytest.raises(NamespaceError, match=rf"Other/x.*{service.namespace}"):
        await service.encode(asking(b"x", namespace="Other/x"))
    assert not fakes.acquire.calls
    at_rest()


async def test_over_the_budget_a_request_is_told_to_come_again(service, fakes, asking, at_rest):
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(*(bytes([n]) for n in range(6)))))
    await entered(fakes.forwarded)
    with pytest.raises(OverloadedError, match="6 items in work, at most 8") as raised:
        await service.encode(asking(b"1", b"2", b"3", request_id="r2"))
    assert raised.value.retry_after_s > 0
    fitting = asyncio.create_task(service.encode(asking(b"1", b"2", request_id="r3")))
    fakes.forwarded.go_on()
    await work
    assert len((await fitting).outcomes) == 2
    at_rest()


async def test_a_request_that_can_never_fit_is_not_told_to_come_again(service, asking, at_rest):
    with pytest.raises(MediaTooLargeError, match="9 items for one encoder, which takes 8"):
        await service.encode(asking(*(bytes([n]) for n in range(9))))
    at_rest()


async def test_options_that_make_no_key_are_the_askers_fault(service, asking, at_rest):
    reply = await service.encode(asking(b"x", detail={1: "a", "1": "b"}))
    assert (reply.outcomes[0].state, reply.outcomes[0].code) == ("failed", "ProtocolError")
    at_rest()


async def test_the_status_shows_what_is_in_work_and_what_was(service, fakes, asking):
    fakes.acquire.failures[b"bad"] = MediaError("no")
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(b"good", b"bad")))
    await entered(fakes.forwarded)
    status = service.status()
    assert (status["requests"], status["items"], status["max_items"]) == (1, 2, 8)
    assert status["namespace"] == service.namespace
    fakes.forwarded.go_on()
    await work
    recent = service.status()["recent"]
    assert [(r["index"], r["state"], r["code"]) for r in recent] == [
        (1, "failed", "MediaError"),
        (0, "delivered", ""),
    ]
    assert "secret" not in json.dumps(service.status()), "a ticket is nobody else's business"


async def test_the_history_is_bounded(service, asking):
    for number in range(60):
        await service.encode(asking(*(bytes([n]) for n in range(8)), request_id=f"r{number}"))
    recent = service.status()["recent"]
    assert len(recent) == service_module._RECENT < 480
    assert recent[-1]["request_id"] == "r59"


async def test_it_is_known_when_nothing_is_in_work(service, fakes, asking):
    assert (service.idle, service.finished) == (True, 0)
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(b"x")))
    await entered(fakes.forwarded)
    assert not service.idle
    fakes.forwarded.go_on()
    await work
    assert (service.idle, service.finished) == (True, 1)
