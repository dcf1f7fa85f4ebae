"""Gated DeltaNet: the delta rule with a decay of each head's state."""

from __future__ import annotations

from torch import Tensor, nn

from lit_effattn.attention.recurrent import GatedNorm, Gates, RecurrentAttention, decay_parameters, log_decay


class GatedDeltaNetAttention(RecurrentAttention):
    """The delta rule, and a decay α for each head and position that can clear the state at once.

        S_t = α_t S_{t−1} + β_t k_t (v_t − α_t S_{t−1}ᵀ k_t)ᵀ                                          Yang et al. 2024b
        y_t = W_o (norm(S_tᵀ q_t) ⊙ SiLU(W_z x_t)),  α = exp(−a softplus(W_α x + b))

    (arXiv 2412.06464.) q, k, v, β and the norm are those of `DeltaNetAttention`, and α is that of Mamba-2, with a and b
    learned for each head. Qwen3-Next, Qwen3.5 and OLMo Hybrid have this layer, with queries scaled by D_qk^(−½), which
    here is `norm_eps` times D_qk.

    Time, state and directions are those of `DeltaNetAttention`.

    Args:
        d_model: Width E.
        n_heads: Heads H of values. Even if not causal.
        causal: Whether a position sees only itself and earlier ones.
        beta_max: The upper bound of β, above 0 and at most 2: see `DeltaNetAttention`.
        conv_size: Positions K that the convolution reads, its own included. None: no convolution.
        qk_dim: Dimensions of a head's queries and keys. Default: E / H. The authors' models have 3 E / 4 H.
        head_dim: Dimensions of a head's values. Default: E / H. The authors' models have 3 E / 2 H.
        n_qk_heads: Heads of queries and keys, each shared by H / n_qk_heads heads of values; Qwen3-Next has H / 2.
            Default: H.
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
        self.decay_proj = nn.Linear(d_model, n_heads, bias=False)
        self.a_log, self.dt_bias = decay_parameters(n_heads, n_heads, least=0.01)  # log 0 would be −∞
        self.gate_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=False)
        self.norm = GatedNorm((self.head_dim,), norm_eps)

    def gates(self, x: Tensor) -> Gates:
        """Compute log α and β: see `RecurrentAttention.gates`."""
        return Gates(log_decay(self.decay_proj(x), self.a_log, self.dt_bias), self.beta(x))
