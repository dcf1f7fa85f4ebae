"""FAVOR+: softmax attention estimated by random features, their sums kept in log space (Choromanski et al. 2020)."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Norms = Literal["gaussian", "sqrt_d"]

# ---------------------------------------------------------------------------------------------- the random directions


def draw_omega(
    heads: int,
    n: int,
    dim: int,
    *,
    orthogonal: bool = True,
    norms: Norms = "gaussian",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw n random vectors ω a head, each as if from N(0, I).

    Orthogonal ones come in blocks of `dim`, the rows of a random rotation (section 2.4). A rotation from the QR
    decomposition of a Gaussian matrix is uniform (of Haar measure) only if R's diagonal is made positive: LAPACK's
    signs are no coin tosses, and without the correction the estimate is biased (Mezzadri 2007).

    Args:
        heads: Independent draws H.
        n: Vectors of each.
        dim: Their dimension D.
        orthogonal: Whether the vectors of a block are orthogonal; else all are independent.
        norms: "gaussian": those of Gaussian vectors, so that each ω is one, and softmax-kernel estimates unbiased.
            "sqrt_d": √D, the root of E ‖ω‖²: less variance, but a bias, which shrinks with D.
        generator: Where to draw from, on any device; None: torch's default one.

    Returns:
        (H, n, D) in float64, on the generator's device, or the CPU.
    """
    device = torch.device("cpu") if generator is None else generator.device

    def gaussian(rows: int) -> Tensor:
        return torch.randn(heads, rows, dim, dtype=torch.float64, device=device, generator=generator)

    blocks = -(-n // dim)
    omega = gaussian(blocks * dim)
    if orthogonal:
        q, r = torch.linalg.qr(omega.unflatten(1, (blocks, dim)))  # (H, n/D, D, D)
        omega = (q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]).flatten(1, 2)
    omega = omega[:, :n]
    if norms == "sqrt_d":
        return math.sqrt(dim) * F.normalize(omega, dim=-1)
    return gaussian(n).norm(dim=-1, keepdim=True) * omega if orthogonal else omega


# ---------------------------------------------------------------------------------------------------- the feature maps


def log_positive_features(x: Tensor, omega: Tensor) -> Tensor:
    """Return log φ(x), φ(x) = F^(−½) exp(ωᵀx − ‖x‖²/2): E φ(x)ᵀφ(y) = exp(xᵀy) (lemma 1).

    Args:
        x: (B, H, N, D).
        omega: (H, F, D).

    Returns:
        (B, H, N, F).
    """
    return x @ omega.mT - _half_square(x) - math.log(omega.size(-2)) / 2


def log_hyperbolic_features(x: Tensor, omega: Tensor) -> Tensor:
    """Return log φ(x), φ(x) = F^(−½) exp(±ωᵀx − ‖x‖²/2): each ω serves twice, (H, F/2, D) -> (B, H, N, F) (lemma 1)."""
    return log_positive_features(x, torch.cat([omega, -omega], -2))


def trigonometric_features(x: Tensor, omega: Tensor) -> Tensor:
    """Return φ(x) = (F/2)^(−½) exp(‖x‖²/2) (sin ωᵀx, cos ωᵀx), (H, F/2, D) -> (B, H, N, F) (section 2.3).

    Unbiased too, but of either sign, and worst where the kernel is small.
    """
    u = x @ omega.mT  # (B, H, N, F/2)
    return (_half_square(x).exp() / math.sqrt(omega.size(-2))) * torch.cat([u.sin(), u.cos()], -1)


def relu_features(x: Tensor, omega: Tensor, floor: float = 1e-3) -> Tensor:
    """Return φ(x) = F^(−½) (relu(ωᵀx) + floor): a kernel of its own, not an estimate of softmax's (section 2.2)."""
    return (F.relu(x @ omega.mT) + floor) / math.sqrt(omega.size(-2))


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


# ------------------------------------------------------------------------------------------------------- the attention


