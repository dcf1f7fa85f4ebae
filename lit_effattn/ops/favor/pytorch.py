"""FAVOR+: softmax attention estimated by random features, their sums kept in log space (Choromanski et al. 2020)."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.favor import cpp_kernels
from lit_effattn.ops.linear.pytorch import _chunked, _chunks, _copy, _in_groups
from lit_effattn.ops.recurrent_step import recurrent_step
from lit_effattn.ops.runtime import selection
from lit_effattn.ops.runtime.operators import Operator

Norms = Literal["gaussian", "sqrt_d"]

WHAT = "Performer"
"""Name of the operation in messages."""

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

    Orthogonal vectors come in blocks of `dim`, the rows of a random rotation (section 2.4). A rotation from the QR
    decomposition of a Gaussian matrix is uniform (of Haar measure) only if R's diagonal is made positive: LAPACK's
    signs are not random, and without the correction the estimate is biased (Mezzadri 2007).

    Args:
        heads: Independent draws H.
        n: Vectors of each.
        dim: Their dimension D.
        orthogonal: Whether the vectors of a block are orthogonal; else all are independent.
        norms: "gaussian": those of Gaussian vectors, so that each ω is one, and softmax-kernel estimates unbiased.
            "sqrt_d": √D, the root of E ‖ω‖²: less variance, but a bias, which shrinks with D.
        generator: Random generator, on any device; None: torch's default.

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
    return _along(x, omega) + log_offset(x, omega.size(1))[..., None]


def log_offset(x: Tensor, n_features: int) -> Tensor:
    """Return the common term of the logs of positive features, −‖x‖²/2 − (log F)/2: (B, H, N, D) -> (B, H, N)."""
    return -_half_square(x).squeeze(-1) - math.log(n_features) / 2


def log_hyperbolic_features(x: Tensor, omega: Tensor) -> Tensor:
    """Return log φ(x), φ(x) = F^(−½) exp(±ωᵀx − ‖x‖²/2): each ω serves twice, (H, F/2, D) -> (B, H, N, F) (lemma 1)."""
    u = _along(x, omega)  # (B, H, N, F/2)
    return torch.cat([u, -u], -1) + log_offset(x, 2 * omega.size(1))[..., None]


def trigonometric_features(x: Tensor, omega: Tensor) -> Tensor:
    """Return φ(x) = (F/2)^(−½) exp(‖x‖²/2) (sin ωᵀx, cos ωᵀx), (H, F/2, D) -> (B, H, N, F) (section 2.3).

    Unbiased too, but of either sign, and worst where the kernel is small.
    """
    u = _along(x, omega)  # (B, H, N, F/2)
    return (_half_square(x).exp() / math.sqrt(omega.size(-2))) * torch.cat([u.sin(), u.cos()], -1)


def relu_features(x: Tensor, omega: Tensor, floor: float = 1e-3) -> Tensor:
    """Return φ(x) = F^(−½) (relu(ωᵀx) + floor): a kernel of its own, not an estimate of softmax's (section 2.2)."""
    return (F.relu(_along(x, omega)) + floor) / math.sqrt(omega.size(-2))


