"""Retention: linear attention with rotary positions and a fixed decay of each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.attention.recurrent import GatedNorm, Gates, RecurrentAttention, per_head


class RetentionAttention(RecurrentAttention):
    """Linear attention without feature map and denominator, with rotary positions and a fixed decay γ for each head.

        S_t = γ S_{t−1} + k_t v_tᵀ,  γ_h = 1 − 2^(−5−h),  h = 0 … H − 1     Sun et al. 2023, Gated Multi-Scale Retention
        q_t, k_t = R_t W_q x_t, R_t W_k x_t / √D_qk
        y_t = W_o (norm(S_tᵀ q_t) ⊙ SiLU(W_z x_t))

    (arXiv 2307.08621.) R_t is the rotation of `RotaryPositions`; with the decay it is the paper's xPos. `norm` is
    GroupNorm with a group for each head, without gain, which W_o takes in. The authors' later code has RMSNorm, and
    rotates neighbouring dimensions by angles that are spaced otherwise. The paper's normalisations of the scores change
    nothing but the weight of ε, and are left out.

    Time O(N (C + D) D H) with chunks of C positions; state: a matrix D_qk × D for each head. Splitting a stream changes
    nothing: the memory reaches back to the start. Not causal: see `RecurrentAttention`.

    Args:
        d_model: Width E.
        n_heads: Heads H. Even if not causal.
        causal: Whether a position sees only itself and earlier ones.
        qk_dim: Dimensions of a head's queries and keys, at least 2. Default: E / H.
        head_dim: Dimensions D of a head's values. Default: 2 E / H, as in the paper.
        norm_eps: ε of the norm.
        chunk_size: Positions computed at once; no effect on the result.
        bias: Whether the projections of queries, keys, values and outputs have a bias.
    """

    decay: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        qk_dim: int | None = None,
        head_dim: int | None = None,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        bias: bool = False,
    ) -> None:
        super().__init__(
            d_model,
            n_heads,
            causal,
            qk_dim=max(2, per_head(d_model, n_heads)) if qk_dim is None else qk_dim,
            head_dim=per_head(d_model, n_heads, 2) if head_dim is None else head_dim,
            chunk_size=chunk_size,
            bias=bias,
        )
        self.rotary = RotaryPositions(self.qk_dim)
        self.gate_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=False)
        self.norm = GatedNorm((self.head_dim,), norm_eps, gain=False, centred=True)
        gamma = 1 - 2.0 ** (-5 - torch.arange(n_heads, dtype=torch.float64))
        self.register_buffer("decay", gamma.log(), persistent=False)  # (H,)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scale the keys: see `RecurrentAttention.features`."""
        return q, k * self.qk_dim**-0.5

    def gates(self, x: Tensor) -> Gates:
        """Return log γ: see `RecurrentAttention.gates`."""
        return Gates(self.decay)
