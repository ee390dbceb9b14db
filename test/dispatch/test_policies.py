from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.config import Settings
from sglang_epd.dispatch import policies
from sglang_epd.dispatch.policies import Affinity, ItemCost, RetryBudget, pause
from sglang_epd.dispatch.pool import Snapshot, View
from sglang_epd.errors import ConfigError

loads = st.floats(0, 1e6)
url_lists = st.lists(
    st.integers(1, 999).map("http://encoder-{}:30000".format), min_size=1, max_size=8, unique=True
)


@st.composite
def snapshots(draw, idle=False):
    urls = sorted(draw(url_lists))
    views = tuple(
        View(url, load=0.0 if idle else draw(loads), rate=draw(st.sampled_from([0.0, 1.0, 500.0])))
        for url in urls
    )
    return Snapshot(views, draw(st.integers(0, 1000)))


work = st.builds(
    ItemCost, st.integers(0, 30).map(lambda number: number.to_bytes(32)), st.floats(1, 1e5)
)
work_lists = st.lists(work, max_size=40)


def works(count, patches=100.0, begin=0):
    return [ItemCost(number.to_bytes(32), patches) for number in range(begin, begin + count)]


def rendezvous(key, urls):
    ranks = policies.rendezvous(key, urls)
    return sorted(ranks, key=ranks.__getitem__, reverse=True)


def idle(*urls):
    return Snapshot(tuple(View(url) for url in urls))


def rng():
    return random.Random(0)


# All of them


@pytest.mark.parametrize("name", sorted(policies._POLICIES))
@given(items=work_lists, snapshot=snapshots(), seed=st.integers())
def test_every_item_goes_to_a_known_encoder(name, items, snapshot, seed):
    chosen = policies.policy(name)(items, snapshot, random.Random(seed))
    assert len(chosen) == len(items)
    assert set(chosen) <= {view.url for view in snapshot.encoders}
    again = policies.policy(name)(items, snapshot, random.Random(seed))
    assert chosen == again, "only the random source decides"


def test_the_default_policy_exists():
    policies.policy(Settings().dispatch_policy)


def test_an_unknown_policy_is_refused_by_the_name_of_its_setting():
    with pytest.raises(ConfigError, match=r"SGLANG_EPD_DISPATCH_POLICY='best'.*shuffle"):
        policies.policy("best")


# shuffle


@given(items=work_lists, snapshot=snapshots(), seed=st.integers())
def test_shuffle_is_balanced_within_one(items, snapshot, seed):
    chosen = Counter(policies.shuffle(items, snapshot, random.Random(seed)))
    shares = [chosen[view.url] for view in snapshot.encoders]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("policy", [policies.shuffle, policies.least_loaded])
def test_chance_decides_between_equals(policy):
    snapshot, random_ = idle("a", "b", "c"), rng()
    first = Counter(policy(works(1), snapshot, random_)[0] for _ in range(300))
    assert set(first) == {"a", "b", "c"}
    assert min(first.values()) > 60


# round_robin


@given(counts=st.lists(st.integers(1, 9), max_size=12), snapshot=snapshots())
def test_round_robin_goes_on_where_it_left_off(counts, snapshot):
    chosen = []
    for count in counts:
        now = replace(snapshot, turn=snapshot.turn + len(chosen))
        chosen += policies.round_robin(works(count), now, rng())
    assert chosen == policies.round_robin(works(len(chosen)), snapshot, rng())
    shares = Counter(chosen)
    every = [shares[view.url] for view in snapshot.encoders]
    assert max(every) - min(every) <= 1


# least_loaded