def log_keys_plus(x: Tensor, omega: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the logs of keys' features that go with those of `log_queries_plus`, and max_f ωᵀx.

        φ(k_j) = exp(ωᵀk_j − ‖k_j‖²/2), and one feature more, 1

    Args:
        x: (B, H, N, D), keys.
        omega: (H, F, D).
        valid: (B or 1, H or 1, N), which keys are valid; None: all.

    Returns:
        (B, H, N, F + 1) and (B, H, N); both −∞ in padding.
    """
    u = _along(x, omega)  # (B, H, N, F)
    result, top = F.pad(u - _half_square(x), (0, 1)), u.amax(-1)
    if valid is None:
        return result, top
    return result.masked_fill(~valid[..., None], -torch.inf), top.masked_fill(~valid, -torch.inf)


def log_queries_plus(x: Tensor, omega: Tensor, top: Tensor, eps: float) -> Tensor:
    """Return the logs of queries' features to which the features of `log_keys_plus` are scaled and eps is added.

        φ(q_i) = exp(ωᵀq_i − ‖q_i‖²/2 − max_f ωᵀq_i) + eps, and one feature more, eps e^{top_i} Σ_f φ_f(q_i)

    The attention with these is that with the features of the authors' code (Choromanski et al. 2020), times e^{top_i},

        (exp(ωᵀq_i − ‖q_i‖²/2 − max_f ωᵀq_i) + eps) · (exp(ωᵀk_j − ‖k_j‖²/2 − top_i) + eps)

    Args:
        x: (B, H, N, D), queries.
        omega: (H, F, D).
        top: (B, H, N or 1), the largest ωᵀk of the keys that each query sees; −∞: it sees none.
        eps: Above 0.

    Returns:
        (B, H, N, F + 1).
    """
    u = _along(x, omega)  # (B, H, N, F)
    log_eps = u.new_tensor(math.log(eps))
    log_q = torch.logaddexp(u - _half_square(x) - u.amax(-1, keepdim=True), log_eps)
    return torch.cat([log_q, log_eps + top[..., None] + log_q.logsumexp(-1, keepdim=True)], -1)


def _along(x: Tensor, omega: Tensor) -> Tensor:
    """Return ωᵀx, (B, H, N, D) -> (B, H, N, F)."""
    if x.size(2) > 1:
        return x @ omega.mT
    return torch.einsum("bhnd,hfd->bhnf", x, omega)  # the product copies `omega` for each row, as large as the sums


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


# ------------------------------------------------------------------------------------------------------- the attention


def favor(log_q: Tensor, log_k: Tensor, v: Tensor) -> Tensor:
    """Compute FAVOR+ in which every query sees every key.

        out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j)

    The largest key of each feature, and then the largest product of each query, are scaled to 1, so nothing overflows
    and the denominator is at least 1. Both maxima are per row and cancel, so they have no gradient.

    Args:
        log_q: (B, H, N, F), log φ(q).
        log_k: (B, H, M, F), log φ(k); −∞ where a key is padding.
        v: (B, H, M, D).

    Returns:
        (B, H, N, D); 0 in a row without keys.
    """
    return read_favor_sums(log_q, *favor_sums(log_k, v))


def favor_sums(log_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum keys and values for `read_favor_sums`.

    Args:
        log_k: (B, H, M, F), log φ(k); −∞ where a key is padding.
        v: (B, H, M, D).

    Returns:
        Σ e^{log φ(k) − m} vᵀ, (B, H, F, D), Σ e^{log φ(k) − m}, and m = max log φ(k), both (B, H, F).
    """
    m = log_k.detach().amax(-2)  # (B, H, F)
    sums = _scaled_keys(log_k, m[:, :, None]).mT @ _with_ones(v)  # (B, H, F, D + 1)
    return sums[..., :-1], sums[..., -1], m


def read_favor_sums(log_q: Tensor, s: Tensor, z: Tensor, m: Tensor) -> Tensor:
    """Compute `favor` of queries, log φ(q) (B, H, N, F), from the sums of `favor_sums`: (B, H, N, D)."""
    row = m[:, :, None]  # (B, H, 1, F)
    p = _scaled_queries(log_q, row, _top(log_q, row))
    return _divided(p @ torch.cat([s, z[..., None]], -1))


def log_products(log_q: Tensor, log_k: Tensor) -> Tensor:
    """Return log φ(q_i)ᵀφ(k_j), finite for all norms.

    It takes N · M · F exponentials, with memory for those of one query.

    Args:
        log_q: (B, H, N, F), log φ(q).
        log_k: (B, H, M, F), log φ(k); −∞ where a key is padding.

    Returns:
        (B, H, N, M).
    """
    return torch.stack([(q[:, :, None] + log_k).logsumexp(-1) for q in log_q.unbind(2)], 2)


