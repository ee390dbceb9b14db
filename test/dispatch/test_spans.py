"""The trace of a request's dispatch."""

from __future__ import annotations

import random
import time

import pytest

from sglang_epd.dispatch.dispatcher import Dispatcher, Patience
from sglang_epd.dispatch.policies import ItemCost, Policy
from sglang_epd.dispatch.pool import Pool, Report
from sglang_epd.errors import EncodeError, EpdError, MediaError
from sglang_epd.spans import OFF
from sglang_epd.wire.http import EncodeItem, ItemOutcome, ReplyTo
from spans import is_part_of, said


@pytest.fixture
def dispatch(client):
    """Two items, the first encoder first."""

    async def run(urls, span):
        pool = Pool("ns")
        for url in urls:
            pool.add(url)
            pool.heard(url, Report("ns"))
        one = Dispatcher(
            client,
            pool,
            Policy(lambda items, snapshot, _rng: [snapshot.encoders[0].url for _ in items]),
            describe=lambda items: [ItemCost(b"", 6.0) for _ in items],
            patience=Patience(0.2, 5.0),
            rng=random.Random(0),
        )
        items = [EncodeItem(n, "IMAGE", f"image {n}", data=b"png") for n in range(2)]
        reply_to = ReplyTo("tcp://127.0.0.1:1", "the-secret-ticket")
        await one.run(reply_to, items, time.monotonic() + 5.0, span=span)

    return run


async def test_a_retry_on_another_encoder_is_a_part_of_its_own(start, dispatch, recorded):
    bad, good = await start(), await start()
    bad.says(
        ItemOutcome(0, "delivered"), ItemOutcome(1, "failed", EncodeError.__name__, "it broke")
    )
    with recorded.root.child("epd_media") as span:
        await dispatch([bad.url, good.url], span)
    first, second = recorded.named("epd_dispatch")
    assert is_part_of(first, recorded.only("epd_media"))
    assert is_part_of(second, recorded.only("epd_media"))
    assert said(first) == {
        "encoder": bad.url,
        "items": (0, 1),
        "patches": 12,
        "bytes": 6,
        "attempt": 1,
        "request_id": bad.requests[0].request_id,
        "error.type": "EncodeError",
        "elsewhere": (1,),
    }
    assert first.status.description == "image 1: it broke"
    told = said(second)
    assert (told["encoder"], told["items"], told["attempt"]) == (good.url, (1,), 2)
    assert second.status.is_unset
    for encoder, sent in ((bad, first), (good, second)):
        (headers,) = encoder.headers
        context = sent.context
        expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-"
        assert headers["traceparent"].startswith(expected)
    assert not any("the-secret-ticket" in str(span.attributes) for span in recorded.ended)


async def test_what_ends_the_request_is_told_too(start, dispatch, recorded, dead_url):
    encoder = await start()
    encoder.refuses(MediaError("no picture"))
    with pytest.raises(MediaError):
        await dispatch([encoder.url], recorded.root)
    assert said(recorded.only("epd_dispatch"))["error.type"] == "MediaError"
    with pytest.raises(EpdError):
        await dispatch([dead_url], recorded.root)
    lost = recorded.named("epd_dispatch")[1]
    assert said(lost)["error.type"] == "UnavailableError"
    assert said(recorded.named("epd_wait_for_encoder")[0])["items"] == 2


async def test_untraced_requests_carry_no_context(start, dispatch):
    encoder = await start()
    await dispatch([encoder.url], OFF)
    assert "traceparent" not in encoder.headers[0]
