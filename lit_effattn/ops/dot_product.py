"""Scaled dot-product attention by PyTorch's fused kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_SHORT = 256  # keys


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`; keys and values may have fewer heads, shared in turn.

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
