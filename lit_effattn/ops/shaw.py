"""Softmax attention with a learned vector for every distance (Shaw et al. 2018, equations 3 and 4)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def shaw_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance: Tensor,
    key_table: Tensor,
    value_table: Tensor,
    *,
    max_distance: int,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention with learned vectors for distances added to keys and values.

        out_i = Σ_j α_ij (v_j + aᵛ_d),  α_ij = softmax_j(q_i · (k_j + aᵏ_d) / √D),  d = clip(distance_ij, −K, K)

    There are few distances, so a query's product with each is computed once and looked up, and its weights are summed
    per distance before the product with the vectors: time O(N M D), memory O(N (M + R)), never N × M × D.

    Args:
        q: (B, H, N, D).
        k: (B, H, M, D).
        v: (B, H, M, D).
        distance: (B or 1, N, M) integers, position of the key minus position of the query.
        key_table: (R, D), aᵏ for the distances from −K on: R = 2K + 1, or K + 1 where no seen key is ahead.
        value_table: (R, D), aᵛ.
        max_distance: K.
        mask: (B or 1, 1, N or 1, M), True where a key is seen, at least one for each query; None: all are.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        (B, H, N, D).
    """
    index = distance.clamp(-max_distance, len(key_table) - 1 - max_distance) + max_distance  # rows of the tables
    index = index[:, None].expand(*q.shape[:3], -1)  # (B, H, N, M)
    q = q / math.sqrt(q.size(-1))
    by_distance = q @ key_table.T  # (B, H, N, R)
    # In place, to avoid a copy of N × M numbers; no gradient needs the previous values.
    scores = (q @ k.transpose(-1, -2)).add_(by_distance.gather(-1, index))
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    of_distance = scores.new_zeros(*q.shape[:3], len(key_table)).scatter_add(-1, index, weights)  # (B, H, N, R)
    return weights @ v + of_distance @ value_table
