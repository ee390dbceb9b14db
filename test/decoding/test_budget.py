from __future__ import annotations

import threading
import time

from sglang_epd.decoding.budget import Budget, Charge


def test_what_a_smaller_charge_gives_back_is_had_at_once():
    budget, first, second = Budget(100), Charge(), Charge()
    assert budget.try_raise(first, 80)
    waits = threading.Thread(target=budget.raise_to, args=(second, 50, time.monotonic() + 60))
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    assert budget.try_raise(first, 40)
    waits.join(20)
    assert not waits.is_alive()
    assert (first.nbytes, second.nbytes) == (40, 50)
