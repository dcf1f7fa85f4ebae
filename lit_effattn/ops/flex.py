"""Attention through PyTorch's FlexAttention, which makes one kernel of scores, mask and softmax (Dong et al. 2024).

Only if asked for, by `LIT_EFFATTN_FLEX=1` in the environment: whether it is faster was not measured. The plain forms
are the reference: the forward pass equals theirs on the CPU, in tests; on a GPU, both passes are tested where one is.
"""

from __future__ import annotations

import math
import os
import warnings
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

FLEX = "LIT_EFFATTN_FLEX"
"""The environment's variable that asks for it."""

_NARROWEST = 16  # columns of the smallest matrix product that a kernel makes


def use_flex(q: Tensor, dropout: float = 0.0) -> bool:
    """Whether FlexAttention was asked for and can be had for queries `q` (B, H, N, D); warns once if it can't."""
    if os.environ.get(FLEX) != "1":
        return False
    obstacle = _obstacle(q, dropout)
    if obstacle is not None:
        _notice(obstacle)
    return obstacle is None


def _obstacle(q: Tensor, dropout: float) -> str | None:
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}; on CUDA alone it has a backward pass"
    if q.dtype == torch.float64:
        return "float64 is none of its types; choose float32 or less"
    if q.size(-1) < _NARROWEST:
        return f"heads of width {q.size(-1)} are narrower than {_NARROWEST}; choose fewer heads"
    if dropout > 0:
        return f"it drops no attention weight, as dropout={dropout} asks for; choose 0"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients are added up in any order, and deterministic algorithms are wanted"
    return None


@cache
def _notice(obstacle: str) -> None:
    warnings.warn(f"{FLEX}=1, but FlexAttention can't be used, and the plain form is: {obstacle}", stacklevel=3)


def relative_flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    there: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Return what `relative_attention` does without dropout, and of the same arguments.

        out_i = Σ_j softmax_j(((q_i + u) · k_j + (q_i + w) · r_{i−j}) / √D) v_j

    (q + w) · r is computed first, for all queries and distances, and looked up by i − j: B · H · N · L numbers of q's
    type, and as many of its gradient, L the distances that are seen: M + N, the window, or 2 N − 1 if not `causal`.
    Nothing else has the size of the scores; the plain form keeps several such tensors for the backward pass. Blocks of
    128 queries and keys that none sees, by `causal` and `window`, cost nothing; `there` and `first` save no time.

    On the CPU it is as slow and large as can be, and has no backward pass: for tests.

    Args:
        q: (B, H, N, D).
        k: (B, H, M + N, D).
        v: (B, H, M + N, D).
        r: (H, L, D), by distance in falling order.
        u: (H, D).
        w: (H, D), v in the paper.
        causal: Whether a query sees only its own and earlier keys.
        window: Number of keys that a query sees, its own included; None: all. Needs `causal`.
        there: (B, M + N), False at keys that hold nothing.
        first: (B, N), which key is the first that a query sees.

    Returns:
        (B, H, N, D).
    """
    n, m = q.size(2), k.size(2) - q.size(2)
    if window is not None:
        r = r[:, max(0, r.size(1) - window) :]
    zero = r.size(1) - (1 if causal else n)  # the row of distance 0
    last = r.size(1) - 1
    scale = 1 / math.sqrt(q.size(-1))
    by_distance = torch.einsum("bhnd,hld->bhnl", (q + w[:, None]) * scale, r)  # (B, H, N, L)

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score + by_distance[b, h, i, (zero - m - i + j).clamp(0, last)]
        if there is not None:
            score = torch.where(there[b, j], score, -torch.inf)
        return score if first is None else torch.where(j >= first[b, i], score, -torch.inf)

    mask = _blocks(n, m, window, q.device) if causal else None
    return _flex(q.device)(q + u[:, None], k, v, score_mod=score, block_mask=mask, scale=scale)


@lru_cache(maxsize=16)
def _blocks(n: int, m: int, window: int | None, device: torch.device) -> Any:
    """Return which blocks of `n` queries and `m + n` keys have one that is seen; the same for all rows and heads."""
    from torch.nn.attention.flex_attention import create_block_mask  # here, since importing it takes half a second

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = m + i - j
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    with torch.inference_mode(False):  # it is kept: made by a first call in validation, training uses it
        return create_block_mask(sees, None, None, n, m + n, device=device)


@lru_cache(maxsize=2)
def _flex(device: torch.device) -> Any:
    """Return FlexAttention; compiled, for only then it is one kernel, where it has one for both passes."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device.type == "cuda" else flex_attention
