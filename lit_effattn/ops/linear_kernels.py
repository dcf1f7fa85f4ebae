"""Causal linear attention through kernels written in Triton: when they are used, and what autograd and compilers see.

They are used on CUDA wherever they can be, after a trial beside the plain form, once on each GPU, type and width.
`LIT_EFFATTN_KERNELS` in the environment forces a form: "plain", or "triton", which is then an error where it can't be
had.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.linear import plain_causal_linear_attention

KERNELS = "LIT_EFFATTN_KERNELS"
"""The environment's variable that forces a form."""

_INTERPRET = "TRITON_INTERPRET"  # Triton's own: its kernels then run in Python, on the CPU
_WIDEST = 128  # columns of q or v: a head's sums stay in registers
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_OLDEST = (8, 0)  # compute capability, the first with TF32


def use_kernels(q: Tensor, v: Tensor, *, elu: bool) -> bool:
    """Whether `elu_linear_attention` is to be used.

    If not, it says once why where that is a loss: on CUDA, unless the plain form was asked for.

    Args:
        q: (B, H, N, D), queries; their type, device and width are looked at.
        v: (B, H, N, D'), values.
        elu: Whether the feature map is elu + 1.

    Raises:
        ValueError: `LIT_EFFATTN_KERNELS` is not a form.
        RuntimeError: it is "triton", and that can't be had.
    """
    return _chosen(os.environ.get(KERNELS, ""), q.device, (q.dtype, v.dtype), max(q.size(-1), v.size(-1)), elu)


@torch.compiler.assume_constant_result
def _chosen(asked: str, device: torch.device, dtypes: tuple[torch.dtype, ...], width: int, elu: bool) -> bool:
    if asked not in ("", "plain", "triton"):
        raise ValueError(f"{KERNELS}={asked!r} in the environment is no form: plain or triton; unset, it is chosen")
    if asked == "plain" or (asked == "" and device.type != "cuda"):
        return False
    obstacle = _obstacle(device, dtypes, width, elu)
    if obstacle is None and asked == "":
        obstacle = _failure(device, dtypes[0], width)
    if obstacle is None:
        return True
    if asked == "triton":
        raise RuntimeError(f"{KERNELS}=triton, but the kernels of linear attention can't be used: {obstacle}")
    _notice(obstacle)
    return False


def _obstacle(device: torch.device, dtypes: tuple[torch.dtype, ...], width: int, elu: bool) -> str | None:
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get(_INTERPRET) == "1"):
        return f"the tensors are on {device}; they are for CUDA (and, with {_INTERPRET}=1, for tests on the CPU)"
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if device.type == "cuda" and torch.version.hip is not None:
        return "they are for NVIDIA's GPUs, and this is ROCm"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {_OLDEST[0]}.{_OLDEST[1]}"
    if not elu:
        return "their feature map is elu + 1 (EluFeatureMap), and another was given"
    for dtype in dtypes:
        if dtype not in _TYPES:
            return f"{dtype} is none of their types; choose torch.float32 or less"
    if width > _WIDEST:
        return f"heads of width {width} are wider than {_WIDEST}; choose more heads"
    return None


