"""Dispatch of causal Performer to kernels in Triton or C++, as operators for autograd and `torch.compile`.

`lit_effattn.ops.runtime.selection` describes when kernels are used.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.favor import cpp_kernels
from lit_effattn.ops.favor.pytorch import WHAT, draw_omega, log_offset, plain_causal_favor, rounding_error
from lit_effattn.ops.runtime import selection
from lit_effattn.ops.runtime.operators import Operator
from lit_effattn.ops.runtime.selection import KERNELS, by_position, interpreted

_WIDEST_IN_FULL = 64  # columns in float32 on CUDA: registers and shared memory hold no more


def use_kernels(q: Tensor, v: Tensor, n_features: int) -> bool:
    """Return whether to use `positive_favor`.

    A warning gives the reason once if kernels can't be used, unless the plain form was asked for.

    Args:
        q: (B, H, N, E), queries; their type, device and width are checked.
        v: (B, H, N, D), values.
        n_features: F.

    Raises:
        ValueError: If `LIT_EFFATTN_KERNELS` is not a form, or one that can't be used.
    """
    width = max(q.size(-1), v.size(-1))
    return _chosen(os.environ.get(KERNELS, ""), q.device, (q.dtype, v.dtype), width, n_features)


@torch.compiler.assume_constant_result
def _chosen(asked: str, device: torch.device, dtypes: tuple[torch.dtype, ...], width: int, n_features: int) -> bool:
    obstacle = None
    if torch.float32 in dtypes and width > _WIDEST_IN_FULL:
        obstacle = (
            f"heads of width {width} in torch.float32 are wider than {_WIDEST_IN_FULL}; choose more heads, or bfloat16"
        )
    if selection.use_triton(
        WHAT, asked, device, dtypes, width, obstacle, lambda: _failure(device, dtypes[0], width, n_features)
    ):
        return True
    return selection.use_cpp(WHAT, asked, device, dtypes, cpp_kernels.NAME)


@cache
def _failure(device: torch.device, dtype: torch.dtype, width: int, n_features: int) -> str | None:
    """Compare the kernels with the plain form, once. In one of two heads log φ(k) rises far."""

    def compare() -> tuple[list[Tensor], list[Tensor]]:
        random = torch.Generator().manual_seed(0)
        q, k, v, g = (torch.randn(1, 2, 150, width, generator=random) for _ in range(4))
        scale = width**-0.25
        k[:, 1, :70] *= 20 * width**-0.25  # log φ is near −200 there
        omega = draw_omega(2, n_features, width, generator=random).to(device, torch.float32)
        q, k, v = inputs = [t.to(device, dtype).requires_grad_() for t in (q, k, v)]
        zeros = torch.zeros(1, 2, n_features, width, device=device)
        none = torch.full_like(zeros[..., 0], -torch.inf)
        out, s, z, m = positive_favor(q, k, v, omega, zeros, zeros[..., 0], none, scale=scale)
        results = [*(t.detach() for t in (out, s, z, m)), *torch.autograd.grad(out, inputs, g.to(out))]
        q, k = scale * q.float(), scale * k.float()
        log_k = k @ omega.mT + log_offset(k, n_features)[..., None]
        out, s, z, m = plain_causal_favor(q @ omega.mT, log_k, v.float(), zeros, zeros[..., 0], none)
        return results, [*(t.detach() for t in (out, s, z, m)), *torch.autograd.grad(out, inputs, g.to(out))]

    # If one key outweighs the others, gradients are small differences. With products in bfloat16 they are off by 5 %.
    return selection.failed_self_check(device, dtype, compare, most=0.1)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `causal_favor` with positive features and padding.

        log φ(x) = ωᵀx̃ − ‖x̃‖²/2 − (log F)/2,  x̃ = scale · x           Choromanski et al. 2020, lemma 1
        out_i = φ(q_i)ᵀ S_i / φ(q_i)ᵀ z_i,  S_i = Σ_{j ≤ i} φ(k_j) v_jᵀ,  z_i with v_j = 1

    S and z are stored scaled by e^{−m}, where m is the greatest log φ(k). Exact for any norms, and no maximum includes
    later keys: see `causal_favor`. Hyperbolic features are positive features of the directions ω and −ω.

    Computed in float32, with ωᵀx in full float32 precision. On CUDA, `torch.set_float32_matmul_precision` sets the
    rounding of the factors of the other matrix products: "highest" is float32 for float32 inputs, TF32 for half
    precision; "high" is TF32; "medium" is bfloat16. The backward pass saves the arguments, and on CUDA the output, its
    rounding error, and two numbers per query. It can't be differentiated. Results are bitwise reproducible.

    Args:
        q: (B, H, N, E), queries before the feature map, of any strides; on CUDA E is at most 128, in float32 64. Like
            `k` and `v`, in bfloat16, float16 or float32.
        k: (B, H, N, E), keys before the feature map.
        v: (B, H, N, D); on CUDA D is at most 128, in float32 64.
        omega: (H, F, E) in float32, the directions; they get no gradient.
        s: (B, H, F, D) in float32, the sum of e^{log φ(k) − m} vᵀ before the first position.
        z: (B, H, F) in float32, the sum of e^{log φ(k) − m}.
        m: (B, H, F) in float32, the greatest log φ(k); −∞: no key yet, and the sums are 0. It has no gradient, since it
            cancels.
        lengths: (B,), number of valid positions; the rest is padding. None: all are valid.
        scale: Factor of queries and keys; D^(−¼) gives softmax's 1/√D.

    Returns:
        The output (B, H, N, D) in v's type, 0 where no key is seen, any finite values in padding, and `s`, `z` and
        `m` after the last position.

    Raises:
        ValueError: If an argument has a wrong shape or type, or `omega` requires a gradient. The message names the
            argument and what was expected.
        NotImplementedError: If the gradient is differentiated; `plain_causal_favor` supports that.
    """
    _check(q, k, v, omega, s, z, m, lengths)
    out, s, z, m, *_ = _OPERATOR(q, k, v, omega, s, z, m, lengths, scale)
    return out, s, z, m


