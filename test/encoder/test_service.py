from __future__ import annotations

import asyncio
import gc
import json
import sys
import time

import msgspec
import pytest
import torch

from encoder.towers import settle, until
from sglang_epd.encoder import service as service_module
from sglang_epd.encoder.pipeline import computations as computations_module
from sglang_epd.errors import (
    MediaError,
    NamespaceError,
    UnavailableError,
)
from sglang_epd.wire.messages import DECLINE_CANCELLED, DECLINE_DUPLICATE, KEY_BYTES, Decline, Wait

WAIT = Wait("the-secret-ticket", 0)
STAGES = ["acquire", "preprocess", "offered", "forwarded", "delivered"]
PATIENCE_S = 5.0
# Items whose pixels may be in memory: one that runs and one that is ready.
PIXELS = 2


@pytest.fixture(autouse=True)
async def at_rest(service, fakes):
    """In the end nothing is live and nothing is held: the next request would go through."""
    yield
    # What a tower has begun it ends, whether or not anybody waits for it.
    for stage in STAGES:
        getattr(fakes, stage).go_on()
    await until(lambda: not any(service.status()["queue"].values()))
    status = service.status()
    assert (status["requests"], status["items"], status["bytes"]) == (0, 0, 0)
    assert status["cache"]["pinned_bytes"] == 0
    assert not service.computations._kept
    assert not fakes.open


@pytest.fixture
def begin(service, fakes, asking):
    """Begins a request; its task, when the first forward pass is held."""

    async def begin(*media: bytes, **options) -> asyncio.Task:
        fakes.forwarded.hold()
        work = asyncio.create_task(service.encode(asking(*media, **options)))
        await entered(fakes.forwarded)
        return work

    return begin


async def entered(stage) -> None:
    await asyncio.wait_for(stage.entered.wait(), PATIENCE_S)


def said(reply) -> list[tuple[str, str]]:
    return [(outcome.state, outcome.code) for outcome in reply.outcomes]


async def test_an_item_goes_through_its_stages(service, fakes, asking, count):
    reply = await service.encode(asking(b"ab"))
    assert (reply.request_id, reply.encoder) == ("r1", "http://encoder:1")
    (outcome,) = reply.outcomes
    assert (outcome.item, outcome.state, outcome.code, outcome.tokens) == (0, "delivered", "", 3)
    (offer,) = fakes.offers
    assert (offer.ticket, offer.item, offer.nbytes) == ("the-secret-ticket", 0, 48)
    assert len(offer.key) == KEY_BYTES
    assert offer.layout.tokens == 3
    assert not offer.renewal
    assert (outcome.layout, outcome.key) == (offer.layout, offer.key)
    ((endpoint, grant, embedding),) = fakes.payloads
    assert (endpoint, grant.ticket, grant.item) == ("tcp://receiver:1", "the-secret-ticket", 0)
    assert torch.equal(embedding, torch.full((3, 4), 2.0))
    assert all(ms >= 0 for ms in outcome.ms.values())
    assert count("items_total", modality="IMAGE", outcome="delivered") == 1
    assert count("delivered_bytes_total", landing="inline") == 48
    assert count("stage_seconds_count", stage="forward") == 1


async def test_each_outcome_says_where_its_embedding_came_from(service, fakes, asking):
    reply = await service.encode(asking(b"x", b"x", b"y"))
    assert [outcome.source for outcome in reply.outcomes] == ["computed", "coalesced", "computed"]
    stages = {"acquire", "wait", "preprocess", "queue", "forward", "grant", "deliver"}
    assert stages == set(reply.outcomes[0].ms)
    assert "forward" not in reply.outcomes[1].ms
    assert len(fakes.preprocess.calls) == 2


@pytest.mark.parametrize("capacity", [1 << 20])
async def test_a_hit_is_offered_without_being_prepared(service, fakes, asking):
    await service.encode(asking(b"x"))
    (outcome,) = (await service.encode(asking(b"x", request_id="r2"))).outcomes
    assert (outcome.state, outcome.source) == ("delivered", "cached")
    assert set(outcome.ms) == {"acquire", "grant", "deliver"}
    assert fakes.preprocess.calls == [b"x"]
    assert len(fakes.payloads) == 2


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
    assert fakes.options == [{}, {}, {"detail": "high"}, {}, {}]


# Failures


