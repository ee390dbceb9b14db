"""Torch-native attention of the tokens behind a cached prefix.

SGLang's backend computes attention for every token of a prompt, those of the cached prefix
with queries of nothing in particular, and drops their rows: a short question behind a long
conversation costs as much attention as all of it did. A row depends on its own query alone,
so those of the new tokens, with a mask, are the same.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def install(module: ModuleType) -> None:
    """Wrap `TorchNativeAttnBackend._run_sdpa_forward_extend`."""
    backend = module.TorchNativeAttnBackend
    whole = backend._run_sdpa_forward_extend

    @functools.wraps(whole)
    def extend(  # noqa: PLR0917 (the signature replaced)
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        caches = k_cache, v_cache, req_to_token
        plain = causal and encoder_lens is None and not is_cross_attn
        windowed = sliding_window_size is not None and sliding_window_size > -1
        # With fewer rows than new ones to spare, a mask costs more than it saves.
        spared = bool((extend_prefix_lens >= extend_seq_lens).any())
        if not plain or windowed or not spared:
            all_of_it: torch.Tensor = whole(
                self,
                *(query, output, *caches, req_pool_indices),
                *(seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens),
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
            return all_of_it
        begin = 0
        for pool_index, length, new in zip(
            req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
        ):
            rows = slice(begin, begin + new)
            places = req_to_token[pool_index, :length]
            output[rows] = _attend(
                query[rows], k_cache[places], v_cache[places], scaling, enable_gqa=enable_gqa
            )
            begin += new
        return output

    backend._run_sdpa_forward_extend = extend


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    *,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention output of the last tokens of a prompt: [new, heads, width of a value].

    Args:
        query: [new, heads, width].
        key, value: of the whole prompt, [tokens, heads, width].
    """
    new, tokens = len(query), len(key)
    prefix = tokens - new
    mask = None
    if prefix:
        mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril(prefix)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.to(query.dtype).transpose(0, 1).unsqueeze(0),
        value.to(query.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=enable_gqa,
        scale=scaling,
        is_causal=mask is None,
    )
    return attended.squeeze(0).transpose(0, 1)
