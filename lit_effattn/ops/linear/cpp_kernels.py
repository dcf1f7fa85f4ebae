"""Causal linear attention on the CPU: tensor interface of the kernels in kernels.cpp."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.cpp_build import Heads, address, copied, heads
from lit_effattn.ops.runtime.selection import by_position

NAME = "linear"


@cache
def _library() -> ctypes.CDLL:
    library = cpp_build.library(NAME)
    size: list[type] = [ctypes.c_int64]
    pointer: list[type] = [ctypes.c_void_p]
    flag: list[type] = [ctypes.c_int]
    common = 3 * pointer + [ctypes.c_float]
    library.forward.argtypes = [*(3 * size), *(3 * [Heads]), *common, Heads, *flag, *flag]
    library.backward.argtypes = [*(3 * size), *(4 * [Heads]), *common, *(3 * [Heads]), *(2 * pointer), *(2 * flag)]
    library.forward.restype = library.backward.restype = None
    return library


def forward(
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


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
