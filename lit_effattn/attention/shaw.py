"""Softmax attention with learned relative positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_effattn.attention.softmax import SoftmaxAttention
from lit_effattn.checks import at_least
from lit_effattn.ops.shaw import shaw_attention
from lit_effattn.ops.window import untiled, window_tiles
from lit_effattn.sequence import accumulator


class ShawAttention(SoftmaxAttention):
    """Softmax attention whose keys and values depend on their distance from the query.

        y_i = Σ_j α_ij (v_j + aᵛ_d),  α_ij = softmax_j(q_i · (k_j + aᵏ_d) / √D),  d = clip(j − i, −K, K),
        j ≤ i if causal                                                     Shaw et al. 2018, equations 3 and 4

    All heads share the learned vectors: 2K + 1 for keys and as many for values, or K + 1 if causal. If they are zero,
    this equals `SoftmaxAttention`. The state is that of `SoftmaxAttention`. Time O(N²) and the N × N scores in memory,
    or O(N · window); apart from the scores, memory is O(N (D + K)). Scores and sums are computed in float32 at least.
    Rotary positions are not supported: the product of a rotated query with aᵏ would depend on its position.

    Args:
        max_distance: K; larger distances are clipped to K.
        window: Number of keys a position sees, its own included; None: all. Needs `causal`. Bounds the state.
        dropout: Probability with which an attention weight is dropped in training.
        bias: Whether the projections have a bias.

    Raises:
        ValueError: If an option is out of its range.
    """

    takes_rotary = False
    has_positions = True
    without_autocast = True
    extra_parameters = ("key_table", "value_table")
    divides_heads = False  # the gradient of the tables would be a sum over processes

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        max_distance: int = 16,
        window: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(d_model, n_heads, causal, window=window, dropout=dropout, bias=bias)
        at_least(1, max_distance=max_distance)
        self.max_distance = max_distance
        rows = max_distance + 1 if causal else 2 * max_distance + 1
        self.key_table = nn.Parameter(torch.empty(rows, self.head_dim))
        self.value_table = nn.Parameter(torch.empty(rows, self.head_dim))
        nn.init.xavier_uniform_(self.key_table)
        nn.init.xavier_uniform_(self.value_table)

    def _see(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        position: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        position = torch.arange(q.size(2), device=q.device)[None] if position is None else position
        at = torch.arange(k.size(2), device=q.device)[None] if at is None else at
        distance = at[:, None] - position[..., None]  # (B or 1, N, M)
        if mask is None and self.causal:
            mask = distance[:, None] <= 0
        return self._relative(q, k, v, distance, mask)

    def _see_window(self, q: Tensor, k: Tensor, v: Tensor, past: Tensor | None, window: int) -> Tensor:
        b, _, n, _ = q.shape
        q, k, v, mask = window_tiles(q, k, v, window, past)
        r = torch.arange(q.size(2), device=q.device)[:, None]
        c = torch.arange(k.size(2), device=q.device)
        return untiled(self._relative(q, k, v, (c - r - (k.size(2) - q.size(2)))[None], mask), b, n)

    def _relative(self, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, mask: Tensor | None) -> Tensor:
        full = accumulator(q.dtype)
        table = self.value_table.to(full)
        y = shaw_attention(
            q.to(full),
            k.to(full),
            v.to(full),
            distance,
            self.key_table.to(full),
            torch.zeros_like(table) if self._weighs else table,
            max_distance=self.max_distance,
            mask=mask,
            dropout=self._dropout_now,
        )
        return y.to(v.dtype)