@pytest.mark.parametrize("stage", ["acquire", "preprocess", "forwarded"])
@pytest.mark.parametrize("error", [RuntimeError("a secret"), asyncio.CancelledError()])
async def test_an_item_fails_alone(service, fakes, asking, count, caplog, stage, error):
    getattr(fakes, stage).failures[b"bad"] = error
    asked = msgspec.structs.replace(asking(b"good", b"bad", b"also good"), asker="the user's")
    reply = await service.encode(asked)
    assert [outcome.state for outcome in reply.outcomes] == ["delivered", "failed", "delivered"]
    assert reply.outcomes[1].code == "EncodeError"
    assert "secret" not in reply.outcomes[1].message
    assert len(fakes.payloads) == 2
    assert count("failures_total", code="EncodeError") == 1
    assert count("items_total", modality="IMAGE", outcome="failed") == 1
    if stage == "forwarded":
        assert count("stage_seconds_count", stage="preprocess") == 3, "of the one that failed, too"
    if stage != "acquire" and isinstance(error, RuntimeError):
        assert "An item of the user's failed" in caplog.text


@pytest.mark.parametrize("stage", ["acquire", "preprocess", "forwarded"])
async def test_a_hopeless_item_ends_the_others(service, fakes, asking, count, stage):
    getattr(fakes, stage).failures[b"bad"] = MediaError("cannot be decoded")
    if stage != "forwarded":
        fakes.forwarded.hold()
    fakes.delivered.hold()
    items = [b"1", b"bad", b"3", b"4", b"5", b"6", b"7", b"8"]
    reply = await asyncio.wait_for(service.encode(asking(*items)), PATIENCE_S)
    (outcome,) = reply.outcomes
    assert (outcome.item, outcome.state, outcome.code) == (1, "failed", "MediaError")
    assert count("items_total", modality="IMAGE", outcome="failed") == 1
    assert len(fakes.preprocess.calls) <= 1 + PIXELS, "the others have waited for their turn"
    assert not fakes.payloads


async def test_an_item_that_cannot_be_delivered_fails_alone(service, fakes, asking):
    fakes.delivered.failures[0] = UnavailableError("gone")
    reply = await service.encode(asking(b"1", b"2"))
    assert said(reply) == [("failed", "UnavailableError"), ("delivered", "")]


async def test_options_that_make_no_key_are_the_askers_fault(service, asking):
    reply = await service.encode(asking(b"x", detail={1: "a", "1": "b"}))
    assert said(reply) == [("failed", "ProtocolError")]


async def test_no_failed_offer_is_left_unobserved(fakes, begin):
    """Both the offer and the forward fail: the loop has nothing to complain of."""
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: complaints.append(what))
    fakes.answers[0] = UnavailableError("x")
    fakes.forwarded.failures[b"x"] = MediaError("y")
    fakes.offered.hold()
    work = await begin(b"x")
    fakes.offered.go_on()
    await until(fakes.open[0][1].decided.done)
    fakes.forwarded.go_on()
    assert (await work).outcomes[0].state == "failed"
    # The errors' traces hold the frames, and with them the offer's task.
    fakes.answers.clear()
    fakes.forwarded.failures.clear()
    del work
    gc.collect()
    assert not complaints


async def test_the_media_of_an_item_that_failed_are_gone_with_its_request(service, fakes, asking):
    """Without waiting for a collection of cycles."""
    media = bytes([1, 2, 3]) * 1000
    before = sys.getrefcount(media)
    fakes.answers[0] = UnavailableError("cannot dial the reply endpoint")
    gc.disable()
    try:
        reply = await service.encode(asking(media))
        assert said(reply) == [("failed", "UnavailableError")]
        await until(lambda: not service.computations.status()["patches_queued"])
        fakes.answers.clear()
        for stage in (fakes.acquire, fakes.preprocess, fakes.forwarded):
            stage.calls.clear()
        for told in (fakes._prepared, fakes.batches):
            told.clear()
        assert sys.getrefcount(media) == before
    finally:
        gc.enable()


# Answers of receivers


DECLINE = Decline("the-secret-ticket", 1, DECLINE_CANCELLED)
GONE = UnavailableError("cannot dial the reply endpoint")


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a wait"])
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(DECLINE, ("declined", DECLINE_CANCELLED)), (GONE, ("failed", "UnavailableError"))],
    ids=["decline", "error"],
)
async def test_an_item_without_a_grant_before_its_turn_is_never_encoded(
    fakes, begin, count, waits, answer, outcome
):
    fakes.answers[1] = WAIT if waits else answer
    work = await begin(b"first", b"second")
    await until(lambda: len(fakes.offered.calls) == 2)
    if waits:
        await until(lambda: fakes.open[1][1].waits)
        offered = fakes.open[1][1]
        fakes.forwarded.go_on()
        await until(lambda: len(fakes.open) == 1)
        (offered.answer if isinstance(answer, Decline) else offered.fail)(answer)
    fakes.forwarded.go_on()
    assert said(await work) == [("delivered", ""), outcome]
    assert fakes.forwarded.calls == [b"first"]
    assert count("items_total", modality="IMAGE", outcome=outcome[0]) == 1


