"""Attention with a kernel's feature map in place of the exponential (Katharopoulos et al. 2020, equations 5 to 12)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
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
    default_form,
    heads,
    in_form,
)
from lit_effattn.sequence import without_padding

_WIDE_IN_FULL = 164  # KiB of shared memory that heads wider than 64 in float32 need

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    lengths: Tensor | None = None,
    *,
    elu: bool = False,
    chunk_size: int = 64,
    eps: float = 1e-6,
    form: Form | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute linear attention in which query i sees the keys up to i and those summed in `s` and `z`.

        S_i = S_{i-1} + k_i v_iᵀ,  z_i = z_{i-1} + k_i,  out_i = q_iᵀ S_i / (q_i · z_i + eps)

    Chunks of C positions are computed as matrix products: a C × C triangle of scores within a chunk, and the sums at
    its border for earlier keys. The plain form computes all chunks at once, with memory O(N (C + F D / C)), and
    autograd differentiates it any number of times. The kernels save only the arguments, and their gradient can't be
    differentiated. They compute in float32, and their results are bitwise reproducible. On CUDA,
    `torch.set_float32_matmul_precision` sets the rounding of the factors of their products: "highest" is float32 for
    float32 inputs, TF32 for half precision; "high" is TF32; "medium" is bfloat16.

    Args:
        q: (B, H, N, F), queries of any strides.
        k: (B, H, N, F), keys.
        v: (B, H, N, D).
        s: (B, H, F, D), the sum of k vᵀ before the first position, in float32 or more, the type of all sums.
        z: (B, H, F), the sum of k before the first position.
        lengths: (B,), number of valid positions; the rest is padding. None: all are valid.
        elu: Whether to apply the feature map elu + 1 to queries and keys. The kernels on CUDA need it.
        chunk_size: C of the plain form. Products take O(C + D) per position and head, but small ones are slow: D, or
            64, is best.
        eps: Keeps the division finite where no key is seen.
        form: How it is computed. None: see `lit_effattn.ops.runtime.operators`.

    Returns:
        The output (B, H, N, D) in v's type, any finite values in padding, and `s` and `z` after the last position.

    Raises:
        ValueError: If an argument has a wrong shape or type, or the form can't be used. The message names it.
        NotImplementedError: If the gradient of a kernel is differentiated.
    """
    (b, h, n, f), d = q.shape, v.size(-1)
    arguments = {"k": (k, (b, h, n, f)), "v": (v, (b, h, n, d)), "s": (s, (b, h, f, d)), "z": (z, (b, h, f))}
    check_arguments(q, {"s": s, "z": z}, **arguments, lengths=(lengths, (b,)))
    if form is None and not elu and default_form(q.device) == "triton":
        form = "plain"
    obstacle = None if elu else "they apply the feature map elu + 1 themselves, as elu=True says"
    width = max(q.size(-1), v.size(-1))
    shared = _WIDE_IN_FULL if width > 64 and torch.float32 in (q.dtype, v.dtype) else 0
    form = choose_form(form, "linear attention", "linear", q, k, v, s, z, width=width, shared=shared, obstacle=obstacle)
    if form in ("cpp", "triton"):
        return _OPERATOR.forward(q, k, v, s, z, lengths, elu, eps, form)
    q, k, values = q.to(s.dtype), k.to(s.dtype), v.to(s.dtype)
    if elu:
        q, k = elu_features(q), elu_features(k)
    k = without_padding(k, lengths, dim=2)
    if form == "onnx":
        out, s, z = _as_gated_linear(q, k, values, s, z, eps)
    else:
        out, s, z = _in_chunks(q, k, values, s, z, chunk_size, eps)
    return out.to(v.dtype), s, z


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, chunk_size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
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
    out, state = gated_linear_attention(q, k, v, state, form="onnx")
    return _quotient(out[..., :-1], out[..., -1:], eps), state[..., :-1], state[..., -1]


def elu_features(x: Tensor) -> Tensor:
    """Return φ(x) = elu(x) + 1 (Katharopoulos et al. 2020, equation 7)."""
    phi: Tensor = _Elu.apply(x)
    return phi


