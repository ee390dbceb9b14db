"""One encoder by itself."""

from __future__ import annotations

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
        lose=lambda _items: None,
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
    assert encoder.encoded == 102_400 + 1024
