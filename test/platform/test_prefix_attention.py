"""Attention of the tokens behind a cached prefix: the rows that SGLang's would have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_epd.platform import prefix_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8


class Backend:
    """Answers nothing: what it is asked is not for the new way."""

    def _run_sdpa_forward_extend(self, *arguments, **options):
        return "whole"


@pytest.fixture
def extend():
    module = SimpleNamespace(TorchNativeAttnBackend=type("Patched", (Backend,), {}))
    prefix_attention.install(module)
    return module.TorchNativeAttnBackend()._run_sdpa_forward_extend


def batch(pairs: list[tuple[int, int]], value_width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Requests of (cached, new) tokens, their keys and values all over the cache."""
    generator = torch.Generator().manual_seed(1)
    lengths = [cached + new for cached, new in pairs]
    slots = sum(lengths) + 7
    order = iter(torch.randperm(slots, generator=generator).tolist())
    places = torch.zeros(len(pairs) + 1, max(lengths), dtype=torch.int64)
    for number, length in enumerate(lengths):
        places[number + 1, :length] = torch.tensor([next(order) for _ in range(length)])
    new = sum(count for _, count in pairs)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "query": drawn(new, HEADS, WIDTH),
        "output": torch.full((new, HEADS, value_width), torch.nan),
        "k_cache": drawn(slots, KV_HEADS, WIDTH),
        "v_cache": drawn(slots, KV_HEADS, value_width),
        "req_to_token": places,
        "req_pool_indices": torch.arange(1, len(pairs) + 1),
        "seq_lens": torch.tensor(lengths),
        "extend_prefix_lens": torch.tensor([cached for cached, _ in pairs]),
        "extend_seq_lens": torch.tensor([count for _, count in pairs]),
    }


def by_hand(asked: dict[str, torch.Tensor], scaling: float) -> torch.Tensor:
    """Each row by itself, in double precision."""
    rows = []
    queries = iter(asked["query"].double())
    for number, length in enumerate(asked["seq_lens"].tolist()):
        places = asked["req_to_token"][number + 1, :length]
        keys = asked["k_cache"][places].double().repeat_interleave(HEADS // KV_HEADS, 1)
        values = asked["v_cache"][places].double().repeat_interleave(HEADS // KV_HEADS, 1)
        for end in range(int(asked["extend_prefix_lens"][number]) + 1, length + 1):
            scores = torch.einsum("hd,thd->ht", next(queries), keys[:end]) * scaling
            rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:end]))
    return torch.stack(rows).float()


@pytest.mark.parametrize("value_width", [WIDTH, 5])
@pytest.mark.parametrize(
    "pairs", [[(9, 3)], [(1, 1)], [(20, 1), (0, 6), (2, 5), (5, 5)], [(0, 4), (30, 2)]]
)
def test_new_tokens_attend_to_the_prefix_and_to_those_before_them(extend, pairs, value_width):
    asked = batch(pairs, value_width)
    found = extend(**asked, scaling=0.3, enable_gqa=True, causal=True)
    assert found is asked["output"]
    torch.testing.assert_close(found, by_hand(asked, 0.3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("pairs", "options"),
    [
        ([(0, 4)], {}),  # nothing is cached
        ([(3, 4)], {}),  # and less than what is new
        ([(9, 3)], {"causal": False}),
        ([(9, 3)], {"sliding_window_size": 4}),
        ([(9, 3)], {"is_cross_attn": True}),
        ([(9, 3)], {"encoder_lens": torch.tensor([2])}),
    ],
)
def test_all_else_is_left_to_sglang(extend, pairs, options):
    assert extend(**batch(pairs), **{"causal": True, "enable_gqa": True, **options}) == "whole"