def causal_favor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    offset: Tensor,
    s: Tensor,
    z: Tensor,
    m: Tensor,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute FAVOR+ in which query i sees the keys up to i and those summed in `s`, `z` and `m`.

        log φ(q) = ωᵀq + …,  log φ(k) = ωᵀk + offset,  m_i = max(m_{i−1}, log φ(k_i)),
        S_i = e^{m_{i−1} − m_i} S_{i−1} + e^{log φ(k_i) − m_i} v_iᵀ,  z_i with v_i = 1,
        out_i = p_iᵀ S_i / p_iᵀ z_i,  p_i = exp(log φ(q_i) + m_i − max_f(…)), all but S v a feature f

    The common term of a query's features cancels and is not an argument. Exact for any norms: no exponential overflows,
    and the denominator does not come near 0. No maximum includes later keys.

    On the CPU chunks of C positions are computed one after another, with a hand-written backward pass: beside inputs,
    outputs and their gradients, O(N D), only the memory of one chunk is needed. The backward pass recomputes features,
    scores and sums, and can't be differentiated. A key is scaled once, by m at the chunk's border. If it rises too far
    above that, the chunk's queries from that key on are computed as in `plain_causal_favor`. Other devices, and
    exported programs, use that for all queries. In float32, if there is a compiler, a C++ kernel is used on the CPU; if
    a key rises too far, it starts another chunk.

    Args:
        q: (B, H, N, E), queries.
        k: (B, H, N, E), keys.
        v: (B, H, N, D).
        omega: (H, F, E), the directions; they get no gradient.
        offset: (B, H, N), the common term of the logarithms of a key's features; −∞ where a key is padding.
        s: (B, H, F, D), the sum of e^{log φ(k) − m} vᵀ before the first position.
        z: (B, H, F), the sum of e^{log φ(k) − m}.
        m: (B, H, F), the greatest log φ(k); −∞: no key yet, and the sums are 0. It has no gradient, since it cancels.
        chunk_size: C, a power of 2, not used by the C++ kernel. Products take O(F (C + D)) per position and head, but
            small ones are slow.

    Returns:
        The output (B, H, N, D), 0 where no key is seen, and `s`, `z` and `m` after the last position.

    Raises:
        ValueError: If `omega` requires a gradient.
        NotImplementedError: On the CPU, if the gradient is differentiated; `plain_causal_favor` supports that.
    """
    if omega.requires_grad:
        raise ValueError("omega requires a gradient, which causal_favor does not compute; pass omega.detach()")
    if q.device.type != "cpu" or torch.compiler.is_exporting():
        log_q, log_k = q @ omega.mT, k @ omega.mT + offset[..., None]
        return plain_causal_favor(log_q, log_k, v, s, z, m, chunk_size=chunk_size)
    out, s, z, m, _ = _OPERATOR(q, k, v, omega, offset, s, z, m, chunk_size)
    return out, s, z, m


def plain_causal_favor(
    log_q: Tensor, log_k: Tensor, v: Tensor, s: Tensor, z: Tensor, m: Tensor, *, chunk_size: int = 64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `causal_favor` from any logarithms of features. Autograd differentiates it, any number of times.

    Exact for any norms: p_i is 1 for one feature, for which z_i ≥ 1, so the denominator is at least 1. A matrix product
    needs one scale for many keys and the queries that see them. For keys before a chunk of C positions the scale is m
    at its border. Within a chunk, blocks are halved recursively: the queries of a block's second half see all keys of
    its first half, scaled by that half's own maximum, down to halves of one position. A query's own key is added last.

    Time O(N F (C/2 + D)) in matrix products and N F (3 + log₂ C) exponentials, which a backward pass keeps; memory
    O(N (C + F log C + F D / C)): never N × N, never N × F × D. The N / C chunks' sums are added up one by one.

    Args:
        log_q: (B, H, N, F), log φ(q).
        log_k: (B, H, N, F), log φ(k); −∞ where a key is padding.
        v: (B, H, N, D).
        s: (B, H, F, D), the sum of e^{log φ(k) − m} vᵀ before the first position.
        z: (B, H, F), the sum of e^{log φ(k) − m}.
        m: (B, H, F), the greatest log φ(k); −∞: no key yet.
        chunk_size: C, a power of 2.

    Returns:
        The output (B, H, N, D), 0 where no key is seen, and `s`, `z` and `m` after the last position.
    """
    n = log_q.size(-2)
    chunk = min(chunk_size, 1 << (n - 1).bit_length())
    # (B, H, N, ·) -> (B, H, N/C, C, ·), padded with absent keys
    log_q, v = _chunked(log_q, chunk), _chunked(_with_ones(v), chunk)
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
    """Compute `causal_favor` for one position, as in generation.

    With `in_place` the sums are scaled and updated in place, and nothing of their size is allocated.
    """
    new = torch.maximum(m, log_k.detach()[:, :, 0])  # (B, H, F)
    kept = _scaled_keys(m, new)  # (B, H, F)
    key = _scaled_keys(log_k[:, :, 0], new)  # (B, H, F)
    row = new[:, :, None]  # (B, H, 1, F)
    p = _scaled_queries(log_q, row, _top(log_q, row))
    numerator, s = recurrent_step(p, key[:, :, None], v, s, decay=kept[:, :, None], in_place=in_place)
    z, m = (z.mul_(kept).add_(key), m.copy_(new)) if in_place else (z * kept + key, new)
    return _quotient(numerator, p @ z[..., None]), s, z, m


