"""Causal linear attention's kernels for GPUs, in Triton: elu(x) + 1, sums and division in one pass over the sequence.

With φ(x) = elu(x) + 1, in chunks of C = 64 positions (Katharopoulos et al. 2020, equations 7 to 12):

    out_i = num_i / den_i,  num_i = φ(q_i)ᵀ S + Σ_j (φ(q_i) · φ(k_j)) v_j,  den_i = the same with 1 for v, + eps

j of the chunk, up to i; S is the sum of φ(k) vᵀ before it, which one program carries from chunk to chunk. One program
processes a head's sequence if there are enough heads to fill the GPU. If not, groups of chunks are processed in
parallel: first each group is summed (`_sum_groups`), the sums are added up (`_add_up`), and then each group starts from
the sums before it. There are only as many groups as fill the GPU, so the sums' memory does not grow with N.

The gradients take two passes. With g_i of out_i, r_i = 1 / den_i, u_i = r_i g_i and w_i = −r_i (g_i · out_i), the
gradients of num_i and den_i (Katharopoulos et al. 2020, section 3.3.1, and the division's):

    ∇φ(q_i) = Σ_{j ≤ i} (u_i · v_j + w_i) φ(k_j)     from left to right, as above; it writes r and w, (B, H, N) each
    ∇φ(k_j) = Σ_{i ≥ j} (u_i · v_j + w_i) φ(q_i)     from right to left, with the sums R of φ(q) uᵀ
    ∇v_j    = Σ_{i ≥ j} (φ(q_i) · φ(k_j)) u_i        together with the last

Only the inputs are saved for them: S is summed again, and g_i · out_i is a by-product of φ(q_i) · (S u_i). No result
depends on the order in which programs run.

All is computed in float32. Only the factors of matrix products are rounded, as set by
`torch.set_float32_matmul_precision`: see `_precision`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_effattn.ops.runtime.operators import by_position, shared_memory

CHUNK = 64
"""C: the least that a warp group's matrix product takes, and a wider triangle is more work."""

_MOST_GROUPS = 64  # of a head; `_add_up` loads one number of each at once
_ADDED_AT_ONCE = 64  # numbers of a group's sums in a program of `_add_up`
_NARROWEST = 16  # columns of the smallest matrix product
_WIDE = 64  # columns; of wider v, a program of the forward pass takes as many
_BY_LENGTH = ["n", "chunks", "each"]  # arguments: else Triton compiles anew for lengths that 16 divides, and so on


# ------------------------------------------------------------------------------------------------- parts of the kernels


@triton.jit
def _phi(x, mask):
    """Return φ(x) = elu(x) + 1, and 0 where `mask` is false, since φ(0) is 1."""
    return tl.where(mask, tl.where(x > 0, x + 1.0, tl.exp(x)), 0.0)  # NaN stays NaN, as in no maximum


@triton.jit
def _slope(phi):
    """Return φ'(x), computed from φ(x): φ(x) itself for x < 0, where both are exp(x), and 1 above; 0 in padding."""
    return tl.where(phi > 1.0, 1.0, phi)


@triton.jit
def _dot(a, b, c, PRECISION: tl.constexpr):
    """Return the matrix product of a (M, K) and b (K, N), plus c (M, N) in float32.

    `PRECISION` says how the factors are rounded: see `_precision`.
    """
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), c)
    else:  # noqa: RET505, a constant decides which of the two is compiled
        return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def _zeros_dot(a, b, PRECISION: tl.constexpr):
    """Return the matrix product of a (M, K) and b (K, N), rounded as in `_dot`."""
    return _dot(a, b, tl.zeros([a.shape[0], b.shape[1]], tl.float32), PRECISION)


