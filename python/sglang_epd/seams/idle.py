"""An idle scheduler leaves the interpreter to the receiver's thread, and prefills at once.

A scheduler that has nothing to run looks for requests again and again, and gives the
interpreter up for microseconds at a time. A thread that waits for it wakes later than that, and
its turn, which is due after five milliseconds, is put off each time. On an H100 answers of the
receiver came 20 to 280 ms late (benchmark/results/gpu.md).

After a prefill SGLang tries no other for `--prefill-decode-interval` turns, 22 by default for
Qwen3-VL on large Hopper GPUs, also where no request decodes. A prompt of which a part was
prefilled early would wait for turns without any work. (On an H100 it was 8.5 ms in the scheduler's
queue, and 0.4 ms without parts: benchmark/results/gpu.md.) All stages drop these turns, or those
that did would prefill before the others, and wait for them for ever.

Leans on `managers.scheduler.Scheduler.on_idle`, which is called where there is no batch; on its
`idle_sleeper`, which is None without `--sleep-on-idle` and is not asked while requests wait, and
its `_prefill_decode_interval_remaining`; and
on `_record_scheduler_state_for_paused_engine`, which a paused scheduler calls at each turn.
"""

from __future__ import annotations

import time
from typing import Any

# A request may find the scheduler asleep for so long.
_SLEEP_S = 0.0001


class Hosted:
    """In this process.

    Attributes:
        language: whether a language server's scheduler is here, of whatever stage. All of them
            prefill in the same turns, or those wait for each other.
        receiver: whether the receiver's thread is here.
    """

    language = False
    receiver = False


def give_way(_: None, scheduler: Any) -> None:
    """After `Scheduler.on_idle`, which all ranks call in the same turn."""
    if Hosted.language:
        scheduler._prefill_decode_interval_remaining = 0
    # It counts turns until the next prefill: those have no work, and are not to last.
    if not Hosted.receiver or scheduler._prefill_decode_interval_remaining:
        return
    if scheduler.idle_sleeper is None or not scheduler.is_fully_idle():
        time.sleep(_SLEEP_S)


def give_way_paused(_: None, _scheduler: Any) -> None:
    """After `Scheduler._record_scheduler_state_for_paused_engine`."""
    if Hosted.receiver:
        time.sleep(_SLEEP_S)