def _within(log_q: Tensor, log_k: Tensor, v: Tensor, top: Tensor) -> Tensor:
    """Sum over the keys of a query's own chunk, up to its own: (B, H, N/C, C, ·) -> (B, H, N/C, C, D)."""
    out = _own(log_q, log_k, top).sum(-1, keepdim=True) * v
    half = 1
    while half < log_q.size(3):
        x = v.unflatten(3, (-1, 2, half))[..., 0, :, :]  # (B, H, N/C, C/2h, h, D)
        q, k = _halves(log_q, log_k, top, half)
        part = (q @ k.mT) @ x  # (B, H, N/C, C/2h, h, D)
        out = out + F.pad(part[..., None, :, :], (0, 0, 0, 0, 1, 0)).flatten(3, 5)  # 0 for the first halves
        half *= 2
    return out


def _own(log_q: Tensor, log_k: Tensor, top: Tensor) -> Tensor:
    """Return the products of each query's features with those of its own key, (…, C, F)."""
    return (log_q + log_k - _finite(top)).exp()


def _halves(log_q: Tensor, log_k: Tensor, top: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Cut C positions into blocks of 2h: scale the queries of second halves and the keys of first, (…, C/2h, h, F)."""
    q, k, t = (y.unflatten(-2, (-1, 2, half)) for y in (log_q, log_k, top))  # (…, C/2h, 2, h, ·)
    k = k[..., 0, :, :]
    m = k.detach().amax(-2, keepdim=True)
    return _scaled_queries(q[..., 1, :, :], m, t[..., 1, :, :]), _scaled_keys(k, m)


# In exponents −∞ (no key) may be added, which gives 0. Subtracting it would give NaN or ∞, so it is replaced.


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
    """Append a column of ones: (…, D) -> (…, D + 1). One product then gives numerator and denominator."""
    return F.pad(v, (0, 1), value=1.0)


def _divided(sums: Tensor) -> Tensor:
    """Divide by the last column: (…, D + 1) -> (…, D); 0 where no key is seen: elsewhere the denominator is ≥ 1."""
    return _quotient(sums[..., :-1], sums[..., -1:])


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.masked_fill(denominator == 0, 1)


# ------------------------------------------------------------------------------------------------- on the CPU, by hand

_LIMIT = 40.0
"""How far the logarithm of a key may rise above its chunk's reference: products of a number as large as e^40 and the
smallest float32 numbers, e^−87, are negligible beside a denominator."""


class _Overflow(NamedTuple):
    """The queries of a chunk that see a key too far above its reference, and the logarithms to compute them from."""

    rows: Tensor  # (L,), those of the BH that have such queries
    queries: Tensor  # (L, C, 1), whether it is such a query
    log_q: Tensor  # (L, C', F), C' being C or the next power of 2
    log_k: Tensor  # (L, C', F)
    top: Tensor  # (L, C', 1)


class _Chunk(NamedTuple):
    """A chunk's scaled features: keys by the reference r, each query by a factor that cancels in the division."""

    q: Tensor  # (BH, C, F), ∝ e^{log φ(q) + r}
    k: Tensor  # (BH, C, F), e^{log φ(k) − r}; 0 where only overflowing queries see them
    kept: Tensor  # (BH, 1, F), e^{r − m} with m after the chunk
    m: Tensor  # (BH, 1, F), after the chunk
    overflow: _Overflow | None


def _chunk(q: Tensor, k: Tensor, omega: Tensor, offset: Tensor, m: Tensor) -> _Chunk:
    """Return the features of a chunk, (BH, C, E) each, from `m` before it, (BH, 1, F).

    The reference is m, or the chunk's first key if no key is before it; it never depends on later keys. Keys use
    torch's exp2, which is 2.6 times as fast as its exp.
    """
    r = m
    if (m == -torch.inf).any():
        first = torch.baddbmm(offset[:, :1, None], k[:, :1], omega.mT)  # (BH, 1, F)
        r = torch.where(m == -torch.inf, first, m)
        r = r.masked_fill(r == -torch.inf, torch.finfo(r.dtype).min / 4)  # any key rises above that
    to_q = torch.baddbmm(r, q, omega.mT).softmax(-1)  # (BH, C, F)
    log_ratio = torch.sub(offset[..., None], r).baddbmm_(k, omega.mT, beta=1 / math.log(2), alpha=1 / math.log(2))
    most = log_ratio.amax(1, keepdim=True)  # (BH, 1, F)
    kept = most.clamp(min=0).neg_().exp2_()
    after = torch.maximum(m, torch.add(r, most, alpha=math.log(2)))
    limit = _LIMIT / math.log(2)
    if not (most > limit).any():
        return _Chunk(to_q, log_ratio.exp2_(), kept, after, None)

    rows = (most > limit).any(-1).any(-1).nonzero().squeeze(-1)  # (L,)
    queries = (log_ratio[rows] > limit).any(-1, keepdim=True).cumsum(1) > 0
    log_q = torch.bmm(q[rows], omega[rows].mT)  # (L, C, F)
    log_k = torch.baddbmm(offset[rows, :, None], k[rows], omega[rows].mT)
    top = _top(log_q, torch.maximum(log_k.cummax(1).values, r[rows]))
    to_q[rows] = torch.where(queries, _scaled_queries(log_q, r[rows], top), to_q[rows])
    to_k = log_ratio.exp2_()
    to_k[rows] = to_k[rows].masked_fill(queries, 0)
    after[rows] = torch.maximum(m[rows], log_k.amax(1, keepdim=True))
    overflow = _Overflow(rows, queries, _filled(log_q, -torch.inf), _filled(log_k, -torch.inf), _filled(top, 0))
    return _Chunk(to_q, to_k, kept, after, overflow)


def _keys_after(c: _Chunk) -> Tensor:
    """Scale the chunk's keys by m after it, in place of those by its reference."""
    k = c.k.mul_(c.kept)
    if c.overflow is not None:
        rows, queries, _, log_k, _ = c.overflow
        k[rows] = (log_k[:, : queries.size(1)] - c.m[rows]).exp()
    return k


def _scores(c: _Chunk) -> Tensor:
    """Return the products of queries' features with those of the keys that they see, (BH, C, C)."""
    scores = torch.bmm(c.q, c.k.mT).tril_()
    if c.overflow is not None:
        rows, queries, log_q, log_k, top = c.overflow
        n, size = queries.size(1), log_q.size(1)
        result = scores.new_zeros(len(rows), size, size)
        result.diagonal(dim1=1, dim2=2).copy_(_own(log_q, log_k, top).sum(-1))
        for half in _powers_below(size):
            to_q, to_k = _halves(log_q, log_k, top, half)  # (L, C/2h, h, F)
            _blocks(result, half).copy_(to_q @ to_k.mT)
        scores[rows] = torch.where(queries, result[:, :n, :n], scores[rows])
    return scores


def _through_scores(c: _Chunk, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores' gradients `g`, 0 for overflowing queries, and their gradients of log φ(q), log φ(k)."""
    if c.overflow is None:
        return g, c.k[:0], c.k[:0]
    rows, queries, log_q, log_k, top = c.overflow
    n, size = queries.size(1), log_q.size(1)
    g_overflow = g.new_zeros(len(rows), size, size)
    g_overflow[:, :n, :n] = g[rows].masked_fill(~queries, 0)
    to_log_q = g_overflow.diagonal(dim1=1, dim2=2)[..., None] * _own(log_q, log_k, top)  # (L, C, F)
    to_log_k = to_log_q.clone()
    for half in _powers_below(size):
        to_q, to_k = _halves(log_q, log_k, top, half)  # (L, C/2h, h, F)
        block = _blocks(g_overflow, half)
        to_log_q.unflatten(1, (-1, 2, half))[:, :, 1] += to_q * (block @ to_k)
        to_log_k.unflatten(1, (-1, 2, half))[:, :, 0] += to_k * (block.mT @ to_q)
    g = g.index_put((rows,), g[rows].masked_fill(queries, 0))
    return g, to_log_q[:, :n], to_log_k[:, :n]


def _powers_below(size: int) -> list[int]:
    return [1 << i for i in range(size.bit_length() - 1)]


def _blocks(scores: Tensor, half: int) -> Tensor:
    """View the scores of second halves' queries with first halves' keys: (L, C, C) -> (L, C/2h, h, h)."""
    blocks = scores.unflatten(2, (-1, 2, half)).unflatten(1, (-1, 2, half))  # (L, C/2h, 2, h, C/2h, 2, h)
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _filled(t: Tensor, value: float) -> Tensor:
    """(L, C, ·) -> (L, C', ·), C' the next power of 2."""
    n = t.size(1)
    return F.pad(t, (0, 0, 0, (1 << (n - 1).bit_length()) - n), value=value)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, offset: Tensor, s: Tensor, z: Tensor, m: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output, the last sums and maxima, and the denominators (B, H, N)."""
    out, denominator = torch.empty_like(v), v.new_empty(v.shape[:-1])
    if selection.use_cpp_in_float32(WHAT, cpp_kernels.NAME, (q, k, v), (omega, offset, s, z, m)):
        s, z, m = cpp_kernels.forward(q, k, v, omega, offset, None, 1.0, s, z, m, out, denominator)
        return out, s, z, m, denominator
    s, z, m = _copy(s), _copy(z), _copy(m)
    with torch.autocast("cpu", enabled=False):
        for rows in _in_groups(q, k, v, omega.expand(len(q), -1, -1, -1), offset, s, z, m, out, denominator):
            _forward_rows(*rows, chunk_size=chunk_size)
    return out, s, z, m, denominator


def _forward_rows(*tensors: Tensor, chunk_size: int) -> None:
    """Fill `out` and `denominator`, and update `s`, `z` and `m` in place from the first position to the last."""
    q, k, v, omega, offset, s, z, m, out, denominator = tensors
    omega, s = omega.flatten(0, 1), s.flatten(0, 1)  # (BH, F, ·)
    z, m = z.flatten(0, 1)[:, None], m.flatten(0, 1)[:, None]  # (BH, 1, F)
    for *inputs, y, below in _chunks(chunk_size, q, k, v, offset, out, denominator):
        q, k, v, offset = (t.flatten(0, 1) for t in inputs)  # (B, H, C, ·) -> (BH, C, ·)
        c = _chunk(q, k, omega, offset, m)
        scores = _scores(c)
        torch.add(scores.sum(-1).view_as(below), torch.bmm(z, c.q.mT).view_as(below), out=below)
        below.masked_fill_(below == 0, 1)  # nothing was seen
        torch.div(torch.bmm(c.q, s).baddbmm_(scores, v).view_as(y), below[..., None], out=y)
        k = _keys_after(c)
        s.mul_(c.kept.mT).baddbmm_(k.mT, v)
        z.mul_(c.kept).add_(k.sum(1, keepdim=True))
        m.copy_(c.m)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, offset, s and z from those of the output and of the last sums."""
    g, g_s, g_z, q, k, v, omega, offset, s, z, m, out, denominator, chunk_size = arguments
    g_q, g_k, g_v, g_offset = (torch.empty_like(t) for t in (q, k, v, offset))
    if selection.use_cpp_in_float32(WHAT, cpp_kernels.NAME, (q, k, v), (omega, offset, s, z, m)):
        g_s, g_z = cpp_kernels.backward(
            *(g, g_s, g_z, q, k, v, omega, offset, None, 1.0, s, z, m, g_q, g_k, g_v, g_offset)
        )
        return g_q, g_k, g_v, g_offset, g_s, g_z
    s, z, m, g_s, g_z = (_copy(t) for t in (s, z, m, g_s, g_z))
    omega = omega.expand(len(q), -1, -1, -1)
    with torch.autocast("cpu", enabled=False):
        for rows in _in_groups(g, q, k, v, omega, offset, s, z, m, out, denominator, g_q, g_k, g_v, g_offset, g_s, g_z):
            _backward_rows(*rows, chunk_size=chunk_size)
    return g_q, g_k, g_v, g_offset, g_s, g_z


def _backward_rows(*tensors: Tensor, chunk_size: int) -> None:
    """Fill the gradients of the inputs, and update `g_s` and `g_z` in place from the last position to the first.

    With the gradients of the numerators, x_i = g_i / denominator_i, and of the denominators, y_i = −x_i · out_i,

        d log φ(q_i) = φ(q_i) ∘ (S_i x_i + y_i z_i),  d log φ(k_j) = φ(k_j) ∘ (R_j v_j + r_j),  dv_j = R_jᵀ φ(k_j),
        R_j = Σ_{i ≥ j} φ(q_i) x_iᵀ,  r_j = Σ_{i ≥ j} y_i φ(q_i)

    S and z are summed forward; R and r are summed backward, starting with the gradients of the last sums.
    """
    g, q, k, v, omega, offset, s, z, m, out, denominator, g_q, g_k, g_v, g_offset, g_s, g_z = tensors
    y_all = torch.empty_like(denominator)
    rightwards = _chunks(chunk_size, q, k, v, offset, g, denominator, out, y_all, g_q)
    leftwards = list(_chunks(chunk_size, q, k, v, offset, g, denominator, y_all, g_k, g_v, g_offset))
    omega, s, g_s = (t.flatten(0, 1) for t in (omega, s, g_s))  # (BH, F, ·)
    z, m, g_z = (t.flatten(0, 1)[:, None] for t in (z, m, g_z))  # (BH, 1, F)
    borders = []  # m before each chunk
    for *inputs, to_y, to_q in rightwards:
        q, k, v, offset, g, denominator, out = (t.flatten(0, 1) for t in inputs)  # (BH, C, ·)
        borders.append(m)
        c = _chunk(q, k, omega, offset, m)
        x = g / denominator[..., None]
        y = (x * out).sum(-1, keepdim=True).neg_()  # (BH, C, 1)
        to_y.copy_(y.view_as(to_y))
        g_scores, extra, _ = _through_scores(c, torch.baddbmm(y, x, v.mT).tril_())  # (BH, C, C)
        g_log = torch.bmm(x, s.mT).addcmul_(y, z).baddbmm_(g_scores, c.k).mul_(c.q)  # (BH, C, F)
        if c.overflow is not None:
            g_log.index_add_(0, c.overflow.rows, extra)
        to_q.copy_(torch.bmm(g_log, omega).view_as(to_q))
        k = _keys_after(c)
        s.mul_(c.kept.mT).baddbmm_(k.mT, v)
        z.mul_(c.kept).add_(k.sum(1, keepdim=True))
        m = c.m
    for (*inputs, to_k, to_v, to_offset), m in zip(reversed(leftwards), reversed(borders), strict=True):
        q, k, v, offset, g, denominator, y = (t.flatten(0, 1) for t in inputs)
        c = _chunk(q, k, omega, offset, m)
        x = g / denominator[..., None]
        g_scores, _, extra = _through_scores(c, torch.baddbmm(y[..., None], x, v.mT).tril_())
        scores, g_log = _scores(c), torch.bmm(g_scores.mT, c.q).mul_(c.k)  # (BH, C, C), (BH, C, F)
        if c.overflow is not None:
            g_log.index_add_(0, c.overflow.rows, extra)
        k = _keys_after(c)
        g_log.addcmul_(torch.baddbmm(g_z, v, g_s.mT), k)
        to_k.copy_(torch.bmm(g_log, omega).view_as(to_k))
        to_offset.copy_(g_log.sum(-1).view_as(to_offset))
        to_v.copy_(torch.bmm(scores.mT, x).baddbmm_(k, g_s).view_as(to_v))
        g_s.mul_(c.kept.mT).baddbmm_(c.q.mT, x)
        g_z.mul_(c.kept).baddbmm_(y[:, None], c.q)


def rounding_error(out: Tensor) -> Tensor:
    """Allocate the rounding error of `out`, in the same layout; empty for float32."""
    return out.new_empty(0) if out.dtype == torch.float32 else torch.empty_like(out)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.chunk_size = inputs
    out, _, _, m, denominator = output
    ctx.save_for_backward(*tensors, out, denominator)
    ctx.mark_non_differentiable(m, denominator)


def _gradients(ctx: Any, g: Tensor, g_s: Tensor, g_z: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    g_q, g_k, g_v, *rest = _OPERATOR.backward(g, g_s, g_z, *ctx.saved_tensors, ctx.chunk_size)
    return g_q, g_k, g_v, None, *rest, None, None


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, offset: Tensor, s: Tensor, z: Tensor, m: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(v), _copy(s), _copy(z), _copy(m), v.new_empty(v.shape[:-1])


def _backward_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, _, _, q, k, v, _, offset, s, z, *_ = arguments
    g_q, g_k, g_v, g_offset = (torch.empty_like(t) for t in (q, k, v, offset))
    return g_q, g_k, g_v, g_offset, _copy(s), _copy(z)


# A custom operator, so that torch.compile does not unroll the loops over chunks.
_OPERATOR = Operator(
    "causal_favor",
    "(Tensor q, Tensor k, Tensor v, Tensor omega, Tensor offset, Tensor s, Tensor z, Tensor m, int chunk_size) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "(Tensor g, Tensor g_s, Tensor g_z, Tensor q, Tensor k, Tensor v, Tensor omega, Tensor offset, Tensor s, Tensor z, "
    "Tensor m, Tensor out, Tensor denominator, int chunk_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _backward,
    shapes=_forward_shapes,
    backward_shapes=_backward_shapes,
    keep=_keep,
    gradients=_gradients,
    refusal="causal_favor has no second derivative on the CPU; plain_causal_favor has one",
)
