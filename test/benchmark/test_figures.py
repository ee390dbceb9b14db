"""Percentiles, ratios and the search for goodput."""

import math

import pytest
from comparison.figures import (
    Bisection,
    Goodput,
    Limits,
    Outcome,
    Run,
    percentile,
    ratios,
    spread,
)
from hypothesis import given
from hypothesis import strategies as st


def run_of(*outcomes: Outcome, seconds: float = 10.0) -> Run:
    return Run("arm", "workload", 0, 1.0, seconds, "digest", "command", list(outcomes))


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.99) == 5.0
    assert percentile(values, 0.2) == 1.0
    assert percentile(list(range(1, 201)), 0.99) == 198
    assert math.isnan(percentile([], 0.5))
    for share in (0, -1, 1.01, float("nan")):
        with pytest.raises(ValueError, match="a share of"):
            percentile(values, share)


@given(
    st.lists(st.floats(0, 1e6), min_size=1),
    st.floats(0, 1, exclude_min=True, allow_subnormal=False),
)
def test_a_percentile_is_exceeded_by_no_more_than_its_share(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < max(1, math.ceil(share * len(values)))


def test_ratios_are_of_one_round_each() -> None:
    ratio = ratios({0: 1.0, 1: 4.0, 2: 9.0}, {0: 2.0, 1: 2.0, 3: 1.0})
    assert ratio is not None
    assert (ratio.median, ratio.lowest, ratio.highest, ratio.rounds) == (1.25, 0.5, 2.0, 2)
    assert ratios({0: 1.0}, {1: 1.0}) is None
    assert ratios({0: 1.0}, {0: 0.0}) is None
    assert spread([float("nan")]) is None
    assert spread([float("inf"), 2.0]) == spread([2.0])


def test_a_run_counts_what_failed() -> None:
    run = run_of(
        Outcome("text", 10.0, 1.0, 5),
        Outcome("media", 30.0, 2.0, 5),
        Outcome("media", None, None, 2, "HTTP 503"),
    )
    assert (len(run.failed), run.throughput, run.token_rate) == (1, 0.2, 1.0)
    assert run.ttfts_ms("media") == [30.0]
    assert run.tpots_ms() == [1.0, 2.0]
    # Nothing that failed is in time.
    assert not Limits(1000.0, 1000.0).hold(run)


def test_limits_hold_for_both_times() -> None:
    run = run_of(*(Outcome("media", 10.0 * n, float(n), 5) for n in range(1, 11)))
    assert Limits(100.0, 10.0).hold(run)
    assert not Limits(99.0, 10.0).hold(run)
    assert not Limits(100.0, 9.0).hold(run)
    assert not Limits(1.0, 1.0).hold(run_of())
    # One token has no time per output token.
    assert Limits(10.0, 1.0).hold(run_of(Outcome("media", 10.0, None, 1)))


def waits_ms(rate: float, capacity: float) -> float:
    """A queue's mean time in system, which has no end at its capacity (M/M/1)."""
    return math.inf if rate >= capacity else 1e3 / (capacity - rate)


@pytest.mark.parametrize("capacity", [0.8, 3.0, 7.7, 31.0])
def test_goodput_of_a_server_whose_limit_is_known(capacity: float) -> None:
    limit_ms = 500.0
    exact = capacity - 1e3 / limit_ms
    search = Bisection(0.5, 16.0, 8)
    while (rate := search.rate) is not None:
        search.tell(waits_ms(rate, capacity) <= limit_ms)
    found = search.found
    rates = [rate for rate, _ in found.tried]
    assert len(set(rates)) == len(rates) <= 10
    if exact < 0.5:
        assert found == Goodput(0.0, False, [(0.5, False)])
    elif exact >= 16:
        assert found == Goodput(16.0, True, [(0.5, True), (16.0, True)])
    else:
        assert not found.capped
        assert found.rate <= exact <= found.rate * 32 ** (1 / 256) + 2e-3
        assert dict(found.tried)[found.rate]


@given(st.sets(st.integers(0, 30)))
def test_goodput_ends_at_a_rate_that_held_whatever_the_server_does(bad: set[int]) -> None:
    answers = iter(range(31))
    search = Bisection(1.0, 100.0, 6)
    while search.rate is not None:
        search.tell(next(answers) not in bad)
    found = search.found
    assert len(found.tried) <= 8
    assert found.rate == 0.0 or dict(found.tried)[found.rate]
