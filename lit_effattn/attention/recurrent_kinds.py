"""The kinds with a recurrent state: retention, gated linear attention, Mamba-2, DeltaNet, Gated DeltaNet, Kimi Delta.

Each computes the gates of the recurrence in `RecurrentAttention`. Definitions: `retention_attention` to
`delta_net_attention` in `reference.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.attention.recurrent import (
    GatedNorm,
    Gates,
    RecurrentAttention,
    decay_parameters,
    log_decay,
    per_head,
    step_sizes,
    unit_length,
)
from lit_effattn.checks import at_least, positive
from lit_effattn.sequence import accumulator


class RetentionAttention(RecurrentAttention):
    """Linear attention with rotary positions and a fixed decay γ for each head.

        S_t = γ S_{t−1} + k_t v_tᵀ,  γ_h = 1 − 2^(−5−h),  h = 0 … H − 1     Sun et al. 2023, Gated Multi-Scale Retention
        q_t, k_t = R_t W_q x_t, R_t W_k x_t / √D_qk
        y_t = W_o (norm(S_tᵀ q_t) ⊙ SiLU(W_z x_t))

    (arXiv 2307.08621.) There is no feature map and no denominator. R_t is the rotation of `RotaryPositions`; with the
    decay it is the paper's xPos. `norm` is GroupNorm with a group for each head, without gain, which W_o takes in. The
    authors' later code has RMSNorm, and rotates neighbouring dimensions by angles that are spaced otherwise. The
    paper's normalisations of the scores change only the weight of ε, and are left out.

    Args:
        qk_dim: Dimensions of a head's queries and keys, at least 2. Default: E / H.
        head_dim: Dimensions D of a head's values. Default: 2 E / H, as in the paper.
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
        **options: Any,
    ) -> None:
        qk_dim = max(2, per_head(d_model, n_heads)) if qk_dim is None else qk_dim
        head_dim = per_head(d_model, n_heads, 2) if head_dim is None else head_dim
        super().__init__(
            d_model, n_heads, causal, qk_dim=qk_dim, head_dim=head_dim, n_qk_heads=None, conv_size=None, **options
        )
        self.rotary = RotaryPositions(qk_dim)
        self.gate_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.norm = GatedNorm((head_dim,), self.norm.eps, gain=False, centred=True)
        gamma = 1 - 2.0 ** (-5 - torch.arange(n_heads, dtype=torch.float64))
        self.register_buffer("decay", gamma.log(), persistent=False)  # (H,)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scale the keys by 1 / √D_qk."""
        return q, k * self.qk_dim**-0.5

    def gates(self, x: Tensor) -> Gates:
        """Return log γ."""
        return Gates(self.decay)


