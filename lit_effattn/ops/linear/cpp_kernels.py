"""Causal linear attention on the CPU: tensor interface of the kernels in kernels.cpp."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.cpp_build import Heads, address, copied, heads

NAME = "linear"


@cache
def _library() -> ctypes.CDLL:
    library = cpp_build.library(NAME)
    size: list[type] = [ctypes.c_int64]
    pointer: list[type] = [ctypes.c_void_p]
    flag: list[type] = [ctypes.c_int]
    common = 3 * pointer + [ctypes.c_float]
    library.forward.argtypes = [*(3 * size), *(3 * [Heads]), *common, Heads, *pointer, *flag, *flag]
    library.backward.argtypes = [*(3 * size), *(4 * [Heads]), *common, *(3 * [Heads]), *(2 * pointer), *(2 * flag)]
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
        lengths: (B,), number of valid positions; None: all are valid. Outputs of padding are 0.
        eps: Keeps the division finite where no key is seen.
        out: (B, H, N, D) in float32, contiguous in its last dimension.
        denominator: (B, H, N) in float32, contiguous; None: not computed.
        elu: Whether to apply the feature map to queries and keys.
    """
    q, k, v = heads(q), heads(k), heads(v)
    s, z = copied(s), copied(z)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().forward(
        *(*q.shape[:3], *map(Heads.of, (q, k, v)), *map(address, (s, z, lengths)), eps),
        *(Heads.of(out), address(denominator), elu, torch.get_num_threads()),
    )
    return s, z


def backward(*arguments: Any, elu: bool) -> tuple[Tensor, Tensor]:
    """Fill the gradients of q, k and v, and return those of `s` and `z`.

    The arguments are the gradients of the output (B, H, N, D) and of the last `s` and `z`, then those of `forward` from
    `q` to `eps`, then the gradients to fill: in float32, in the shapes of their arguments, and contiguous in the last
    dimension.
    """
    g, g_s, g_z, q, k, v, s, z, lengths, eps, g_q, g_k, g_v = arguments
    g, q, k, v = heads(g), heads(q), heads(k), heads(v)
    s, z = s.float().contiguous(), z.float().contiguous()
    g_s, g_z = copied(g_s), copied(g_z)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().backward(
        *(*q.shape[:3], *map(Heads.of, (g, q, k, v)), *map(address, (s, z, lengths)), eps),
        *(*map(Heads.of, (g_q, g_k, g_v)), *map(address, (g_s, g_z)), elu, torch.get_num_threads()),
    )
    return g_s, g_z
