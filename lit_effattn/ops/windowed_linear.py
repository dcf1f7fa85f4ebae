"""Softmax attention to the newest positions and linear attention to all before them, with one denominator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.linear.pytorch import causal_linear_attention, key_sums
from lit_effattn.ops.window import untiled, window_tiles

_NO_KEY = 1e-30  # avoids 0 / 0 where no key is before the window


def windowed_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    s: Tensor,
    z: Tensor,
    gamma: Tensor,
    window: int,
    *,
    past: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `WindowedLinearAttention` of N queries in time O(N (w + C + F) D), all in one type.

    Args:
        q: (B, H, N, D).
        k: (B, H, M + N, D), the keys of the M = window − 1 positions before the first query, then its own.
        v: (B, H, M + N, D).
        phi_q: (B, H, N, F), queries after the feature map.
        phi_k: (B, H, N, F), the first N of the keys after the feature map, which leave the window; 0 where a key does
            not exist, or does not leave it.
        s: (B, H, F, D), Σ φ(k) vᵀ of the positions before those of `k`.
        z: (B, H, F), Σ φ(k) of these.
        gamma: (H,), the factor of the softmax terms.
        window: w, the number of keys that have softmax terms.
        past: (B,), how many of the M positions exist, the last ones; None: all.
        chunk_size: Of `causal_linear_attention`.

    Returns:
        The output (B, H, N, D), and `s` and `z` with the N keys that leave the window.
    """
    n = q.size(2)
    near, total = _near(q, k, v, gamma, window, past)  # (B, H, N, D), (B, H, N, 1)
    # Query i sees the keys that left the window before it: those up to i − 1.
    values = v[:, :, :n]
    if n == 1:
        y = (near + phi_q @ s) / (total + phi_q @ z[..., None])
        return y, torch.addcmul(s, phi_k.mT, values), z + phi_k[:, :, 0]
    before, earlier = (F.pad(t, (0, 0, 1, -1)) for t in (phi_k, values))
    far, s, z_before = causal_linear_attention(phi_q, before, earlier, s, z, chunk_size=chunk_size, eps=_NO_KEY)
    weight = (phi_q * (before.cumsum(2) + z[:, :, None])).sum(-1, keepdim=True)  # (B, H, N, 1), its denominators
    ds, dz = key_sums(phi_k[:, :, -1:], values[:, :, -1:])
    return (near + weight * far) / (total + weight), s + ds, z_before + dz


def _near(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, window: int, past: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the softmax terms' sums with values and without, (B, H, N, D) and (B, H, N, 1).

    A term is γ exp(score − c), with c the largest score that a query sees. A row of padding may see nothing; its terms
    are then 0.
    """
    b, _, n, d = q.shape
    q, k, v, seen = window_tiles(q, k, v, window, past)
    scores = (q @ k.mT * d**-0.5).masked_fill(~seen, -torch.inf)  # (B·⌈N/S⌉, H, S, S + R)
    largest = scores.amax(-1, keepdim=True)
    terms = gamma[:, None, None] * (scores - largest.masked_fill(largest == -torch.inf, 0)).exp()
    return untiled(terms @ v, b, n), untiled(terms.sum(-1, keepdim=True), b, n)