@given(items=work_lists, snapshot=snapshots(), seed=st.integers())
def test_least_loaded_leaves_no_encoder_that_would_have_been_done_sooner(items, snapshot, seed):
    chosen = policies.least_loaded(items, snapshot, random.Random(seed))
    rated = all(view.rate for view in snapshot.encoders)
    rates = {view.url: view.rate if rated else 1.0 for view in snapshot.encoders}
    ends = {view.url: view.load for view in snapshot.encoders}
    for item, url in zip(items, chosen, strict=True):
        ends[url] += item.patches
    for url in set(chosen):
        # Its last item is its smallest, and was better off there than anywhere else.
        mine = [item.patches for item, at in zip(items, chosen, strict=True) if at == url]
        other = min((ends[one] + min(mine)) / rates[one] for one in ends)
        assert ends[url] / rates[url] <= other * (1 + 1e-9) or len(ends) == 1


# affinity: where a key belongs


@given(urls=url_lists, keys=st.lists(st.binary(min_size=32, max_size=32), max_size=8))
def test_an_order_of_encoders_is_the_keys_alone(urls, keys):
    for key in keys:
        order = rendezvous(key, urls)
        assert order == sorted(
            urls, key=lambda url: (blake3(url.encode() + b"\0" + key).digest(8), url), reverse=True
        )
        assert rendezvous(key, urls[::-1]) == order
        assert rendezvous(key, urls[1:]) == [url for url in order if url != urls[0]]


@given(item=work, snapshot=snapshots(idle=True), seed=st.integers())
def test_one_item_on_an_idle_pool_goes_to_its_first(item, snapshot, seed):
    first = rendezvous(item.key, [view.url for view in snapshot.encoders])[0]
    assert Affinity()([item], snapshot, random.Random(seed)) == [first]


@given(items=work_lists, snapshot=snapshots(), seed=st.integers())
def test_equal_items_of_a_request_go_together(items, snapshot, seed):
    chosen = Affinity()(items, snapshot, random.Random(seed))
    places: dict[bytes, set[str]] = {}
    for item, url in zip(items, chosen, strict=True):
        places.setdefault(item.key, set()).add(url)
    assert all(len(urls) == 1 for urls in places.values())


def one_by_one(affinity, items, snapshot):
    random_ = rng()
    return {item.key: affinity([item], snapshot, random_)[0] for item in items}


def test_who_leaves_or_joins_moves_its_own_keys_only():
    affinity, items = Affinity(), works(600)
    before = one_by_one(affinity, items, idle("a", "b", "c", "d"))
    after = one_by_one(affinity, items, idle("a", "b", "d"))
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key, url in before.items() if url == "c"}
    assert 120 < len(moved) < 180
    shares = Counter(after[key] for key in moved)
    assert min(shares.values()) > len(moved) / 5, "all others share them"
    # It comes back, and has its keys back.
    assert one_by_one(affinity, items, idle("a", "b", "c", "d")) == before
    new = one_by_one(affinity, items, idle("a", "b", "c", "d", "e"))
    moved = {key for key in before if before[key] != new[key]}
    assert all(new[key] == "e" for key in moved)
    assert 80 < len(moved) < 160


def test_who_leaves_or_joins_moves_its_own_keys_only_where_load_had_placed_them():
    affinity, items = alone(), works(600)
    draw = random.Random(1)

    def placed(*urls):
        """One by one, with loads that have nothing to do with a key's order."""
        homes = {}
        for item in items:
            loads = with_load(**{url: draw.random() for url in urls})
            (homes[item.key],) = affinity([item], loads, rng())
        return homes

    before = placed("a", "b", "c", "d")
    assert min(Counter(before.values()).values()) > 100
    assert placed("a", "b", "c", "d", "e") == before
    after = placed("a", "b", "d", "e")
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key, url in before.items() if url == "c"}


# affinity: what is decided without sorting, and with