def favor(log_q: Tensor, log_k: Tensor, v: Tensor) -> Tensor:
    """Let every query see every key.

        out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j)

    A feature's largest key, and then a query's largest product, are scaled to 1: nothing overflows, and the denominator
    is at least 1. Both maxima belong to one row and cancel, so no gradient goes through them.

    Args:
        log_q: (B, H, N, F), log φ(q).
        log_k: (B, H, M, F), log φ(k); −∞ where a key is padding.
        v: (B, H, M, D).

    Returns:
        (B, H, N, D); 0 in a row without keys.
    """
    m = log_k.detach().amax(-2, keepdim=True)  # (B, H, 1, F)
    v = _with_ones(v)
    return _divided(_scaled_queries(log_q, m, _top(log_q, m)) @ (_scaled_keys(log_k, m).mT @ v))


def causal_favor(
    log_q: Tensor, log_k: Tensor, v: Tensor, s: Tensor, z: Tensor, m: Tensor, *, chunk_size: int = 64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Let query i see the keys up to i, and those that `s`, `z` and `m` sum up.

        m_i = max(m_{i−1}, log φ(k_i)),  S_i = e^{m_{i−1} − m_i} S_{i−1} + e^{log φ(k_i) − m_i} v_iᵀ,  z_i with v_i = 1,
        out_i = p_iᵀ S_i / p_iᵀ z_i,  p_i = exp(log φ(q_i) + m_i − max_f(…)), all but S v a feature f

    Exact for any norms: p_i is 1 for one feature, and there z_i ≥ 1, so the denominator is at least 1. No maximum looks
    ahead. Two factors that are matrix products need one scale for many keys, and for the queries that see them. Before
    a chunk of C positions it is m at its border. Within, blocks are halved: the queries of a block's second half see
    all keys of the first, scaled by that half's own maximum, down to halves of one; there remains a query's own key.

    Time O(N F (C/2 + D)) in matrix products and N F (3 + log₂ C) exponentials, which a backward pass keeps; memory
    O(N (C + F log C + F D / C)): never N × N, never N × F × D. The N / C chunks' sums are added up one by one.

    Args:
        log_q: (B, H, N, F), log φ(q).
        log_k: (B, H, N, F), log φ(k); −∞ where a key is padding.
        v: (B, H, N, D).
        s: (B, H, F, D), the sum of e^{log φ(k) − m} vᵀ before the first position.
        z: (B, H, F), the sum of e^{log φ(k) − m}.
        m: (B, H, F), the greatest log φ(k); −∞: there is none.
        chunk_size: C, a power of 2.

    Returns:
        The output (B, H, N, D), 0 where no key is seen, and `s`, `z` and `m` after the last position.
    """
    n = log_q.size(-2)
    chunk = min(chunk_size, 1 << (n - 1).bit_length())
    # (B, H, N, ·) -> (B, H, N/C, C, ·), filled up with keys that are not there
    log_q, v = _chunked(log_q, chunk, 0), _chunked(_with_ones(v), chunk, 0)
    log_k = _chunked(log_k, chunk, -torch.inf)

    largest = log_k.detach().amax(-2)  # (B, H, N/C, F)
    borders = torch.cat([m[:, :, None], largest], 2).cummax(2).values  # (B, H, N/C + 1, F), m at the chunks' borders
    before, after = borders[:, :, :-1, None], borders[:, :, 1:, None]  # (B, H, N/C, 1, F)
    top = _top(log_q, torch.maximum(log_k.detach().cummax(3).values, before))  # (B, H, N/C, C, 1)

    added = _scaled_keys(log_k, after).mT @ v  # (B, H, N/C, F, D + 1)
    kept = _scaled_keys(before, after).mT  # (B, H, N/C, F, 1)
    sums = [torch.cat([s, z[..., None]], -1)]  # (B, H, F, D + 1)
    for a, b in zip(added.unbind(2), kept.unbind(2), strict=True):
        sums.append(torch.addcmul(a, sums[-1], b))
    out = _scaled_queries(log_q, before, top) @ torch.stack(sums[:-1], 2) + _within(log_q, log_k, v, top)
    s, z = (part.clone() for part in (sums[-1][..., :-1], sums[-1][..., -1]))  # not views of one another
    return _divided(out).flatten(2, 3)[:, :, :n], s, z, borders[:, :, -1].clone()


def favor_step(
    log_q: Tensor, log_k: Tensor, v: Tensor, s: Tensor, z: Tensor, m: Tensor, *, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `causal_favor` does, for one position: what generating one more token costs.

    With `in_place` the sums are scaled and added to where they are, and nothing of their size is allocated.
    """
    new = torch.maximum(m, log_k.detach()[:, :, 0])  # (B, H, F)
    kept = _scaled_keys(m, new)  # (B, H, F)
    key = _scaled_keys(log_k[:, :, 0], new)  # (B, H, F)
    if in_place:
        s.mul_(kept[..., None]).addcmul_(key[..., None], v)
        z.mul_(kept).add_(key)
        m.copy_(new)
    else:
        s, z, m = torch.addcmul(s * kept[..., None], key[..., None], v), z * kept + key, new
    row = new[:, :, None]  # (B, H, 1, F)
    p = _scaled_queries(log_q, row, _top(log_q, row))
    return _divided(torch.cat([p @ s, p @ z[..., None]], -1)), s, z, m


def _within(log_q: Tensor, log_k: Tensor, v: Tensor, top: Tensor) -> Tensor:
    """Sum over the keys of a query's own chunk, up to its own: (B, H, N/C, C, ·) -> (B, H, N/C, C, D)."""
    out = (log_q + log_k - _finite(top)).exp().sum(-1, keepdim=True) * v  # each query's own key
    half = 1
    while half < log_q.size(3):
        q, k, x, t = (y.unflatten(3, (-1, 2, half)) for y in (log_q, log_k, v, top))  # (B, H, N/C, C/2h, 2, h, ·)
        q, t = q[..., 1, :, :], t[..., 1, :, :]
        k, x = k[..., 0, :, :], x[..., 0, :, :]
        m = k.detach().amax(-2, keepdim=True)
        part = (_scaled_queries(q, m, t) @ _scaled_keys(k, m).mT) @ x  # (B, H, N/C, C/2h, h, D)
        out = out + F.pad(part[..., None, :, :], (0, 0, 0, 0, 1, 0)).flatten(3, 5)  # nothing for the first halves
        half *= 2
    return out


# In the exponents −∞ (nothing there) may be added, and gives 0; subtracted it would give NaN or ∞, so it is replaced.


def _scaled_keys(log_k: Tensor, m: Tensor) -> Tensor:
    return (log_k - _finite(m)).exp()


def _scaled_queries(log_q: Tensor, m: Tensor, top: Tensor) -> Tensor:
    return (log_q + m - _finite(top)).exp()


def _top(log_q: Tensor, m: Tensor) -> Tensor:
    """Return the largest log of a query's products with the features' largest keys, (…, N, 1)."""
    return (log_q.detach() + m).amax(-1, keepdim=True)


def _finite(m: Tensor) -> Tensor:
    return m.masked_fill(m == -torch.inf, 0)


def _with_ones(v: Tensor) -> Tensor:
    """Append a column of ones: (…, D) -> (…, D + 1); the denominator is what becomes of it."""
    return F.pad(v, (0, 1), value=1.0)


def _divided(sums: Tensor) -> Tensor:
    """(…, D + 1) -> (…, D); 0 where nothing was seen, for everywhere else the denominator is at least 1."""
    denominator = sums[..., -1:]
    return sums[..., :-1] / denominator.masked_fill(denominator == 0, 1)


def _chunked(t: Tensor, chunk: int, value: float) -> Tensor:
    return F.pad(t, (0, 0, 0, -t.size(-2) % chunk), value=value).unflatten(2, (-1, chunk))