class GatedLinearAttention(RecurrentAttention):
    """Linear attention with a decay α for each channel of the keys and each position.

        S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ,  α_t = σ(W_α2 W_α1 x_t + b_α)^(1/τ)                         Yang et al. 2023
        y_t = W_o (norm(S_tᵀ q_t) ⊙ SiLU(W_z x_t + b_z))

    (arXiv 2312.06635.) There is no feature map and no denominator. `norm` is LayerNorm of each head, without gain,
    which W_o takes in.

    Args:
        tau: τ. Larger: slower decays.
        gate_rank: Rank of the decay's projection: W_α1 has as many rows.
        conv_size: Positions K of a causal convolution of queries, keys and values, followed by SiLU, as in the kinds
            with a delta rule. None: none, as in the paper.
        qk_dim: Dimensions of a head's queries and keys. Default: E / 2 H, as in the paper.
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
        **options: Any,
    ) -> None:
        at_least(1, gate_rank=gate_rank)
        positive(tau=tau)
        qk_dim = per_head(d_model, n_heads, 0.5) if qk_dim is None else qk_dim
        super().__init__(d_model, n_heads, causal, qk_dim=qk_dim, n_qk_heads=None, conv_size=conv_size, **options)
        self.activated = conv_size is not None
        self.tau = tau
        of_rank = nn.Linear(d_model, gate_rank, bias=False)
        self.decay_proj = nn.Sequential(of_rank, nn.Linear(gate_rank, n_heads * qk_dim))
        self.gate_proj = nn.Linear(d_model, n_heads * self.head_dim)
        self.norm = GatedNorm((self.head_dim,), self.norm.eps, gain=False, centred=True)

    def gates(self, x: Tensor) -> Gates:
        """Compute log α of each channel."""
        raw = self.decay_proj(x).unflatten(2, (self.n_heads, -1))  # (B, N, H, D_qk)
        return Gates(F.logsigmoid(raw.to(accumulator(raw.dtype))) / self.tau)


class Mamba2Attention(RecurrentAttention):
    """The mixer of Mamba-2 (state space duality, SSD): a state space model that is linear attention with a decay.

        S_t = exp(−a Δ_t) S_{t−1} + Δ_t k_t v_tᵀ,  Δ = softplus(W_Δ x + b)     Dao and Gu 2024, The Mamba-2 Architecture
        y_t = W_o norm((S_tᵀ q_t + d v_t) ⊙ SiLU(W_z x_t)),  q, k, v = SiLU(conv(W x))

    (arXiv 2405.21060.) q, k and v are the paper's C, B and X. By default all heads share one q and one k (multi-value
    attention). a, b and d are learned for each head. The convolution has a bias, and `norm` is RMSNorm over the heads
    that share q and k, after the gate. In a `Transformer` the projections start as `nn.Linear` starts them, as in the
    authors' code: with 0.02 in place of 1/√(3 E), ε would be a large part of what a narrow layer normalises.

    Args:
        qk_dim: Dimensions of queries and keys: the paper's state size N.
        head_dim: Dimensions D of a head's values: the paper's P. Default: 2 E / H, as in the paper.
        n_qk_heads: Heads of queries and keys, each shared by H / n_qk_heads heads of values: the paper's groups.
        conv_size: Positions K that the convolution reads, its own included. None: no convolution.
    """

    activated = True
    conv_bias = True
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
        **options: Any,
    ) -> None:
        head_dim = per_head(d_model, n_heads, 2) if head_dim is None else head_dim
        super().__init__(
            d_model,
            n_heads,
            causal,
            qk_dim=qk_dim,
            head_dim=head_dim,
            n_qk_heads=n_qk_heads,
            conv_size=conv_size,
            **options,
        )
        width = n_heads * head_dim
        self.decay_proj = nn.Linear(d_model, n_heads, bias=False)
        self.a_log, self.dt_bias = decay_parameters(n_heads, n_heads)
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.gate_proj = nn.Linear(d_model, width, bias=False)
        self.norm = GatedNorm((n_qk_heads, width // n_qk_heads), self.norm.eps, gate_first=True)

    def gates(self, x: Tensor) -> Gates:
        """Compute −a Δ and Δ."""
        step = step_sizes(self.decay_proj(x), self.dt_bias)  # (B, N, H)
        return Gates(-self.a_log.to(step.dtype).exp() * step, step=step)


class _DeltaRule(RecurrentAttention):
    """The kinds with the delta rule: β, and queries and keys of unit length.

    Args:
        beta_max: The upper bound of β, above 0 and at most 2: see `DeltaNetAttention`.
        conv_size: Positions K that the convolution reads, its own included. None: no convolution.
    """

    activated = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        beta_max: float = 1.0,
        conv_size: int | None = 4,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, causal, conv_size=conv_size, **options)
        if not 0 < beta_max <= 2:
            raise ValueError(
                f"beta_max={beta_max} must be above 0 and at most 2: beyond, the state grows without bound"
            )
        self.beta_max = beta_max
        self.beta_proj = nn.Linear(d_model, n_heads, bias=False)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Divide queries and keys by their length."""
        return unit_length(q), unit_length(k)

    def beta(self, x: Tensor) -> Tensor:
        """Return β of `x` (B, N, E), (B, N, H)."""
        raw = self.beta_proj(x)
        return self.beta_max * raw.to(accumulator(raw.dtype)).sigmoid()


