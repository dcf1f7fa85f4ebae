"""Gated linear attention: a decay for each channel of the keys, computed from the input."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.recurrent import GatedNorm, Gates, RecurrentAttention, per_head
from lit_effattn.checks import at_least
from lit_effattn.sequence import accumulator


class GatedLinearAttention(RecurrentAttention):
    """Linear attention without feature map and denominator, with a decay α for each channel and position.

        S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ,  α_t = σ(W_α2 W_α1 x_t + b_α)^(1/τ)                         Yang et al. 2023
        y_t = W_o (norm(S_tᵀ q_t) ⊙ SiLU(W_z x_t + b_z))

    (arXiv 2312.06635.) `norm` is LayerNorm of each head, without gain, which W_o takes in. W_α1 has `gate_rank` rows.

    Time O(N (C + D) D H) with chunks of C positions; state: a matrix D_qk × D for each head. Splitting a stream changes
    nothing: the memory reaches back to the start. Not causal: see `RecurrentAttention`.

    Args:
        d_model: Width E.
        n_heads: Heads H. Even if not causal.
        causal: Whether a position sees only itself and earlier ones.
        tau: τ. Larger: slower decays.
        gate_rank: Rank of the decay's projection.
        conv_size: Positions K of a causal convolution of queries, keys and values, followed by SiLU, as in the kinds
            with a delta rule. None: none, as in the paper.
        qk_dim: Dimensions of a head's queries and keys. Default: E / 2 H, as in the paper.
        head_dim: Dimensions D of a head's values. Default: E / H.
        norm_eps: ε of the norm.
        chunk_size: Positions computed at once; no effect on the result.
        bias: Whether the projections of queries, keys, values and outputs have a bias.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        tau: float = 16.0,
        gate_rank: int = 16,
        conv_size: int | None = None,
        qk_dim: int | None = None,
        head_dim: int | None = None,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        bias: bool = False,
    ) -> None:
        at_least(1, gate_rank=gate_rank)
        if not 0 < tau < math.inf:
            raise ValueError(f"tau={tau} must be above 0, and finite; 16 is usual")
        super().__init__(
            d_model,
            n_heads,
            causal,
            qk_dim=per_head(d_model, n_heads, 0.5) if qk_dim is None else qk_dim,
            head_dim=head_dim,
            conv_size=conv_size,
            activated=conv_size is not None,
            chunk_size=chunk_size,
            bias=bias,
        )
        self.tau = tau
        self.decay_proj = nn.Sequential(
            nn.Linear(d_model, gate_rank, bias=False), nn.Linear(gate_rank, n_heads * self.qk_dim)
        )
        self.gate_proj = nn.Linear(d_model, n_heads * self.head_dim)
        self.norm = GatedNorm((self.head_dim,), norm_eps, gain=False, centred=True)

    def gates(self, x: Tensor) -> Gates:
        """Compute log α of each channel: see `RecurrentAttention.gates`."""
        raw = self.decay_proj(x).unflatten(2, (self.n_heads, -1))  # (B, N, H, D_qk)
        return Gates(F.logsigmoid(raw.to(accumulator(raw.dtype))) / self.tau)
