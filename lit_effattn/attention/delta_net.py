"""DeltaNet: a key's new value replaces the value that the state has for it."""

from __future__ import annotations

from torch import Tensor, nn

from lit_effattn.attention.recurrent import GatedNorm, Gates, RecurrentAttention


class DeltaNetAttention(RecurrentAttention):
    """Linear attention with the delta rule: the state forgets what it has for a key when the key comes again.

        S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ,  y_t = W_o norm(S_tᵀ q_t)                       Yang et al. 2024a
        q, k = unit(SiLU(conv(W x))),  v = SiLU(conv(W_v x)),  β = beta_max · σ(W_β x)

    (arXiv 2406.06484.) A step of gradient descent on ½ ‖Sᵀ k_t − v_t‖² with rate β_t. `unit` is x / √(‖x‖² + 10⁻⁶),
    `conv` a causal convolution of each channel, and `norm` RMSNorm of each head. A factor I − β k kᵀ has an eigenvalue
    of 1 − β. With β in (0, 1) it is positive; with `beta_max=2` it may be negative, and the layer can count modulo 2
    (Grazzi et al. 2024, arXiv 2411.12537).

    Time O(N (C + D) D H) with chunks of C positions; state: a matrix D × D for each head, and K − 1 inputs of the
    convolution. Splitting a stream changes nothing: the memory reaches back to the start. Not causal: see
    `RecurrentAttention`.

    Args:
        d_model: Width E.
        n_heads: Heads H. Even if not causal.
        causal: Whether a position sees only itself and earlier ones.
        beta_max: The upper bound of β, above 0 and at most 2.
        conv_size: Positions K that the convolution reads, its own included. None: no convolution.
        gate: Whether the normalised outputs are multiplied by SiLU(W_z x), as in `GatedDeltaNetAttention`.
        qk_dim: Dimensions of a head's queries and keys. Default: E / H.
        head_dim: Dimensions of a head's values. Default: E / H.
        n_qk_heads: Heads of queries and keys, each shared by H / n_qk_heads heads of values. Default: H.
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
        beta_max: float = 1.0,
        conv_size: int | None = 4,
        gate: bool = False,
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
        self.norm = GatedNorm((self.head_dim,), norm_eps)
        if gate:
            self.gate_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=False)

    def gates(self, x: Tensor) -> Gates:
        """Compute β: see `RecurrentAttention.gates`."""
        return Gates(beta=self.beta(x))
