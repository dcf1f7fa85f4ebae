"""Causal linear attention on the CPU: tensor interface of the kernels in kernels.cpp."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.cpp_build import Heads, address, copied, heads

NAME = "linear"


@cache
def _library() -> ctypes.CDLL:
    library = cpp_build.library(NAME)
    size: type = ctypes.c_int64
    pointer: type = ctypes.c_void_p
    number: type = ctypes.c_float
    flag: type = ctypes.c_int
    several: type = Heads
    library.forward.argtypes = 3 * [size] + 3 * [several] + 3 * [pointer] + [number, several, pointer, flag, flag]
    library.backward.argtypes = 3 * [size] + 4 * [several] + 3 * [pointer] + [number] + 3 * [several]
    library.backward.argtypes += [pointer, pointer, flag, flag]
    library.forward.restype = library.backward.restype = None
    return library


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    lengths: Tensor | None,
    eps: float,
    out: Tensor,
    denominator: Tensor | None = None,
    *,
    elu: bool,
) -> tuple[Tensor, Tensor]:
    """Fill `out` and `denominator`, all in float32 or less, and return `s` and `z` after the last position.

    Args:
        q: (B, H, N, F), queries; like `k`, before the feature map elu + 1 if `elu`, else after a feature map.
        k: (B, H, N, F), keys.
        v: (B, H, N, D).
        s: (B, H, F, D), the sum of φ(k) vᵀ before the first position.
        z: (B, H, F), the sum of φ(k).
        lengths: (B,), number of valid keys; None: all are valid.
        eps: Keeps the division finite where no key is seen.
        out: (B, H, N, D) in float32, contiguous in its last dimension.
        denominator: (B, H, N) in float32, contiguous; None: not computed.
        elu: Whether to apply the feature map to queries and keys.
    """
    q, k, v = heads(q), heads(k), heads(v)
    s, z = copied(s), copied(z)
    lengths = None if lengths is None else lengths.long().contiguous()
    b, h, n, _ = q.shape
    _library().forward(
        b,
        h,
        n,
        *(Heads.of(t) for t in (q, k, v)),
        *(address(t) for t in (s, z, lengths)),
        eps,
        Heads.of(out),
        address(denominator),
        elu,
        torch.get_num_threads(),
    )
    return s, z


def backward(
    g: Tensor,
    g_s: Tensor,
    g_z: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    lengths: Tensor | None,
    eps: float,
    g_q: Tensor,
    g_k: Tensor,
    g_v: Tensor,
    *,
    elu: bool,
) -> tuple[Tensor, Tensor]:
    """Fill `g_q`, `g_k` and `g_v`, and return the gradients of `s` and `z`: see `forward`.

    Args:
        g: (B, H, N, D), the gradient of the output.
        g_s: (B, H, F, D), the gradient of the last `s`.
        g_z: (B, H, F), the gradient of the last `z`.
        q: As in `forward`.
        k: As in `forward`.
        v: As in `forward`.
        s: As in `forward`.
        z: As in `forward`.
        lengths: As in `forward`.
        eps: As in `forward`.
        g_q: (B, H, N, F) in float32, contiguous in its last dimension.
        g_k: Like `g_q`.
        g_v: (B, H, N, D), like `g_q`.
        elu: As in `forward`.
    """
    g, q, k, v = heads(g), heads(q), heads(k), heads(v)
    s, z = s.float().contiguous(), z.float().contiguous()
    g_s, g_z = copied(g_s), copied(g_z)
    lengths = None if lengths is None else lengths.long().contiguous()
    b, h, n, _ = q.shape
    _library().backward(
        b,
        h,
        n,
        *(Heads.of(t) for t in (g, q, k, v)),
        *(address(t) for t in (s, z, lengths)),
        eps,
        *(Heads.of(t) for t in (g_q, g_k, g_v)),
        *(address(t) for t in (g_s, g_z)),
        elu,
        torch.get_num_threads(),
    )
    return g_s, g_z