class Sorted(Affinity):
    """The same by the whole order of a key's encoders, as it is described."""

    def _choose(self, item, loads, everyone):
        order = rendezvous(item.key, loads)
        mean = (sum(loads.values()) + item.patches) / len(loads)

        def fits(url, bound, slack):
            limit = max(bound * mean, mean + slack * item.patches)
            return loads[url] + item.patches <= limit

        known = item.key in self._homes
        url, there, tells = self._homes.pop(item.key, ("", frozenset(), False))
        stays = url in order and set(order[: order.index(url)]) <= there
        if not (stays and fits(url, policies._KNOWN_BOUND, policies._KNOWN_SLACK)):
            url = next(url for url in order if fits(url, policies._BOUND, policies._SLACK))
            there = everyone
            tells = not known and url == order[0]
        self._homes[item.key] = (url, there, tells)
        if len(self._homes) > self._keys:
            self._homes.popitem(last=False)
        return url


@given(seed=st.integers(), count=st.integers(1, 12), keys=st.integers(1, 40))
def test_an_order_need_not_be_sorted_to_be_followed(seed, count, keys):
    """Encoders come and go, and loads change."""
    draw, urls = random.Random(seed), [f"http://e{number}" for number in range(count)]
    quick, slow = Affinity(keys=keys), Sorted(keys=keys)
    for number in range(60):
        there = draw.sample(urls, draw.randint(1, count))
        heavy = draw.choice([0.0, 100.0, 5000.0])
        views = tuple(View(url, load=draw.random() * heavy) for url in there)
        items = [
            ItemCost(int(draw.random() ** 3 * keys).to_bytes(32), draw.choice([1.0, 50.0, 4000.0]))
            for _ in range(draw.randint(1, 8))
        ]
        chosen = quick(items, Snapshot(views), random.Random(number))
        assert chosen == slow(items, Snapshot(views), random.Random(number))
        assert quick._homes == slow._homes


# affinity: load


@given(items=work_lists, snapshot=snapshots(), seed=st.integers())
def test_new_keys_respect_the_bound(items, snapshot, seed):
    items = list({item.key: item for item in items}.values())
    chosen = Affinity()(items, snapshot, random.Random(seed))
    load = {view.url: view.load for view in snapshot.encoders}
    for item, url in zip(items, chosen, strict=True):
        mean = (sum(load.values()) + item.patches) / len(load)
        bound = max(1.25 * mean, mean + 3 * item.patches)
        for passed in rendezvous(item.key, list(load)):
            if passed == url:
                break
            assert load[passed] + item.patches > bound
        load[url] += item.patches
        assert load[url] <= bound


def with_load(**of):
    return Snapshot(tuple(View(url, load=load) for url, load in of.items()))


def first_for(url, *urls, begin=0):
    return next(one for one in works(100, begin=begin) if rendezvous(one.key, urls)[0] == url)


def test_a_known_key_waits_longer_than_a_new_one_but_not_for_ever():
    affinity = Affinity()
    item, other = first_for("a", "a", "b", "c"), first_for("a", "a", "b", "c", begin=50)
    assert affinity([item], idle("a", "b", "c"), rng()) == ["a"]
    busy = with_load(a=500.0, b=0.0, c=0.0)
    assert affinity([other], busy, rng()) != ["a"]
    assert affinity([item], busy, rng()) == ["a"]
    assert affinity([item], with_load(a=50_000.0, b=0.0, c=0.0), rng()) != ["a"]


def alone(affinity=None):
    """A policy that has been answered that no encoder had any of its keys."""
    affinity = affinity or Affinity()
    for item in works(29, begin=1_000_000):
        affinity([item], idle("a", "b", "c", "d"), rng())
        affinity.heard(item.key, "computed")
    return affinity


def test_a_request_of_new_keys_is_spread_evenly_by_a_server_that_is_alone():
    for begin in range(0, 400, 4):
        chosen = alone()(works(4, begin=begin), idle("a", "b", "c", "d"), rng())
        assert sorted(chosen) == ["a", "b", "c", "d"]
    chosen = alone()(works(8), with_load(a=150.0, b=0.0, c=700.0), rng())
    assert Counter(chosen) == {"b": 5, "a": 3}


def test_the_order_decides_between_equally_loaded_ones():
    policy = alone()
    for item in works(50):
        first = rendezvous(item.key, "abcd")[0]
        assert policy([item], idle("a", "b", "c", "d"), rng()) == [first]


