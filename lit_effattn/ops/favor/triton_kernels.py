"""Causal Performer's kernels for GPUs, in Triton: positive features in log space, sums and division in one pass.

With log φ(q) = ωᵀq, log φ(k) = ωᵀk + offset and m_i the greatest log φ(k_j) up to i, feature by feature, in chunks of
C positions, 64 forward and 32 backward (Choromanski et al. 2020, section 2.2, and lemma 1):

    out_i = num_i / den_i,  num_i = p_iᵀ S + Σ_j (p_i · κ_j) v_j,  den_i the same with 1 for v,
    p_i = exp(log φ(q_i) + r − top_i),  κ_j = exp(log φ(k_j) − r),  j of the chunk, up to i

r is m before the chunk, or the chunk's first key where that is −∞; it never depends on later keys. S is the sum of
e^{log φ(k) − m} vᵀ before the chunk. top_i, the greatest of log φ(q_i) + r over the features, cancels in the division,
and keeps p at most 1, and den at least 1. Where keys rise too far above r, the queries from the first such on take
Σ_f exp(log φ(q_i) + log φ(k_j) − top_i) for p_i · κ_j, key by key: slow, rare, and exact for any norms. No bit of an
earlier query depends on them.

A head's S, F × D, is too large for a program's registers. A program processes chunk after chunk, goes over blocks of
features within a chunk, and has S in global memory, whose blocks come from the GPU's cache; top_i grows from block to
block, and the sums so far are scaled down with it. One program processes a head's sequence if there are enough heads to
fill the GPU. If not, groups of chunks are processed in parallel, from sums that are computed first (`_sum_keys`,
`_add_up_keys`). There are only as many groups as fill the GPU, so the sums' memory does not grow with N.

The gradients take two passes. With g_i of out_i, x_i = g_i / den_i and y_i = −x_i · out_i, the gradients of num_i
and den_i, and a_ij = x_i · v_j + y_i, which no feature is needed for:

    ∇log φ(q_i) = p_i ∘ (S x_i + y_i z + Σ_{j ≤ i} a_ij κ_j)         from left to right, as above
    ∇log φ(k_j) = κ_j ∘ (R v_j + r + Σ_{i ≥ j} a_ij p_i)             from right to left, R the sum of p xᵀ to the right,
    ∇v_j        = Rᵀκ_j + Σ_{i ≥ j} (p_i · κ_j) x_i                  r of y p, scaled by m at the chunk's end

Beside the inputs, out, top and den are saved for them; S is summed again. If one key outweighs all others, a is a small
difference, so the rounding error of out is saved too. m at the chunks' borders, (B, H, N / C, F), is in memory while
the gradients are computed. No result depends on the order in which programs run.

All is computed in float32: ωᵀq and ωᵀk in full precision (their errors are in exponents), the factors of other products
rounded as set by `torch.set_float32_matmul_precision`: see `_precision` of linear attention's kernels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_effattn.ops.favor.pytorch import rounding_error
from lit_effattn.ops.linear.triton_kernels import (
    _at,
    _at_once,
    _dot,
    _load,
    _of_head,
    _padded,
    _precision,
    _store,
    _sums_at,
    _valid,
    _zeros_dot,
)
from lit_effattn.ops.runtime.operators import by_position, copied, shared_memory

CHUNK = 64
"""C of the forward pass: the least that a warp group's matrix product takes, and a wider triangle is more work."""

CHUNK_BACKWARD = 32
"""C of the backward pass: fewer rows than a warp group's matrix product takes.

With these products, as Triton 3.6 and its ptxas compile them for compute capability 9.0, `_query_gradients` is wrong:
seen on an H200, gradients of q off by 4.4 times their norm (D = 32), and reads beyond shared memory (D = 64, "medium").
"""

FEATURES = 32
"""Number of features that a program processes at once: more do not fit into registers beside a chunk's sums."""

_MOST_GROUPS = 64  # of a head; `_add_up_keys` goes over them one by one
_SUMMED_AT_ONCE = 64  # features in a program that makes a group's own sums
_ADDED_AT_ONCE = 16  # features in a program that adds up
_WIDE = 64  # columns; wider heads have more warps
_BY_LENGTH = ["n", "chunks", "each"]  # arguments: else Triton compiles anew for lengths that 16 divides, and so on

_NOTHING = tl.constexpr(float("-inf"))  # the logarithm of a key that is not there
_BOTTOM = tl.constexpr(-1e38)  # a reference where there is no key: any rises too far above it
_TOP = tl.constexpr(1e38)  # m of a feature that is not there: no key rises above it
_LIMIT = tl.constexpr(40.0)  # how far a key may rise above the reference: see `_LIMIT` in pytorch.py


# ------------------------------------------------------------------------------------------------- parts of the kernels


@triton.jit
def _load_as_is(pointer, strides, rows, columns, n, width):
    """Load a chunk of a head's (N, width) in its own type, (C, BE); 0 beyond the n rows and `width` columns."""
    mask = (rows < n)[:, None] & (columns < width)[None, :]
    return tl.load(_at(pointer, strides, rows, columns), mask=mask, other=0.0)


