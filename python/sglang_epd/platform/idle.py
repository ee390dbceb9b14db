"""A scheduler sleeps while it has nothing to run.

SGLang's idle sleeper waits up to a second for a request from the tokenizer and knows
no other source of work, and a scheduler that is not idle but has no batch does not
sleep at all. Both cost more here than on a GPU machine, where the cores that wait are
not the cores that compute.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

EMBEDDING_POLL_MS = 2
REPLICA_POLL_MS = 10
STALL_POLL_MS = 1


def install(scheduler_module: ModuleType) -> None:
    """Wrap `Scheduler.maybe_sleep_on_idle` and `Scheduler.on_idle`."""
    scheduler = scheduler_module.Scheduler
    sleep_on_idle = scheduler.maybe_sleep_on_idle
    on_idle = scheduler.on_idle

    @functools.wraps(sleep_on_idle)
    def maybe_sleep_on_idle(self: Any) -> None:
        if awaits_embeddings(self.mm_receiver):
            poll(self.idle_sleeper, EMBEDDING_POLL_MS)
        elif self.attn_dp_enabled:
            # A replica that has a request waits for each of the others, which hear nothing of it.
            poll(self.idle_sleeper, REPLICA_POLL_MS)
        else:
            sleep_on_idle(self)

    @functools.wraps(on_idle)
    def on_idle_or_stalled(self: Any) -> None:
        on_idle(self)
        # Requests whose KV is on its way, in either direction: SGLang polls for it in a
        # loop that takes a whole core from the transfer, and from the other server.
        if not self.is_fully_idle():
            poll(self.idle_sleeper, STALL_POLL_MS)

    scheduler.maybe_sleep_on_idle = maybe_sleep_on_idle
    scheduler.on_idle = on_idle_or_stalled


def awaits_embeddings(receiver: Any) -> bool:
    """Whether requests wait for an encoder on sockets that the idle sleeper does not watch.

    A receiver that registers its own with the sleeper says so by a true
    `wakes_idle_scheduler`.
    """
    return (
        receiver is not None
        and len(receiver.waiting_list) > 0
        and not getattr(receiver, "wakes_idle_scheduler", False)
    )


def poll(idle_sleeper: Any, timeout_ms: int) -> None:
    """Wait that long, or less if a request arrives; ranks without a sleeper do not wait."""
    poller = getattr(idle_sleeper, "poller", None)
    if poller is not None:
        poller.poll(timeout_ms)
