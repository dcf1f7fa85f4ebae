"""Mamba-2: a decay for each head and position, with a step that also scales the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.recurrent import GatedNorm, Gates, RecurrentAttention, decay_parameters, per_head
from lit_effattn.sequence import accumulator


class Mamba2Attention(RecurrentAttention):
    """The mixer of Mamba-2 (state space duality, SSD): a state space model that is linear attention with a decay.

        S_t = exp(−a Δ_t) S_{t−1} + Δ_t k_t v_tᵀ,  Δ = softplus(W_Δ x + b)     Dao and Gu 2024, The Mamba-2 Architecture
        y_t = W_o norm((S_tᵀ q_t + d v_t) ⊙ SiLU(W_z x_t)),  q, k, v = SiLU(conv(W x))

    (arXiv 2405.21060.) q, k and v are the paper's C, B and X. By default all heads share one q and one k (multi-value
    attention). a, b and d are learned for each head. `conv` is a causal convolution of each channel, with a bias, and
    `norm` is RMSNorm over the heads that share q and k, after the gate. In a `Transformer` the projections start as
    `nn.Linear` starts them, as in the authors' code: with 0.02 in place of 1/√(3 E), ε would be a large part of what a
    narrow layer normalises.

    Time O(N (C + D) D H) with chunks of C positions; state: a matrix D_qk × D for each head, and K − 1 inputs of the
    convolution. Splitting a stream changes nothing: the memory reaches back to the start. Not causal: see
    `RecurrentAttention`.

    Args:
        d_model: Width E.
        n_heads: Heads H of values. Even if not causal.
        causal: Whether a position sees only itself and earlier ones.
        qk_dim: Dimensions of queries and keys: the paper's state size N.
        head_dim: Dimensions D of a head's values: the paper's P. Default: 2 E / H, as in the paper.
        n_qk_heads: Heads of queries and keys, each shared by H / n_qk_heads heads of values: the paper's groups.
        conv_size: Positions K that the convolution reads, its own included. None: no convolution.
        norm_eps: ε of the norm.
        chunk_size: Positions computed at once; no effect on the result.
        bias: Whether the projections of queries, keys, values and outputs have a bias.
    """

    no_weight_decay = ("a_log", "dt_bias", "skip")
    keeps_start = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        qk_dim: int = 128,
        head_dim: int | None = None,
        n_qk_heads: int = 1,
        conv_size: int | None = 4,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        bias: bool = False,
    ) -> None:
        super().__init__(
            d_model,
            n_heads,
            causal,
            qk_dim=qk_dim,
            head_dim=per_head(d_model, n_heads, 2) if head_dim is None else head_dim,
            n_qk_heads=n_qk_heads,
            conv_size=conv_size,
            conv_bias=True,
            activated=True,
            chunk_size=chunk_size,
            bias=bias,
        )
        width = n_heads * self.head_dim
        self.decay_proj = nn.Linear(d_model, n_heads, bias=False)
        self.a_log, self.dt_bias = decay_parameters(n_heads, n_heads)
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.gate_proj = nn.Linear(d_model, width, bias=False)
        self.norm = GatedNorm((n_qk_heads, width // n_qk_heads), norm_eps, gate_first=True)

    def gates(self, x: Tensor) -> Gates:
        """Compute −a Δ and Δ: see `RecurrentAttention.gates`."""
        raw = self.decay_proj(x)  # (B, N, H)
        full = accumulator(raw.dtype)
        step = F.softplus(raw.to(full) + self.dt_bias.to(full))
        return Gates(-self.a_log.to(full).exp() * step, step=step)
