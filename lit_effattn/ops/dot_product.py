"""Scaled dot-product attention by PyTorch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_SHORT = 256  # keys

_MASKED = 2**22
"""Scores, N · M, that are masked at once: the mask of more would need more memory than the fused kernel saves."""


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`; keys and values may have fewer heads.

    Consecutive heads of queries then share a head of keys and values.

    On the CPU, training in bfloat16 with fewer than 256 keys is computed in float32: PyTorch's backward pass in
    bfloat16 takes up to ten times as long there.
    """
    gqa = k.size(1) != q.size(1)
    short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.size(-2) < _SHORT
    if not (short and torch.is_grad_enabled()):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, dropout_p=dropout, enable_gqa=gqa)
    with torch.autocast("cpu", enabled=False):
        q32, k32, v32 = q.float(), k.float(), v.float()
        y = F.scaled_dot_product_attention(q32, k32, v32, mask, is_causal=is_causal, dropout_p=dropout, enable_gqa=gqa)
    return y.to(q.dtype)


def in_groups_of_queries(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, position: Tensor
) -> Tensor:
    """Compute `attend(q, k, v, position)`, which makes a mask of N · M scores, with few enough queries at a time.

    The backward pass makes the masks again.

    Args:
        attend: Attention from queries (B, H, N, D) at `position` (B, N) to all keys: (B, H, N, D).
        q: (B, H, N, D).
        k: (B, H, M, D).
        v: (B, H, M, D).
        position: (B, N), the queries' positions.

    Returns:
        (B, H, N, D).
    """
    rows = max(_MASKED // k.size(2), 1)
    if q.size(2) <= rows:
        return attend(q, k, v, position)
    group = partial(checkpoint, attend, use_reentrant=False) if q.requires_grad else attend
    parts = zip(q.split(rows, 2), position.split(rows, 1), strict=True)
    return torch.cat([group(queries, k, v, at) for queries, at in parts], 2)
