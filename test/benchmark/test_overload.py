"""An encoder that is asked for more than its tower can do goes on answering as much as it can.

In a loop whose time jumps: nothing here depends on how fast the machine is.
"""

import overload
import pytest


def answered(name: str, load: float, *, seconds: float = 20.0) -> overload.Figures:
    (case,) = [case for case in overload.CASES if case.name == name]
    with overload.jumping() as runner:
        return runner.run(overload.run(case, load, seconds, 1))


@pytest.mark.parametrize(
    "name", ["1080p, one a request, 2 s", "1080p, four a request, 10 s"], ids=["one", "four"]
)
def test_under_overload_nearly_all_that_a_tower_does_is_in_time(name: str) -> None:
    figures = answered(name, 2.0)
    assert figures.goodput > 0.9
    assert figures.p99_s <= 10.0


def test_what_the_tower_can_do_is_done() -> None:
    figures = answered("1080p, one a request, 2 s", 0.9)
    assert figures.requests == figures.items == 1.0