def test_a_server_that_is_alone_sends_keys_where_they_were():
    policy = alone()
    items, snapshot = works(8), idle("a", "b", "c", "d")
    chosen = policy(items, snapshot, rng())
    assert policy(items[::-1], snapshot, rng()) == chosen[::-1]
    assert policy(items, with_load(a=300.0, b=0.0, c=0.0, d=0.0), rng()) == chosen


def test_servers_that_are_asked_for_the_same_keep_to_the_order():
    policy = alone()
    crowded = idle("a", "b", "c", "d")
    for item in works(8, begin=2_000_000):
        policy([item], crowded, rng())
        policy.heard(item.key, "cached")
    items = [one for one in works(400) if rendezvous(one.key, "abcd")[0] == "a"][:3]
    assert policy(items, crowded, rng()) == ["a", "a", "a"]


@pytest.mark.parametrize("source", ["", "stored", "coalesced", "of a later version"])
def test_what_tells_nothing_of_other_servers_is_not_counted(source):
    policy = Affinity()
    for item in works(200):
        policy([item], idle("a", "b"), rng())
        policy.heard(item.key, source)
    assert policy._shared == Affinity()._shared


def test_a_key_is_counted_once_and_only_at_its_first_encoder():
    policy, first = Affinity(), Affinity()._shared
    item, other = works(2)
    policy([item], idle("a", "b"), rng())
    policy.heard(item.key, "computed")
    once = policy._shared
    assert once < first
    for _ in range(50):
        # What this server sent there itself.
        policy([item], idle("a", "b"), rng())
        policy.heard(item.key, "cached")
    assert policy._shared == once
    busy = rendezvous(other.key, "ab")[0]
    views = [View(url, load=50_000.0 if url == busy else 0.0) for url in "ab"]
    policy([other], Snapshot(tuple(views)), rng())
    policy.heard(other.key, "computed")
    policy.heard(b"unknown", "computed")
    assert policy._shared == once


def test_keys_that_were_placed_among_the_same_encoders_share_their_names():
    affinity, urls = Affinity(), [f"http://e{number}" for number in range(300)]
    for item in works(50):
        affinity([item], idle(*urls), rng())
    assert len({id(home.known) for home in affinity._homes.values()}) == 1


def test_only_so_many_keys_are_remembered():
    affinity = Affinity(keys=100)
    for item in works(1000):
        affinity([item], idle("a", "b"), rng())
    assert len(affinity) == 100


def test_retries_of_one_dead_encoder_are_free_and_a_storm_is_spread_over_time():
    now = 0.0
    budget = RetryBudget(lambda: now)
    assert budget.take(100, math.inf) == 0
    waits = [budget.take(10, math.inf) for _ in range(20)]
    assert waits[-1] > 10
    assert waits == sorted(waits), "each waits its turn"
    now += 60
    assert budget.take(1, math.inf) == 0, "calm fills it again"


def test_retries_that_come_too_late_delay_no_others():
    now = 0.0
    budget = RetryBudget(lambda: now)
    waits = [budget.take(10, 30.0) for _ in range(1000)]
    assert 29 <= min(waits[-100:]) <= max(waits) <= 31, "of a fault of hours no more is left"
    now += 31
    assert budget.take(1, 30.0) == 0


def test_first_tries_bring_a_share_of_retries():
    budget = RetryBudget(lambda: 0.0)
    budget.take(200, math.inf)
    waited = budget.take(0, math.inf)
    budget.sent(100)
    assert 0 < budget.take(0, math.inf) < waited


def test_pauses_grow_to_a_bound_and_differ():
    rng = random.Random(1)
    for number in (0, 3, 10_000):
        drawn = [pause(number, rng) for _ in range(200)]
        assert len(set(drawn)) > 1 or number == 0
        assert min(drawn) >= 0.05 and max(drawn) <= min(2.0, 0.05 * 2.0 ** min(number, 20)) + 1e-9