def _check(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, s: Tensor, z: Tensor, m: Tensor, lengths: Tensor | None
) -> None:
    b, h, n, e = q.shape
    f, d = omega.size(1), v.size(-1)
    shapes = {"k": (b, h, n, e), "v": (b, h, n, d), "omega": (h, f, e), "s": (b, h, f, d), "z": (b, h, f)}
    shapes |= {"m": (b, h, f), "lengths": (b,)}
    for (name, expected), t in zip(shapes.items(), (k, v, omega, s, z, m, lengths), strict=True):
        if t is not None and t.shape != expected:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; with q of {tuple(q.shape)} it should be {expected}")
    sums, heads = {"omega": omega, "s": s, "z": z, "m": m}, {"q": q, "k": k, "v": v}
    if _in_cpp(q):
        selection.refuse_others(sums, heads, "causal_favor", widest=None)
    else:
        selection.refuse_others(sums, heads, "causal_favor", widest_in_full=_WIDEST_IN_FULL)
    if omega.requires_grad:
        raise ValueError("omega requires a gradient, which positive_favor does not compute; pass omega.detach()")


def _in_cpp(q: Tensor) -> bool:
    return q.device.type == "cpu" and not interpreted()


# --------------------------------------------------------------- operators, which autograd and compilers see as a whole


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    s: Tensor,
    z: Tensor,
    m: Tensor,
    lengths: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = by_position(v, torch.float32)
    s, z, m = cpp_kernels.forward(q, k, v, omega, None, lengths, scale, s, z, m, out)
    return out.to(v.dtype), s, z, m, *_nothing(q)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g, g_s, g_z, q, k, v, omega, s, z, m, lengths, *_, scale = arguments
    results = [by_position(t, torch.float32) for t in (q, k, v)]
    g_s, g_z = cpp_kernels.backward(g, g_s, g_z, q, k, v, omega, None, lengths, scale, s, z, m, *results)
    g_q, g_k, g_v = (to.to(t.dtype) for to, t in zip(results, (q, k, v), strict=True))
    return g_q, g_k, g_v, g_s, g_z


def _nothing(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors: the C++ kernels save only their inputs, and compute the rest again."""
    return q.new_empty(0), q.new_empty(0), q.new_empty(0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    out, _, _, m, *saved = output
    ctx.save_for_backward(*tensors, out, *saved)
    ctx.mark_non_differentiable(m, *saved)


def _gradients(ctx: Any, g: Tensor, g_s: Tensor, g_z: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    g_q, g_k, g_v, g_s, g_z = _OPERATOR.backward(g, g_s, g_z, *ctx.saved_tensors, ctx.scale)
    return g_q, g_k, g_v, None, g_s, g_z, None, None, None


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, s: Tensor, z: Tensor, m: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = by_position(v)
    s, z, m = (t.new_empty(t.shape) for t in (s, z, m))
    if _in_cpp(q):
        return out, s, z, m, *_nothing(q)
    top, denominator = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return out, s, z, m, rounding_error(out), top, denominator


def _backward_shapes(
    g: Tensor, g_s: Tensor, g_z: Tensor, q: Tensor, k: Tensor, v: Tensor, omega: Tensor, s: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return by_position(q), by_position(k), by_position(v), s.new_empty(s.shape), z.new_empty(z.shape)


_OPERATOR = Operator(
    "positive_favor",
    "(Tensor q, Tensor k, Tensor v, Tensor omega, Tensor s, Tensor z, Tensor m, Tensor? lengths, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "(Tensor g, Tensor g_s, Tensor g_z, Tensor q, Tensor k, Tensor v, Tensor omega, Tensor s, Tensor z, Tensor m, "
    "Tensor? lengths, Tensor out, Tensor rest, Tensor top, Tensor denominator, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _backward,
    shapes=_shapes,
    backward_shapes=_backward_shapes,
    keep=_keep,
    gradients=_gradients,
    refusal="positive_favor has no second derivative; plain_causal_favor has one",
    triton="lit_effattn.ops.favor.triton_kernels",
)
