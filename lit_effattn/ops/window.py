"""Softmax attention to the last few positions, at a cost linear in the window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, past: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute attention to the `window` newest keys, a query's own included: i − window < j ≤ i for query i, key j.

    Blocks of `window` queries attend to their own block of keys and the one before, so time and memory are
    O(N · window), not O(N²).

    Args:
        q: (B, H, N, D).
        k: (B, H, M + N, D): the keys of the M positions before the first query, then its own. There may be
            fewer heads than queries have; consecutive heads of queries then share one.
        v: (B, H, M + N, D).
        window: Number of keys that a query sees, at least 1. M is at most window − 1.
        past: (B,), number of valid earlier positions, the last of the M; None: all M.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        (B, H, N, D).
    """
    b, h, n, _ = q.shape
    q, k, v, mask = window_tiles(q, k, v, window, past)
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, enable_gqa=k.size(1) != h)
    return untiled(y, b, n)


def window_tiles(
    q: Tensor, k: Tensor, v: Tensor, window: int, past: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut the inputs of `windowed_attention` into blocks of S = min(window, N) queries, each with dense attention.

    Returns:
        Queries (B·⌈N/S⌉, H, S, D), keys and values (B·⌈N/S⌉, H, S + R, D), and which of these the queries see,
        (B·⌈N/S⌉, 1, S, S + R), with R = window − 1, or less if there are fewer keys. Query r and key c of a block are
        r + R − c positions apart.
    """
    b, _, n, _ = q.shape
    m = k.size(2) - n
    size = min(window, n)  # queries in a block
    reach = min(window, m + n) - 1  # keys before a block that its queries can see
    blocks = -(-n // size)

    right = blocks * size - n
    q = F.pad(q, (0, 0, 0, right)).unflatten(2, (blocks, size))  # (B, H, N/S, S, D)
    k, v = (
        F.pad(t, (0, 0, reach - m, right)).unfold(2, size + reach, size).transpose(-1, -2) for t in (k, v)
    )  # (B, H, N/S, S + reach, D)
    r = torch.arange(size, device=q.device)[:, None]
    c = torch.arange(size + reach, device=q.device)
    seen = (c >= r) & (c <= r + reach)  # (S, S + reach)

    # Index c of block i is position i·S + c − reach; those before the first are there only as far as `past` says.
    position = torch.arange(blocks, device=q.device)[:, None] * size + c - reach  # (N/S, S + reach)
    first = -m if past is None else -past[:, None, None]
    valid = (position >= first).expand(1 if past is None else b, blocks, -1)
    mask = (seen & valid[:, :, None]).expand(b, -1, -1, -1)  # (B, N/S, S, S + reach)

    # Blocks go to the batch: (B, H, N/S, S, D) -> (B·N/S, H, S, D)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    return q, k, v, mask.flatten(0, 1)[:, None]


def untiled(y: Tensor, b: int, n: int) -> Tensor:
    """Put blocks together again: (B·⌈N/S⌉, H, S, D) -> (B, H, N, D)."""
    return y.unflatten(0, (b, -1)).transpose(1, 2).flatten(2, 3)[:, :, :n]


def slices(t: Tensor, bounds: Sequence[tuple[int, int]], dim: int) -> tuple[Tensor, ...]:
    """Return `t`'s slice from low to high − 1 along `dim` for each (low, high) of `bounds`; they may overlap.

    The views are the same as by indexing, whose backward pass writes a gradient as large as `t` for every slice:
    O(N² / C) for N / C slices. Here the gradients are added into one, in time O(sum of the slices).
    """
    return _Slices.apply(t, tuple(bounds), dim)


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, bounds: tuple[tuple[int, int], ...], dim: int) -> tuple[Tensor, ...]:
        ctx.shape, ctx.bounds, ctx.dim = t.shape, bounds, dim
        return tuple(t.narrow(dim, low, high - low) for low, high in bounds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].new_zeros(ctx.shape)
        for (low, high), grad in zip(ctx.bounds, grads, strict=True):
            total.narrow(ctx.dim, low, high - low).add_(grad)
        return total, None, None
