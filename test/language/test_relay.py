"""Real processes, joined by gloo as a server's ranks are."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forking import fork
from sglang_epd.cli.processes import free_port
from sglang_epd.errors import EncodeError, EpdError, MediaError, ProtocolError
from sglang_epd.language.relay import Relay, RelayError
from sglang_epd.transfer.arena import ReceivedItem
from sglang_epd.wire.messages import Landed, Layout, Settled, TensorSpec
from sglang_epd.wire.tensors import view_tensor

SECRET = bytes(range(32))
DTYPES = ("float32", "bfloat16", "float16")
# A rank of a busy machine may be late by seconds.
TIMEOUT_S = 8.0


def landed(number: int, dtype: str = "float32", rows: int = 5) -> Landed:
    layout = Layout("IMAGE", TensorSpec(dtype, (rows, 8)), [[1, 1, rows]])
    return Landed(bytes([number]) * 32, layout, 0, number, 0)


def settled(*items: Landed | None, error: EpdError | None = None) -> Settled:
    code, message = (error.code, error.message) if error else ("", "")
    return Settled("0", items, code, message)


# In the order in which all ranks see them.
OUTCOMES = {
    "of each dtype": settled(*(landed(number, dtype) for number, dtype in enumerate(DTYPES))),
    "failed": settled(landed(7), error=MediaError("cut off")),
    "unreadable": settled(landed(9)),
    "with a covered item": settled(None, landed(8, rows=3)),
    "large": settled(landed(6, rows=1 << 17)),
}


def read(settled: Settled) -> list[ReceivedItem]:
    """As the leading rank's arena would: bytes that tell items apart."""
    if settled.code:
        raise MediaError(settled.message)
    if settled is OUTCOMES["unreadable"]:
        raise ProtocolError("outside the arena")
    items = []
    for item in settled.items:
        if item is not None:
            spec = item.layout.embedding
            size = spec.elements * (4 if spec.dtype == "float32" else 2)
            raw = np.random.default_rng(item.slot).integers(0, 200, size, dtype=np.uint8)
            items.append(ReceivedItem(item.key, item.layout, view_tensor(raw, spec)))
    return items


def bytes_of(item: ReceivedItem) -> bytes:
    return item.embedding.view(torch.uint8).numpy().tobytes()


def same(ours: list[ReceivedItem], expected: list[ReceivedItem]) -> bool:
    keys = [(item.key, item.layout) for item in ours]
    return keys == [(item.key, item.layout) for item in expected] and all(
        mine.embedding.dtype == other.embedding.dtype
        and mine.embedding.shape == other.embedding.shape
        # By numpy, which has no threads that a fork would miss.
        and bytes_of(mine) == bytes_of(other)
        for mine, other in zip(ours, expected, strict=True)
    )


def attempt(receive, settled: Settled) -> str:
    try:
        items = receive(settled)
    except EpdError as error:
        return f"{error.code}: {error.message}"
    except RelayError:
        return "ended"
    return "same" if same(items, read(settled)) else "another"


def rank(number: int, world: int, port: int, words: Connection) -> None:
    """Ranks 0 and 1 are on the receiver's host."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=TIMEOUT_S)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=world)
    group = dist.new_group([0, *range(2, world)], backend="gloo", timeout=limit)
    if number == 1:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        words.send("aside")
    else:
        relay = Relay(group)
        secret = relay.share(SECRET if number == 0 else bytes(32))
        words.send("secret" if secret == SECRET else "another secret")
        receive = relay.receive if number else relay.sending(read)
        for outcome in OUTCOMES.values():
            words.send(attempt(receive, outcome))
        if number != 2:  # which the test stops
            began = time.monotonic()
            words.send(attempt(receive, OUTCOMES["large"]))
            assert time.monotonic() - began < 5 * TIMEOUT_S
    time.sleep(60)


@pytest.fixture(
    params=[
        pytest.param(signal.SIGSTOP, id="frozen"),
        # Ends the others as late; test_large kills a rank of a real server.
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.extended),
    ]
)
def told(request):
    """What each rank saw; the third one ends, or stands still, before the last outcome."""
    port, world = free_port(), 4
    # Each has a pipe of its own: one that is stopped would keep the lock of a queue for all.
    pipes = [Pipe(duplex=False) for _ in range(world)]
    ranks = [fork(rank, number, world, port, pipes[number][1]) for number in range(world)]
    seen: dict[int, list[str]] = {number: [] for number in range(world)}
    readers = {reader: number for number, (reader, _) in enumerate(pipes)}
    try:
        while sum(map(len, seen.values())) < 1 + 3 * (1 + len(OUTCOMES)) + 2:
            ready = wait(list(readers), timeout=60)
            assert ready, seen
            for reader in ready:
                number = readers[reader]
                seen[number].append(reader.recv())
                if number == 2 and len(seen[2]) == 1 + len(OUTCOMES):
                    os.kill(ranks[2].pid, request.param)
                    del readers[reader]
        yield seen
    finally:
        for one in ranks:
            one.kill()
            one.join()
        for reader, writer in pipes:
            reader.close()
            writer.close()


def test_other_hosts_have_what_landed_and_end_with_the_first_that_is_lost(told):
    unreadable = f"{EncodeError.__name__}: the host that received the request's media"
    assert told[1] == ["aside"]
    for number in (0, 2, 3):
        secret, *outcomes = told[number][: 1 + len(OUTCOMES)]
        assert secret == "secret"
        good, failed, unread, covered, large = outcomes
        assert (good, failed, covered, large) == ("same", "MediaError: cut off", "same", "same")
        assert unread.startswith("ProtocolError" if number == 0 else unreadable)
    assert told[0][-1] == "ended"
    # It may have had the bytes before the first one saw that another did not take them.
    assert told[3][-1] in ("ended", "same")