class _Elu(torch.autograd.Function):
    """elu(x) + 1, whose derivative min(φ, 1) is computed from φ alone, which attention saves anyway.

    F.elu(x) + 1 is 0 in float32 for x ≤ −17, and saves x as well.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # PyTorch 2.11 drops the gradient of what is computed in place
            return x.clamp(max=0).exp() + F.relu(x)
        return x.clamp(max=0).exp_().add_(F.relu(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return g * phi.clamp(max=1)


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *, eps: float = 1e-6, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_linear_attention` for one position, as in generation.

    With `in_place` the sums are updated in place, and nothing of their size is allocated.
    """
    numerator, s = recurrent_step(q, k, v, s, in_place=in_place)
    z = z.add_(k[:, :, 0]) if in_place else z + k[:, :, 0]
    return _quotient(numerator, q @ z[..., None], eps), s, z


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


# --------------------------------------------------------------------------------------------------- the kernels in C++


@cache
def _library() -> ctypes.CDLL:
    kernels = cpp_build.library("linear")
    size, pointer, flag = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    sums = [pointer] * 3 + [ctypes.c_float]
    kernels.forward.argtypes = [size] * 3 + [Heads] * 3 + sums + [Heads] + [flag] * 2
    kernels.backward.argtypes = [size] * 3 + [Heads] * 4 + sums + [Heads] * 3 + [pointer] * 2 + [flag] * 2
    kernels.forward.restype = kernels.backward.restype = None
    return kernels


def _forward_in_cpp(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, lengths: Tensor | None, elu: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_linear_attention`, whose arguments these are. Outputs of padding are 0."""
    q, k, values = heads(q), heads(k), heads(v)
    out = by_position(v, torch.float32)
    s, z = copied(s), copied(z)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().forward(
        *(*q.shape[:3], *map(Heads.of, (q, k, values)), *map(address, (s, z, lengths)), eps),
        *(Heads.of(out), elu, torch.get_num_threads()),
    )
    return out.to(v.dtype), s, z


def _backward_in_cpp(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, `s` and `z`.

    The arguments are the gradients of the output (B, H, N, D) and of the last `s` and `z`, then those of `forward`.
    """
    g, g_s, g_z, *given, s, z, lengths, elu, eps = arguments
    g, q, k, v = heads(g), *map(heads, given)
    s, z = s.float().contiguous(), z.float().contiguous()
    g_s, g_z = copied(g_s), copied(g_z)
    results = [by_position(t, torch.float32) for t in given]
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().backward(
        *(*q.shape[:3], *map(Heads.of, (g, q, k, v)), *map(address, (s, z, lengths)), eps),
        *(*map(Heads.of, results), *map(address, (g_s, g_z)), elu, torch.get_num_threads()),
    )
    g_q, g_k, g_v = (to.to(t.dtype) for to, t in zip(results, given, strict=True))
    return g_q, g_k, g_v, g_s, g_z


# --------------------------------------------------------------------------------------- the operator, for the kernels


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.elu, ctx.eps, ctx.form = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, g: Tensor, g_s: Tensor, g_z: Tensor) -> tuple[Tensor | None, ...]:
    results = _OPERATOR.backward(g, g_s, g_z, *ctx.saved_tensors, ctx.elu, ctx.eps, ctx.form)
    return *results, None, None, None, None


def _shapes(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return by_position(v), s.new_empty(s.shape), z.new_empty(z.shape)


def _backward_shapes(
    g: Tensor, g_s: Tensor, g_z: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return by_position(q), by_position(k), by_position(v), s.new_empty(s.shape), z.new_empty(z.shape)


_OPERATOR = Operator(
    "linear",
    "(Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? lengths, bool elu, float eps, str form) "
    "-> (Tensor, Tensor, Tensor)",
    "(Tensor g, Tensor g_s, Tensor g_z, Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? lengths, bool elu, "
    "float eps, str form) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    in_form(_forward_in_cpp, "lit_effattn.ops.linear.triton_kernels.forward"),
    in_form(_backward_in_cpp, "lit_effattn.ops.linear.triton_kernels.backward"),
    shapes=_shapes,
    backward_shapes=_backward_shapes,
    keep=_keep,
    gradients=_gradients,
    refusal="the kernels of causal_linear_attention have no second derivative; form='plain' has one",
)
