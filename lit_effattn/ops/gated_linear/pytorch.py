"""Linear attention with decay and the delta rule: one recurrence for six kinds of attention.

    S_t = A_t S_{t-1} + k_t u_tᵀ,  y_t = S_tᵀ q_t
    u_t = v_t, or with the delta rule β_t (v_t − S_{t-1}ᵀ A_tᵀ k_t)

A_t is 1, or diagonal: a decay per head, per head and position, or per channel and position. The papers: retention (Sun
et al. 2023), gated linear attention (Yang et al. 2023), state space duality (Dao and Gu 2024), DeltaNet (Yang et al.
2024, arXiv 2406.06484), Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), and Kimi Delta Attention (Kimi Team 2025).
Queries are not scaled, and nothing is normalised.

In chunks of C positions, with S before the chunk and a_i for the decays from its start to i, r_j from j to its end, and
l_ij from j to i, which are products over channels (the chunkwise forms of DeltaNet and Gated DeltaNet, with l in both
triangles):

    P_ij = (k_i ∘ l_ij) · k_j for j < i,  U = (1 + β P)⁻¹ β (V − (a ∘ K) S), or V without the delta rule
    A_ij = (q_i ∘ l_ij) · k_j for j ≤ i,  Y = (a ∘ Q) S + A U,  S' = a_C ∘ S + (r ∘ K)ᵀ U

Every exponent is a sum of logarithms of decays, which are at most 0: never a difference of sums, which loses digits and
is not a number where both are −∞, and never the logarithm of 1 / a, whose exponential overflows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.gated_linear import fla
from lit_effattn.ops.recurrent_step import recurrent_step
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.operators import (
    Form,
    Heads,
    Operator,
    address,
    check_arguments,
    choose_form,
    copied,
    heads,
    in_form,
)
from lit_effattn.sequence import valid_positions


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    lengths: Tensor | None = None,
    chunk_size: int = 64,
    form: Form | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over N positions.

    The backward pass of the kernels is written by hand. It saves only the arguments, recomputes the rest in memory
    O(N (D + D')), and can't be differentiated. The plain form has memory O(N (C + D + D' + D D' / C)), and autograd
    differentiates it any number of times.

    Args:
        q: (B, H, N, D), queries.
        k: (B, H, N, D), keys.
        v: (B, H, N, D').
        state: (B, H, D, D'), S before the first position, in float32 or more, the type of all sums.
        log_decay: The logarithms of A_t, at most 0: (H,), (B or 1, H, N or 1), or (B, H, N, D) for a decay per channel.
            None: A_t = 1.
        beta: (B, H, N), the strengths of the delta rule. None: u_t = v_t.
        lengths: (B,), number of valid positions; the rest is padding, which leaves the state as it is. None: all are
            valid.
        chunk_size: Positions that PyTorch computes at once, not used by the C++ kernel; no effect on the result.
        form: How it is computed. None: see `lit_effattn.ops.runtime.operators`, and on CUDA `fla`.

    Returns:
        The output (B, H, N, D') in v's type, any finite values in padding, and S after the last valid position.

    Raises:
        ValueError: If an argument has a wrong shape or type, or the form can't be used. The message names it and what
            was expected.
        NotImplementedError: If a gradient that was written by hand is differentiated.
    """
    _check(q, k, v, state, log_decay, beta, lengths)
    if form is None and q.is_cuda and q.dtype == k.dtype == v.dtype:
        gated = fla.is_gated(log_decay, beta, lengths)
        form = "fla" if fla.use(q.device, q.dtype, q.size(-1), gated=gated) else None
    if form == "fla":
        return fla.gated_linear_attention(q, k, v, state, log_decay=log_decay, beta=beta, lengths=lengths)
    what = "linear attention with decay or the delta rule"
    form = choose_form(form, what, "gated_linear", q, k, v, state, width=q.size(-1))
    arguments = (q, k, v, state, _by_position(log_decay, q), beta, lengths, chunk_size)
    return _forward_in_pytorch(*arguments) if form == "plain" else _OPERATOR.forward(*arguments, form)


