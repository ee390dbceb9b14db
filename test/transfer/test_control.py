from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import zmq

from sglang_epd import wire
from sglang_epd.errors import EncodeError, RequestCancelledError, UnavailableError
from sglang_epd.transfer.control import Control
from sglang_epd.wire import messages

PATIENCE_S = 5.0


@pytest.fixture
async def control(control_path) -> AsyncIterator[Control]:
    control = Control(control_path)
    yield control
    control.close()


async def test_the_endpoint_is_the_receivers(receiver, control):
    assert await control.endpoint(PATIENCE_S) == receiver.endpoint


async def test_the_endpoint_is_asked_once(receiver, control):
    first = await asyncio.gather(*(control.endpoint(PATIENCE_S) for _ in range(5)))
    assert {*first, await control.endpoint(0.0)} == {receiver.endpoint}


async def test_all_who_ask_in_vain_are_told_within_their_own_time(control):
    started = time.monotonic()
    outcomes = await asyncio.gather(
        *(control.endpoint(0.1) for _ in range(20)), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} == {UnavailableError}
    assert time.monotonic() - started < 1


async def test_a_receiver_that_comes_later_is_found(control, request):
    with pytest.raises(UnavailableError):
        await control.endpoint(0.05)
    receiver = request.getfixturevalue("receiver")
    assert await control.endpoint(PATIENCE_S) == receiver.endpoint


async def test_an_expected_request_can_be_delivered(receiver, control, encoder):
    await control.expect(wire.Expect("t", 1, 1, 60.0))
    await control.endpoint(PATIENCE_S)  # what went before has been read
    assert isinstance(encoder.offer(), wire.Grant)


async def test_a_failure_reaches_who_waits(receiver, control, settle):
    receiver.claim("r", wire.Expect("t", 1, 1, 60.0))
    await control.fail("t", EncodeError("no encoder could"))
    (settled,) = await asyncio.to_thread(settle, 1)
    assert type(settled.error) is EncodeError
    assert settled.error.message == "no encoder could"


async def test_a_cancelled_request_takes_nothing_more(receiver, control, settle, encoder):
    receiver.claim("r", wire.Expect("t", 1, 1, 60.0))
    await control.cancel("t")
    (settled,) = await asyncio.to_thread(settle, 1)
    assert type(settled.error) is RequestCancelledError
    assert encoder.offer().reason == messages.DECLINE_CANCELLED


@pytest.mark.timeout(30)
async def test_a_receiver_that_reads_nothing_blocks_nobody(control, caplog):
    with pytest.raises(UnavailableError, match="does not read"):
        for number in range(5000):
            await control.expect(wire.Expect(f"t{number}", 1, 1, 60.0))
    await control.cancel("t0")
    await control.fail("t1", EncodeError("x"))
    assert "Cancel is not told" in caplog.text
    assert "Fail is not told" in caplog.text


def test_it_may_be_made_before_the_event_loop_runs(receiver, control_path):
    control = Control(control_path)
    try:
        assert asyncio.run(control.endpoint(PATIENCE_S)) == receiver.endpoint
    finally:
        control.close()


async def test_another_answer_than_a_welcome_is_refused(control_path, context):
    control_path.parent.mkdir()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{control_path}")
    control = Control(control_path)
    try:
        asked = asyncio.create_task(control.endpoint(PATIENCE_S))
        peer, _ = await asyncio.to_thread(router.recv_multipart)
        router.send_multipart([peer, wire.encode_message(wire.Hello())])
        with pytest.raises(Exception, match="expected Welcome, got Hello"):
            await asked
    finally:
        control.close()


async def test_nothing_is_left_after_close(receiver, control_path, resources):
    async def live_once():
        control = Control(control_path)
        await control.endpoint(PATIENCE_S)
        control.close()

    await live_once()
    before = resources()
    for _ in range(5):
        await live_once()
    after = resources()
    assert after[1] == before[1]
    assert after[0] - before[0] <= 5  # the receiver's ends, which close a moment later
