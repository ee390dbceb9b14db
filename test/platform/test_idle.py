"""How long a scheduler without a batch waits, and for what."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_epd.platform import idle


class Scheduler:
    """The part of SGLang's scheduler that is wrapped."""

    def __init__(self) -> None:
        self.waits: list[Any] = []
        self.fully_idle = True
        self.mm_receiver: Any = None
        self.attn_dp_enabled = False
        self.idle_sleeper: Any = SimpleNamespace(
            poller=SimpleNamespace(poll=self.waits.append), maybe_sleep=lambda: None
        )

    def is_fully_idle(self) -> bool:
        return self.fully_idle

    def maybe_sleep_on_idle(self) -> None:
        self.waits.append("asleep")

    def on_idle(self) -> None:
        if self.fully_idle:
            self.maybe_sleep_on_idle()


@pytest.fixture
def scheduler():
    module: Any = ModuleType("scheduler")
    module.Scheduler = type("Wrapped", (Scheduler,), {})
    idle.install(module)
    return module.Scheduler()


def test_an_idle_scheduler_sleeps(scheduler):
    scheduler.on_idle()
    assert scheduler.waits == ["asleep"]


def test_an_idle_replica_of_data_parallel_attention_keeps_no_other_waiting(scheduler):
    scheduler.attn_dp_enabled = True
    scheduler.on_idle()
    assert scheduler.waits == [idle.REPLICA_POLL_MS]


def test_a_stalled_scheduler_yields_its_core(scheduler):
    scheduler.fully_idle = False
    scheduler.on_idle()
    assert scheduler.waits == [idle.STALL_POLL_MS]


def test_a_scheduler_that_awaits_embeddings_looks_often(scheduler):
    scheduler.mm_receiver = SimpleNamespace(waiting_list=["request"])
    scheduler.on_idle()
    assert scheduler.waits == [idle.EMBEDDING_POLL_MS]


def test_a_receiver_that_wakes_the_scheduler_needs_no_polling(scheduler):
    scheduler.mm_receiver = SimpleNamespace(waiting_list=["request"], wakes_idle_scheduler=True)
    scheduler.on_idle()
    assert scheduler.waits == ["asleep"]


def test_ranks_without_a_sleeper_do_not_wait(scheduler):
    scheduler.idle_sleeper = None
    scheduler.fully_idle = False
    scheduler.on_idle()
    assert scheduler.waits == []
