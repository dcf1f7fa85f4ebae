"""Kimi Delta Attention: the delta rule with a decay of each channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_effattn.attention.recurrent import GatedNorm, Gates, RecurrentAttention, decay_parameters, log_decay


class KimiDeltaAttention(RecurrentAttention):
    """The delta rule, and a decay α for each head, channel of the keys and position.

        S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ                                         Kimi Team 2025
        y_t = W_o (norm(S_tᵀ q_t) ⊙ σ(W_z2 W_z1 x_t)),  α = exp(−a softplus(W_α2 W_α1 x + b))

    (arXiv 2510.26692.) q, k, v, β and the norm are those of `DeltaNetAttention`. The projections of α and of the gate
    have rank D, and a is learned for each head, b for each channel.

    Time, state and directions are those of `DeltaNetAttention`.

    Args:
        d_model: Width E.
        n_heads: Heads H of values. Even if not causal.
        causal: Whether a position sees only itself and earlier ones.
        beta_max: The upper bound of β, above 0 and at most 2: see `DeltaNetAttention`.
        conv_size: Positions K that the convolution reads, its own included. None: no convolution.
        qk_dim: Dimensions of a head's queries and keys. Default: E / H.
        head_dim: Dimensions D of a head's values. Default: E / H.
        n_qk_heads: Heads of queries and keys, each shared by H / n_qk_heads heads of values. Default: H.
        norm_eps: ε of the norm.
        chunk_size: Positions computed at once; no effect on the result.
        bias: Whether the projections of queries, keys, values and outputs have a bias.
    """

    no_weight_decay = ("a_log", "dt_bias")

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        beta_max: float = 1.0,
        conv_size: int | None = 4,
        qk_dim: int | None = None,
        head_dim: int | None = None,
        n_qk_heads: int | None = None,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        bias: bool = False,
    ) -> None:
        super().__init__(
            d_model,
            n_heads,
            causal,
            qk_dim=qk_dim,
            head_dim=head_dim,
            n_qk_heads=n_qk_heads,
            conv_size=conv_size,
            activated=True,
            beta_max=beta_max,
            chunk_size=chunk_size,
            bias=bias,
        )
        rank, d_v, d_qk = self.head_dim, n_heads * self.head_dim, n_heads * self.qk_dim
        self.decay_proj = _of_rank(rank, d_model, d_qk)
        self.a_log, self.dt_bias = decay_parameters(n_heads, d_qk)
        self.gate_proj = _of_rank(rank, d_model, d_v)
        self.norm = GatedNorm((self.head_dim,), norm_eps, activation=torch.sigmoid)

    def gates(self, x: Tensor) -> Gates:
        """Compute log α of each channel and β: see `RecurrentAttention.gates`."""
        raw = self.decay_proj(x).unflatten(2, (self.n_heads, -1))  # (B, N, H, D_qk)
        return Gates(log_decay(raw, self.a_log, self.dt_bias), self.beta(x))


def _of_rank(rank: int, d_in: int, d_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False))
