"""Attention with a kernel's feature map in place of the exponential (Katharopoulos et al. 2020, equations 5 to 12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.linear import cpp_kernels
from lit_effattn.ops.recurrent_step import recurrent_step
from lit_effattn.ops.runtime import selection
from lit_effattn.ops.runtime.operators import Operator, keeps

WHAT = "linear attention"
"""Name of the operation in messages."""

_DROPPED = 1e-7
"""Optimisers of exported programs may drop an addition of less, so 0 / 0 has to be excluded in another way too."""


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Compute linear attention in which every query sees every key.

        out_i = q_i Σ_j k_j v_jᵀ / (q_i · Σ_j k_j + eps)

    Args:
        q: (B, H, N, F), queries after the feature map.
        k: (B, H, M, F), keys after the feature map; 0 where a key is padding.
        v: (B, H, M, D).
        eps: Keeps the division finite where no key is seen.

    Returns:
        (B, H, N, D).
    """
    return read_sums(q, *key_sums(k, v), eps=eps)


def key_sums(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Sum keys (B, H, M, F) and values (B, H, M, D) for `read_sums`: Σ k vᵀ, (B, H, F, D), and Σ k, (B, H, F)."""
    return k.transpose(-1, -2) @ v, k.sum(-2)  # (B, H, F, D), (B, H, F)


def read_sums(q: Tensor, s: Tensor, z: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Compute `linear_attention` of queries (B, H, N, F) from the sums of `key_sums`: (B, H, N, D)."""
    return _quotient(q @ s, q @ z[..., None], eps)


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *, chunk_size: int = 64, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute linear attention in which query i sees the keys up to i and those summed in `s` and `z`.

        S_i = S_{i-1} + k_i v_iᵀ,  z_i = z_{i-1} + k_i,  out_i = q_iᵀ S_i / (q_i · z_i + eps)

    Chunks of C positions are computed as matrix products: a C × C triangle of scores within a chunk, and the sums at
    its border for earlier keys. On the CPU chunks are computed one after another, with a hand-written backward pass:
    beside inputs, outputs and their gradients, O(N (F + D)), only the memory of one chunk is needed. The backward pass
    recomputes the scores and sums, and can't be differentiated. Other devices, and exported programs, use
    `plain_causal_linear_attention`.

    Args:
        q: (B, H, N, F), queries after the feature map.
        k: (B, H, N, F), keys after the feature map; 0 where a key is padding.
        v: (B, H, N, D).
        s: (B, H, F, D), the sum of k vᵀ before the first position.
        z: (B, H, F), the sum of k before the first position.
        chunk_size: C, not used by the C++ kernel. Products take O(C + D) per position and head, but small ones are
            slow: D, or 64, is best.
        eps: Keeps the division finite where no key is seen.

    Returns:
        The output (B, H, N, D) and `s` and `z` after the last position.

    Raises:
        NotImplementedError: On the CPU, if the gradient is differentiated; `plain_causal_linear_attention` supports
            that.
    """
    if keeps():
        return _as_gated_linear(q, k, v, s, z, eps)
    if q.device.type != "cpu" or torch.compiler.is_exporting():
        return plain_causal_linear_attention(q, k, v, s, z, chunk_size=chunk_size, eps=eps)
    out, s, z, _ = _OPERATOR(q, k, v, s, z, chunk_size, eps)
    return out, s, z


def plain_causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *, chunk_size: int = 64, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_linear_attention` with all chunks at once. Autograd differentiates it, any number of times.

    Memory O(N (C + F D / C)): never N × N, never N × F × D.
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
    out = _quotient(numerator, denominator, eps)
    # Copies: views would keep the sums of every chunk in memory as long as the state exists.
    return out.flatten(2, 3)[:, :, :n], s[:, :, -1].clone(), z[:, :, -1].clone()


def _as_gated_linear(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_linear_attention` by an operator without a division: a value of 1 more sums the keys."""
    v, state = F.pad(v, (0, 1), value=1.0), torch.cat([s, z[..., None]], -1)  # (B, H, N, D + 1), (B, H, F, D + 1)
    out, state = gated_linear_attention(q, k, v, state)
    return _quotient(out[..., :-1], out[..., -1:], eps), state[..., :-1], state[..., -1]


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *, eps: float = 1e-6, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_linear_attention` for one position, as in generation.

    With `in_place` the sums are updated in place, and nothing of their size is allocated.
    """
    numerator, s = recurrent_step(q, k, v, s, in_place=in_place)
    z = z.add_(k[:, :, 0]) if in_place else z + k[:, :, 0]
    return _quotient(numerator, q @ z[..., None], eps), s, z


def linear_attention_weights(
    q: Tensor, k: Tensor, z: Tensor | None = None, *, causal: bool, eps: float = 1e-6
) -> Tensor:
    """Return the weights of the values in `linear_attention` or `causal_linear_attention`.

        w_ij = q_i · k_j / (Σ_j q_i · k_j + q_i · z + eps),  j ≤ i if causal

    Args:
        q: (B, H, N, F), queries after the feature map.
        k: (B, H, N, F), keys after the feature map; 0 where a key is padding.
        z: (B, H, F), the sum of earlier keys; None: there are none.
        causal: Whether a query sees only its own and earlier keys.
        eps: Keeps the division finite where no key is seen.

    Returns:
        (B, H, N, N); with `z` (B, H, N, 1 + N), the first column being the weight of all earlier keys together.
    """
    products = q @ k.mT  # (B, H, N, N)
    if causal:
        products = products.tril()
    if z is not None:
        products = torch.cat([q @ z[..., None], products], -1)  # (B, H, N, 1 + N)
    return _quotient(products, products.sum(-1, keepdim=True), eps)


def _quotient(numerator: Tensor, denominator: Tensor, eps: float) -> Tensor:
    """Return numerator / (denominator + eps)."""
    total = denominator + eps
    if eps < _DROPPED:
        total = total.masked_fill(denominator == 0, eps)
    return numerator / total


def _chunked(t: Tensor, chunk: int, value: float = 0) -> Tensor:
    """(B, H, N, F) -> (B, H, ⌈N/C⌉, C, F), padded with `value`, which acts as absent keys."""
    return F.pad(t, (0, 0, 0, -t.size(-2) % chunk), value=value).unflatten(2, (-1, chunk))


def _running(increments: Tensor, start: Tensor) -> Tensor:
    """Return the cumulative sums from `start`, before each increment (dimension 2) and after the last: one more."""
    return F.pad(increments, [0, 0] * (increments.dim() - 3) + [1, 0]).cumsum(2) + start[:, :, None]


# ------------------------------------------------------------------------------------------------- on the CPU, by hand


def _forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, chunk_size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output, the last sums, and the denominators (B, H, N), eps included."""
    out, denominator = torch.empty_like(v), q.new_empty(q.shape[:-1])
    if selection.use_cpp_in_float32(WHAT, cpp_kernels.NAME, (q, k, v), (s, z)):
        s, z = cpp_kernels.forward(q, k, v, s, z, None, eps, out, denominator, elu=False)
        return out, s, z, denominator
    s, z = _copy(s), _copy(z)
    with torch.autocast("cpu", enabled=False):
        for rows in _in_groups(q, k, v, s, z, out, denominator):
            _forward_rows(*rows, chunk_size=chunk_size, eps=eps)
    return out, s, z, denominator


def _forward_rows(*tensors: Tensor, chunk_size: int, eps: float) -> None:
    """Fill `out` and `denominator`, and update `s` and `z` in place from the first position to the last."""
    q, k, v, s, z, out, denominator = tensors
    s, z = s.flatten(0, 1), z.flatten(0, 1)[:, None]  # (BH, F, D), (BH, 1, F)
    for *inputs, y, below in _chunks(chunk_size, q, k, v, out, denominator):
        q, k, v = (t.flatten(0, 1) for t in inputs)  # (B, H, C, ·) -> (BH, C, ·)
        before = torch.bmm(z, q.mT)  # (BH, 1, C)
        z.add_(k.sum(1, keepdim=True))  # first, since a sum loads k into the caches faster than a product
        scores = torch.bmm(q, k.mT).tril_()  # (BH, C, C)
        torch.add(scores.sum(-1).view_as(below), before.view_as(below), out=below).add_(eps)
        torch.div(torch.bmm(q, s).baddbmm_(scores, v).view_as(y), below[..., None], out=y)
        s.baddbmm_(k.mT, v)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, s and z from those of the output and of the last sums."""
    g, g_s, g_z, q, k, v, s, z, out, denominator, chunk_size, eps = arguments
    g_q, g_k, g_v = (torch.empty_like(t) for t in (q, k, v))
    if selection.use_cpp_in_float32(WHAT, cpp_kernels.NAME, (q, k, v), (s, z)):
        g_s, g_z = cpp_kernels.backward(g, g_s, g_z, q, k, v, s, z, None, eps, g_q, g_k, g_v, elu=False)
        return g_q, g_k, g_v, g_s, g_z
    s, z, g_s, g_z = (_copy(t) for t in (s, z, g_s, g_z))
    with torch.autocast("cpu", enabled=False):
        for rows in _in_groups(g, q, k, v, s, z, out, denominator, g_q, g_k, g_v, g_s, g_z):
            _backward_rows(*rows, chunk_size=chunk_size)
    return g_q, g_k, g_v, g_s, g_z


def _backward_rows(*tensors: Tensor, chunk_size: int) -> None:
    """Fill `g_q`, `g_k` and `g_v`, and update `g_s` and `g_z` in place from the last position to the first.

    With the gradients of the numerators, x_i = g_i / denominator_i, and of the denominators, y_i = −x_i · out_i,

        dq_i = S_i x_i + y_i z_i,  dk_j = R_j v_j + r_j,  dv_j = R_jᵀ k_j,
        R_j = Σ_{i ≥ j} q_i x_iᵀ,  r_j = Σ_{i ≥ j} y_i q_i

    S and z are summed forward; R and r are summed backward, starting with the gradients of the last sums.
    """
    g, q, k, v, s, z, out, denominator, g_q, g_k, g_v, g_s, g_z = tensors
    y_all = torch.empty_like(denominator)
    rightwards = _chunks(chunk_size, k, v, g, denominator, out, y_all, g_q)
    leftwards = reversed(list(_chunks(chunk_size, q, k, v, g, denominator, y_all, g_q, g_k, g_v)))
    s, g_s = s.flatten(0, 1), g_s.flatten(0, 1)  # (BH, F, D)
    z, g_z = z.flatten(0, 1)[:, None], g_z.flatten(0, 1)[:, None]  # (BH, 1, F)
    for *inputs, to_y, to_q in rightwards:
        k, v, g, denominator, out = (t.flatten(0, 1) for t in inputs)  # (BH, C, ·)
        x = g / denominator[..., None]
        y = (x * out).sum(-1).neg_()  # (BH, C)
        to_y.copy_(y.view_as(to_y))
        to_q.copy_(torch.bmm(x, s.mT).addcmul_(y[..., None], z).view_as(to_q))
        s.baddbmm_(k.mT, v)
        z.add_(k.sum(1, keepdim=True))
    for *inputs, to_q, to_k, to_v in leftwards:
        q, k, v, g, denominator, y = (t.flatten(0, 1) for t in inputs)
        x = g / denominator[..., None]
        scores = torch.bmm(q, k.mT).tril_()  # (BH, C, C)
        g_scores = torch.bmm(x, v.mT).add_(y[..., None]).tril_()
        to_q.add_(torch.bmm(g_scores, k).view_as(to_q))
        to_k.copy_(torch.baddbmm(g_z, g_scores.mT, q).baddbmm_(v, g_s.mT).view_as(to_k))
        to_v.copy_(torch.bmm(scores.mT, x).baddbmm_(k, g_s).view_as(to_v))
        g_s.baddbmm_(q.mT, x)
        g_z.baddbmm_(y[:, None], q)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.chunk_size, ctx.eps = inputs
    out, _, _, denominator = output
    ctx.save_for_backward(*tensors, out, denominator)
    ctx.mark_non_differentiable(denominator)


def _gradients(ctx: Any, g: Tensor, g_s: Tensor, g_z: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _OPERATOR.backward(g, g_s, g_z, *ctx.saved_tensors, ctx.chunk_size, ctx.eps)
    return *gradients, None, None


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, chunk_size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(v), _copy(s), _copy(z), q.new_empty(q.shape[:-1])


def _backward_shapes(
    g: Tensor, g_s: Tensor, g_z: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _copy(s), _copy(z)


# A custom operator, so that torch.compile does not unroll the loops over chunks.
_OPERATOR = Operator(
    "causal_linear",
    "(Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, int chunk_size, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    "(Tensor g, Tensor g_s, Tensor g_z, Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor out, "
    "Tensor denominator, int chunk_size, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _backward,
    shapes=_forward_shapes,
    backward_shapes=_backward_shapes,
    keep=_keep,
    gradients=_gradients,
    refusal="causal_linear_attention has no second derivative on the CPU; plain_causal_linear_attention has one",
)


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _in_groups(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors (B, H, …) into groups of rows that share the caches well: 16 heads a thread, at least one row."""
    rows = max(1, 16 * torch.get_num_threads() // tensors[0].size(1))
    return zip(*(t.split(rows) for t in tensors), strict=True)


def _chunks(chunk_size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors (B, H, N, …) into chunks of positions."""
    return zip(*(t.split(chunk_size, 2) for t in tensors), strict=True)