async def test_an_item_declined_after_its_forward_is_not_sent(fakes, begin):
    fakes.offered.hold()
    fakes.answers[0] = Decline("the-secret-ticket", 0, DECLINE_DUPLICATE)
    work = await begin(b"x")
    fakes.offered.go_on()
    (outcome,) = (await work).outcomes
    assert (outcome.state, outcome.code) == ("declined", DECLINE_DUPLICATE)
    assert (outcome.layout, outcome.key) == (fakes.offers[0].layout, fakes.offers[0].key)
    assert not fakes.payloads


async def test_a_grant_that_comes_in_the_queue_spares_the_second_preparation(fakes, begin):
    fakes.answers[1] = WAIT
    work = await begin(b"first", b"second")
    await until(lambda: len(fakes.open) == 2 and fakes.open[1][1].waits)
    fakes.grant(1)
    fakes.forwarded.go_on()
    await work
    assert len(fakes.preprocess.calls) == len(fakes.forwarded.calls) == 2


async def test_an_item_whose_receiver_does_not_answer_is_not_in_work(
    service, fakes, asking, monkeypatch
):
    """A language server that is gone would have others refused until its deadlines."""
    monkeypatch.setattr(service_module, "_ANSWER_S", 0.01)
    fakes.offered.hold()
    work = asyncio.create_task(service.encode(asking(b"one")))
    await until(lambda: service.admission.waiting == 1)
    assert service.admission.items == 0
    fakes.offered.go_on()
    assert [one.state for one in (await work).outcomes] == ["delivered"]
    assert (service.admission.waiting, service.admission.live) == (0, 0)


async def test_a_burst_of_grants_does_not_bring_all_pixels_back(service, fakes, asking):
    waiting = range(6)
    fakes.answers = dict.fromkeys(waiting, WAIT)
    work = asyncio.create_task(service.encode(asking(*(bytes([n]) for n in waiting))))
    await until(lambda: sum(offered.waits for _, offered in fakes.open) == len(waiting))
    fakes.forwarded.hold()
    for item in waiting:
        fakes.grant(item)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(fakes.pixels) <= PIXELS
    fakes.forwarded.go_on()
    assert len((await work).outcomes) == len(waiting)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_lost_grant_is_offered_again_with_the_embedding_at_hand(
    service, fakes, asking, times
):
    fakes.lost[0] = times
    (outcome,) = (await service.encode(asking(b"x"))).outcomes
    assert outcome.state == "delivered"
    first, *renewed = fakes.offers
    assert not first.renewal
    assert renewed == [msgspec.structs.replace(first, renewal=True)] * times
    assert (fakes.preprocess.calls, fakes.forwarded.calls) == ([b"x"], [b"x"])
    assert [grant.grant for _, grant, _ in fakes.payloads] == [times + 1]
    assert not fakes.withdrawn


@pytest.mark.parametrize("lost", [0, 1])
async def test_rows_are_delivered_before_all_are_made(service, fakes, asking, lost):
    """And from the first on again, where the grant was lost."""
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(b"x")))
    await entered(fakes.forwarded)
    fakes.lost[0] = lost
    for rows in (1, 2):
        fakes.tell(torch.zeros(3, 4), rows)
        for _ in range(20):
            await asyncio.sleep(0)
    fakes.forwarded.go_on()
    assert said(await work) == [("delivered", "")]
    assert fakes.begun == [(0, 1)] * (1 + lost) + [(0, 2)]
    assert len(fakes.payloads) == 1
    assert not fakes.withdrawn


async def test_a_grant_that_is_lost_again_and_again_ends_at_the_deadline(service, fakes, asking):
    fakes.lost[0] = 1 << 60
    assert said(await service.encode(asking(b"x", ttl_s=0.05))) == [("failed", "DeadlineError")]
    assert fakes.forwarded.calls == [b"x"]


async def test_an_item_that_is_lost_to_another_encoder_is_declined(service, fakes, asking):
    fakes.lost[0] = 1
    fakes.delivered.hold()
    work = asyncio.create_task(service.encode(asking(b"x")))
    await entered(fakes.delivered)
    fakes.answers[0] = Decline("the-secret-ticket", 0, DECLINE_DUPLICATE)
    fakes.delivered.go_on()
    (outcome,) = (await work).outcomes
    assert (outcome.state, outcome.code) == ("declined", DECLINE_DUPLICATE)
    assert (outcome.layout, outcome.key) == (fakes.offers[1].layout, fakes.offers[1].key)
    assert [offer.renewal for offer in fakes.offers] == [False, True]
    assert not fakes.payloads


