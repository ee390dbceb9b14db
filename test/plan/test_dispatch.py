"""What a language server takes encoders' loads for, and when it leaves one alone."""

from __future__ import annotations

import random

import pytest
import simpy

from sglang_epd.dispatch.pool import View
from sglang_epd_plan.dispatch import Dispatch
from sglang_epd_plan.encoders import Encoder
from sglang_epd_plan.records import Item, Request

PATCHES = 1024.0


@pytest.fixture
def dispatch(profile) -> Dispatch:
    """Over two encoders that take two items at a time and answer for none."""
    env, costs = simpy.Environment(), profile(encoder={"max_items": 2})
    encoders = [
        Encoder(
            env,
            f"http://{name}",
            costs,
            grant=lambda _item, then: then(),
            deliver=lambda _item: None,
        )
        for name in ("one", "two")
    ]
    return Dispatch(env, encoders, "least_loaded", random.Random(0))


def items(count: int) -> list[Item]:
    request = Request(0, 0, 0.0, 99.0, 1, 1)
    return [Item(request, b"%d" % number, PATCHES, 1) for number in range(count)]


def test_loads_are_those_reported_and_what_was_sent_since(dispatch):
    dispatch.send(items(1))
    assert [view.load for view in dispatch._usable()] == [PATCHES, 0.0]
    # The queue of the first has four items of other servers, too.
    dispatch.hear([View("http://one", load=5 * PATCHES), View("http://two", load=9 * PATCHES)])
    assert [view.load for view in dispatch._usable()] == [5 * PATCHES, 9 * PATCHES]
    (sent,) = items(1)
    dispatch.send([sent])
    assert [view.load for view in dispatch._usable()] == [6 * PATCHES, 9 * PATCHES]
    dispatch.settle(sent)
    # It reported too early: what this server sent it is still there.
    dispatch.hear([View("http://one"), View("http://two")])
    assert [view.load for view in dispatch._usable()] == [PATCHES, 0.0]


def test_an_encoder_that_refused_is_left_alone_for_a_second(dispatch):
    dispatch.hear([View("http://one"), View("http://two", load=1e9)])
    asked = items(3)
    dispatch.send(asked)
    assert [item.encoder for item in asked] == [0, 0, -1]
    assert [view.url for view in dispatch._usable()] == ["http://two"]
    dispatch._env.run(until=0.99)
    assert asked[2].encoder == 1 and len(dispatch._usable()) == 1
    dispatch._env.run(until=1.01)
    assert len(dispatch._usable()) == 2
