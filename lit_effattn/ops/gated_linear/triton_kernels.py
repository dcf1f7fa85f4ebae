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

Only the arguments are saved for the backward pass. Memory is that of the form in PyTorch, O(N (C + D + D')), plus
O(N D (D + D') / C) for T and the states. No result depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_effattn.ops.gated_linear import pytorch
from lit_effattn.ops.linear.triton_kernels import _NARROWEST, _WIDE, _dot, _padded, _precision

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

    def states(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `pytorch._Chunks.states`."""
        v = self.v if self.beta is None else self.inverse @ (self.beta * self.v)
        before, last = self._recurrence(self.k_out.mT @ v, state, backward=False)
        return before, v if self.w is None else v - self.w @ before, last

    def state_gradients(self, g: Tensor, g_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `pytorch._Chunks.state_gradients`."""
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


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator `gated_linear`: see `pytorch.gated_linear_attention`."""
    return pytorch._forward(*arguments, in_chunks=_Chunks)


def backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute its gradients.

    The arguments are the gradients of the two tensors that `forward` returned, and the arguments of `forward`.
    """
    return pytorch._backward(*arguments, in_chunks=_Chunks)
