"""Dispatch of causal linear attention to kernels in Triton or C++, as operators for autograd and `torch.compile`.

`lit_effattn.ops.runtime.selection` describes when kernels are used.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.linear import cpp_kernels
from lit_effattn.ops.linear.pytorch import WHAT, plain_causal_linear_attention
from lit_effattn.ops.runtime import selection
from lit_effattn.ops.runtime.operators import Operator
from lit_effattn.ops.runtime.selection import KERNELS, by_position, interpreted


def use_kernels(q: Tensor, v: Tensor, *, elu: bool) -> bool:
    """Return whether to use `elu_linear_attention`.

    A warning gives the reason once if kernels can't be used, unless the plain form was asked for. On the CPU another
    feature map causes no warning, since `causal_linear_attention` has kernels there too.

    Args:
        q: (B, H, N, D), queries; their type, device and width are checked.
        v: (B, H, N, D'), values.
        elu: Whether the feature map is elu + 1.

    Raises:
        ValueError: If `LIT_EFFATTN_KERNELS` is not a form, or one that can't be used.
    """
    return _chosen(os.environ.get(KERNELS, ""), q.device, (q.dtype, v.dtype), max(q.size(-1), v.size(-1)), elu)


@torch.compiler.assume_constant_result
def _chosen(asked: str, device: torch.device, dtypes: tuple[torch.dtype, ...], width: int, elu: bool) -> bool:
    obstacle = None if elu else "their feature map is elu + 1 (EluFeatureMap), but another was given"
    if selection.use_triton(WHAT, asked, device, dtypes, width, obstacle, lambda: _failure(device, dtypes[0], width)):
        return True
    return elu and selection.use_cpp(WHAT, asked, device, dtypes, cpp_kernels.NAME)


@cache
def _failure(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Compare the kernels with the plain form, once."""

    def compare() -> tuple[list[Tensor], list[Tensor]]:
        random = torch.Generator().manual_seed(0)
        q, k, v, g = (torch.randn(1, 2, 150, width, generator=random).to(device, dtype) for _ in range(4))
        inputs = [t.requires_grad_() for t in (q, k, v)]
        s, z = (torch.zeros(1, 2, *shape, device=device) for shape in ((width, width), (width,)))
        out, *_ = elu_linear_attention(q, k, v, s, z)
        results = [out.detach(), *torch.autograd.grad(out, inputs, g)]
        fq, fk = (torch.where(t > 0, t + 1, t.clamp(max=0).exp()) for t in (q.float(), k.float()))
        out, *_ = plain_causal_linear_attention(fq, fk, v.float(), s, z)
        return results, [out.detach(), *torch.autograd.grad(out, inputs, g.float())]

    return selection.failed_self_check(device, dtype, compare)


def elu_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, lengths: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_linear_attention` with the feature map elu + 1 and padding.

        S_i = S_{i-1} + φ(k_i) v_iᵀ,  z_i = z_{i-1} + φ(k_i),  out_i = φ(q_i)ᵀ S_i / (φ(q_i) · z_i + eps),
        φ(x) = elu(x) + 1                                      Katharopoulos et al. 2020, equations 7 and 16 to 20

    Computed in float32. On CUDA, `torch.set_float32_matmul_precision` sets the rounding of the factors of matrix
    products: "highest" is float32 for float32 inputs, TF32 for half precision; "high" is TF32; "medium" is bfloat16.
    The backward pass saves only the arguments and can't be differentiated. Results are bitwise reproducible.

    Args:
        q: (B, H, N, D), queries before the feature map, of any strides; D at most 128 on CUDA. Like `k` and `v`, in
            bfloat16, float16 or float32.
        k: (B, H, N, D), keys before the feature map.
        v: (B, H, N, D'), D' at most 128 on CUDA.
        s: (B, H, D, D') in float32, the sum of φ(k) vᵀ before the first position.
        z: (B, H, D) in float32, the sum of φ(k).
        lengths: (B,), number of valid positions; the rest is padding. None: all are valid.
        eps: Keeps the division finite where no key is seen.

    Returns:
        The output (B, H, N, D') in v's type, any finite values in padding, and `s` and `z` after the last position.

    Raises:
        ValueError: If an argument has a wrong shape or type. The message names it and what was expected.
        NotImplementedError: If the gradient is differentiated; `plain_causal_linear_attention` supports that.
    """
    _check(q, k, v, s, z, lengths)
    return _OPERATOR(q, k, v, s, z, lengths, eps)


def _check(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, lengths: Tensor | None) -> None:
    b, h, n, d = q.shape
    width = v.size(-1)
    shapes = {"k": (b, h, n, d), "v": (b, h, n, width), "s": (b, h, d, width), "z": (b, h, d), "lengths": (b,)}
    for (name, expected), t in zip(shapes.items(), (k, v, s, z, lengths), strict=True):
        if t is not None and t.shape != expected:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; with q of {tuple(q.shape)} it should be {expected}")
    widest = None if q.device.type == "cpu" and not interpreted() else selection.WIDEST
    selection.refuse_others({"s": s, "z": z}, {"q": q, "k": k, "v": v}, "causal_linear_attention", widest=widest)


# --------------------------------------------------------------- operators, which autograd and compilers see as a whole


def _forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, lengths: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out = by_position(v, torch.float32)
    s, z = cpp_kernels.forward(q, k, v, s, z, lengths, eps, out, elu=True)
    return out.to(v.dtype), s, z


def _backward(
    g: Tensor, g_s: Tensor, g_z: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    results = [by_position(t, torch.float32) for t in (q, k, v)]
    g_s, g_z = cpp_kernels.backward(g, g_s, g_z, q, k, v, *arguments, *results, elu=True)
    g_q, g_k, g_v = (to.to(t.dtype) for to, t in zip(results, (q, k, v), strict=True))
    return g_q, g_k, g_v, g_s, g_z


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, g: Tensor, g_s: Tensor, g_z: Tensor) -> tuple[Tensor | None, ...]:
    results = _OPERATOR.backward(g, g_s, g_z, *ctx.saved_tensors, ctx.eps)
    return *results, None, None


def _shapes(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return by_position(v), s.new_empty(s.shape), z.new_empty(z.shape)


def _backward_shapes(
    g: Tensor, g_s: Tensor, g_z: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return by_position(q), by_position(k), by_position(v), s.new_empty(s.shape), z.new_empty(z.shape)


_OPERATOR = Operator(
    "elu_linear",
    "(Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? lengths, float eps) -> (Tensor, Tensor, Tensor)",
    "(Tensor g, Tensor g_s, Tensor g_z, Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? lengths, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _backward,
    shapes=_shapes,
    backward_shapes=_backward_shapes,
    keep=_keep,
    gradients=_gradients,
    refusal="elu_linear_attention has no second derivative; plain_causal_linear_attention has one",
    triton="lit_effattn.ops.linear.triton_kernels",
)
