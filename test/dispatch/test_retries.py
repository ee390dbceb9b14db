from __future__ import annotations

import random

from sglang_epd.dispatch.retries import RetryBudget, pause


def test_retries_of_one_dead_encoder_are_free_and_a_storm_is_spread_over_time():
    now = 0.0
    budget = RetryBudget(lambda: now)
    assert budget.take(100) == 0
    waits = [budget.take(10) for _ in range(20)]
    assert waits[-1] > 10
    assert waits == sorted(waits), "each waits its turn"
    now += 60
    assert budget.take(1) == 0, "calm fills it again"


def test_first_tries_bring_a_share_of_retries():
    budget = RetryBudget(lambda: 0.0)
    budget.take(200)
    waited = budget.take(0)
    budget.sent(100)
    assert 0 < budget.take(0) < waited


def test_pauses_grow_to_a_bound_and_differ():
    rng = random.Random(1)
    for number in (0, 3, 10_000):
        drawn = [pause(number, rng) for _ in range(200)]
        assert len(set(drawn)) > 1 or number == 0
        assert min(drawn) >= 0.05 and max(drawn) <= min(2.0, 0.05 * 2.0 ** min(number, 20)) + 1e-9
