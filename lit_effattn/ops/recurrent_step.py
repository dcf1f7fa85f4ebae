"""One position of a recurrence over matrices, as in generation."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Update sums of keys and values, and read them.

        S' = diag(a) S,  S_t = S' + k uᵀ,  y = S_tᵀ q,  u = v, or with the delta rule u = β (v − S'ᵀ k)

    Args:
        q: (B, H, 1, F), queries; all arguments are in one type.
        k: (B, H, 1, F), keys.
        v: (B, H, 1, D), values.
        s: (B, H, F, D), the sums before the position.
        decay: a, (B, H, 1, F or 1). None: 1.
        beta: β, (B, H, 1, 1). None: no delta rule.
        in_place: Whether to update `s` in place. Then nothing of its size is allocated.

    Returns:
        y (B, H, 1, D), and the sums after the position.
    """
    if decay is not None:
        a = decay.mT
        s = s.mul_(a) if in_place else s * a
    u = v if beta is None else beta * (v - k @ s)
    s = s.addcmul_(k.mT, u) if in_place else torch.addcmul(s, k.mT, u)
    return q @ s, s
