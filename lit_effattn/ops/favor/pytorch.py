"""FAVOR+: softmax attention estimated by random features, their sums kept in log space (Choromanski et al. 2020)."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.linear.pytorch import _chunked
from lit_effattn.ops.recurrent_step import recurrent_step
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.operators import (
    Form,
    Heads,
    Operator,
    address,
    by_position,
    check_arguments,
    choose_form,
    copied,
    heads,
    in_form,
)
from lit_effattn.sequence import valid_positions

Norms = Literal["gaussian", "sqrt_d"]

_WIDEST_IN_FULL = 64  # columns in float32 on CUDA: registers and shared memory hold no more

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
    """Return the logarithms of the queries' features with eps, on the scale of the keys' features of `log_keys_plus`.

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


def favor_sums(log_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum keys and values for `read_favor_sums`, the largest key of each feature scaled to 1.

    The maximum cancels in the attention, so it has no gradient.

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
    """Compute FAVOR+ in which every query sees every key, from the sums of `favor_sums`.

        out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j)

    The largest product of each query is scaled to 1, so nothing overflows and the denominator is at least 1.

    Args:
        log_q: (B, H, N, F), log φ(q).
        s: (B, H, F, D).
        z: (B, H, F).
        m: (B, H, F).

    Returns:
        (B, H, N, D); 0 in a row without keys.
    """
    row = m[:, :, None]  # (B, H, 1, F)
    p = _scaled_queries(log_q, row, _top(log_q, row))
    return _divided(p @ torch.cat([s, z[..., None]], -1))


def positive_favor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    s: Tensor,
    z: Tensor,
    m: Tensor,
    lengths: Tensor | None = None,
    *,
    scale: float = 1.0,
    chunk_size: int = 64,
    form: Form | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `causal_favor` with positive features of queries and keys, and padding.

        log φ(x) = ωᵀx̃ − ‖x̃‖²/2 − (log F)/2,  x̃ = scale · x           Choromanski et al. 2020, lemma 1

    Hyperbolic features are positive features of the directions ω and −ω.

    The kernels compute in float32, with ωᵀx in full float32 precision, and their results are bitwise reproducible. On
    CUDA, `torch.set_float32_matmul_precision` sets the rounding of the factors of the other matrix products: "highest"
    is float32 for float32 inputs, TF32 for half precision; "high" is TF32; "medium" is bfloat16. Their backward pass
    saves the arguments, and on CUDA the output, its rounding error, and two numbers per query. It can't be
    differentiated. In C++, a key that rises too far above the reference of its chunk starts another chunk.

    Args:
        q: (B, H, N, E), queries of any strides; on CUDA E is at most 128, in float32 64.
        k: (B, H, N, E), keys.
        v: (B, H, N, D); on CUDA D is at most 128, in float32 64.
        omega: (H, F, E), the directions, like `s`, `z` and `m` in float32 or more, the type of all sums; they get no
            gradient.
        s: (B, H, F, D), the sum of e^{log φ(k) − m} vᵀ before the first position.
        z: (B, H, F), the sum of e^{log φ(k) − m}.
        m: (B, H, F), the greatest log φ(k); −∞: no key yet, and the sums are 0. It has no gradient, since it cancels.
        lengths: (B,), number of valid positions; the rest is padding. None: all are valid.
        scale: Factor of queries and keys; D^(−¼) gives softmax's 1/√D.
        chunk_size: Of the plain form, a power of 2; no effect on the result.
        form: How it is computed. None: see `lit_effattn.ops.runtime.operators`.

    Returns:
        The output (B, H, N, D) in v's type, 0 where no key is seen, any finite values in padding, and `s`, `z` and
        `m` after the last position.

    Raises:
        ValueError: If an argument has a wrong shape or type, the form can't be used, or `omega` requires a gradient.
            The message names it.
        NotImplementedError: If the gradient of a kernel is differentiated.
    """
    (b, h, n, e), f, d = q.shape, omega.size(1), v.size(-1)
    arguments = {"k": (k, (b, h, n, e)), "v": (v, (b, h, n, d)), "omega": (omega, (h, f, e))}
    arguments |= {"s": (s, (b, h, f, d)), "z": (z, (b, h, f)), "m": (m, (b, h, f))}
    check_arguments(q, {"omega": omega, "s": s, "z": z, "m": m}, **arguments, lengths=(lengths, (b,)))
    if omega.requires_grad:
        raise ValueError("omega requires a gradient, which positive_favor does not compute; pass omega.detach()")
    width, obstacle = max(q.size(-1), v.size(-1)), None
    if width > _WIDEST_IN_FULL and torch.float32 in (q.dtype, v.dtype):
        obstacle = (
            f"heads of width {width} in torch.float32 are wider than {_WIDEST_IN_FULL}; choose more heads, or bfloat16"
        )
    form = choose_form(form, "Performer", "favor", q, k, v, omega, s, z, m, width=width, obstacle=obstacle)
    if form in ("cpp", "triton"):
        out, s, z, m, *_ = _OPERATOR.forward(q, k, v, omega, s, z, m, lengths, scale, form)
        return out, s, z, m
    q, k = scale * q.to(s.dtype), scale * k.to(s.dtype)
    log_q, log_k = q @ omega.mT, k @ omega.mT + log_offset(k, omega.size(1))[..., None]  # a query's offset cancels
    if lengths is not None:
        log_k = log_k.masked_fill(~valid_positions(lengths, k.size(2))[:, None, :, None], -torch.inf)
    out, s, z, m = causal_favor(log_q, log_k, v.to(s.dtype), s, z, m, chunk_size=chunk_size)
    return out.to(v.dtype), s, z, m


def causal_favor(
    log_q: Tensor, log_k: Tensor, v: Tensor, s: Tensor, z: Tensor, m: Tensor, *, chunk_size: int = 64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute FAVOR+ in which query i sees the keys up to i and those summed in `s`, `z` and `m`.

        m_i = max(m_{i−1}, log φ(k_i)),
        S_i = e^{m_{i−1} − m_i} S_{i−1} + e^{log φ(k_i) − m_i} v_iᵀ,  z_i with v_i = 1,
        out_i = p_iᵀ S_i / p_iᵀ z_i,  p_i = exp(log φ(q_i) + m_i − max_f(…)), all but S v a feature f

    Autograd differentiates it, any number of times. No maximum includes later keys.

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


# --------------------------------------------------------------------------------------------------- the kernels in C++


class _Inputs(ctypes.Structure):
    """As `Inputs` in kernels.cpp."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("q", Heads),
        ("k", Heads),
        ("v", Heads),
        ("omega", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


@cache
def _library() -> ctypes.CDLL:
    kernels = cpp_build.library("favor")
    pointer, flag = ctypes.c_void_p, ctypes.c_int
    kernels.forward.argtypes = [_Inputs] + [pointer] * 3 + [Heads, flag]
    kernels.backward.argtypes = [_Inputs, Heads] + [pointer] * 3 + [Heads] * 3 + [pointer] * 2 + [flag]
    kernels.forward.restype = kernels.backward.restype = None
    return kernels


def _forward_in_cpp(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `positive_favor`, whose tensors and `scale` are the arguments. Outputs of padding are 0.

    Three empty tensors follow `m`: the backward pass needs only the arguments.
    """
    q, k, v, omega, s, z, m, lengths, scale = arguments
    q, k, values = heads(q), heads(k), heads(v)
    omega, s, z, m = _full(omega), copied(s), copied(z), copied(m)
    lengths = None if lengths is None else lengths.long().contiguous()
    out = by_position(v, torch.float32)
    _library().forward(
        _inputs(q, k, values, omega, lengths, scale),
        *(*map(address, (s, z, m)), Heads.of(out), torch.get_num_threads()),
    )
    return out.to(v.dtype), s, z, m, q.new_empty(0), q.new_empty(0), q.new_empty(0)


def _backward_in_cpp(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, `s` and `z`.

    The arguments are the gradients of the output (B, H, N, D) and of the last `s` and `z`, then the tensors given to
    `forward`, the output and the three tensors after `m`, and `scale`.
    """
    g, g_s, g_z, *given, omega, s, z, m, lengths, _, _, _, _, scale = arguments
    g, q, k, v = (heads(t) for t in (g, *given))
    omega, s, z, m = _full(omega), _full(s), _full(z), _full(m)
    lengths = None if lengths is None else lengths.long().contiguous()
    g_s, g_z = copied(g_s), copied(g_z)
    results = [by_position(t, torch.float32) for t in given]
    _library().backward(
        _inputs(q, k, v, omega, lengths, scale),
        *(Heads.of(g), *map(address, (s, z, m)), *map(Heads.of, results)),
        *(*map(address, (g_s, g_z)), torch.get_num_threads()),
    )
    g_q, g_k, g_v = (to.to(t.dtype) for to, t in zip(results, given, strict=True))
    return g_q, g_k, g_v, g_s, g_z


def _inputs(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, lengths: Tensor | None, scale: float) -> _Inputs:
    """Describe the tensors, which must outlive the result."""
    return _Inputs(
        *(*q.shape[:3], omega.size(1), *map(Heads.of, (q, k, v)), *map(address, (omega, lengths)), scale),
    )


def _full(t: Tensor) -> Tensor:
    return t.float().contiguous()


# --------------------------------------------------------------------------------------- the operator, for the kernels


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.form = inputs
    out, _, _, m, *saved = output
    ctx.save_for_backward(*tensors, out, *saved)
    ctx.mark_non_differentiable(m, *saved)


def _gradients(ctx: Any, g: Tensor, g_s: Tensor, g_z: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    g_q, g_k, g_v, g_s, g_z = _OPERATOR.backward(g, g_s, g_z, *ctx.saved_tensors, ctx.scale, ctx.form)
    return g_q, g_k, g_v, None, g_s, g_z, None, None, None, None


def rounding_error(out: Tensor) -> Tensor:
    """Allocate the rounding error of `out`, in the same layout; empty for float32."""
    return out.new_empty(0) if out.dtype == torch.float32 else torch.empty_like(out)


def _shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, _, v, _, s, z, m, *_, form = arguments
    out = by_position(v)
    s, z, m = (t.new_empty(t.shape) for t in (s, z, m))
    if form == "cpp":
        return out, s, z, m, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    top, denominator = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return out, s, z, m, rounding_error(out), top, denominator


def _backward_shapes(
    g: Tensor, g_s: Tensor, g_z: Tensor, q: Tensor, k: Tensor, v: Tensor, omega: Tensor, s: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return by_position(q), by_position(k), by_position(v), s.new_empty(s.shape), z.new_empty(z.shape)


_OPERATOR = Operator(
    "positive_favor",
    "(Tensor q, Tensor k, Tensor v, Tensor omega, Tensor s, Tensor z, Tensor m, Tensor? lengths, float scale, "
    "str form) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "(Tensor g, Tensor g_s, Tensor g_z, Tensor q, Tensor k, Tensor v, Tensor omega, Tensor s, Tensor z, Tensor m, "
    "Tensor? lengths, Tensor out, Tensor rest, Tensor top, Tensor denominator, float scale, str form) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    in_form(_forward_in_cpp, "lit_effattn.ops.favor.triton_kernels.forward"),
    in_form(_backward_in_cpp, "lit_effattn.ops.favor.triton_kernels.backward"),
    shapes=_shapes,
    backward_shapes=_backward_shapes,
    keep=_keep,
    gradients=_gradients,
    refusal="the kernels of positive_favor have no second derivative; form='plain' has one",
)