def gated_linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    lengths: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_linear_attention` for one position, N = 1, as in generation.

    With `in_place` the state is updated in place, and nothing of its size is allocated.
    """
    _check(q, k, v, state, log_decay, beta, lengths)
    if q.size(2) != 1:
        raise ValueError(f"q has {q.size(2)} positions; a step takes one, gated_linear_attention any number")
    k, log_decay, beta = _masked(k, state.dtype, _by_position(log_decay, q), beta, lengths)
    decay = None if log_decay is None else log_decay.exp()
    heads = (q.to(state.dtype), k, v.to(state.dtype))
    y, state = recurrent_step(*heads, state, decay=decay, beta=beta, in_place=in_place)
    return y.to(v.dtype), state


def _by_position(log_decay: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the logarithms of decays as (B, H, N, D or 1), without a copy."""
    if log_decay is None:
        return None
    if log_decay.dim() == 1:
        log_decay = log_decay[:, None]  # (H,) -> (H, 1)
    if log_decay.dim() < 4:
        log_decay = log_decay[..., None]
    shape = q.shape[:3]
    is_given = log_decay.dim() == 4 and log_decay.shape[:3] == shape  # the exported graph then has no Expand
    return log_decay if is_given else log_decay.expand(*shape, -1)


def _masked(
    k: Tensor, full: torch.dtype, log_decay: Tensor | None, beta: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return k, the logarithms of decays, and β as (B, H, N, 1): in type `full`, and 0 in padding."""
    padding = None if lengths is None else ~valid_positions(lengths, k.size(2))[:, None, :, None]  # (B, 1, N, 1)

    def masked(t: Tensor) -> Tensor:
        return t.to(full) if padding is None else t.to(full).masked_fill(padding, 0)

    log_decay = None if log_decay is None else masked(log_decay)
    return masked(k), log_decay, None if beta is None else masked(beta[..., None])


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor | None,
) -> None:
    (b, h, n, d), width = q.shape, v.size(-1)
    check_arguments(
        q,
        {"state": state},
        k=(k, (b, h, n, d)),
        v=(v, (b, h, n, width)),
        state=(state, (b, h, d, width)),
        log_decay=(log_decay, (h,), *((i, h, j) for i in (b, 1) for j in (n, 1)), (b, h, n, d)),
        beta=(beta, (b, h, n)),
        lengths=(lengths, (b,)),
    )


# ------------------------------------------------------------------------------------------------ in chunks, in PyTorch


class _Chunks:
    """All chunks' parts that do not depend on the state; the letters are those at the top of this file.

    Tensors are (B, H, M, C, ·), of M chunks. The last is filled up with positions that are padding.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        full: torch.dtype,
        log_decay: Tensor | None,
        beta: Tensor | None,
        lengths: Tensor | None,
        chunk_size: int,
    ) -> None:
        k, log_decay, beta = _masked(k, full, log_decay, beta, lengths)
        self.n, self.chunk = q.size(2), min(chunk_size, q.size(2))
        self.q, self.k, self.v = self.split(q.to(full)), self.split(k), self.split(v.to(full))
        self.log_decay = None if log_decay is None else self.split(log_decay)
        self.beta = None if beta is None else self.split(beta)
        self.before, self.after = None, None  # a and r, (B, H, M, C, D or 1)
        self.q_in, self.k_in, self.k_out = self.q, self.k, self.k
        if self.log_decay is not None:
            self.before, self.after = _from_start(self.log_decay), _to_end(self.log_decay)
            self.q_in, self.k_in, self.k_out = self.q * self.before, self.k * self.before, self.k * self.after
        self.scores = _scores(self.q, self.k, self.log_decay)  # A
        if self.beta is not None:
            self.overlaps = _scores(self.k, self.k, self.log_decay).tril(-1)  # P
            one = torch.eye(self.chunk, dtype=full, device=q.device).expand_as(self.overlaps)
            self.inverse = torch.linalg.solve_triangular(
                self.beta * self.overlaps, one, upper=False, unitriangular=True
            )

    def split(self, t: Tensor) -> Tensor:
        """(B, H, N, F) -> (B, H, M, C, F)."""
        return F.pad(t, (0, 0, 0, -self.n % self.chunk)).unflatten(2, (-1, self.chunk))

    def join(self, t: Tensor) -> Tensor:
        """(B, H, M, C, F) -> (B, H, N, F)."""
        return t.flatten(2, 3)[:, :, : self.n]

    def decayed(self, c: int, state: Tensor) -> Tensor:
        """Return a_C ∘ `state`, (B, H, D, D'), for chunk c."""
        return state if self.before is None else self.before[:, :, c, -1, :, None] * state

    def states(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return S before each chunk (B, H, M, D, D'), U, and S after the last chunk (B, H, D, D')."""
        before, values = [], []
        for c in range(self.v.size(2)):
            u = self.v[:, :, c]
            if self.beta is not None:
                u = self.inverse[:, :, c] @ (self.beta[:, :, c] * (u - self.k_in[:, :, c] @ state))
            before.append(state)
            values.append(u)
            state = self.decayed(c, state) + self.k_out[:, :, c].mT @ u
        return torch.stack(before, 2), torch.stack(values, 2), state


def _from_start(log_decay: Tensor) -> Tensor:
    """Return the decays from before the first position to each, (…, C, D or 1)."""
    return log_decay.cumsum(-2).exp()


def _to_end(log_decay: Tensor) -> Tensor:
    """Return the decays from each position to the last, (…, C, D or 1)."""
    return F.pad(log_decay, (0, 0, 0, 1))[..., 1:, :].flip(-2).cumsum(-2).flip(-2).exp()


def _between(log_decay: Tensor) -> Tensor:
    """Return the decays l_ij from position j to i, 0 for j > i: (…, C, 1) -> (…, C, C)."""
    c = log_decay.size(-2)
    ones = torch.ones(c, c, dtype=torch.bool, device=log_decay.device)
    summed = log_decay.expand(*log_decay.shape[:-1], c).masked_fill(ones.triu(), 0).cumsum(-2)
    return summed.masked_fill(ones.triu(1), -torch.inf).exp()


def _scores(x: Tensor, k: Tensor, log_decay: Tensor | None) -> Tensor:
    """Return (x_i ∘ l_ij) · k_j for j ≤ i, else 0: (…, C, D) -> (…, C, C)."""
    if log_decay is None:
        return (x @ k.mT).tril()
    if log_decay.size(-1) == 1:
        return x @ k.mT * _between(log_decay)
    c, x, k, log_decay = x.size(-2), *_filled_up(x, k, log_decay)
    scores = (x * k).sum(-1)[..., None, None]  # (…, C, 1, 1), squares on the diagonal, which are merged in pairs
    for rows, columns, *_ in _halves(x, k, log_decay):
        first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)  # (…, C / 2 s, s, s)
        corner = first.size(-1)
        scores = torch.cat([F.pad(first, (0, corner)), torch.cat([rows @ columns.mT, second], -1)], -2)
    return scores[..., 0, :c, :c]


def _filled_up(*tensors: Tensor) -> list[Tensor]:
    """Fill (…, C, D) up with zeros to a power of 2 of positions."""
    c = tensors[0].size(-2)
    return [F.pad(t, (0, 0, 0, (1 << (c - 1).bit_length()) - c)) for t in tensors]


def _halves(x: Tensor, k: Tensor, log_decay: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Divide blocks of 2 s positions in halves, for s = 1, 2, 4, … < C, with decays per channel.

    l_ij is the product of the decays from the border between the halves to i and from j to the border. Yields the
    second halves of x and the first halves of k times these factors, (…, C / 2 s, s, D), and the factors.
    """
    size = 1
    while size < x.size(-2):
        (_, rows), (columns, _), (first, second) = (
            t.unflatten(-2, (-1, 2, size)).unbind(-3) for t in (x, k, log_decay)
        )
        to_rows, to_columns = _from_start(second), _to_end(first)
        yield rows * to_rows, columns * to_columns, to_rows, to_columns
        size *= 2


def _forward_in_pytorch(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, *arguments: Any, in_chunks: type[_Chunks] = _Chunks
) -> tuple[Tensor, Tensor]:
    chunks = in_chunks(q, k, v, state.dtype, *arguments)
    states, u, state = chunks.states(state)
    return chunks.join(chunks.q_in @ states + chunks.scores @ u).to(v.dtype), state


# --------------------------------------------------------------------------------------------------- the kernels in C++


@cache
def _library() -> ctypes.CDLL:
    kernels = cpp_build.library("gated_linear")
    size, pointer, flag = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    kernels.forward.argtypes = [size] * 3 + [Heads] * 5 + [pointer] * 2 + [Heads, flag]
    kernels.backward.argtypes = [size] * 3 + [Heads] * 6 + [pointer] * 2 + [Heads] * 5 + [pointer, flag]
    kernels.forward.restype = kernels.backward.restype = None
    return kernels


def _forward_in_cpp(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute `gated_linear_attention`, whose tensors and `chunk_size` are the arguments, `log_decay` by position."""
    q, k, v, state, log_decay, beta, lengths, _ = arguments
    out = empty_like(v, torch.float32)
    inputs = [None if t is None else heads(t) for t in (q, k, v, log_decay, _column(beta))]
    state = copied(state)
    lengths = None if lengths is None else lengths.long().contiguous()
    _library().forward(
        *(*q.shape[:3], *map(Heads.of, inputs), address(state), address(lengths)),
        *(Heads.of(out), torch.get_num_threads()),
    )
    return out.to(v.dtype), state


def _backward_in_cpp(*arguments: Any) -> tuple[Tensor, ...]:
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
        *(*q.shape[:3], *map(Heads.of, inputs), address(state), address(lengths)),
        *(*map(Heads.of, results), address(g_state), torch.get_num_threads()),
    )
    g_q, g_k, g_v, g_decay, g_beta = (
        q.new_empty(0) if to is None or t is None else to.to(t.dtype) for to, t in zip(results, given, strict=True)
    )
    return g_q, g_k, g_v, g_state, g_decay, g_beta if beta is None else g_beta[..., 0]


def _column(beta: Tensor | None) -> Tensor | None:
    return None if beta is None else beta[..., None]


# --------------------------------------------------------------------------------------- the operator, for the kernels


def empty_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a tensor in the layout of `t` if that is contiguous in the last dimension."""
    like = torch.empty_like(t, dtype=dtype)
    return like if like.stride(-1) == 1 else t.new_empty(t.shape, dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.chunk_size, ctx.form = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, g: Tensor, g_state: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: `torch.utils.checkpoint` computes them again for one reading alone
    *gradients, g_decay, g_beta = _OPERATOR.backward(g, g_state, *saved, ctx.chunk_size, ctx.form)
    _, _, _, _, log_decay, beta, _ = saved
    of_gates = (None if log_decay is None else g_decay, None if beta is None else g_beta)
    return *gradients, *of_gates, None, None, None


def _shapes(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_like(v), state.new_empty(state.shape)


def _backward_shapes(
    g: Tensor, g_state: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    log_decay, beta, *_ = rest
    g_decay = q.new_empty(0) if log_decay is None else empty_like(log_decay)
    g_beta = q.new_empty(0) if beta is None else empty_like(beta[..., None])[..., 0]
    return *(empty_like(t) for t in (q, k, v)), state.new_empty(state.shape), g_decay, g_beta


_OPERATOR = Operator(
    "gated_linear",
    "(Tensor q, Tensor k, Tensor v, Tensor state, Tensor? log_decay, Tensor? beta, Tensor? lengths, int chunk_size, "
    "str form) -> (Tensor, Tensor)",
    "(Tensor g, Tensor g_state, Tensor q, Tensor k, Tensor v, Tensor state, Tensor? log_decay, Tensor? beta, "
    "Tensor? lengths, int chunk_size, str form) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    in_form(_forward_in_cpp, "lit_effattn.ops.gated_linear.triton_kernels.forward"),
    in_form(_backward_in_cpp, "lit_effattn.ops.gated_linear.triton_kernels.backward"),
    shapes=_shapes,
    backward_shapes=_backward_shapes,
    keep=_keep,
    gradients=_gradients,
    refusal="the kernels of gated_linear_attention have no second derivative; form='plain' has one",
)
