from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.config import Settings
from sglang_epd.dispatch import policies
from sglang_epd.errors import ConfigError
from sglang_epd.wire import EncodeItem

url_lists = st.lists(
    st.integers(1, 999).map("http://encoder-{}:30000".format), min_size=1, max_size=8, unique=True
)


def items(count: int) -> list[EncodeItem]:
    return [EncodeItem(n, "IMAGE", f"image {n}", data=b"x") for n in range(count)]


@pytest.mark.parametrize("name", sorted(policies._POLICIES))
@given(count=st.integers(0, 40), urls=url_lists, seed=st.integers())
def test_every_item_goes_to_a_known_encoder(name, count, urls, seed):
    given_urls = list(urls)
    chosen = policies.policy(name)(items(count), urls, random.Random(seed))
    assert len(chosen) == count
    assert set(chosen) <= set(urls)
    assert urls == given_urls
    again = policies.policy(name)(items(count), urls, random.Random(seed))
    assert chosen == again, "only the random source decides"


@given(count=st.integers(0, 40), urls=url_lists, seed=st.integers())
def test_shuffle_is_balanced_within_one(count, urls, seed):
    chosen = Counter(policies.shuffle(items(count), urls, random.Random(seed)))
    shares = [chosen[url] for url in urls]
    assert max(shares) - min(shares) <= 1


def test_shuffle_lets_chance_decide_who_gets_the_remainder():
    urls = ["a", "b", "c"]
    rng = random.Random(0)
    first = Counter(policies.shuffle(items(1), urls, rng)[0] for _ in range(300))
    assert set(first) == set(urls)
    assert min(first.values()) > 60


def test_the_default_policy_exists():
    policies.policy(Settings().dispatch_policy)


def test_an_unknown_policy_is_refused_by_the_name_of_its_setting():
    with pytest.raises(ConfigError, match=r"SGLANG_EPD_DISPATCH_POLICY='best'.*shuffle"):
        policies.policy("best")
