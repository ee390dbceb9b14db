"""Attention by segment equals attention under the dense mask, and costs what it should."""

import itertools
import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_epd.platform import vision_attention
from sglang_epd.platform.vision_attention import (
    install,
    plan_groups,
    segment_bounds,
    segmented_attention,
)


def bounds_of(lengths: list[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(lengths))


def dense(q, k, v, bounds, scale):
    """The reference: one boolean mask of tokens x tokens."""
    mask = torch.zeros(q.shape[0], q.shape[0], dtype=torch.bool)
    for start, end in itertools.pairwise(bounds):
        mask[start:end, start:end] = True
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


windows = st.lists(st.sampled_from([4, 16, 64]), min_size=1, max_size=24)
images = st.lists(st.integers(0, 96), min_size=1, max_size=8).filter(lambda x: sum(x) > 0)


@settings(deadline=None, max_examples=60)
@given(lengths=windows | images, kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_equals_the_dense_mask(lengths, kv_heads, seed):
    bounds = bounds_of(lengths)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(bounds[-1], 4, 8, generator=generator)
    k, v = (torch.randn(bounds[-1], kv_heads, 8, generator=generator) for _ in range(2))
    scale = 1 / math.sqrt(8)
    torch.testing.assert_close(
        segmented_attention(q, k, v, bounds, scale=scale), dense(q, k, v, bounds, scale)
    )


@settings(deadline=None)
@given(lengths=windows | images)
def test_groups_cover_every_row_once(lengths):
    rows = []
    for group in plan_groups(bounds_of(lengths)):
        size = group.segments * group.length
        if group.rows is None:
            rows += range(group.start, group.start + size)
        else:
            assert group.rows.shape == (size,)
            rows += group.rows.tolist()
    assert sorted(rows) == list(range(sum(lengths)))


def test_equal_images_are_one_group_without_copies():
    (group,) = plan_groups(bounds_of([256] * 4))
    assert (group.length, group.segments, group.rows) == (256, 4, None)


def test_thousands_of_windows_are_a_call_for_each_length():
    assert len(plan_groups(bounds_of([64, 64, 64, 16] * 1000 + [4]))) == 3


@pytest.fixture
def scores(monkeypatch):
    """Counts the scores that attention computes: the work, whatever the clock says."""
    computed = []
    real = F.scaled_dot_product_attention

    def counting(q, k, v, **kwargs: Any):
        assert kwargs.get("attn_mask") is None
        computed.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(vision_attention.F, "scaled_dot_product_attention", counting)
    return computed


def test_work_is_linear_in_the_number_of_images(scores):
    def work(images: int) -> int:
        scores.clear()
        x = torch.randn(images * 64, 2, 8)
        segmented_attention(x, x, x, bounds_of([64] * images), scale=1.0)
        return sum(scores)

    assert [work(n) for n in (1, 4, 16)] == [work(1) * n for n in (1, 4, 16)]


@pytest.mark.parametrize(
    ("bounds", "batch", "flatten", "usable"),
    [
        ((0, 4, 10), 1, True, True),
        ((0, 4, 9), 1, True, False),  # rows that no segment holds
        ((1, 4, 10), 1, True, False),
        ((0, 5, 10), 2, False, True),  # a batch without padding
        ((0, 4, 9), 2, False, False),  # with padding
        ((0, 4, 10), 1, False, False),
    ],
)
def test_only_masks_that_segments_describe_are_replaced(bounds, batch, flatten, usable):
    found = segment_bounds(torch.tensor(bounds, dtype=torch.int32), batch, 10, flatten)
    assert found == (bounds if usable else None)


def test_no_bounds_without_segments():
    assert segment_bounds(None, 1, 10, True) is None


class Sdpa:
    """Stands for SGLang's backend: says when its own path is taken."""

    flatten_batch = True
    softmax_in_single_precision = False
    scale = 0.5

    def forward(self, *args, **kwargs):
        return "own path"


@pytest.fixture
def backend():
    class Fresh(Sdpa):
        forward = Sdpa.forward

    module: Any = ModuleType("vision")
    module.VisionSdpaAttention = Fresh
    install(module)
    return Fresh()


def test_installed_path_takes_packed_images(backend):
    x = torch.randn(6, 2, 8)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    out = backend.forward(q=x, k=x, v=x, bsz=1, cu_seqlens=bounds, max_seqlen=None)
    torch.testing.assert_close(out, dense(x, x, x, (0, 2, 6), 0.5))


def test_installed_path_leaves_the_rest_alone(backend):
    x = torch.randn(6, 2, 8)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    assert backend.forward(q=x, k=x, v=x, bsz=1) == "own path"
    assert backend.forward(x, x, x, 1, bounds, mask) == "own path"
    backend.softmax_in_single_precision = True
    assert backend.forward(x, x, x, 1, bounds) == "own path"