@triton.jit
def _offsets(k, rows, valid, half_square, common):
    """Return −½ ‖k̃‖² − ½ ln F, the summand of all log φ(k) of a key, for keys k (C, BE): (C,); −∞ in padding."""
    k = k.to(tl.float32)
    return tl.where(rows < valid, -half_square * tl.sum(k * k, 1) - common, _NOTHING)


@triton.jit
def _directions(omega, features, dims, E: tl.constexpr, F: tl.constexpr):
    """Load the vectors ω of `features` (BF,) from a head's (F, E): (BF, BE), 0 where there is none."""
    mask = (features < F)[:, None] & (dims < E)[None, :]
    return tl.load(omega + features[:, None] * E + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _along(x, omega):
    """Return the products ωᵀx of x (C, BE) and ω (BF, BE), as accurate as float32: (C, BF)."""
    if x.dtype == tl.float32:
        result = _zeros_dot(x, tl.trans(omega), "tf32x3")
    else:  # ω is split into three numbers of x's type, whose products with x are exact; the least are added first
        high = omega.to(x.dtype)
        rest = omega - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        result = tl.dot(x, tl.trans(low))
        result = tl.dot(x, tl.trans(middle), result)
        result = tl.dot(x, tl.trans(high), result)
    return result


@triton.jit
def _logs(queries, keys, offset, omega, features, F: tl.constexpr, BF: tl.constexpr):
    """Return the logarithms of a chunk's features, (C, BF) each: ωᵀq and log φ(k).

    ωᵀq is log φ(q) without the summand of all features of a query, which cancels in the division. It is −∞ for features
    that do not exist.
    """
    log_q, log_k = _along(queries, omega), _along(keys, omega) + offset[:, None]
    if F % BF:
        log_q += tl.where(features < F, 0.0, _NOTHING)[None, :]
    return log_q, log_k


@triton.jit
def _reference(m, log_k):
    """Return r (BF,): m, or where m is −∞ log φ(k) of the chunk's first key; at least `_BOTTOM`. `log_k`: (C, BF)."""
    r = m
    if tl.min(m) == _NOTHING:
        first = tl.sum(tl.where(tl.arange(0, log_k.shape[0])[:, None] == 0, log_k, 0.0), 0)
        r = tl.where(m == _NOTHING, first, m)
    return tl.maximum(r, _BOTTOM)


@triton.jit
def _maximum(after):
    """Return m after a chunk, (BF,), from the maximum of r and the chunk's log φ(k): −∞ if no key was seen."""
    return tl.where(after == _BOTTOM, _NOTHING, after)


@triton.jit
def _larger(a, b):
    """Return the larger of two numbers, for a scan."""
    return tl.maximum(a, b)


@triton.jit
def _overflows(log_k, r):
    """Return which queries overflow, (C,): they see a key of the chunk more than `_LIMIT` above r in some feature."""
    return tl.cumsum((tl.max(log_k - r[None, :], 1) > _LIMIT).to(tl.int32), 0) > 0


@triton.jit
def _near(log_k, r):
    """Return φ(k) e^(−r) of a chunk's keys, at most e^`_LIMIT`: (C, BF)."""
    log_k -= r[None, :]
    return tl.exp(tl.where(log_k > _LIMIT, _LIMIT, log_k))  # NaN stays NaN, as in no minimum


@triton.jit
def _pair(log_q, log_k, top, overflow, j):
    """Return the products φ(q_i) φ(k_j) e^(−top_i) of overflowing queries and the chunk's key j, by feature: (C, BF).

    They are 0 for other queries, and for queries before j.
    """
    places = tl.arange(0, log_q.shape[0])
    key = tl.sum(tl.where(places[:, None] == j, log_k, 0.0), 0)  # (BF,)
    sees = overflow & (places >= j)
    return tl.exp(tl.where(sees[:, None], log_q + key[None, :] - top[:, None], _NOTHING))


@triton.jit
def _fade(m, after):
    """Return e^(m − after), the factor for sums scaled by e^(−m) when the maximum becomes `after`; 0 where m is −∞."""
    return tl.exp(m - tl.where(after == _NOTHING, 0.0, after))


# ---------------------------------------------------------------------------------------------------------- the kernels
#
# Sums are stored as s (heads, groups, F, D), z and m (heads, groups, F), and updated in place: one thread may read what
# another wrote, so the threads of a program wait for one another before sums are read, and before they are overwritten.
# Values that do not change between iterations, mostly addresses, are computed in each: kept, they would take half of
# the registers.


@triton.jit(do_not_specialize=_BY_LENGTH)
def _sum_keys(
    k, k_strides, v, v_strides, omega, lengths, s, z, m, n, chunks, each, N_HEADS, half_square, common,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute S (F, D), z (F,) and m (F,) of each group alone, as if there were no keys before it.

    A program writes those of one block of features of one group to `s`, `z` and `m` (heads, groups, …).
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    features = tl.program_id(2) * BF + tl.arange(0, BF)
    dims, columns = tl.arange(0, BE), tl.arange(0, BD)
    k = _of_head(k, k_strides, head, N_HEADS)
    v = _of_head(v, v_strides, head, N_HEADS)
    valid = _valid(lengths, head, n, N_HEADS)
    directions = _directions(omega + (head % N_HEADS) * (F * E), features, dims, E, F)  # (BF, BE)
    total = tl.zeros([BF, BD], tl.float32)
    ones = tl.zeros([BF], tl.float32)
    largest = tl.full([BF], _NOTHING, tl.float32)
    for i in range(slot * each, tl.minimum((slot + 1) * each, chunks)):
        rows = i * C + tl.arange(0, C).to(tl.int64)
        keys = _load_as_is(k, k_strides, rows, dims, n, E)  # (C, BE)
        values = _load(v, v_strides, rows, columns, n, D)  # (C, BD)
        log_k = _along(keys, directions) + _offsets(keys, rows, valid, half_square, common)[:, None]
        after = tl.maximum(largest, tl.max(log_k, 0))  # (BF,)
        fade = _fade(largest, after)
        far = _fade(log_k, after[None, :])  # (C, BF)
        total = _dot(tl.trans(far), values, total * fade[:, None], PRECISION)
        ones = ones * fade + tl.sum(far, 0)
        largest = after
    group = head.to(tl.int64) * tl.num_programs(1) + slot
    places, mask = _sums_at(s + group * (F * D), features, columns, F, D)
    tl.store(places, total, mask=mask)
    tl.store(z + group * F + features, ones, mask=features < F)
    tl.store(m + group * F + features, largest, mask=features < F)


@triton.jit(do_not_specialize=["slots"])
def _add_up_keys(
    s, z, m, s_end, z_end, m_end, slots,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Replace the sums of each group alone by the sums of all keys before the group.

    `s_end`, `z_end` and `m_end` (heads, …) hold the sums before the first position, and then those of all keys.
    """
    head = tl.program_id(0).to(tl.int64)
    features, columns = tl.program_id(1) * BF + tl.arange(0, BF), tl.arange(0, BD)
    inside = features < F
    ends, mask = _sums_at(s_end + head * (F * D), features, columns, F, D)
    z_end += head * F + features
    m_end += head * F + features
    total = tl.load(ends, mask=mask, other=0.0)  # (BF, BD)
    ones = tl.load(z_end, mask=inside, other=0.0)  # (BF,)
    largest = tl.load(m_end, mask=inside, other=_NOTHING)
    for slot in range(slots):
        group = head * slots + slot
        places, _ = _sums_at(s + group * (F * D), features, columns, F, D)
        at = group * F + features
        own = tl.load(places, mask=mask, other=0.0)
        own_ones = tl.load(z + at, mask=inside, other=0.0)
        own_largest = tl.load(m + at, mask=inside, other=_NOTHING)
        tl.debug_barrier()
        tl.store(places, total, mask=mask)
        tl.store(z + at, ones, mask=inside)
        tl.store(m + at, largest, mask=inside)
        after = tl.maximum(largest, own_largest)
        fade, own_fade = _fade(largest, after), _fade(own_largest, after)
        total = total * fade[:, None] + own * own_fade[:, None]
        ones = ones * fade + own_ones * own_fade
        largest = after
    tl.debug_barrier()
    tl.store(ends, total, mask=mask)
    tl.store(z_end, ones, mask=inside)
    tl.store(m_end, largest, mask=inside)


@triton.jit(do_not_specialize=_BY_LENGTH)
def _outputs(
    q, q_strides, k, k_strides, v, v_strides, out, out_strides, rest, omega, lengths, s, z, m, top, denominator,
    n, chunks, each, N_HEADS, half_square, common,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one group of a head, from left to right.

    Starts from the sums before the group, in `s`, `z` and `m`, and replaces them by the sums after it. It also
    writes the outputs' rounding errors to `rest`, and the queries' top and den to `top` and `denominator` (heads, N).
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    dims, columns = tl.arange(0, BE), tl.arange(0, BD)
    q = _of_head(q, q_strides, head, N_HEADS)
    k = _of_head(k, k_strides, head, N_HEADS)
    v = _of_head(v, v_strides, head, N_HEADS)
    out = _of_head(out, out_strides, head, N_HEADS)
    rest = _of_head(rest, out_strides, head, N_HEADS)
    omega += (head % N_HEADS) * (F * E)
    valid = _valid(lengths, head, n, N_HEADS)
    row = head.to(tl.int64) * n
    group = head.to(tl.int64) * tl.num_programs(1) + slot
    s += group * (F * D)
    z += group * F
    m += group * F
    lower = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
    for i in tl.range(slot * each, tl.minimum((slot + 1) * each, chunks), disable_licm=True):
        rows = i * C + tl.arange(0, C).to(tl.int64)
        queries = _load_as_is(q, q_strides, rows, dims, n, E)  # (C, BE)
        keys = _load_as_is(k, k_strides, rows, dims, n, E)  # (C, BE)
        values = _load(v, v_strides, rows, columns, n, D)  # (C, BD)
        offset = _offsets(keys, rows, valid, half_square, common)  # (C,)
        numerator = tl.zeros([C, BD], tl.float32)
        scores = tl.zeros([C, C], tl.float32)
        below = tl.zeros([C], tl.float32)
        peak = tl.full([C], _NOTHING, tl.float32)  # top so far
        tl.debug_barrier()
        for start in tl.range(0, F, BF, disable_licm=True):
            features = start + tl.arange(0, BF)
            inside = features < F
            directions = _directions(omega, features, dims, E, F)  # (BF, BE)
            log_q, log_k = _logs(queries, keys, offset, directions, features, F, BF)  # (C, BF)
            before = tl.load(m + features, mask=inside, other=_TOP)  # (BF,)
            places, mask = _sums_at(s, features, columns, F, D)
            total = tl.load(places, mask=mask, other=0.0)  # (BF, BD)
            ones = tl.load(z + features, mask=inside, other=0.0)  # (BF,)

            r = _reference(before, log_k)  # (BF,)
            after = tl.maximum(r, tl.max(log_k, 0))
            any_overflow = tl.max(after - r) > _LIMIT
            reached = log_q + r[None, :]
            if any_overflow:
                seen = tl.maximum(tl.associative_scan(log_k, 0, _larger), r[None, :])
                reached = tl.where(_overflows(log_k, r)[:, None], log_q + seen, reached)
            new = tl.maximum(peak, tl.max(reached, 1))  # (C,)
            shrink = tl.exp(peak - new)
            peak = new
            p = tl.exp(log_q + r[None, :] - peak[:, None])  # (C, BF)
            near = _near(log_k, r)  # (C, BF)
            fade = tl.exp(r - after)
            scores *= shrink[:, None]
            if any_overflow:  # rare, so the logs are computed again, not kept
                log_q, log_k = _logs(
                    queries, keys, offset, _directions(omega, features, dims, E, F), features, F, BF
                )  # (C, BF)
                overflow = _overflows(log_k, r)
                scores += tl.where(overflow[:, None], 0.0, _zeros_dot(p, tl.trans(near), PRECISION))
                scores += _overflow_scores(log_q, log_k, peak, overflow)
                far = tl.exp(log_k - after[None, :])
            else:
                scores = _dot(p, tl.trans(near), scores, PRECISION)  # (C, C)
                far = near * fade[None, :]
            numerator = _dot(p, total, numerator * shrink[:, None], PRECISION)  # (C, BD)
            below = below * shrink + tl.sum(p * ones[None, :], 1)
            total = _dot(tl.trans(far), values, total * fade[:, None], PRECISION)
            tl.debug_barrier()
            tl.store(places, total, mask=mask)
            tl.store(z + features, ones * fade + tl.sum(far, 0), mask=inside)
            tl.store(m + features, _maximum(after), mask=inside)
        scores = tl.where(lower, scores, 0.0)
        numerator = _dot(scores, values, numerator, PRECISION)
        below += tl.sum(scores, 1)
        below = tl.where(below == 0.0, 1.0, below)  # no key was seen
        numerator /= below[:, None]
        _store(out, out_strides, rows, columns, n, D, numerator)
        if out.dtype.element_ty != tl.float32:
            rounded = numerator.to(out.dtype.element_ty).to(tl.float32)
            _store(rest, out_strides, rows, columns, n, D, numerator - rounded)
        tl.store(top + row + rows, peak, mask=rows < n)
        tl.store(denominator + row + rows, below, mask=rows < n)


@triton.jit
def _overflow_scores(log_q, log_k, top, overflow):
    """Return the products of overflowing queries and the chunk's keys, summed over features: (C, C), query by key."""
    places = tl.arange(0, log_q.shape[0])
    scores = tl.zeros([log_q.shape[0], log_q.shape[0]], tl.float32)
    for j in range(log_q.shape[0]):
        pairs = tl.sum(_pair(log_q, log_k, top, overflow, j), 1)  # (C,), of queries
        scores += tl.where(places[None, :] == j, pairs[:, None], 0.0)
    return scores


@triton.jit
def _overflow_to_queries(a, log_q, log_k, top, overflow):
    """Return the gradient of log φ(q) from the products in `_overflow_scores`, (C, BF).

    `a` (C, C) is the gradient of these products, by query and key.
    """
    places = tl.arange(0, log_q.shape[0])
    result = tl.zeros(log_q.shape, tl.float32)
    for j in range(log_q.shape[0]):
        of_key = tl.sum(tl.where(places[None, :] == j, a, 0.0), 1)  # (C,), of queries
        result += _pair(log_q, log_k, top, overflow, j) * of_key[:, None]
    return result


@triton.jit
def _overflow_to_keys(a, log_q, log_k, top, overflow):
    """Return the gradient of log φ(k) from the products in `_overflow_scores`, (C, BF), and these products, (C, C).

    `a` (C, C) is the gradient of these products. Both are by key and query here.
    """
    places = tl.arange(0, log_q.shape[0])
    result = tl.zeros(log_q.shape, tl.float32)
    scores = tl.zeros([log_q.shape[0], log_q.shape[0]], tl.float32)
    for j in range(log_q.shape[0]):
        pair = _pair(log_q, log_k, top, overflow, j)  # (C, BF)
        this = places[:, None] == j
        scores += tl.where(this, tl.sum(pair, 1)[None, :], 0.0)
        of_key = tl.sum(tl.where(this, a, 0.0), 0)  # (C,), of queries
        result += tl.where(this, tl.sum(pair * of_key[:, None], 0)[None, :], 0.0)
    return result, scores


@triton.jit(do_not_specialize=_BY_LENGTH)
def _query_gradients(
    q, q_strides, k, k_strides, v, v_strides, g, g_strides, out, out_strides, rest, dq, dq_strides, omega,
    lengths, s, z, m, borders, top, denominator, y, n, chunks, each, N_HEADS, half_square, common,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q for one group of a head, from left to right.

    Uses the sums as `_outputs` does. It also writes y (heads, N), and m before each chunk and after the last
    to `borders` (heads, chunks + 1, F).
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    dims, columns = tl.arange(0, BE), tl.arange(0, BD)
    q = _of_head(q, q_strides, head, N_HEADS)
    k = _of_head(k, k_strides, head, N_HEADS)
    v = _of_head(v, v_strides, head, N_HEADS)
    g = _of_head(g, g_strides, head, N_HEADS)
    out = _of_head(out, out_strides, head, N_HEADS)
    rest = _of_head(rest, out_strides, head, N_HEADS)
    dq = _of_head(dq, dq_strides, head, N_HEADS)
    omega += (head % N_HEADS) * (F * E)
    valid = _valid(lengths, head, n, N_HEADS)
    row = head.to(tl.int64) * n
    group = head.to(tl.int64) * tl.num_programs(1) + slot
    s += group * (F * D)
    z += group * F
    m += group * F
    borders += head.to(tl.int64) * (chunks + 1) * F
    lower = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
    for i in tl.range(slot * each, tl.minimum((slot + 1) * each, chunks), disable_licm=True):
        rows = i * C + tl.arange(0, C).to(tl.int64)
        queries = _load_as_is(q, q_strides, rows, dims, n, E)  # (C, BE)
        keys = _load_as_is(k, k_strides, rows, dims, n, E)  # (C, BE)
        values = _load(v, v_strides, rows, columns, n, D)  # (C, BD)
        offset = _offsets(keys, rows, valid, half_square, common)  # (C,)
        peak = tl.load(top + row + rows, mask=rows < n, other=0.0)  # (C,)
        below = tl.load(denominator + row + rows, mask=rows < n, other=1.0)
        x = _load(g, g_strides, rows, columns, n, D) / below[:, None]  # (C, BD)
        exact = _load(out, out_strides, rows, columns, n, D)  # (C, BD)
        if out.dtype.element_ty != tl.float32:
            exact += _load(rest, out_strides, rows, columns, n, D)
        weight = -tl.sum(x * exact, 1)  # (C,)
        tl.store(y + row + rows, weight, mask=rows < n)
        a = tl.where(lower, _zeros_dot(x, tl.trans(values), PRECISION) + weight[:, None], 0.0)  # (C, C)
        result = tl.zeros([C, BE], tl.float32)
        tl.debug_barrier()
        for start in tl.range(0, F, BF, disable_licm=True):
            features = start + tl.arange(0, BF)
            inside = features < F
            directions = _directions(omega, features, dims, E, F)  # (BF, BE)
            log_q, log_k = _logs(queries, keys, offset, directions, features, F, BF)  # (C, BF)
            before = tl.load(m + features, mask=inside, other=_TOP)  # (BF,)
            tl.store(borders + i * F + features, before, mask=inside)
            places, mask = _sums_at(s, features, columns, F, D)
            total = tl.load(places, mask=mask, other=0.0)  # (BF, BD)
            ones = tl.load(z + features, mask=inside, other=0.0)  # (BF,)

            r = _reference(before, log_k)  # (BF,)
            after = tl.maximum(r, tl.max(log_k, 0))
            fade = tl.exp(r - after)
            p = _queries(log_q, r, peak, rows, n)  # (C, BF)
            near = _near(log_k, r)  # (C, BF)
            through = _zeros_dot(x, tl.trans(total), PRECISION) + weight[:, None] * ones[None, :]  # (C, BF)
            if tl.max(after - r) > _LIMIT:
                log_q, log_k = _logs(
                    queries, keys, offset, _directions(omega, features, dims, E, F), features, F, BF
                )  # (C, BF)
                overflow = _overflows(log_k, r)
                through = _dot(tl.where(overflow[:, None], 0.0, a), near, through, PRECISION) * p
                through += _overflow_to_queries(a, log_q, log_k, peak, overflow)
                far = tl.exp(log_k - after[None, :])
            else:
                through = _dot(a, near, through, PRECISION) * p
                far = near * fade[None, :]
            result = _dot(through, directions, result, PRECISION)  # (C, BE)
            total = _dot(tl.trans(far), values, total * fade[:, None], PRECISION)
            tl.debug_barrier()
            tl.store(places, total, mask=mask)
            tl.store(z + features, ones * fade + tl.sum(far, 0), mask=inside)
            tl.store(m + features, _maximum(after), mask=inside)
            tl.store(borders + chunks * F + features, _maximum(after), mask=inside & (i == chunks - 1))
        _store(dq, dq_strides, rows, dims, n, E, result)


@triton.jit
def _queries(log_q, r, top, rows, n):
    """Return p (C, BF), given `top` (C,) of the forward pass; 0 beyond the n rows."""
    return tl.where((rows < n)[:, None], tl.exp(log_q + r[None, :] - top[:, None]), 0.0)


@triton.jit(do_not_specialize=_BY_LENGTH)
def _sum_queries(
    q, q_strides, g, g_strides, omega, s, z, borders, top, denominator, y, n, chunks, each, N_HEADS,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute R (F, D) and r (F,) of each group alone, as if there were no queries after it.

    They are scaled by m at the group's start, and written to `s` and `z` (heads, groups, …).
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    features = tl.program_id(2) * BF + tl.arange(0, BF)
    inside = features < F
    dims, columns = tl.arange(0, BE), tl.arange(0, BD)
    q = _of_head(q, q_strides, head, N_HEADS)
    g = _of_head(g, g_strides, head, N_HEADS)
    row = head.to(tl.int64) * n
    borders += head.to(tl.int64) * (chunks + 1) * F
    directions = _directions(omega + (head % N_HEADS) * (F * E), features, dims, E, F)  # (BF, BE)
    total = tl.zeros([BF, BD], tl.float32)
    ones = tl.zeros([BF], tl.float32)
    end = tl.minimum((slot + 1) * each, chunks)
    after = tl.load(borders + end * F + features, mask=inside, other=_NOTHING)  # (BF,)
    for back in range(slot * each, end):
        i = slot * each + end - 1 - back
        rows = i * C + tl.arange(0, C).to(tl.int64)
        queries = _load_as_is(q, q_strides, rows, dims, n, E)  # (C, BE)
        peak = tl.load(top + row + rows, mask=rows < n, other=0.0)  # (C,)
        below = tl.load(denominator + row + rows, mask=rows < n, other=1.0)
        x = _load(g, g_strides, rows, columns, n, D) / below[:, None]  # (C, BD)
        weight = tl.load(y + row + rows, mask=rows < n, other=0.0)
        before = tl.load(borders + i * F + features, mask=inside, other=_NOTHING)  # (BF,)
        p = _queries(_along(queries, directions), before, peak, rows, n)  # (C, BF); 0 where m is −∞
        fade = _fade(before, after)
        total = _dot(tl.trans(p), x, total * fade[:, None], PRECISION)
        ones = ones * fade + tl.sum(p * weight[:, None], 0)
        after = before
    group = head.to(tl.int64) * tl.num_programs(1) + slot
    places, mask = _sums_at(s + group * (F * D), features, columns, F, D)
    tl.store(places, total, mask=mask)
    tl.store(z + group * F + features, ones, mask=inside)


@triton.jit(do_not_specialize=["slots", "chunks", "each"])
def _add_up_queries(
    s, z, borders, s_end, z_end, slots, chunks, each,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Replace the sums of each group alone by the sums of all queries after the group.

    `s_end` and `z_end` (heads, …) hold the gradients of the sums after the last position, and then the sums of all
    queries.
    """
    head = tl.program_id(0).to(tl.int64)
    features, columns = tl.program_id(1) * BF + tl.arange(0, BF), tl.arange(0, BD)
    inside = features < F
    borders += head * (chunks + 1) * F
    ends, mask = _sums_at(s_end + head * (F * D), features, columns, F, D)
    z_end += head * F + features
    total = tl.load(ends, mask=mask, other=0.0)  # (BF, BD)
    ones = tl.load(z_end, mask=inside, other=0.0)  # (BF,)
    after = tl.load(borders + chunks * F + features, mask=inside, other=_NOTHING)
    for back in range(slots):
        slot = slots - 1 - back
        group = head * slots + slot
        places, _ = _sums_at(s + group * (F * D), features, columns, F, D)
        at = group * F + features
        own = tl.load(places, mask=mask, other=0.0)
        own_ones = tl.load(z + at, mask=inside, other=0.0)
        before = tl.load(borders + slot * each * F + features, mask=inside, other=_NOTHING)
        tl.debug_barrier()
        tl.store(places, total, mask=mask)
        tl.store(z + at, ones, mask=inside)
        fade = _fade(before, after)
        total = total * fade[:, None] + own
        ones = ones * fade + own_ones
        after = before
    tl.debug_barrier()
    tl.store(ends, total, mask=mask)
    tl.store(z_end, ones, mask=inside)


@triton.jit(do_not_specialize=_BY_LENGTH)
def _key_value_gradients(
    q, q_strides, k, k_strides, v, v_strides, g, g_strides, dk, dk_strides, dv, dv_strides, omega, lengths,
    s, z, borders, top, denominator, y, n, chunks, each, N_HEADS, half_square, common,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k and v for one group of a head, from right to left.

    Starts from the sums R and r after the group, in `s` and `z`, and replaces them by those before it.
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    dims, columns = tl.arange(0, BE), tl.arange(0, BD)
    q = _of_head(q, q_strides, head, N_HEADS)
    k = _of_head(k, k_strides, head, N_HEADS)
    v = _of_head(v, v_strides, head, N_HEADS)
    g = _of_head(g, g_strides, head, N_HEADS)
    dk = _of_head(dk, dk_strides, head, N_HEADS)
    dv = _of_head(dv, dv_strides, head, N_HEADS)
    omega += (head % N_HEADS) * (F * E)
    valid = _valid(lengths, head, n, N_HEADS)
    row = head.to(tl.int64) * n
    group = head.to(tl.int64) * tl.num_programs(1) + slot
    s += group * (F * D)
    z += group * F
    borders += head.to(tl.int64) * (chunks + 1) * F
    upper = tl.arange(0, C)[:, None] <= tl.arange(0, C)[None, :]  # a row is a key, a column a query
    end = tl.minimum((slot + 1) * each, chunks)
    for back in tl.range(slot * each, end, disable_licm=True):
        i = slot * each + end - 1 - back
        rows = i * C + tl.arange(0, C).to(tl.int64)
        queries = _load_as_is(q, q_strides, rows, dims, n, E)  # (C, BE)
        keys = _load_as_is(k, k_strides, rows, dims, n, E)  # (C, BE)
        values = _load(v, v_strides, rows, columns, n, D)  # (C, BD)
        offset = _offsets(keys, rows, valid, half_square, common)  # (C,)
        peak = tl.load(top + row + rows, mask=rows < n, other=0.0)  # (C,)
        below = tl.load(denominator + row + rows, mask=rows < n, other=1.0)
        x = _load(g, g_strides, rows, columns, n, D) / below[:, None]  # (C, BD)
        weight = tl.load(y + row + rows, mask=rows < n, other=0.0)  # (C,)
        a = tl.where(upper, _zeros_dot(values, tl.trans(x), PRECISION) + weight[None, :], 0.0)  # (C, C)
        to_keys = tl.zeros([C, BE], tl.float32)
        to_values = tl.zeros([C, BD], tl.float32)
        to_offset = tl.zeros([C], tl.float32)
        scores = tl.zeros([C, C], tl.float32)
        tl.debug_barrier()
        for start in tl.range(0, F, BF, disable_licm=True):
            features = start + tl.arange(0, BF)
            inside = features < F
            directions = _directions(omega, features, dims, E, F)  # (BF, BE)
            log_q, log_k = _logs(queries, keys, offset, directions, features, F, BF)  # (C, BF)
            border = borders + i * F + features
            before = tl.load(border, mask=inside, other=_TOP)  # (BF,)
            after = tl.load(border + F, mask=inside, other=_TOP)
            places, mask = _sums_at(s, features, columns, F, D)
            total = tl.load(places, mask=mask, other=0.0)  # (BF, BD)
            ones = tl.load(z + features, mask=inside, other=0.0)  # (BF,)

            r = _reference(before, log_k)  # (BF,)
            any_overflow = tl.max(tl.max(log_k, 0) - r) > _LIMIT
            p = _queries(log_q, r, peak, rows, n)  # (C, BF)
            near = _near(log_k, r)  # (C, BF)
            far = _fade(log_k, after[None, :])  # (C, BF)
            through = (_zeros_dot(values, tl.trans(total), PRECISION) + ones[None, :]) * far  # (C, BF)
            if any_overflow:
                log_q, log_k = _logs(
                    queries, keys, offset, _directions(omega, features, dims, E, F), features, F, BF
                )  # (C, BF)
                overflow = _overflows(log_k, r)
                through += _zeros_dot(tl.where(overflow[None, :], 0.0, a), p, PRECISION) * near
                scores += tl.where(overflow[None, :], 0.0, _zeros_dot(near, tl.trans(p), PRECISION))
                exact, overflow_scores = _overflow_to_keys(a, log_q, log_k, peak, overflow)
                through += exact
                scores += overflow_scores
            else:
                through += _zeros_dot(a, p, PRECISION) * near
                scores = _dot(near, tl.trans(p), scores, PRECISION)  # (C, C)
            to_keys = _dot(through, directions, to_keys, PRECISION)  # (C, BE)
            to_offset += tl.sum(through, 1)
            to_values = _dot(far, total, to_values, PRECISION)  # (C, BD)
            fade = _fade(before, after)
            p = tl.where((before == _NOTHING)[None, :], 0.0, p)  # no key is before them
            total = _dot(tl.trans(p), x, total * fade[:, None], PRECISION)
            tl.debug_barrier()
            tl.store(places, total, mask=mask)
            tl.store(z + features, ones * fade + tl.sum(p * weight[:, None], 0), mask=inside)
        to_keys -= (2 * half_square) * to_offset[:, None] * keys.to(tl.float32)
        _store(dk, dk_strides, rows, dims, n, E, to_keys)
        to_values = _dot(tl.where(upper, scores, 0.0), x, to_values, PRECISION)
        _store(dv, dv_strides, rows, columns, n, D, to_values)


# ---------------------------------------------------------------------------------------------------------- their calls


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `positive_favor`, whose tensors and `scale` are the arguments.

    After `m` come the tensors that `backward` takes besides: the rounding errors of the output, empty for float32, and
    each query's top and den, (B, H, N) each.
    """
    q, k, v, omega, s, z, m, lengths, scale = arguments
    plan = _Plan(q, v, omega, lengths, scale, CHUNK)
    s, z, m = copied(s), copied(z), copied(m)
    starts = plan.starts(k, v, s, z, m)
    out = by_position(v)
    rest = rounding_error(out)
    top, denominator = (torch.empty(q.shape[:3], device=q.device, dtype=torch.float32) for _ in range(2))
    _outputs[plan.grid](
        q, q.stride(), k, k.stride(), v, v.stride(), out, out.stride(), rest, plan.omega, plan.lengths, *starts,
        top, denominator, *plan.counts, *plan.of_keys, **plan.constants, BF=plan.features, num_warps=plan.warps,
        num_stages=1,
    )  # fmt: skip
    return out, s, z, m, rest, top, denominator


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, s and z, in their shapes.

    The arguments are the gradients of the output and of the sums that `forward` returned, the tensors given to
    `forward`, the output and the three tensors after it, and `scale`.
    """
    g, g_s, g_z, q, k, v, omega, s, z, m, lengths, out, rest, top, denominator, scale = arguments
    plan = _Plan(q, v, omega, lengths, scale, CHUNK_BACKWARD)
    dq, dk, dv = (by_position(t) for t in (q, k, v))
    y = torch.empty_like(top)
    borders = z.new_empty(plan.heads, plan.chunks + 1, z.size(2))
    starts = plan.starts(k, v, copied(s), copied(z), copied(m))
    inputs = (q, q.stride(), k, k.stride(), v, v.stride(), g, g.stride())
    kept = (borders, top, denominator, y, *plan.counts, *plan.of_keys)
    options = {**plan.constants, "BF": plan.features, "num_warps": plan.warps, "num_stages": 1}
    _query_gradients[plan.grid](
        *inputs, out, out.stride(), rest, dq, dq.stride(), plan.omega, plan.lengths, *starts, *kept, **options
    )
    ds, dz = copied(g_s), copied(g_z)
    ends = plan.ends(q, g, borders, top, denominator, y, ds, dz)
    _key_value_gradients[plan.grid](
        *inputs, dk, dk.stride(), dv, dv.stride(), plan.omega, plan.lengths, *ends, *kept, **options
    )
    return dq, dk, dv, ds, dz


class _Plan:
    """The division of each head's sequence into groups of chunks, and the arguments that the kernels share."""

    def __init__(self, q: Tensor, v: Tensor, omega: Tensor, lengths: Tensor | None, scale: float, chunk: int) -> None:
        b, h, n, e = q.shape
        d, f = v.size(3), omega.size(1)
        self.omega = (omega * scale).contiguous()  # queries and keys need no copy that is scaled
        self.lengths = None if lengths is None else lengths.contiguous()
        self.heads, self.chunks = b * h, triton.cdiv(n, chunk)
        groups = min(self.chunks, _MOST_GROUPS, max(1, _at_once(q.device) // max(1, self.heads)))
        self.each = triton.cdiv(self.chunks, groups)
        self.groups = triton.cdiv(self.chunks, self.each)  # none is empty
        self.grid = (self.heads, self.groups)
        self.counts = (n, self.chunks, self.each, h)
        self.of_keys = (scale * scale / 2, math.log(f) / 2)
        self.constants: dict[str, Any] = {
            "E": e, "D": d, "F": f, "C": chunk, "BE": _padded(e), "BD": _padded(d),
            "PRECISION": _precision(q, v),
        }  # fmt: skip
        self.features = min(FEATURES, _padded(f))
        self.warps = 8 if max(_padded(e), _padded(d)) > _WIDE else 4
        self.stages = 3 if shared_memory(q.device) >= 164 else 1  # of sums alone: how many chunks are in shared memory

    def starts(self, k: Tensor, v: Tensor, s: Tensor, z: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums before each group, (heads, groups, …).

        `s`, `z` and `m` hold the sums before the first position. The kernels replace them by the sums after the last.
        """
        if self.groups == 1:
            return s, z, m  # and are updated in place
        sums = self._sums(s, z, m)
        _sum_keys[self.heads, self.groups, triton.cdiv(s.size(2), _SUMMED_AT_ONCE)](
            k, k.stride(), v, v.stride(), self.omega, self.lengths, *sums, *self.counts, *self.of_keys,
            **self.constants, BF=_SUMMED_AT_ONCE, num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip
        _add_up_keys[self._parts()](*sums, s, z, m, self.groups, **self._part())
        return sums[0], sums[1], sums[2]

    def ends(
        self, q: Tensor, g: Tensor, borders: Tensor, top: Tensor, denominator: Tensor, y: Tensor, s: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sums R and r after each group, (heads, groups, …).

        `s` and `z` hold the gradients of the sums after the last position. The kernels replace them by those of the
        initial sums.
        """
        if self.groups == 1:
            return s, z
        sums = self._sums(s, z)
        _sum_queries[self.heads, self.groups, triton.cdiv(s.size(2), _SUMMED_AT_ONCE)](
            q, q.stride(), g, g.stride(), self.omega, *sums, borders, top, denominator, y, *self.counts,
            **self.constants, BF=_SUMMED_AT_ONCE, num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip
        _add_up_queries[self._parts()](*sums, borders, s, z, self.groups, self.chunks, self.each, **self._part())
        return sums[0], sums[1]

    def _sums(self, *like: Tensor) -> list[Tensor]:
        """Return uninitialised tensors for the sums of each group, with the last dimensions of `like`."""
        return [t.new_empty(self.heads, self.groups, *t.shape[2:]) for t in like]

    def _parts(self) -> tuple[int, int]:
        """Return the grid of `_add_up_keys` and `_add_up_queries`: heads, and blocks of features."""
        return self.heads, triton.cdiv(self.constants["F"], _ADDED_AT_ONCE)

    def _part(self) -> dict[str, int]:
        """Return the constants of `_add_up_keys` and `_add_up_queries`."""
        return {name: self.constants[name] for name in ("D", "F", "BD")} | {"BF": _ADDED_AT_ONCE}
