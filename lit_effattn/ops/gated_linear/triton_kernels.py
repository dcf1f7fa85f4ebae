"""Linear attention with decay and the delta rule on GPUs: PyTorch within the chunks, a kernel in Triton between them.

With the letters of `lit_effattn.ops.gated_linear.pytorch`, and W = (1 + β P)⁻¹ β (a ∘ K), V' = (1 + β P)⁻¹ β V, the
state S before each chunk and its gradient R after each chunk are the same linear recurrence over the chunks:

    S' = a_C ∘ S + T S + (r ∘ K)ᵀ V',               T = −(r ∘ K)ᵀ W,  U = V' − W S
    R' = a_C ∘ R + Tᵀ R + (a ∘ Q)ᵀ G − Wᵀ (Aᵀ G),   X = (1 + β P)⁻ᵀ (Aᵀ G + (r ∘ K) R)

without W and T, and with V' = V, if there is no delta rule. The terms that do not depend on S or R are computed for all
chunks at once by the functions in PyTorch, which form the exponents. `_recurrence` is the one kernel. Each of its
programs keeps some columns of S or R, which are independent of the others, in registers. T is separate from a_C, so
that rounding the factors of the product affects only the update, not what the state keeps.

Why only this in Triton: a launch takes some 5 µs, and the recurrence in PyTorch is several launches a chunk, one after
another. At N = 8192 and D = C = 64, the gated delta rule takes 53 launches instead of 939 forward, and 120 instead of
2151 backward. Its traffic is that of 88 and 235 reads or writes of (B, H, N, D) in float32, as before. At 3 TB/s the
launches would take longer than the traffic up to some 80 heads in a batch; beyond, little is gained. Kernels that fuse
everything would save most of the traffic, but would form the exponents and solve the triangular systems a second time,
for four decays, both rules and both directions.

Only the arguments are saved for the backward pass. It recomputes the rest in memory O(N (C + D + D')), plus
O(N D (D + D') / C) for T and the states. No result depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lit_effattn.ops.gated_linear import pytorch
from lit_effattn.ops.linear.triton_kernels import _NARROWEST, _WIDE, _dot, _padded, _precision
from lit_effattn.sequence import without_padding

_COLUMNS = 16  # of a program, the fewest of a product: the programs of one head share T in the GPU's cache


@triton.jit(do_not_specialize=["chunks"])
def _recurrence(
    a, t, added, first, states, last, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute S ← a ∘ S + T S + P for a block (BD, BV) of a head's S, over all chunks, starting from `first`.

    `states` (heads, chunks, D, DV) gets S before each chunk, and `last` (heads, D, DV) the final S. `a` is
    (heads, chunks, D), or None for 1. `t` is (heads, chunks, D, D), or None for 0; with it BD covers all rows. P is
    `added`, in the shape of `states`. With `BACKWARD` chunks are visited from the last to the first, and T is
    transposed.
    """
    across, down = tl.cdiv(DV, BV), tl.cdiv(D, BD)
    head = (tl.program_id(0) // (across * down)).to(tl.int64)  # offsets may exceed 2³¹
    rows = tl.program_id(0) // across % down * BD + tl.arange(0, BD)
    columns = tl.program_id(0) % across * BV + tl.arange(0, BV)
    places = rows[:, None] * DV + columns[None, :]
    mask = (rows < D)[:, None] & (columns < DV)[None, :]
    square = rows[:, None] * D + rows[None, :]
    inside = (rows < D)[:, None] & (rows < D)[None, :]
    state = tl.load(first + head * (D * DV) + places, mask=mask, other=0.0)  # (BD, BV)
    for i in tl.range(chunks, num_stages=STAGES):
        chunk = head * chunks + (chunks - 1 - i if BACKWARD else i)
        tl.store(states + chunk * (D * DV) + places, state, mask=mask)
        kept = state
        if a is not None:
            kept *= tl.load(a + chunk * D + rows, mask=rows < D, other=0.0)[:, None]
        kept += tl.load(added + chunk * (D * DV) + places, mask=mask, other=0.0)
        if t is None:
            state = kept
        else:
            update = tl.load(t + chunk * (D * D) + square, mask=inside, other=0.0)  # (BD, BD)
            state = _dot(tl.trans(update) if BACKWARD else update, state, kept, PRECISION)
    tl.store(last + head * (D * DV) + places, state, mask=mask)


class _Chunks(pytorch._Chunks):
    """The chunks' parts, with the recurrences of the states and of their gradients in Triton."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.w: Tensor | None = None
        self.t: Tensor | None = None
        if self.beta is not None:
            self.w = self.inverse @ (self.beta * self.k_in)  # (B, H, M, C, D)
            self.t = -self.k_out.mT @ self.w  # (B, H, M, D, D)

    @override
    def states(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = self.v if self.beta is None else self.inverse @ (self.beta * self.v)
        before, last = self._recurrence(self.k_out.mT @ v, state, backward=False)
        return before, v if self.w is None else v - self.w @ before, last

    def state_gradients(self, g: Tensor, g_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return R after each chunk (B, H, M, D, D'), X, and R before the first chunk: see `_gradients`."""
        of_u, added = self.scores.mT @ g, self.q_in.mT @ g
        if self.w is not None:
            added = added - self.w.mT @ of_u
        after, g_state = self._recurrence(added, g_state, backward=True)
        x = of_u + self.k_out @ after
        return after, x if self.beta is None else self.inverse.mT @ x, g_state

    def _recurrence(self, added: Tensor, first: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
        """Return S at each chunk, (B, H, M, D, D'), and after all."""
        b, h, chunks, d, width = added.shape
        a = None if self.before is None else self.before[..., -1, :].expand(b, h, chunks, d).contiguous()
        first, added = first.contiguous(), added.contiguous()
        states, last = torch.empty_like(added), torch.empty_like(first)
        rows = _NARROWEST if self.t is None else _padded(d)
        wide = rows > _WIDE  # shared memory has room for one T, and registers only of more warps
        _recurrence[b * h * triton.cdiv(d, rows) * triton.cdiv(width, _COLUMNS),](
            a, self.t, added, first, states, last, chunks, D=d, DV=width, BD=rows, BV=_COLUMNS,
            BACKWARD=backward, PRECISION=_precision(added, added), STAGES=1 if wide else 3,
            num_warps=8 if wide else 4,
        )  # fmt: skip
        return states, last


def _score_gradients(g: Tensor, x: Tensor, k: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and k from that of `_scores`, without that of the decays."""
    if log_decay is None or log_decay.size(-1) == 1:
        g = g.tril() if log_decay is None else g * pytorch._between(log_decay)
        return g @ k, g.mT @ x
    c, x, k, log_decay = x.size(-2), *pytorch._filled_up(x, k, log_decay)
    g = F.pad(g, [0, x.size(-2) - c] * 2)
    on_diagonal = g.diagonal(dim1=-2, dim2=-1)[..., None]
    g_x, g_k = on_diagonal * k, on_diagonal * x
    for rows, columns, to_rows, to_columns in pytorch._halves(x, k, log_decay):
        size = rows.size(-2)
        squares = g.unflatten(-2, (-1, 2 * size)).unflatten(-1, (-1, 2 * size))  # (…, C / 2 s, 2 s, C / 2 s, 2 s)
        corners = squares.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]  # (…, C / 2 s, s, s)
        g_x = g_x + F.pad(corners @ columns * to_rows, (0, 0, size, 0)).flatten(-3, -2)
        g_k = g_k + F.pad(corners.mT @ rows * to_columns, (0, 0, 0, size)).flatten(-3, -2)
    return g_x[..., :c, :], g_k[..., :c, :]


def _gradients(*arguments: Any) -> tuple[Any, ...]:
    """Return the gradients of the state, q, k, v, log_decay and β, the last two None if these are.

    With R for the gradient of S after a chunk, and E for that of V, from the last chunk to the first:

        X = (1 + β P)⁻ᵀ (Aᵀ G + (r ∘ K) R),  E = β X,  R' = a_C ∘ R + (a ∘ Q)ᵀ G − (a ∘ K)ᵀ E

    A key is read by its own position and written for those after: its gradient has a part of each. The sum of a
    channel's logarithms up to i occurs in q_i and the key read at i as an exponential, and in the key written at i as
    its inverse, so its gradient is q_i ∘ dq_i + k_i ∘ dk_i(read) − k_i ∘ dk_i(written). The logarithm at t is in all
    sums from t on. Those after the chunk add up to S' ∘ R, which is computed anew, so that no error accumulates.
    """
    g, g_state, q, k, v, state, log_decay, beta, lengths, chunk_size = arguments
    chunks = _Chunks(q, k, v, state.dtype, log_decay, beta, lengths, chunk_size)
    states, u, last = chunks.states(state)
    g = chunks.split(g.to(state.dtype))
    g_after, x, g_state = chunks.state_gradients(g, g_state)

    def scaled(t: Tensor, decays: Tensor | None) -> Tensor:
        return t if decays is None else t * decays

    g_q, written = _score_gradients(g @ u.mT, chunks.q, chunks.k, chunks.log_decay)
    g_q = g_q + scaled(g @ states.mT, chunks.before)
    written = written + scaled(u @ g_after.mT, chunks.after)
    read, g_v = torch.zeros_like(written), x
    g_beta = g_decay = None
    if chunks.beta is not None:
        g_v = chunks.beta * x
        g_beta = x * (chunks.v - chunks.k_in @ states - chunks.overlaps @ u)
        g_beta = without_padding(chunks.join(g_beta.sum(-1, keepdim=True)), lengths, dim=2)[..., 0]
        read, more = _score_gradients((-g_v @ u.mT).tril(-1), chunks.k, chunks.k, chunks.log_decay)
        read, written = read - scaled(g_v @ states.mT, chunks.before), written + more
    if log_decay is not None:
        of_sums = chunks.q * g_q + chunks.k * (read - written)  # (B, H, M, C, D)
        of_rest = (torch.cat([states[:, :, 1:], last[:, :, None]], 2) * g_after).sum(-1)[..., None, :]
        g_decay = of_sums.flip(-2).cumsum(-2).flip(-2) + of_rest
        if log_decay.size(-1) == 1:
            g_decay = g_decay.sum(-1, keepdim=True)
        g_decay = without_padding(chunks.join(g_decay), lengths, dim=2)
    g_k = without_padding(chunks.join(read + written), lengths, dim=2)
    return g_state, chunks.join(g_q), g_k, chunks.join(g_v), g_decay, g_beta


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator `gated_linear`: see `pytorch.gated_linear_attention`."""
    _, _, v, *_ = arguments
    with torch.autocast(v.device.type, enabled=False):
        y, state = pytorch._forward_in_pytorch(*arguments, in_chunks=_Chunks)
    return pytorch.empty_like(v).copy_(y), state


def backward(g: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Compute its gradients, as `pytorch._backward_in_cpp`.

    The arguments are the gradients of the two tensors that `forward` returned, and the arguments of `forward`.
    """
    _, q, k, v, _, log_decay, beta, *_ = arguments
    with torch.autocast(g.device.type, enabled=False):
        g_state, *computed = _gradients(g, *arguments)
    g_q, g_k, g_v, g_decay, g_beta = (
        g.new_empty(0) if t is None else pytorch.empty_like(t).copy_(result)
        for result, t in zip(computed, (q, k, v, log_decay, beta), strict=True)
    )
    return g_q, g_k, g_v, g_state, g_decay, g_beta