class DeltaNetAttention(_DeltaRule):
    """Linear attention with the delta rule: the state forgets what it has for a key when the key comes again.

        S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ,  y_t = W_o norm(S_tᵀ q_t)                       Yang et al. 2024a
        q, k = unit(SiLU(conv(W x))),  v = SiLU(conv(W_v x)),  β = beta_max · σ(W_β x)

    (arXiv 2406.06484.) A step of gradient descent on ½ ‖Sᵀ k_t − v_t‖² with rate β_t. `unit` is x / √(‖x‖² + 10⁻⁶),
    and `norm` RMSNorm of each head. A factor I − β k kᵀ has an eigenvalue of 1 − β. With β in (0, 1) it is positive;
    with `beta_max=2` it may be negative, and the layer can count modulo 2 (Grazzi et al. 2024, arXiv 2411.12537).

    Args:
        gate: Whether the normalised outputs are multiplied by SiLU(W_z x), as in `GatedDeltaNetAttention`.
    """

    def __init__(self, d_model: int, n_heads: int, causal: bool = True, *, gate: bool = False, **options: Any) -> None:
        super().__init__(d_model, n_heads, causal, **options)
        if gate:
            self.gate_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=False)

    def gates(self, x: Tensor) -> Gates:
        """Compute β."""
        return Gates(beta=self.beta(x))


class GatedDeltaNetAttention(_DeltaRule):
    """The delta rule, and a decay α for each head and position that can clear the state at once.

        S_t = α_t S_{t−1} + β_t k_t (v_t − α_t S_{t−1}ᵀ k_t)ᵀ                                          Yang et al. 2024b
        y_t = W_o (norm(S_tᵀ q_t) ⊙ SiLU(W_z x_t)),  α = exp(−a softplus(W_α x + b))

    (arXiv 2412.06464.) q, k, v, β and the norm are those of `DeltaNetAttention`, and α is that of Mamba-2, with a and b
    learned for each head. Qwen3-Next, Qwen3.5 and OLMo Hybrid have this layer, with queries scaled by D_qk^(−½), which
    here is `norm_eps` times D_qk. Their `qk_dim` is 3 E / 4 H, their `head_dim` 3 E / 2 H, and Qwen3-Next's
    `n_qk_heads` H / 2.
    """

    no_weight_decay = ("a_log", "dt_bias")

    def __init__(self, d_model: int, n_heads: int, causal: bool = True, **options: Any) -> None:
        super().__init__(d_model, n_heads, causal, **options)
        self.decay_proj = nn.Linear(d_model, n_heads, bias=False)
        self.a_log, self.dt_bias = decay_parameters(n_heads, n_heads, least=0.01)  # log 0 would be −∞
        self.gate_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=False)

    def gates(self, x: Tensor) -> Gates:
        """Compute log α and β."""
        return Gates(log_decay(self.decay_proj(x), self.a_log, self.dt_bias), self.beta(x))


class KimiDeltaAttention(_DeltaRule):
    """The delta rule, and a decay α for each head, channel of the keys and position.

        S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ                                         Kimi Team 2025
        y_t = W_o (norm(S_tᵀ q_t) ⊙ σ(W_z2 W_z1 x_t)),  α = exp(−a softplus(W_α2 W_α1 x + b))

    (arXiv 2510.26692.) q, k, v, β and the norm are those of `DeltaNetAttention`. The projections of α and of the gate
    have rank D, and a is learned for each head, b for each channel.
    """

    no_weight_decay = ("a_log", "dt_bias")

    def __init__(self, d_model: int, n_heads: int, causal: bool = True, **options: Any) -> None:
        super().__init__(d_model, n_heads, causal, **options)
        d_qk, d_v = n_heads * self.qk_dim, n_heads * self.head_dim
        self.decay_proj = _of_rank(self.head_dim, d_model, d_qk)
        self.a_log, self.dt_bias = decay_parameters(n_heads, d_qk)
        self.gate_proj = _of_rank(self.head_dim, d_model, d_v)
        self.norm = GatedNorm((self.head_dim,), self.norm.eps, activation=torch.sigmoid)

    def gates(self, x: Tensor) -> Gates:
        """Compute log α of each channel and β."""
        raw = self.decay_proj(x).unflatten(2, (self.n_heads, -1))  # (B, N, H, D_qk)
        return Gates(log_decay(raw, self.a_log, self.dt_bias), self.beta(x))


def _of_rank(rank: int, d_in: int, d_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False))