async def test_a_receiver_that_is_slow_to_answer_costs_no_more_memory_than_is_kept_for_all(
    service, fakes, asking, monkeypatch
):
    """A hundred requests are encoded before it answers one. Ten embeddings are kept; the others
    are made again when they are granted."""
    kept, nbytes = 10, 48
    monkeypatch.setattr(computations_module, "_KEPT_BYTES", kept * nbytes)
    service.admission.max_items = 100
    cache, held = service.computations.cache, []
    add = cache.add
    monkeypatch.setattr(cache, "add", lambda *one: (add(*one), held.append(cache.nbytes))[0])
    fakes.offered.hold()
    names = [b"%03d" % number for number in range(100)]
    asked = [asking(name, request_id=name.decode()) for name in names]
    works = [asyncio.create_task(service.encode(each)) for each in asked]
    await until(lambda: len(held) == 100)
    await settle()
    assert cache.nbytes == kept * nbytes
    # One that has just been made, beside them.
    assert max(held) == (kept + 1) * nbytes
    assert not any(service.status()["queue"][state] for state in ("running", "ready", "waiting"))
    fakes.offered.go_on()
    replies = await asyncio.gather(*works)
    assert {said(reply)[0] for reply in replies} == {("delivered", "")}
    assert len(fakes.batches) == 100 + 100 - kept


# Deadlines and cancellation


@pytest.mark.parametrize("stage", [*STAGES, "memory"])
async def test_the_deadline_ends_an_item_in_any_stage(service, fakes, asking, count, stage):
    if stage == "memory":
        fakes.answers[0] = WAIT
    else:
        getattr(fakes, stage).hold()
    started = time.monotonic()
    assert said(await service.encode(asking(b"x", ttl_s=0.5))) == [("failed", "DeadlineError")]
    assert 0.4 <= time.monotonic() - started < 10
    assert count("failures_total", code="DeadlineError") == 1
    assert bool(fakes.withdrawn) == (stage == "forwarded"), "a grant that was not used"


@pytest.mark.parametrize("stage", [*STAGES, "memory"])
async def test_a_request_is_cancelled_in_any_stage(service, fakes, asking, count, stage):
    held = fakes.offered if stage == "memory" else getattr(fakes, stage)
    if stage == "memory":
        fakes.answers = {0: WAIT, 1: WAIT}
    else:
        held.hold()
    before = asyncio.all_tasks()
    work = asyncio.create_task(service.encode(asking(b"x", b"y")))
    await entered(held)
    await until(lambda: stage != "memory" or all(offered.waits for _, offered in fakes.open))
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert count("items_total", modality="IMAGE", outcome="cancelled") == 2
    assert not fakes.payloads
    held.go_on()
    await until(lambda: asyncio.all_tasks() == before)
    fakes.answers.clear()
    assert said(await service.encode(asking(b"z"))) == [("delivered", "")]


# Refusals


async def test_another_namespace_is_refused_showing_both(service, fakes, asking):
    with pytest.raises(NamespaceError, match=rf"Other/x.*{service.namespace}"):
        await service.encode(asking(b"x", namespace="Other/x"))
    assert not fakes.acquire.calls


async def test_a_draining_service_finishes_what_it_has(service, fakes, asking, begin):
    work = await begin(b"x")
    service.drain()
    idle = asyncio.create_task(service.wait_idle())
    with pytest.raises(UnavailableError):
        await service.encode(asking(b"y", request_id="r2"))
    assert service.status()["state"] == "draining"
    assert not idle.done()
    fakes.forwarded.go_on()
    assert (await work).outcomes[0].state == "delivered"
    await asyncio.wait_for(idle, PATIENCE_S)


# What it says of itself


async def test_the_status_shows_what_is_in_work_and_what_was(service, fakes, begin):
    fakes.acquire.failures[b"bad"] = UnavailableError("no")
    work = await begin(b"good", b"bad")
    status = service.status()
    assert (status["requests"], status["items"], status["max_items"]) == (1, 1, 8)
    assert status["namespace"] == service.namespace
    fakes.forwarded.go_on()
    await work
    recent = service.recent()
    assert [(r["index"], r["state"], r["code"]) for r in recent] == [
        (1, "failed", "UnavailableError"),
        (0, "delivered", ""),
    ]
    assert all(r["began_at"] <= r["ended_at"] <= time.time() for r in recent)
    assert "secret" not in json.dumps([service.status(), recent]), (
        "a ticket is nobody else's business"
    )


async def test_the_history_is_bounded(service, asking):
    for number in range(60):
        await service.encode(asking(*(bytes([n]) for n in range(8)), request_id=f"r{number}"))
    recent = service.recent()
    assert len(recent) == service_module._RECENT < 480
    assert recent[-1]["request_id"] == "r59"
