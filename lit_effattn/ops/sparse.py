"""Sparse softmax attention in a fixed pattern (Child et al. 2019, section 4), at the cost of the seen keys alone.

Each set of keys is dense in its own layout: adjacent windows and blocks, columns of positions a stride apart, gathered
summary columns. If a query sees two sets, one softmax runs over both: the sets are disjoint, so that no key
counts twice, and are merged by their maxima and sums. A single set uses scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.sequence import accumulator


class Call(NamedTuple):
    """The arguments of a call that every set of keys needs: see `strided_attention` and `fixed_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    stride: int
    causal: bool
    start: Tensor | None
    lengths: Tensor | None


class Part(NamedTuple):
    """One set of keys, in G groups within which attention is dense."""

    q: Tensor  # (B, G, H, Q, D)
    k: Tensor  # (B, G, H, K, D)
    v: Tensor  # (B, G, H, K, D')
    mask: Tensor | None  # (B or 1, G or 1, H or 1, Q, K), which keys are seen; None: those up to the query's index
    back: Callable[[Tensor], Tensor]  # (B, G, H, Q, …) -> (B, H, N, …)


class Sums(NamedTuple):
    """A softmax over some of its keys: numerator and denominator, both divided by exp(top)."""

    numerator: Tensor  # (B, H, N, D')
    denominator: Tensor  # (B, H, N, 1)
    top: Tensor  # (B, H, N, 1)


def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stride: int,
    *,
    local: bool = True,
    distant: bool = True,
    causal: bool = True,
    start: Tensor | None = None,
    lengths: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention of query i to keys less than `stride` away (local) and a multiple of it away (distant).

        local:    j ≤ i,  i − j < stride;       distant:  j ≤ i,  (i − j) mod stride = 0

    Without `causal`, |i − j| < stride and (i − j) mod stride = 0, on both sides. Time and memory are
    O(N (stride + N / stride)), and O(stride + M / stride) for one query with a `start`.

    Args:
        q: (B, H, N, D).
        k: (B, H, M, D), of the positions 0 … M − 1. M is N, unless there is a `start`.
        v: (B, H, M, D').
        stride: At least 1.
        local: Whether the near keys are seen.
        distant: Whether the far ones are.
        causal: Whether a query sees only itself and earlier positions.
        start: (B,), position of each row's first query; None: 0. Causal only.
        lengths: (B,), number of valid keys; None: all. A query in the padding sees itself too. Not used if causal,
            since the padding comes after every valid query.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        (B, H, N, D').
    """
    if start is not None and q.size(2) == 1:
        return _strided_step(q, k, v, stride, local, distant, start, dropout)
    call = Call(q, k, v, stride, causal, start, lengths)
    parts = []
    if local:
        parts.append(_window(call))
    if distant:
        parts.append(_columns(call, itself=not local))
    return _attend(parts, dropout)


def fixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stride: int,
    columns: Tensor,
    *,
    local: bool = True,
    distant: bool = True,
    causal: bool = True,
    start: Tensor | None = None,
    block: tuple[Tensor, Tensor] | None = None,
    summary: tuple[Tensor, Tensor] | None = None,
    lengths: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention of query i to keys in its block (local) and in the summary columns of all blocks (distant).

        local:    j ≤ i,  ⌊j / stride⌋ = ⌊i / stride⌋;       distant:  j ≤ i,  j mod stride ∈ columns, or j = i

    Without `causal`, the same without j ≤ i. Time and memory are O(N (stride + C N / stride)) for C columns.

    Args:
        q: (B, H, N, D).
        k: (B, H, N, D), of the same positions.
        v: (B, H, N, D').
        stride: Positions in a block, at least 1.
        columns: (H or 1, C), different numbers from 0 to stride − 1: the columns that each head sees.
        local: Whether the block is seen.
        distant: Whether the summary columns are.
        causal: Whether a query sees only itself and earlier positions.
        start: (B,), position of each row's first query; None: 0. Causal only.
        block: With a `start`: keys and values (B, H, stride, ·) of each row's block before `start`, position p in
            slot p mod stride; not read unless `local`.
        summary: With a `start`: keys and values (B, H, S, ·) in the summary columns up to the last query, in order,
            as in `summary_positions`; not read unless `distant`.
        lengths: See `strided_attention`.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        (B, H, N, D').
    """
    n = q.size(2)
    if start is not None and n == 1:
        return _fixed_step(q, k, v, stride, columns, local, distant, start, block, summary, dropout)
    call = Call(q, k, v, stride, causal, start, lengths)
    parts, sums = [], []
    if local:
        parts.append(_own_block(call, block))
    if distant:
        if summary is None:
            positions = summary_positions(columns, stride, -(-n // stride)).clamp(max=n - 1)
            summary = gather_rows(k, positions), gather_rows(v, positions)
        parts.append(_summary(call._replace(k=summary[0], v=summary[1]), columns, other_blocks=local))
        if not local:
            sums.append(_itself(q, k, v, dropout))
    return _attend(parts, dropout, sums)


def summary_positions(columns: Tensor, stride: int, blocks: int) -> Tensor:
    """Return the positions of the summary `columns` (H or 1, C) in the first `blocks` blocks, (H or 1, blocks · C)."""
    first = torch.arange(blocks, device=columns.device)[:, None] * stride  # (blocks, 1)
    return (first + columns[:, None]).flatten(1)


# ----------------------------------------------------------------------------------------------------------- the sets


def _window(call: Call) -> Part:
    """Return the local part: one group for each block of `stride` queries.

    Its keys are those of the block, of the block before and, without `causal`, of the block after.
    """
    q, k, v, stride, causal, start, lengths = call
    n = q.size(2)
    laid = _lay_out(q, start, stride)  # (B, H, G·S, D)
    blocks = laid.size(2) // stride
    size = (2 if causal else 3) * stride  # keys that a block's queries can see
    length = (blocks - 1) * stride + size
    first = torch.zeros(1, dtype=torch.long, device=q.device) if start is None else start // stride
    if start is None:
        k, v = (F.pad(t, (0, 0, stride, length - stride - n)) for t in (k, v))
    else:
        index = (first[:, None] - 1) * stride + torch.arange(length, device=q.device)  # (B, G·S + S)
        index = index.clamp(0, k.size(2) - 1)[:, None]
        k, v = gather_rows(k, index), gather_rows(v, index)
    k, v = (t.unfold(2, size, stride).permute(0, 2, 1, 4, 3) for t in (k, v))  # (B, G, H, size, D)

    # Distance between index r of a block's queries and index c of its keys.
    r = torch.arange(stride, device=q.device)[:, None]
    c = torch.arange(size, device=q.device)
    distance = r + stride - c  # (S, size)
    seen = (distance >= 0 if causal else distance > -stride) & (distance < stride)
    block = first[:, None] + torch.arange(blocks, device=q.device)  # (B or 1, G)
    position = (block[..., None] - 1) * stride + c  # (B or 1, G, size)
    valid = position >= 0
    if not causal:
        valid = valid & (position < _ends(lengths, n, q.device)[:, None, None])
    mask = (seen & valid[:, :, None]) | (distance == 0)  # (B or 1, G, S, size)
    return Part(_blocks(laid, stride), k, v, mask[:, :, None], lambda t: _unlay(_unblock(t), start, stride, n))


def _columns(call: Call, *, itself: bool) -> Part:
    """Return the distant part: one group for each remainder of positions modulo `stride`, dense within.

    `itself` says whether a query sees its own key.
    """
    q, k, v, stride, causal, start, lengths = call
    n = q.size(2)
    laid = _lay_out(q, start, stride)
    q, k, v = (_blocks(F.pad(t, (0, 0, 0, -t.size(2) % stride)), stride).transpose(1, 3) for t in (laid, k, v))
    mask = None
    if not (causal and start is None and itself):
        first = torch.zeros(1, dtype=torch.long, device=q.device) if start is None else start // stride
        i = (first[:, None] + torch.arange(q.size(3), device=q.device))[:, None, :, None]  # (B or 1, 1, Q, 1)
        j = torch.arange(k.size(3), device=q.device)  # (K,)
        if causal:
            mask = j <= i if itself else j < i  # (B or 1, 1, Q, K)
        else:
            position = j * stride + torch.arange(stride, device=q.device)[:, None]  # (S, K)
            valid = position < _ends(lengths, n, q.device)[:, None, None]  # (B or 1, S, K)
            valid = valid[:, :, None]  # (B or 1, S, 1, K)
            mask = valid | (j == i) if itself else valid & (j != i)  # (B or 1, S, Q, K)
        mask = mask[:, :, None]
    return Part(q, k, v, mask, lambda t: _unlay(_unblock(t.transpose(1, 3)), start, stride, n))


def _own_block(call: Call, block: tuple[Tensor, Tensor] | None) -> Part:
    """Return the local part: one group for each block of `stride` queries, with the keys of the same block."""
    q, k, v, stride, causal, start, lengths = call
    n = q.size(2)
    q, k, v = (_lay_out(t, start, stride) for t in (q, k, v))  # (B, H, G·S, D)
    if start is not None:
        assert block is not None
        slot = torch.arange(k.size(2), device=q.device)
        earlier = (slot < (start % stride)[:, None])[:, None, :, None]  # (B, 1, G·S, 1)
        k, v = (
            torch.where(earlier, F.pad(stored, (0, 0, 0, t.size(2) - stride)).to(t.dtype), t)
            for stored, t in zip(block, (k, v), strict=True)
        )
    mask = None
    if not causal:
        position = torch.arange(q.size(2), device=q.device).view(-1, stride)  # (G, S)
        valid = position < _ends(lengths, n, q.device)[:, None, None]  # (B or 1, G, S)
        itself = torch.eye(stride, dtype=torch.bool, device=q.device)
        mask = (valid[:, :, None] | itself)[:, :, None]  # (B or 1, G, 1, S, S)
    q, k, v = (_blocks(t, stride) for t in (q, k, v))
    return Part(q, k, v, mask, lambda t: _unlay(_unblock(t), start, stride, n))


def _summary(call: Call, columns: Tensor, *, other_blocks: bool) -> Part:
    """Return the distant part: one group of all queries and the keys of `call`, those in summary columns.

    A query does not see its own key, nor, with `other_blocks`, any key of its block.
    """
    q, k, v, stride, causal, start, lengths = call
    n = q.size(2)
    j = summary_positions(columns, stride, k.size(2) // columns.size(1))[:, None]  # (H or 1, 1, S)
    position = torch.arange(n, device=q.device)[None]  # (1, N)
    if start is not None:
        position = position + start[:, None]  # (B, N)
    mask = _sees_summary(position, j, stride, causal, other_blocks)  # (B or 1, H or 1, N, S)
    if not causal:
        mask = mask & (j < _ends(lengths, n, q.device)[:, None, None, None])
    q, k, v = (t[:, None] for t in (q, k.to(q.dtype), v.to(q.dtype)))  # (B, 1, H, N or S, D)
    return Part(q, k, v, mask[:, None], lambda t: t[:, 0])


def _sees_summary(i: Tensor, j: Tensor, stride: int, causal: bool, other_blocks: bool) -> Tensor:
    """Return whether the queries at `i` (B or 1, N) see the summary keys at `j` (H or 1, 1, S)."""
    i = i[:, None, :, None]  # (B or 1, 1, N, 1)
    if other_blocks:
        i, j = i // stride, j // stride
    return j < i if causal else j != i


def _itself(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Sums:
    """Return the sums over one key for each query, its own."""
    full = accumulator(q.dtype)
    score = (q.to(full) * k.to(full)).sum(-1, keepdim=True) / math.sqrt(q.size(-1))  # (B, H, N, 1)
    one = torch.ones_like(score)
    return Sums(F.dropout(one, dropout, training=dropout > 0) * v, one, score)


# ------------------------------------------------------------------------------------------------------- the softmax


def _attend(parts: Sequence[Part], dropout: float, sums: Sequence[Sums] = ()) -> Tensor:
    """Compute one softmax over the keys of all `parts` and `sums`, and return its outputs (B, H, N, D')."""
    if len(parts) == 1 and not sums:
        return parts[0].back(_fused(parts[0], dropout))
    sums = [*(_summed(part, dropout) for part in parts), *sums]
    top = reduce(torch.maximum, [s.top.detach() for s in sums])
    factors = [(s.top - top).exp() for s in sums]
    numerator = reduce(torch.add, [s.numerator * factor for s, factor in zip(sums, factors, strict=True)])
    denominator = reduce(torch.add, [s.denominator * factor for s, factor in zip(sums, factors, strict=True)])
    return (numerator / denominator).to(parts[0].v.dtype)


def _fused(part: Part, dropout: float) -> Tensor:
    """Compute attention within the groups of a single part by scaled_dot_product_attention: (B, G, H, Q, D')."""
    q, k, v = (t.flatten(0, 1) for t in part[:3])  # (B·G, H, ·, D)
    mask = part.mask
    if mask is not None:
        mask = mask.expand(*part.q.shape[:2], -1, -1, -1).flatten(0, 1)  # (B·G, H or 1, Q, K)
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=mask is None)
    return y.unflatten(0, part.q.shape[:2])  # (B, G, H, Q, D')


def _summed(part: Part, dropout: float) -> Sums:
    """Return the sums over the keys of a part.

    They are computed in place, so that the backward pass saves only the exponentials of the attention weights.
    """
    full = accumulator(part.q.dtype)
    q, k, v = (t.to(full) for t in part[:3])
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-1, -2)  # (B, G, H, Q, K)
    mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril() if part.mask is None else part.mask
    scores = scores.masked_fill_(~mask, -torch.inf)
    # Where no key is seen the maximum is −∞, and −∞ − (−∞) is not a number.
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(full).min)
    weights = scores.sub_(top).exp_()
    dropped = F.dropout(weights, dropout) if dropout else weights
    return Sums(part.back(dropped @ v), part.back(weights.sum(-1, keepdim=True)), part.back(top))


# ------------------------------------------------------------------------------------------------------ a single step


def _strided_step(
    q: Tensor, k: Tensor, v: Tensor, stride: int, local: bool, distant: bool, start: Tensor, dropout: float
) -> Tensor:
    """Compute `strided_attention` for one query a row, (B, H, 1, D), of gathered keys."""
    i = start[:, None]  # (B, 1)
    positions, seen = [], []
    if local:
        near = i - torch.arange(stride, device=q.device)  # (B, S)
        positions.append(near)
        seen.append(near >= 0)
    if distant:
        column = i % stride + stride * torch.arange(-(-k.size(2) // stride), device=q.device)  # (B, M/S)
        positions.append(column)
        seen.append(column < i if local else column <= i)
    index = torch.cat(positions, 1).clamp(0, k.size(2) - 1)[:, None]  # (B, 1, K)
    mask = torch.cat(seen, 1)[:, None, None]  # (B, 1, 1, K)
    return F.scaled_dot_product_attention(q, gather_rows(k, index), gather_rows(v, index), mask, dropout_p=dropout)


def _fixed_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stride: int,
    columns: Tensor,
    local: bool,
    distant: bool,
    start: Tensor,
    block: tuple[Tensor, Tensor] | None,
    summary: tuple[Tensor, Tensor] | None,
    dropout: float,
) -> Tensor:
    """Compute `fixed_attention` for one query a row, (B, H, 1, D), of its own key and the stored keys."""
    shape = (q.size(0), q.size(1), 1, -1)
    keys, values = [k], [v]
    seen = [torch.ones((*shape[:3], 1), dtype=torch.bool, device=q.device)]
    if local:
        assert block is not None
        keys.append(block[0])
        values.append(block[1])
        slot = torch.arange(stride, device=q.device)
        seen.append((slot < (start % stride)[:, None])[:, None, None].expand(shape))
    if distant:
        assert summary is not None
        keys.append(summary[0])
        values.append(summary[1])
        j = summary_positions(columns, stride, summary[0].size(2) // columns.size(1))[:, None]
        seen.append(_sees_summary(start[:, None], j, stride, True, local).expand(shape))
    keys, values = ([t.to(q.dtype) for t in ts] for ts in (keys, values))
    mask = torch.cat(seen, 3)  # (B, H, 1, K)
    return F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), mask, dropout_p=dropout)


# ---------------------------------------------------------------------------------------------------------- the layouts


def _lay_out(t: Tensor, start: Tensor | None, stride: int) -> Tensor:
    """Shift the entries of `t` (B, H, N, D) right by each row's `start` modulo `stride`, and pad to whole blocks.

    (B, H, N, D) -> (B, H, G · stride, D). The padding is finite, and no query of `t` sees it.
    """
    n = t.size(2)
    if start is None:
        return F.pad(t, (0, 0, 0, -n % stride))
    room = -(-(n + stride - 1) // stride) * stride
    index = torch.arange(room, device=t.device) - (start % stride)[:, None]  # (B, G·S)
    return gather_rows(t, index.clamp(0, n - 1)[:, None])


def _unlay(t: Tensor, start: Tensor | None, stride: int, n: int) -> Tensor:
    """Undo `_lay_out`: (B, H, G · stride, D) -> (B, H, N, D)."""
    if start is None:
        return t[:, :, :n]
    return gather_rows(t, (torch.arange(n, device=t.device) + (start % stride)[:, None])[:, None])


def _blocks(t: Tensor, stride: int) -> Tensor:
    """Split positions into blocks: (B, H, G · stride, D) -> (B, G, H, stride, D)."""
    return t.unflatten(2, (-1, stride)).transpose(1, 2)


def _unblock(t: Tensor) -> Tensor:
    """Join the blocks: (B, G, H, stride, D) -> (B, H, G · stride, D)."""
    return t.transpose(1, 2).flatten(2, 3)


def gather_rows(t: Tensor, index: Tensor) -> Tensor:
    """Return the entries `index` (B or 1, H or 1, K), or (H or 1, K), of `t` (B, H, M, D): (B, H, K, D)."""
    return t.gather(2, index[..., None].expand(t.size(0), t.size(1), -1, t.size(3)))


def _ends(lengths: Tensor | None, n: int, device: torch.device) -> Tensor:
    """Return the number of valid keys of each row, (B or 1,): `lengths`, or n without `lengths`."""
    return torch.full((1,), n, device=device) if lengths is None else lengths
