"""One encoder by itself."""

from __future__ import annotations

import pytest
import simpy

from sglang_epd_plan.encoders import Encoder
from sglang_epd_plan.records import Item, Request


def test_a_shared_item_is_encoded_for_the_request_that_ends_last(profile):
    """Its first request ends while it waits for the tower."""
    env = simpy.Environment()
    delivered: list[Item] = []
    encoder = Encoder(
        env,
        "http://encoder",
        profile(),
        grant=lambda _item, then: then(),
        deliver=delivered.append,
    )
    # 10 s, 0.1 s and 0.1 s of the tower.
    items = [
        Item(Request(number, 0, 0.0, deadline, 1, 1), key, patches, 1)
        for number, (key, patches, deadline) in enumerate(
            [(b"long", 102_400.0, 99.0), (b"twice", 1024.0, 5.0), (b"twice", 1024.0, 20.0)]
        )
    ]
    assert encoder.ask(items[0])
    env.run(until=1.0)
    assert encoder.ask(items[1]) and encoder.ask(items[2])
    env.run(until=15.0)
    assert delivered == items
    assert items[2].encoded == items[1].encoded > 10
    assert not encoder.items and not encoder.queued
    assert encoder.busy_s == pytest.approx(10.1)


def ends(profile, asked_at):
    """When items that come at these moments have their embeddings; a pass takes 0.5 s and
    0.1 s an item."""
    env = simpy.Environment()
    found: list[float] = []
    encoder = Encoder(
        env,
        "http://encoder",
        profile,
        grant=lambda _item, then: then(),
        deliver=lambda _item: found.append(env.now),
    )
    for number, at in enumerate(asked_at):
        item = Item(Request(number, 0, at, 99.0, 1, 1), b"%d" % number, 1024.0, 1)
        env.timeout(at).callbacks.append(lambda _event, item=item: encoder.ask(item))
    env.run()
    return found


def test_a_batch_waits_behind_the_one_that_runs(profile):
    """Nothing joins it any more: of four items that come one by one the last two share a pass."""
    costs = profile(encoder={"tower": {"launch_s": 0.5}})
    assert ends(costs, [0.0, 0.1, 0.2, 0.3]) == pytest.approx([0.6, 1.2, 1.9, 1.9])


def test_a_tower_at_work_waits_for_what_is_being_prepared(profile):
    """The second item is ready at 0.5 s, while the third is prepared, which joins it."""
    host = {"workers": 2, "item_s": 0.3}
    costs = profile(encoder={"host": host, "tower": {"launch_s": 0.5}})
    assert ends(costs, [0.0, 0.2, 0.35]) == pytest.approx([0.9, 1.6, 1.6])
