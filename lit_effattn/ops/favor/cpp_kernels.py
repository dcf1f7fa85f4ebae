"""Causal Performer on the CPU: tensor interface of the kernels in kernels.cpp."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.cpp_build import Heads, address, copied, heads

NAME = "favor"


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
        ("offset", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


@cache
def _library() -> ctypes.CDLL:
    library = cpp_build.library(NAME)
    pointer, flag = ctypes.c_void_p, ctypes.c_int
    library.forward.argtypes = [_Inputs] + [pointer] * 3 + [Heads, pointer, flag]
    library.backward.argtypes = [_Inputs, Heads] + [pointer] * 3 + [Heads] * 3 + [pointer] * 3 + [flag]
    library.forward.restype = library.backward.restype = None
    return library


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    offset: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    s: Tensor,
    z: Tensor,
    m: Tensor,
    out: Tensor,
    denominator: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill `out` and `denominator`, all in float32 or less, and return `s`, `z` and `m` after the last position.

    Args:
        q: (B, H, N, E), queries.
        k: (B, H, N, E), keys.
        v: (B, H, N, D).
        omega: (H, F, E), the directions.
        offset: (B, H, N), the common term of the logarithms of a key's features, −∞ where it is padding; None: that of
            positive features, −‖scale · k‖²/2 − (log F)/2.
        lengths: (B,), number of valid positions; None: all are valid. Outputs of padding are 0.
        scale: Factor of queries and keys.
        s: (B, H, F, D), the sum of e^{log φ(k) − m} vᵀ before the first position.
        z: (B, H, F), the sum of e^{log φ(k) − m}.
        m: (B, H, F), the greatest log φ(k); −∞: no key yet.
        out: (B, H, N, D) in float32, contiguous in its last dimension; 0 where a query sees no key.
        denominator: (B, H, N) in float32, contiguous; None: not computed.
    """
    q, k, v = heads(q), heads(k), heads(v)
    omega, s, z, m = _full(omega), copied(s), copied(z), copied(m)
    offset = None if offset is None else _full(offset)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().forward(
        _inputs(q, k, v, omega, offset, lengths, scale),
        *(s.data_ptr(), z.data_ptr(), m.data_ptr(), Heads.of(out), address(denominator), torch.get_num_threads()),
    )
    return s, z, m


def backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Fill the gradients of q, k, v and `offset`, and return those of `s` and `z`.

    The arguments are the gradients of the output (B, H, N, D) and of the last `s` and `z`, then those of `forward` from
    `q` to `m`, then the gradients to fill: in float32, in the shapes of their arguments, and contiguous in the last
    dimension. That of `offset` is left out if `offset` is None.
    """
    g, g_s, g_z, q, k, v, omega, offset, lengths, scale, s, z, m, g_q, g_k, g_v, *g_offset = arguments
    g, q, k, v = heads(g), heads(q), heads(k), heads(v)
    omega, s, z, m = _full(omega), _full(s), _full(z), _full(m)
    offset = None if offset is None else _full(offset)
    lengths = None if lengths is None else lengths.long().contiguous()
    g_s, g_z = copied(g_s), copied(g_z)
    offset_gradient = None if offset is None else torch.empty_like(offset)
    _library().backward(
        _inputs(q, k, v, omega, offset, lengths, scale),
        *(Heads.of(g), s.data_ptr(), z.data_ptr(), m.data_ptr(), Heads.of(g_q), Heads.of(g_k), Heads.of(g_v)),
        *(address(offset_gradient), g_s.data_ptr(), g_z.data_ptr(), torch.get_num_threads()),
    )
    if offset_gradient is not None:
        g_offset[0].copy_(offset_gradient)
    return g_s, g_z


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, offset: Tensor | None, lengths: Tensor | None, scale: float
) -> _Inputs:
    """Describe the tensors, which must outlive the result."""
    return _Inputs(
        *(*q.shape[:3], omega.size(1), Heads.of(q), Heads.of(k), Heads.of(v)),
        *(omega.data_ptr(), address(offset), address(lengths), scale),
    )


def _full(t: Tensor) -> Tensor:
    return t.float().contiguous()
