"""Attention with a kernel's feature map in place of the exponential (Katharopoulos et al. 2020, equations 5 to 12)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Let every query see every key.

        out_i = q_i Σ_j k_j v_jᵀ / (q_i · Σ_j k_j + eps)

    Args:
        q: (B, H, N, F), queries after the feature map.
        k: (B, H, M, F), keys after the feature map; 0 where a key is padding.
        v: (B, H, M, D).
        eps: Keeps the division finite where no key is seen.

    Returns:
        (B, H, N, D).
    """
    s = k.transpose(-1, -2) @ v  # (B, H, F, D)
    z = k.sum(-2)  # (B, H, F)
    return (q @ s) / ((q @ z[..., None]) + eps)


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *, chunk_size: int = 128, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Let query i see the keys up to i, and those that `s` and `z` sum up.

        S_i = S_{i-1} + k_i v_iᵀ,  z_i = z_{i-1} + k_i,  out_i = q_iᵀ S_i / (q_i · z_i + eps)

    Chunks of C positions are matrix products: within a chunk a C × C triangle of scores, before it the sums at the
    chunk's border. Memory O(N (C + F D / C)): never N × N, never N × F × D.

    Args:
        q: (B, H, N, F), queries after the feature map.
        k: (B, H, N, F), keys after the feature map; 0 where a key is padding.
        v: (B, H, N, D).
        s: (B, H, F, D), the sum of k vᵀ before the first position.
        z: (B, H, F), the sum of k before the first position.
        chunk_size: C.
        eps: Keeps the division finite where no key is seen.

    Returns:
        The output (B, H, N, D) and `s` and `z` after the last position.
    """
    n = q.size(-2)
    chunk = min(chunk_size, n)
    q, k, v = (_chunked(t, chunk) for t in (q, k, v))  # (B, H, N/C, C, F or D)

    # The sums before each chunk, and after the last one.
    s = _running(k.transpose(-1, -2) @ v, s)  # (B, H, N/C + 1, F, D)
    z = _running(k.sum(-2), z)  # (B, H, N/C + 1, F)
    scores = (q @ k.transpose(-1, -2)).tril()  # (B, H, N/C, C, C)
    numerator = scores @ v + q @ s[:, :, :-1]
    denominator = scores.sum(-1, keepdim=True) + q @ z[:, :, :-1, :, None]
    out = numerator / (denominator + eps)
    # Copies: as views they would keep the sums of every chunk alive for as long as the state lives.
    return out.flatten(2, 3)[:, :, :n], s[:, :, -1].clone(), z[:, :, -1].clone()


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *, eps: float = 1e-6, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `causal_linear_attention` does, for one position: what generating one more token costs.

    With `in_place` the sums are added to where they are, and nothing of their size is allocated.
    """
    column = k.transpose(-1, -2)  # (B, H, F, 1), times v (B, H, 1, D)
    s = s.addcmul_(column, v) if in_place else torch.addcmul(s, column, v)
    z = z.add_(k[:, :, 0]) if in_place else z + k[:, :, 0]
    return (q @ s) / ((q @ z[..., None]) + eps), s, z


def _chunked(t: Tensor, chunk: int) -> Tensor:
    """(B, H, N, F) -> (B, H, ⌈N/C⌉, C, F), filled up with zeros: keys that are not there."""
    t = F.pad(t, (0, 0, 0, -t.size(-2) % chunk))
    return t.unflatten(2, (-1, chunk))


def _running(increments: Tensor, start: Tensor) -> Tensor:
    """Return the sums from `start` on, before each increment (dimension 2) and after the last: one more than given."""
    return F.pad(increments, [0, 0] * (increments.dim() - 3) + [1, 0]).cumsum(2) + start[:, :, None]
