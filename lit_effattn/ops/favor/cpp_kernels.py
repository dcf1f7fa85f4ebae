"""Causal Performer on the CPU: tensor interface of the kernels in kernels.cpp."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.cpp_build import Heads, address, copied, heads
from lit_effattn.ops.runtime.selection import by_position

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
        ("lengths", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


@cache
def _library() -> ctypes.CDLL:
    library = cpp_build.library(NAME)
    pointer, flag = ctypes.c_void_p, ctypes.c_int
    library.forward.argtypes = [_Inputs] + [pointer] * 3 + [Heads, flag]
    library.backward.argtypes = [_Inputs, Heads] + [pointer] * 3 + [Heads] * 3 + [pointer] * 2 + [flag]
    library.forward.restype = library.backward.restype = None
    return library


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
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


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
