"""Vision attention by segment, in place of one dense mask over all images.

SGLang's SDPA backend gives the packed patches of all images of a forward one boolean
mask of `tokens x tokens`: work and memory grow with the square of the sum. A segment
of `cu_seqlens` (an image, a frame or a window) attends to itself alone, so attention
segment by segment, without a mask, gives the same result in the sum of the squares.
Segments of one length are one batch: windowed attention has thousands of them, of
two or three lengths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Group(NamedTuple):
    """Segments of one length.

    `start` is the first row where the segments are adjacent, and `rows` is None then;
    else `rows` holds the row numbers, [segments * length], of segments lying apart.
    """

    length: int
    segments: int
    start: int
    rows: torch.Tensor | None


@functools.lru_cache(maxsize=64)
def plan_groups(bounds: tuple[int, ...]) -> tuple[Group, ...]:
    """Group the segments between consecutive bounds by length; empty ones drop out.

    Cached because every layer of a forward asks with the same bounds.

    Args:
        bounds: positions of tokens at which segments begin and end.
    """
    starts_of: dict[int, list[int]] = {}
    for start, end in itertools.pairwise(bounds):
        if end > start:
            starts_of.setdefault(end - start, []).append(start)
    groups = []
    for length, starts in starts_of.items():
        adjacent = starts[-1] - starts[0] == length * (len(starts) - 1)
        rows = None
        if not adjacent:
            rows = (torch.tensor(starts)[:, None] + torch.arange(length)).reshape(-1)
        groups.append(Group(length, len(starts), starts[0], rows))
    return tuple(groups)


def segmented_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: tuple[int, ...],
    *,
    scale: float,
) -> torch.Tensor:
    """Full attention inside each segment, none across.

    Args:
        q: [tokens, heads, head_dim].
        k, v: [tokens, kv_heads, head_dim], `heads` a multiple of `kv_heads`.
        bounds: 0 = b0 <= b1 <= ... <= bn = tokens; segment i is the rows [bi, bi+1).
        scale: factor on the scores before the softmax.

    Returns:
        [tokens, heads, head_dim], in q's dtype.
    """
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    grouped = q.shape[1] != k.shape[1]
    for group in plan_groups(bounds):
        # [segments, heads, length, head_dim] each
        queries, keys, values = (_take(x, group).transpose(1, 2) for x in (q, k, v))
        part = F.scaled_dot_product_attention(
            queries, keys, values, scale=scale, enable_gqa=grouped
        )
        _put(output, group, part.transpose(1, 2))
    return output


def _take(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The group's rows of [tokens, heads, head_dim] as [segments, length, heads, head_dim]."""
    if group.rows is None:
        rows = x.narrow(0, group.start, group.segments * group.length)
    else:
        rows = x.index_select(0, group.rows)
    return rows.reshape(group.segments, group.length, *x.shape[1:])


def _put(output: torch.Tensor, group: Group, part: torch.Tensor) -> None:
    rows = part.reshape(group.segments * group.length, *output.shape[1:])
    if group.rows is None:
        output.narrow(0, group.start, rows.shape[0]).copy_(rows)
    else:
        output.index_copy_(0, group.rows, rows)


def segment_bounds(
    cu_seqlens: torch.Tensor | None, batch: int, tokens: int, flatten_batch: bool
) -> tuple[int, ...] | None:
    """The bounds if segments alone describe the mask, else None.

    They do for a packed batch that `cu_seqlens` covers from end to end. Unpacked, row
    i of the batch is padded to `tokens / batch`, and they do only without any padding.

    Args:
        cu_seqlens: [segments + 1]; None where SGLang has none.
        batch, tokens: rows of the input, and tokens of all of them.
        flatten_batch: whether the input is packed.
    """
    if cu_seqlens is None:
        return None
    bounds = tuple(cu_seqlens.tolist())
    if flatten_batch:
        return bounds if batch == 1 and bounds[0] == 0 and bounds[-1] == tokens else None
    length = tokens // batch
    return bounds if bounds == tuple(range(0, tokens + 1, length)) else None


def install(vision: ModuleType) -> None:
    """Put the segmented path before `VisionSdpaAttention.forward`.

    Left to SGLang's own path: a mask that the model made itself, padded batches, and
    the towers that ask for a softmax in single precision whatever the dtype.
    """
    original: Callable[..., torch.Tensor] = vision.VisionSdpaAttention.forward

    @functools.wraps(original)
    def forward(  # noqa: PLR0917 (the signature replaced)
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bsz: int,
        cu_seqlens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attention_mask is None and not self.softmax_in_single_precision:
            bounds = segment_bounds(cu_seqlens, bsz, q.shape[0], self.flatten_batch)
            if bounds is not None:
                return segmented_attention(q, k, v, bounds, scale=self.scale)
        return original(self, q, k, v, bsz, cu_seqlens, attention_mask, **kwargs)

    vision.VisionSdpaAttention.forward = forward
