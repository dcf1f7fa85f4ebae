"""Linear attention with decay and the delta rule on the CPU: tensor interface of the kernels in kernels.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Fill `out` and return the state after the last position, all in float32 or less.

    Args:
        q: (B, H, N, D), queries.
        k: (B, H, N, D), keys.
        v: (B, H, N, D').
        state: (B, H, D, D'), the state before the first position.
        log_decay: (B, H, N, D or 1), logarithms of decays; None: no decay.
        beta: (B, H, N), strengths of the delta rule; None: without it.
        lengths: (B,), number of valid positions; None: all are valid.
        out: (B, H, N, D') in float32, contiguous in its last dimension.
    """
    inputs = [None if t is None else heads(t) for t in (q, k, v, log_decay, _column(beta))]
    state = copied(state)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().forward(
        *(*q.shape[:3], *map(_described, inputs), address(state), address(lengths)),
        *(Heads.of(out), torch.get_num_threads()),
    )
    return state


def backward(
    g: Tensor,
    g_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor | None,
    results: Sequence[Tensor | None],
) -> Tensor:
    """Fill the gradients `results` of q, k, v, log_decay and beta, and return that of the state.

    The first arguments are the gradients of the output (B, H, N, D') and of the last state, then those of `forward`.
    The results have the shapes of their arguments, in float32, and are contiguous in the last dimension.
    """
    inputs = [None if t is None else heads(t) for t in (g, q, k, v, log_decay, _column(beta))]
    *gradients, g_beta = results
    state, g_state = state.float().contiguous(), copied(g_state)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().backward(
        *(*q.shape[:3], *map(_described, inputs), address(state), address(lengths)),
        *(*map(_described, [*gradients, _column(g_beta)]), address(g_state), torch.get_num_threads()),
    )
    return g_state


def _described(t: Tensor | None) -> Heads:
    return Heads() if t is None else Heads.of(t)


def _column(beta: Tensor | None) -> Tensor | None:
    return None if beta is None else beta[..., None]