@cache
def _failure(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Try them, once, beside the plain form: no GPU was at hand when they were written."""
    random = torch.Generator().manual_seed(0)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v, g = (torch.randn(1, 2, 150, width, generator=random).to(device, dtype) for _ in range(4))
            inputs = [t.requires_grad_() for t in (q, k, v)]
            s, z = (torch.zeros(1, 2, *shape, device=device) for shape in ((width, width), (width,)))
            out, *_ = elu_linear_attention(q, k, v, s, z)
            found = [out.detach(), *torch.autograd.grad(out, inputs, g)]
            fq, fk = (torch.where(t > 0, t + 1, t.clamp(max=0).exp()) for t in (q.float(), k.float()))
            out, *_ = plain_causal_linear_attention(fq, fk, v.float(), s, z)
            wanted = [out.detach(), *torch.autograd.grad(out, inputs, g.float())]
        worst = max(
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True)
        )
    except Exception as error:  # of Triton's compiler, of the driver: there are many kinds
        return f"tried on {device} in {dtype}, they fail: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # bfloat16 rounds to 2⁻⁹; what is wrong is off by far more. NaN is not less, either.
    return None if worst < 0.02 else f"tried on {device} in {dtype}, they are off by {worst:.1%}"


@cache
def _notice(obstacle: str) -> None:
    warnings.warn(
        f"linear attention runs in its plain form, several times slower than its kernels, which can't be used: "
        f"{obstacle}. {KERNELS}=plain in the environment silences this",
        stacklevel=4,
    )


def elu_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, lengths: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `causal_linear_attention` does, with the feature map inside, and padding.

        S_i = S_{i-1} + φ(k_i) v_iᵀ,  z_i = z_{i-1} + φ(k_i),  out_i = φ(q_i)ᵀ S_i / (φ(q_i) · z_i + eps),
        φ(x) = elu(x) + 1                                      Katharopoulos et al. 2020, equations 7 and 16 to 20

    Computed in float32; how the factors of matrix products are rounded, `torch.set_float32_matmul_precision` says:
    "highest" is float32 for float32 inputs, TF32 for half precision; "high" is TF32; "medium" is bfloat16. For the
    backward pass nothing is kept but the arguments; it can't be differentiated itself. Results repeat bit by bit.

    Args:
        q: (B, H, N, D), queries before the feature map, of any strides; D at most 128. As `k` and `v`, in bfloat16,
            float16 or float32.
        k: (B, H, N, D), keys before the feature map.
        v: (B, H, N, D'), D' at most 128.
        s: (B, H, D, D') in float32, the sum of φ(k) vᵀ before the first position.
        z: (B, H, D) in float32, the sum of φ(k).
        lengths: (B,), the keys that are there; the rest is padding. None: all are.
        eps: Keeps the division finite where no key is seen.

    Returns:
        The output (B, H, N, D') in v's type, and `s` and `z` after the last position.

    Raises:
        ValueError: names the argument, its shape or type, and what was expected.
    """
    _check(q, k, v, s, z, lengths)
    return torch.ops.lit_effattn.elu_linear(q, k, v, s, z, lengths, eps)


def _check(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, lengths: Tensor | None) -> None:
    b, h, n, d = q.shape
    width = v.size(-1)
    shapes = {"k": (b, h, n, d), "v": (b, h, n, width), "s": (b, h, d, width), "z": (b, h, d), "lengths": (b,)}
    for (name, expected), t in zip(shapes.items(), (k, v, s, z, lengths), strict=True):
        if t is not None and t.shape != expected:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; with q of {tuple(q.shape)} it should be {expected}")
    for name, t in (("s", s), ("z", z)):
        if t.dtype != torch.float32:
            raise ValueError(f"{name} is {t.dtype}; sums are torch.float32: {name}.float()")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype not in _TYPES or t.size(-1) > _WIDEST:
            raise ValueError(
                f"{name} is {t.dtype} of width {t.size(-1)}; expected bfloat16, float16 or float32, and at most "
                f"{_WIDEST}: `causal_linear_attention` takes any"
            )


# --------------------------------------------------------------- operators, which autograd and compilers see as a whole

torch.library.define(
    "lit_effattn::elu_linear",
    "(Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? lengths, float eps) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "lit_effattn::elu_linear_backward",
    "(Tensor g, Tensor g_s, Tensor g_z, Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? lengths, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("lit_effattn::elu_linear", ("cuda", "cpu"))
def _forward(q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    from lit_effattn.ops import linear_triton  # here, since importing Triton takes time, and not all have it

    with _on(q):
        return linear_triton.forward(q, *others)


@torch.library.impl("lit_effattn::elu_linear_backward", ("cuda", "cpu"))
def _backward(g: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from lit_effattn.ops import linear_triton

    with _on(g):
        return linear_triton.backward(g, *others)


def _on(t: Tensor) -> AbstractContextManager[Any]:
    """Make `t`'s GPU the current one: where Triton launches."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


@torch.library.register_fake("lit_effattn::elu_linear")
def _shapes(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return by_position(v), s.new_empty(s.shape), z.new_empty(z.shape)


@torch.library.register_fake("lit_effattn::elu_linear_backward")
def _shapes_backward(
    g: Tensor, g_s: Tensor, g_z: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return by_position(q), by_position(k), by_position(v), s.new_empty(s.shape), z.new_empty(z.shape)


def by_position(like: Tensor) -> Tensor:
    """Return room for (B, H, N, D), laid out (B, N, H, D): what joins the heads again then copies nothing."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, g: Tensor, g_s: Tensor, g_z: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.lit_effattn.elu_linear_backward(g, g_s, g_z, *ctx.saved_tensors, ctx.eps)
    return *found, None, None


torch.library.register_autograd("lit_effattn::elu_linear", _gradients, setup_context=_keep)
