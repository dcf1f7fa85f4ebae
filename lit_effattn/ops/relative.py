"""Softmax attention with sinusoidal relative positions (Dai et al. 2019, section 3.3 and appendix B)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.window import slices
from lit_effattn.sequence import accumulator


def sinusoids(
    first: int, last: int, width: int, *, clamp: int | None = None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return R of the distances first, first − 1, …, last.

        R_d = [sin(d ω_0), …, sin(d ω_{E/2−1}), cos(d ω_0), …, cos(d ω_{E/2−1})],  ω_i = 10000^{−2i/E}

    Args:
        first: The largest distance; the first row.
        last: The smallest distance, at most 0; negative distances are those of keys after the query.
        width: E, even.
        clamp: Largest absolute distance, to which larger ones are clipped; None: no limit.
        dtype: Type of the result.
        device: Device of the result.

    Returns:
        (first − last + 1, E).
    """
    distance = torch.arange(first, last - 1, -1, device=device)
    furthest = max(first, -last)
    if clamp is not None:
        distance, furthest = distance.clamp(-clamp, clamp), min(furthest, clamp)
    sin, cos = (t[distance.abs()] for t in _waves(furthest + 1, width, accumulator(dtype), device))
    return torch.cat([sin * distance.sign()[:, None], cos], -1).to(dtype)


def _waves(count: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sines and cosines of 0, …, count − 1 times each frequency, (count, E / 2).

    Each generated token needs them for its whole memory, where computing all sines would cost more than the attention.
    With d = S a + b and S = ⌈√count⌉, 2 S sines give all by sin(x + y) = sin x cos y + cos x sin y. A traced count has
    no value, so S is 64.
    """
    step = math.isqrt(count - 1) + 1 if isinstance(count, int) else 64
    # Angles in float64, since float32 is off by 0.06 at distance 10⁶.
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    near = torch.arange(step, device=device)[:, None] * frequency  # (S, E / 2)
    far = (torch.arange((count + step - 1) // step, device=device)[:, None] * frequency * step)[:, None]
    s, c, sf, cf = (t.to(dtype) for t in (near.sin(), near.cos(), far.sin(), far.cos()))
    return (sf * c + cf * s).flatten(0, 1)[:count], (cf * c - sf * s).flatten(0, 1)[:count]


def relative_shift(scores: Tensor) -> Tensor:
    """Reindex scores from distances to keys: out[i, j] = scores[i, n − 1 − i + j].

    This takes a copy and two reshapes, so the cost is that of the scores alone. Where n − 1 − i + j ≥ L, beyond the
    smallest distance in `scores`, the result has entries of another row, which must be masked.

    Args:
        scores: (…, n, L), a column for each distance, in falling order.

    Returns:
        (…, n, L).
    """
    n, width = scores.shape[-2:]
    # With one more column in front, each element is n places after its place in the result.
    return F.pad(scores, (1, 0)).flatten(-2)[..., n:].unflatten(-1, (n, width))


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    valid: Tensor | None = None,
    first: Tensor | None = None,
    chunk_size: int = 128,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax attention with content and relative position terms.

        out_i = Σ_j softmax_j(((q_i + u) · k_j + (q_i + w) · r_{i−j}) / √D) v_j

    Queries are processed in chunks of C, each with the keys up to its last query, or in its window: time O(N (M + N)),
    or O(N (C + window)), and at most C (M + N) scores at once unless they are saved for a gradient.

    Args:
        q: (B, H, N, D).
        k: (B, H, M + N, D): keys of M earlier positions, then those of the queries.
        v: (B, H, M + N, D).
        r: (H, L, D), a row for each distance in falling order: the last is 0, or 1 − N if not `causal`. The first is
            M + N − 1, or less with a window: `furthest`.
        u: (H, D).
        w: (H, D), v in the paper.
        causal: Whether a query sees only its own and earlier keys.
        window: Number of keys that a query sees, its own included; None: all. Needs `causal`.
        valid: (B, M + N), False at empty keys; None: no key is empty. Each query must see a key.
        first: (B, N), index of the first key that a query sees; None: given by the other arguments.
        chunk_size: C; no effect on the result.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        (B, H, N, D).
    """
    n, m = q.size(2), k.size(2) - q.size(2)
    zero = r.size(1) - (1 if causal else n)  # the row of distance 0
    scale = 1 / math.sqrt(q.size(-1))
    starts = range(0, n, chunk_size)
    bounds = [
        (0 if window is None else max(0, m + start + 1 - window), m + min(start + chunk_size, n) if causal else m + n)
        for start in starts
    ]
    pieces: Iterable[tuple[Tensor, Tensor]]
    if window is None:
        # Each piece has a large part of all keys. Made when needed, its gradient is added at once and not kept.
        pieces = ((k[:, :, low:high], v[:, :, low:high]) for low, high in bounds)
    else:
        pieces = zip(slices(k, bounds, 2), slices(v, bounds, 2), strict=True)
    out = []
    for start, chunk, (low, high), (keys, values) in zip(starts, q.split(chunk_size, 2), bounds, pieces, strict=True):
        end = start + chunk.size(2)
        largest, last = m + end - 1 - low, 0 if causal else start - (n - 1)

        distances = r[:, zero - largest : zero - last + 1]
        scores = torch.einsum("bhnd,hld->bhnl", chunk + w[:, None], distances)
        scores = relative_shift(scores)[..., : high - low] * scale  # (B, H, C, K)
        distance = torch.arange(m + start, m + end, device=q.device)[:, None] - torch.arange(low, high, device=q.device)
        seen = (distance >= last) if window is None else (distance >= last) & (distance < window)  # (C, K)
        if valid is not None:
            seen = seen & valid[:, None, None, low:high]  # (B, 1, C, K)
        if first is not None:
            seen = seen & (torch.arange(low, high, device=q.device) >= first[:, None, start:end, None])
        scores = scores.masked_fill(~seen, -torch.inf)
        out.append(F.scaled_dot_product_attention(chunk + u[:, None], keys, values, scores, dropout_p=dropout))
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def furthest(n: int, m: int, window: int | None, chunk_size: int) -> int:
    """Return the largest distance that `relative_attention` needs in `r`."""
    return m + n - 1 if window is None else min(m + n, window - 1 + min(n, chunk_size)) - 1


def attention_by_distance(
    q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, index: Tensor, seen: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """Compute attention to keys in any order, with distances that differ between rows.

        out_i = Σ_j softmax_j(q_i · k_j / √D + by_distance[i, index[i, j]]) v_j,  j with seen[i, j]

    Args:
        q: (B, H, N, D).
        k: (B, H, M, D).
        v: (B, H, M, D).
        by_distance: (B, H, N, L), the term of each distance in the score.
        index: (B, N, M), index of each key's distance, below L; arbitrary for keys that are not seen.
        seen: (B, N, M). Each query must see a key.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        (B, H, N, D).
    """
    index = index.clamp(0, by_distance.size(-1) - 1)[:, None].expand(-1, q.size(1), -1, -1)  # (B, H, N, M)
    scores = by_distance.gather(-1, index).masked_fill(~seen[:, None], -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, scores, dropout_p=dropout)
