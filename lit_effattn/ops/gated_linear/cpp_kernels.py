"""Linear attention with decay and the delta rule on the CPU: tensor interface of the kernels in kernels.cpp."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.gated_linear.pytorch import empty_like
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.cpp_build import Heads, address, copied, heads

NAME = "gated_linear"


@cache
def _library() -> ctypes.CDLL:
    library = cpp_build.library(NAME)
    size: list[type] = [ctypes.c_int64]
    pointer: list[type] = [ctypes.c_void_p]
    flag: list[type] = [ctypes.c_int]
    library.forward.argtypes = [*(3 * size), *(5 * [Heads]), *(2 * pointer), Heads, *flag]
    library.backward.argtypes = [*(3 * size), *(6 * [Heads]), *(2 * pointer), *(5 * [Heads]), *pointer, *flag]
    library.forward.restype = library.backward.restype = None
    return library


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute `gated_linear_attention`, whose tensors and `chunk_size` are the arguments, `log_decay` by position."""
    q, k, v, state, log_decay, beta, lengths, _ = arguments
    out = empty_like(v, torch.float32)
    inputs = [None if t is None else heads(t) for t in (q, k, v, log_decay, _column(beta))]
    state = copied(state)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().forward(
        *(*q.shape[:3], *map(_described, inputs), address(state), address(lengths)),
        *(Heads.of(out), torch.get_num_threads()),
    )
    return out.to(v.dtype), state


def backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, state, log_decay and beta; empty tensors for the last two if they are None.

    The first arguments are the gradients of the output (B, H, N, D') and of the last state, then those of `forward`.
    """
    g, g_state, q, k, v, state, log_decay, beta, lengths, _ = arguments
    given = (q, k, v, log_decay, _column(beta))
    inputs = [None if t is None else heads(t) for t in (g, *given)]
    results = [None if t is None else empty_like(t, torch.float32) for t in given]
    state, g_state = state.float().contiguous(), copied(g_state)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().backward(
        *(*q.shape[:3], *map(_described, inputs), address(state), address(lengths)),
        *(*map(_described, results), address(g_state), torch.get_num_threads()),
    )
    g_q, g_k, g_v, g_decay, g_beta = (
        q.new_empty(0) if to is None or t is None else to.to(t.dtype) for to, t in zip(results, given, strict=True)
    )
    return g_q, g_k, g_v, g_state, g_decay, g_beta if beta is None else g_beta[..., 0]


def _described(t: Tensor | None) -> Heads:
    return Heads() if t is None else Heads.of(t)


def _column(beta: Tensor | None) -> Tensor | None:
    return None if beta is None else beta[..., None]
