"""Attention through PyTorch's FlexAttention, which makes one kernel of scores, mask and softmax (Dong et al. 2024).

Only if asked for, by `LIT_EFFATTN_FLEX=1` in the environment: whether it is faster was not measured. The plain forms
are the reference: the forward pass equals theirs on the CPU, in tests; on a GPU, both passes are tested where one is.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLEX = "LIT_EFFATTN_FLEX"
"""The environment's variable that asks for it."""

_NARROWEST = 16  # columns of the smallest matrix product that a kernel makes
_KERNELS = 64  # different ones before the compiler gives up
_MOST = 65535  # of CUDA's second dimension of a grid, which counts the batch


class Band(NamedTuple):
    """Which keys a query can see, by their places: `least` ≤ ⌊i / rows⌋ + offset − ⌊j / columns⌋ < `below`."""

    rows: int = 1
    columns: int = 1
    offset: int = 0
    least: int = 0
    below: int | None = None


def use_flex(q: Tensor, dropout: float = 0.0, *, batch: int = 1) -> bool:
    """Whether FlexAttention was asked for and can be had for queries `q` (…, N, D); warns once if it can't.

    Args:
        q: The queries, or whatever else is as wide as it is asked about.
        dropout: Probability with which an attention weight is dropped.
        batch: How many attentions a head does side by side.
    """
    if os.environ.get(FLEX) != "1":
        return False
    obstacle = _obstacle(q, dropout, batch)
    if obstacle is not None:
        _notice(obstacle)
    return obstacle is None


def _obstacle(q: Tensor, dropout: float, batch: int) -> str | None:
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}; it has a backward pass on CUDA only"
    if q.dtype == torch.float64:
        return "it does not support float64; choose float32 or less"
    if q.size(-1) < _NARROWEST:
        return f"heads of width {q.size(-1)} are narrower than {_NARROWEST}; choose fewer heads"
    if batch > _MOST:
        return f"{batch} groups side by side are more than {_MOST}; choose a smaller batch, or a greater stride"
    if dropout > 0:
        return f"it does not support attention dropout, but dropout={dropout}; choose 0"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients are summed in any order, but deterministic algorithms are enabled"
    return None


@cache
def _notice(obstacle: str) -> None:
    warnings.warn(f"{FLEX}=1, but FlexAttention can't be used, so the plain form is: {obstacle}", stacklevel=3)


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
    type, and as many of their gradient, which is added up in float32, L the distances that are seen: M + N, the window,
    or 2 N − 1 if not `causal`. Nothing else has the size of the scores; the plain form keeps several such tensors for
    the backward pass. Blocks of 128 queries and keys that none sees, by `causal` and `window`, cost nothing; `there`
    and `first` save no time.

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

    mask = _blocks(n, m + n, Band(offset=m, below=window), q.device) if causal else None
    return _flex(q.device)(q + u[:, None], k, v, score_mod=score, block_mask=mask, scale=scale)


def flex_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, band: Band | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax attention within G groups, and of each query the logarithm of what the softmax divided by.

        y_i = Σ_j exp(q_i · k_j / √D − l_i) v_j,    l_i = ln Σ_j exp(q_i · k_j / √D)

    Several sets of keys can so be put together. A query that sees none has y = 0 and l = −∞. Nothing has the size of
    the scores. Blocks of 128 queries and keys that are outside `band` cost nothing; `mask` saves no time.

    Args:
        q: (B, G, H, Q, D).
        k: (B, G, H, K, D).
        v: (B, G, H, K, D').
        mask: (B or 1, G or 1, H or 1, Q, K), which keys are seen, all in `band`; None: all in `band`.
        band: Which keys can be seen at all; None: all.

    Returns:
        y (B, G, H, Q, D') of q's type, and l (B, G, H, Q) in float32 (float64 of float64).
    """
    groups = q.shape[:2]

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert mask is not None
        row, group, head = (int(size > 1) for size in mask.shape[:3])  # 0 where one mask is for all
        return torch.where(mask[b // groups[1] * row, b % groups[1] * group, h * head, i, j], score, -torch.inf)

    blocks = None if band is None else _blocks(q.size(3), k.size(3), band, q.device)
    modify = None if mask is None else score
    y, aux = _flex(q.device)(
        *(t.flatten(0, 1) for t in (q, k, v)), score_mod=modify, block_mask=blocks, return_aux=_lse()
    )
    return y.unflatten(0, groups), aux.lse.unflatten(0, groups)  # (B·G, H, Q, ·) -> (B, G, H, Q, ·)


@lru_cache(maxsize=16)
def _blocks(n: int, m: int, band: Band, device: torch.device) -> Any:
    """Return which blocks of `n` queries and `m` keys have one that is seen; the same for all rows and heads."""
    from torch.nn.attention.flex_attention import create_block_mask  # here, since importing it takes half a second

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i // band.rows + band.offset - j // band.columns
        seen = distance >= band.least
        return seen if band.below is None else seen & (distance < band.below)

    with torch.inference_mode(False):  # it is kept: made by a first call in validation, training uses it
        return create_block_mask(sees, None, None, n, m, device=device)


def _lse() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


@lru_cache(maxsize=2)
def _flex(device: torch.device) -> Any:
    """Return FlexAttention; compiled, for only then it is one kernel, where it has one for both passes."""
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled(flex_attention) if device.type == "cuda" else flex_attention


def _compiled(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Compile `function` anew for each kind of mask, type and shape, of which a model has more than Dynamo's limit."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)  # an error, not scores in memory, if it can't

    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **options)  # as a part of what is being compiled
        with torch._dynamo.config.patch(recompile_limit=_KERNELS):
            return compiled(*args, **options)

    return call
