"""What an idle scheduler leaves to the receiver's thread beside it."""

import threading
import time
from types import SimpleNamespace

import pytest
import zmq

from sglang_epd.seams import idle

# So often the receiver waits for something, and wants the interpreter afterwards.
TIMES = 50


class Spinning:
    """The part of SGLang's scheduler that looks for requests where it does not sleep."""

    idle_sleeper = None
    _prefill_decode_interval_remaining = 0

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.bind_to_random_port("tcp://127.0.0.1")

    def turn(self) -> None:
        for _ in range(2):
            with pytest.raises(zmq.Again):
                self.socket.recv(zmq.NOBLOCK)
        sum(range(3000))
        idle.give_way(None, self)


def test_the_receiver_gets_its_turns_beside_an_idle_scheduler(monkeypatch) -> None:
    monkeypatch.setattr(idle.Hosted, "receiver", True)
    scheduler = Spinning()

    def receive() -> None:
        for _ in range(TIMES):
            time.sleep(0.0002)  # for a message

    receiver = threading.Thread(target=receive)
    receiver.start()
    turns = 0
    while receiver.is_alive():
        scheduler.turn()
        turns += 1
    scheduler.socket.close()
    # Without its sleep some 6,500.
    assert turns < 40 * TIMES


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("sleeper", [None, SimpleNamespace()])
@pytest.mark.parametrize("waits", [True, False])
def test_a_scheduler_sleeps_beside_the_receiver_where_nothing_runs(
    monkeypatch, here, sleeper, waits
) -> None:
    slept: list[float] = []
    scheduler = SimpleNamespace(
        idle_sleeper=sleeper,
        is_fully_idle=lambda: not waits,
        _prefill_decode_interval_remaining=0,
    )
    monkeypatch.setattr(idle.Hosted, "receiver", here)
    monkeypatch.setattr(idle, "time", SimpleNamespace(sleep=slept.append))
    idle.give_way(None, scheduler)
    # SGLang's own sleeper sleeps where no request waits.
    assert bool(slept) == (here and (sleeper is None or waits))
    slept.clear()
    scheduler._prefill_decode_interval_remaining = 3
    idle.give_way(None, scheduler)
    assert not slept, "turns that SGLang counts"
    idle.give_way_paused(None, scheduler)
    assert bool(slept) == here


@pytest.mark.parametrize("ours", [True, False])
def test_a_prefill_waits_for_no_turns_in_which_nobody_decodes(monkeypatch, sglang, ours) -> None:
    """SGLang's own rule, between two prefills of a scheduler that nothing else runs on."""
    Scheduler = sglang("managers.scheduler").Scheduler
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.prefill_decode_interval, scheduler.prefill_decode_interval_min_bs = 22, 0
    scheduler.require_mlp_sync = False
    scheduler._prefill_decode_interval_remaining = 0
    monkeypatch.setattr(idle.Hosted, "language", ours)
    prefill = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True))
    nothing = SimpleNamespace(batch_size=lambda: 0)
    scheduler._arm_prefill_decode_interval(prefill)
    turns = 0
    while scheduler._should_defer_prefill(nothing):
        idle.give_way(None, scheduler)
        turns += 1
    assert turns == (1 if ours else 22)