@triton.jit
def _of_head(pointer, strides, head, N_HEADS):
    """Return a pointer to the (N, D) of head `head`, numbered over rows and heads, of a tensor (B, H, N, D).

    Offsets are computed in 64 bits, since they may exceed 2³¹.
    """
    return pointer + (head // N_HEADS).to(tl.int64) * strides[0] + (head % N_HEADS).to(tl.int64) * strides[1]


@triton.jit
def _at(pointer, strides, rows, columns):
    """Return pointers to the entries at `rows` (C,) and `columns` (BD,) of a head's (N, D): (C, BD)."""
    return pointer + rows[:, None] * strides[2] + columns[None, :] * strides[3]


@triton.jit
def _load(pointer, strides, rows, columns, n, width):
    """Load a chunk of a head's (N, width) in float32, (C, BD); 0 beyond the n rows and `width` columns."""
    mask = (rows < n)[:, None] & (columns < width)[None, :]
    return tl.load(_at(pointer, strides, rows, columns), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, strides, rows, columns, n, width, x):
    """Store a chunk x (C, BD) of a head's (N, width) in its type; nothing beyond the n rows and `width` columns."""
    mask = (rows < n)[:, None] & (columns < width)[None, :]
    tl.store(_at(pointer, strides, rows, columns), x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _sums_at(s, rows, columns, D: tl.constexpr, DV: tl.constexpr):
    """Return pointers to the sums S (D, DV) at `rows` (BD,) and `columns` (BV,), and which exist: (BD, BV) each."""
    return s + rows[:, None] * DV + columns[None, :], (rows < D)[:, None] & (columns < DV)[None, :]


@triton.jit
def _valid(lengths, head, n, N_HEADS):
    """Return the number of valid keys of the head: its row's entry of `lengths` (B,), or n without `lengths`."""
    if lengths is None:
        return n
    else:  # noqa: RET505
        return tl.minimum(tl.load(lengths + head // N_HEADS).to(tl.int32), n)


# ---------------------------------------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=_BY_LENGTH)
def _sum_groups(
    x, x_strides, y, y_strides, r, w, lengths, s, z, sums, n, chunks, each, N_HEADS,
    D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum each group of `each` chunks, for `_add_up`.

    A program writes to one slot of `sums` (heads, groups, D · DV + D): S (D, DV), then z (D,). Slot 0 gets the initial
    sums `s` and `z`, and slot i the sums of group i − 1 alone. In the forward pass x = k and y = v: S sums φ(k) vᵀ and
    z sums φ(k). In the backward pass x = q and y = g: S sums φ(q) uᵀ and z sums w φ(q); groups are numbered from the
    right.
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    features = tl.arange(0, BD)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    x = _of_head(x, x_strides, head, N_HEADS)
    y = _of_head(y, y_strides, head, N_HEADS)
    valid = n if BACKWARD else _valid(lengths, head, n, N_HEADS)
    row = head.to(tl.int64) * n
    starts, mask = _sums_at(s + head.to(tl.int64) * (D * DV), features, columns, D, DV)
    z += head.to(tl.int64) * D
    first = slot == 0
    total = tl.load(starts, mask=mask & first, other=0.0)  # (BD, BV)
    ones = tl.load(z + features, mask=(features < D) & first, other=0.0)  # (BD,)
    for i in range(tl.maximum(slot - 1, 0) * each, slot * each):
        chunk = chunks - 1 - i if BACKWARD else i
        rows = chunk * C + tl.arange(0, C).to(tl.int64)
        phi = _phi(
            _load(x, x_strides, rows, features, valid, D), (rows < valid)[:, None] & (features < D)[None, :]
        )  # (C, BD)
        values = _load(y, y_strides, rows, columns, n, DV)  # (C, BV)
        if BACKWARD:
            values *= tl.load(r + row + rows, mask=rows < n, other=0.0)[:, None]
            ones += tl.sum(phi * tl.load(w + row + rows, mask=rows < n, other=0.0)[:, None], 0)
        else:
            ones += tl.sum(phi, 0)
        total = _dot(tl.trans(phi), values, total, PRECISION)
    sums += (head.to(tl.int64) * tl.num_programs(1) + slot) * (D * DV + D)
    places, mask = _sums_at(sums, features, columns, D, DV)
    tl.store(places, total, mask=mask)
    if tl.program_id(2) == 0:
        tl.store(sums + D * DV + features, ones, mask=features < D)


@triton.jit(do_not_specialize=["slots"])
def _add_up(sums, slots, SIZE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add to each slot of `sums` (heads, slots, SIZE) all slots before it, in place.

    Slot i then has the sums before group i.
    """
    slot = tl.arange(0, SLOTS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = sums + (tl.program_id(0).to(tl.int64) * slots + slot)[:, None] * SIZE + place[None, :]
    mask = (slot < slots)[:, None] & (place < SIZE)[None, :]
    tl.store(at, tl.cumsum(tl.load(at, mask=mask, other=0.0), 0), mask=mask)


@triton.jit(do_not_specialize=_BY_LENGTH)
def _outputs(
    q, q_strides, k, k_strides, v, v_strides, out, out_strides, lengths, s, z, s_after, z_after, by_head, by_slot,
    n, chunks, each, N_HEADS, eps,
    D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one group of a head, from left to right.

    Starts from the group's sums, S (D, DV) at `s` + head · by_head[0] + group · by_slot[0], and z (D,) at `z`
    with by_head[1] and by_slot[1]. The last group writes the sums after the last position to `s_after` and `z_after`.
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    features = tl.arange(0, BD)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    q = _of_head(q, q_strides, head, N_HEADS)
    k = _of_head(k, k_strides, head, N_HEADS)
    v = _of_head(v, v_strides, head, N_HEADS)
    out = _of_head(out, out_strides, head, N_HEADS)
    valid = _valid(lengths, head, n, N_HEADS)
    starts, mask = _sums_at(s + head.to(tl.int64) * by_head[0] + slot * by_slot[0], features, columns, D, DV)
    total = tl.load(starts, mask=mask, other=0.0)  # (BD, BV)
    z += head.to(tl.int64) * by_head[1] + slot * by_slot[1]
    ones = tl.load(z + features, mask=features < D, other=0.0)  # (BD,)
    lower = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
    for i in range(slot * each, tl.minimum((slot + 1) * each, chunks)):
        rows = i * C + tl.arange(0, C).to(tl.int64)
        phi_q = _phi(_load(q, q_strides, rows, features, n, D), (features < D)[None, :])  # (C, BD)
        phi_k = _phi(
            _load(k, k_strides, rows, features, valid, D), (rows < valid)[:, None] & (features < D)[None, :]
        )  # (C, BD)
        values = _load(v, v_strides, rows, columns, n, DV)  # (C, BV)
        scores = tl.where(lower, _zeros_dot(phi_q, tl.trans(phi_k), PRECISION), 0.0)  # (C, C)
        numerator = _dot(scores, values, _zeros_dot(phi_q, total, PRECISION), PRECISION)  # (C, BV)
        denominator = tl.sum(scores, 1) + tl.sum(phi_q * ones[None, :], 1) + eps  # (C,)
        _store(out, out_strides, rows, columns, n, DV, numerator / denominator[:, None])
        total = _dot(tl.trans(phi_k), values, total, PRECISION)
        ones += tl.sum(phi_k, 0)
    if slot == tl.num_programs(1) - 1:
        places, mask = _sums_at(s_after + head.to(tl.int64) * (D * DV), features, columns, D, DV)
        tl.store(places, total, mask=mask)
        if tl.program_id(2) == 0:
            tl.store(z_after + head.to(tl.int64) * D + features, ones, mask=features < D)


@triton.jit(do_not_specialize=_BY_LENGTH)
def _query_gradients(
    q, q_strides, k, k_strides, v, v_strides, g, g_strides, dq, dq_strides, r, w, lengths, s, z, by_head, by_slot,
    n, chunks, each, N_HEADS, eps,
    D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q for one group of a head, from left to right.

    Starts from the group's sums, as in `_outputs`. It also writes r and w, (heads, N) each.
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    features, columns = tl.arange(0, BD), tl.arange(0, BV)
    q = _of_head(q, q_strides, head, N_HEADS)
    k = _of_head(k, k_strides, head, N_HEADS)
    v = _of_head(v, v_strides, head, N_HEADS)
    g = _of_head(g, g_strides, head, N_HEADS)
    dq = _of_head(dq, dq_strides, head, N_HEADS)
    valid = _valid(lengths, head, n, N_HEADS)
    row = head.to(tl.int64) * n
    starts, mask = _sums_at(s + head.to(tl.int64) * by_head[0] + slot * by_slot[0], features, columns, D, DV)
    total = tl.load(starts, mask=mask, other=0.0)  # (BD, BV)
    z += head.to(tl.int64) * by_head[1] + slot * by_slot[1]
    ones = tl.load(z + features, mask=features < D, other=0.0)  # (BD,)
    lower = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
    for i in range(slot * each, tl.minimum((slot + 1) * each, chunks)):
        rows = i * C + tl.arange(0, C).to(tl.int64)
        phi_q = _phi(_load(q, q_strides, rows, features, n, D), (features < D)[None, :])  # (C, BD)
        phi_k = _phi(
            _load(k, k_strides, rows, features, valid, D), (rows < valid)[:, None] & (features < D)[None, :]
        )  # (C, BD)
        values = _load(v, v_strides, rows, columns, n, DV)  # (C, BV)
        grads = _load(g, g_strides, rows, columns, n, DV)  # (C, BV)
        scores = tl.where(lower, _zeros_dot(phi_q, tl.trans(phi_k), PRECISION), 0.0)  # (C, C)
        along = tl.where(lower, _zeros_dot(grads, tl.trans(values), PRECISION), 0.0)  # (C, C), g_i · v_j
        before = _zeros_dot(grads, tl.trans(total), PRECISION)  # (C, BD)
        one_over = 1.0 / (tl.sum(scores, 1) + tl.sum(phi_q * ones[None, :], 1) + eps)  # (C,)
        weight = -(tl.sum(scores * along, 1) + tl.sum(phi_q * before, 1)) * one_over * one_over  # (C,)
        tl.store(r + row + rows, one_over, mask=rows < n)
        tl.store(w + row + rows, weight, mask=rows < n)
        along = tl.where(lower, along * one_over[:, None] + weight[:, None], 0.0)
        dphi = _dot(along, phi_k, before * one_over[:, None] + weight[:, None] * ones[None, :], PRECISION)  # (C, BD)
        _store(dq, dq_strides, rows, features, n, D, dphi * _slope(phi_q))
        total = _dot(tl.trans(phi_k), values, total, PRECISION)
        ones += tl.sum(phi_k, 0)


@triton.jit(do_not_specialize=_BY_LENGTH)
def _key_value_gradients(
    q, q_strides, k, k_strides, v, v_strides, g, g_strides, dk, dk_strides, dv, dv_strides, r, w, lengths, s, z,
    s_before, z_before, by_head, by_slot, n, chunks, each, N_HEADS,
    D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k and v for one group of a head, from right to left.

    Starts from the group's sums R (D, DV) and Σ w φ(q) (D,), placed as in `_outputs`; groups are numbered from
    the right. The last one writes the gradients of the initial sums to `s_before` and `z_before`.
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    features, columns = tl.arange(0, BD), tl.arange(0, BV)
    q = _of_head(q, q_strides, head, N_HEADS)
    k = _of_head(k, k_strides, head, N_HEADS)
    v = _of_head(v, v_strides, head, N_HEADS)
    g = _of_head(g, g_strides, head, N_HEADS)
    dk = _of_head(dk, dk_strides, head, N_HEADS)
    dv = _of_head(dv, dv_strides, head, N_HEADS)
    valid = _valid(lengths, head, n, N_HEADS)
    row = head.to(tl.int64) * n
    starts, mask = _sums_at(s + head.to(tl.int64) * by_head[0] + slot * by_slot[0], features, columns, D, DV)
    total = tl.load(starts, mask=mask, other=0.0)  # (BD, BV)
    z += head.to(tl.int64) * by_head[1] + slot * by_slot[1]
    ones = tl.load(z + features, mask=features < D, other=0.0)  # (BD,)
    upper = tl.arange(0, C)[:, None] <= tl.arange(0, C)[None, :]  # a row is a key, a column a query
    for i in range(slot * each, tl.minimum((slot + 1) * each, chunks)):
        rows = (chunks - 1 - i) * C + tl.arange(0, C).to(tl.int64)
        phi_q = _phi(_load(q, q_strides, rows, features, n, D), (features < D)[None, :])  # (C, BD)
        phi_k = _phi(
            _load(k, k_strides, rows, features, valid, D), (rows < valid)[:, None] & (features < D)[None, :]
        )  # (C, BD)
        one_over = tl.load(r + row + rows, mask=rows < n, other=0.0)  # (C,)
        u = _load(g, g_strides, rows, columns, n, DV) * one_over[:, None]  # (C, BV)
        scores = tl.where(upper, _zeros_dot(phi_k, tl.trans(phi_q), PRECISION), 0.0)  # (C, C)
        dvalues = _dot(scores, u, _zeros_dot(phi_k, total, PRECISION), PRECISION)  # (C, BV)
        _store(dv, dv_strides, rows, columns, n, DV, dvalues)
        values = _load(v, v_strides, rows, columns, n, DV)  # (C, BV)
        weight = tl.load(w + row + rows, mask=rows < n, other=0.0)  # (C,)
        along = tl.where(upper, _zeros_dot(values, tl.trans(u), PRECISION) + weight[None, :], 0.0)  # (C, C)
        dphi = _zeros_dot(values, tl.trans(total), PRECISION) + ones[None, :]  # (C, BD)
        dphi = _dot(along, phi_q, dphi, PRECISION)
        _store(dk, dk_strides, rows, features, n, D, dphi * _slope(phi_k))
        total = _dot(tl.trans(phi_q), u, total, PRECISION)
        ones += tl.sum(phi_q * weight[:, None], 0)
    if slot == tl.num_programs(1) - 1:
        places, mask = _sums_at(s_before + head.to(tl.int64) * (D * DV), features, columns, D, DV)
        tl.store(places, total, mask=mask)
        tl.store(z_before + head.to(tl.int64) * D + features, ones, mask=features < D)


# ---------------------------------------------------------------------------------------------------------- their calls


def forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, lengths: Tensor | None, elu: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_linear_attention`, whose arguments these are, with φ(x) = elu(x) + 1: `elu` is True."""
    plan = _Plan(q, v, backward=False)
    s, z, lengths = s.contiguous(), z.contiguous(), None if lengths is None else lengths.contiguous()
    starts = plan.starts(k, v, None, None, lengths, s, z, backward=False)
    out = by_position(v)
    s_after, z_after = torch.empty_like(s), torch.empty_like(z)
    _outputs[plan.grid](
        q, q.stride(), k, k.stride(), v, v.stride(), out, out.stride(), lengths, *starts[:2], s_after, z_after,
        *starts[2:], *plan.counts, eps, **plan.constants,
    )  # fmt: skip
    return out, s_after, z_after


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, s and z, in their shapes.

    The arguments are the gradients of the three tensors that `forward` returned, and the arguments of `forward`.
    """
    g, g_s, g_z, q, k, v, s, z, lengths, _, eps = arguments
    plan = _Plan(q, v, backward=True)
    s, z, g_s, g_z = (t.contiguous() for t in (s, z, g_s, g_z))
    lengths = None if lengths is None else lengths.contiguous()
    r, w = (torch.empty(q.shape[:3], device=q.device, dtype=torch.float32) for _ in range(2))
    dq, dk, dv = (by_position(t) for t in (q, k, v))
    ds, dz = torch.empty_like(s), torch.empty_like(z)
    starts = plan.starts(k, v, None, None, lengths, s, z, backward=False)
    inputs = (q, q.stride(), k, k.stride(), v, v.stride(), g, g.stride())
    _query_gradients[plan.grid](*inputs, dq, dq.stride(), r, w, lengths, *starts, *plan.counts, eps, **plan.constants)
    starts = plan.starts(q, g, r, w, lengths, g_s, g_z, backward=True)
    _key_value_gradients[plan.grid](
        *inputs, dk, dk.stride(), dv, dv.stride(), r, w, lengths, *starts[:2], ds, dz, *starts[2:],
        *plan.counts, **plan.constants,
    )  # fmt: skip
    return dq, dk, dv, ds, dz


class _Plan:
    """The division of each head's sequence into groups of chunks, and the arguments that the kernels share."""

    def __init__(self, q: Tensor, v: Tensor, *, backward: bool) -> None:
        b, h, n, d = q.shape
        width, padded = v.size(3), (_padded(q.size(3)), _padded(v.size(3)))
        wide = max(padded) > _WIDE
        columns = padded[1] if backward else min(padded[1], _WIDE)  # a query's gradient takes all of its v
        precision, shared = _precision(q, v), shared_memory(q.device)  # fewer rows and stages take less of it
        chunk = CHUNK // 2 if wide and (backward or (precision == "tf32x3" and shared < 228)) else CHUNK
        self.heads, blocks = b * h, triton.cdiv(width, columns)
        self.chunks = triton.cdiv(n, chunk)
        groups = min(self.chunks, _MOST_GROUPS, max(1, _at_once(q.device) // max(1, self.heads * blocks)))
        self.each = triton.cdiv(self.chunks, groups)
        self.groups = triton.cdiv(self.chunks, self.each)  # none is empty
        self.grid = (self.heads, self.groups, blocks)
        self.counts = (n, self.chunks, self.each, h)
        # If nothing is loaded ahead, a multiprocessor's registers and shared memory hold two backward programs (of wide
        # heads, one): they hide one another's waiting.
        self.constants: dict[str, Any] = {
            "D": d, "DV": width, "C": chunk, "BD": padded[0], "BV": columns, "PRECISION": precision,
            "num_warps": 8 if wide else 4, "num_stages": 1 if backward or wide or shared < 164 else 2,
        }  # fmt: skip

    def starts(
        self, x: Tensor, y: Tensor, r: Tensor | None, w: Tensor | None, lengths: Tensor | None, s: Tensor, z: Tensor,
        *, backward: bool,
    ) -> tuple[Tensor, Tensor, tuple[int, int], tuple[int, int]]:  # fmt: skip
        """Return the sums before each group, S and z, and their distances in memory.

        The first pair of distances is from head to head, of S and of z; the second is from group to group. See
        `_sum_groups` for the arguments.
        """
        size, last = s[0, 0].numel(), z.size(2)
        if self.groups == 1:
            return s, z, (size, last), (0, 0)
        sums = s.new_empty(self.heads, self.groups, size + last)
        _sum_groups[self.grid](
            x, x.stride(), y, y.stride(), r, w, lengths, s, z, sums, *self.counts, BACKWARD=backward, **self.constants
        )
        _add_up[self.heads, triton.cdiv(size + last, _ADDED_AT_ONCE)](
            sums, self.groups, SIZE=size + last, SLOTS=triton.next_power_of_2(self.groups), BLOCK=_ADDED_AT_ONCE
        )
        return sums, sums[..., size:], (sums.stride(0), sums.stride(0)), (sums.stride(1), sums.stride(1))


def _padded(width: int) -> int:
    """Return the columns of a block that holds `width` columns: a power of 2, at least `_NARROWEST`."""
    return max(_NARROWEST, triton.next_power_of_2(width))


def _precision(q: Tensor, v: Tensor) -> str:
    """Return how the products' factors are rounded.

    PyTorch's own setting for float32's products decides. "highest": float32 inputs are split in three (as exact as
    float32, and on tensor cores, which IEEE float32 is not). Half-precision inputs, too, get TF32: it holds float16's
    and bfloat16's numbers exactly, has float32's range (a sum of φ(k) vᵀ soon passes float16's), and three bits more
    for sums and scores than bfloat16. "high": TF32. "medium": bfloat16, twice as fast in products.
    """
    try:
        setting = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer `torch.backends`, which knows no bfloat16 on CUDA
        setting = "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
    if setting == "medium":
        return "bf16"
    return "tf32x3" if setting == "highest" and torch.float32 in (q.dtype, v.dtype) else "tf32"


@cache
def _at_once(device: torch.device) -> int:
    """Return how many programs fill the device: two per multiprocessor, limited by registers; 8 if interpreted."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
