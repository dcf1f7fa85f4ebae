"""Linear attention: a feature map replaces softmax's exponential, so the state consists of sums."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.base import Attention
from lit_effattn.hparams import HasInitArgs
from lit_effattn.ops.linear.dispatch import elu_linear_attention, use_kernels
from lit_effattn.ops.linear.pytorch import (
    causal_linear_attention,
    key_sums,
    linear_attention,
    linear_attention_step,
    linear_attention_weights,
)
from lit_effattn.sequence import accumulator, may_overwrite, valid_positions


class FeatureMap(HasInitArgs, nn.Module, ABC):
    """Maps (…, D) queries or keys to (…, n_features) non-negative numbers.

    Args:
        head_dim: D, the dimension of a head's queries and keys.
    """

    n_features: int

    eps: float = 1e-6
    """What linear attention with this map adds to its denominators; 10⁻⁶ in the code of Katharopoulos et al. 2020."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.n_features = head_dim

    def for_heads(self, n_heads: int) -> None:
        """Make the parameters that each head has of its own: none by default. The attention calls it once."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Map queries, and keys unless `keys` is overridden: (B, H, N, D) -> (B, H, N, n_features)."""

    def keys(self, k: Tensor) -> Tensor:
        """Map keys, by default as queries."""
        phi: Tensor = self(k)
        return phi


class EluFeatureMap(FeatureMap):
    """φ(x) = elu(x) + 1 (Katharopoulos et al. 2020, equation 7)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`."""
        found: Tensor = _Elu.apply(x)
        return found


class _Elu(torch.autograd.Function):
    """elu(x) + 1, whose derivative min(φ, 1) is computed from φ alone, which attention saves anyway.

    F.elu(x) + 1 is 0 in float32 for x ≤ −17, and saves x as well.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(max=0).exp_().add_(F.relu(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return g * phi.clamp(max=1)


class ReluFeatureMap(FeatureMap):
    """φ(x) = relu(x) + floor. The floor avoids 0 / 0 for a query that has a product of 0 with every key.

    Args:
        head_dim: D.
        floor: Constant that is added.
    """

    def __init__(self, head_dim: int, floor: float = 1e-3) -> None:
        super().__init__(head_dim)
        if not 0 <= floor < math.inf:
            raise ValueError(f"floor={floor} must be at least 0, and finite: attention weights are not negative")
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`."""
        return F.relu(x) + self.floor


class HedgehogFeatureMap(FeatureMap):
    """φ(x) = [softmax(W x), softmax(−W x)], with a learned D × D matrix W per head (Hedgehog, Zhang et al. 2024).

        softmax_i(u) = exp(u_i) / Σ_j exp(u_j),  i, j = 1 … D;  n_features = 2 D

    The paper's section 4.2 has [exp(W x + b), exp(−W x − b)]. Here each half is normalised by its own sum, as in the
    authors' later code (LoLCATs, Zhang et al. 2024): features are at most 1, so no exponential overflows, and no key
    has a weight only because its norm is large. In the quotient of linear attention the normalisation of a query would
    cancel if both halves had the same sum; that of the keys is another function. b is left out.

    Queries and keys have matrices of their own. They start as the identity, with which φ(q)ᵀφ(k) is large where q and k
    have the same large elements. In a swap from softmax attention, train them first: see `tasks.transfer`.

    φ(q)ᵀφ(k) may be small: about 10⁻⁶ where q and k have norms of 30 and different large elements. Linear attention
    therefore adds less to its denominators than with other maps.

    Args:
        head_dim: D.
        eps: What is added to the denominators of linear attention: 10⁻¹² in the authors' later code.
            `WindowedLinearAttention` adds nothing, since its denominators have a softmax term.

    Raises:
        ValueError: `eps` is not positive.
    """

    def __init__(self, head_dim: int, eps: float = 1e-12) -> None:
        super().__init__(head_dim)
        if not 0 < eps < math.inf:
            raise ValueError(f"eps={eps} must be above 0, for a row without keys, and finite; 1e-12 is usual")
        self.eps = eps
        self.head_dim = head_dim
        self.n_features = 2 * head_dim

    def for_heads(self, n_heads: int) -> None:
        """Make the matrices, (H, D, D)."""
        identity = torch.eye(self.head_dim).repeat(n_heads, 1, 1)
        self.query_weight = nn.Parameter(identity)
        self.key_weight = nn.Parameter(identity.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map queries (B, H, N, D)."""
        return self._map(x, self.query_weight)

    def keys(self, k: Tensor) -> Tensor:
        """Map keys (B, H, N, D)."""
        return self._map(k, self.key_weight)

    @staticmethod
    def _map(x: Tensor, weight: Tensor) -> Tensor:
        u = x @ weight.to(x.dtype).mT  # (B, H, N, D)
        return torch.cat([u.softmax(-1), (-u).softmax(-1)], -1)  # (B, H, N, 2 D)


class LinearState(NamedTuple):
    """Sums over all positions seen, in float32 or more. The size does not depend on the number of positions."""

    s: Tensor  # (B, H, F, D), Σ φ(k) vᵀ
    z: Tensor  # (B, H, F), Σ φ(k)
    length: Tensor  # (B,)


class LinearAttention(Attention):
    """Attention with a feature map φ.

        y_i = φ(q_i)ᵀ S_i / (φ(q_i)ᵀ z_i + ε),  S_i = Σ_j φ(k_j) v_jᵀ,  z_i = Σ_j φ(k_j),  j ≤ i if causal

    Katharopoulos et al. 2020, equations 9 to 12. ε is the feature map's `eps`. Queries are not scaled by 1/√D. Time
    O(N (C + F) D) with chunks of C positions; state O(F D), constant. Splitting a stream changes nothing: the memory
    reaches back to the start. Feature map, sums and division are computed in float32 at least, regardless of autocast:
    in float16 the denominator overflows near N = 1024, and a running sum in bfloat16 drifts by a quarter. Causal
    attention has its own kernels, on CUDA for elu + 1, on the CPU for any feature map: see `ops.runtime.selection`.

    Args:
        d_model: Width E.
        n_heads: Heads H.
        causal: Whether a position sees only itself and earlier ones.
        feature_map: Makes φ from the dimension of a head's queries and keys: `EluFeatureMap`, `ReluFeatureMap`,
            `HedgehogFeatureMap`.
        chunk_size: Positions computed at once when causal and without kernels; no effect on the result.
        bias: Whether the projections have a bias.
        d_qk: Width of all heads' queries and keys together: H times the `query_dimensions` of the authors' library,
            fast-transformers. Default: E. W_q and W_k have E · d_qk weights each, and the state H F (D + 1) numbers,
            with F = d_qk / H for elu + 1.
        n_kv_heads: Heads of keys and values, each shared by H / n_kv_heads heads of queries, as in `SoftmaxAttention`,
            whose weights then fit. The state keeps the sums of every head of queries. Default: H.
        out_bias: Whether the output's projection has a bias. Default: as `bias` says.
        head_dim: Dimensions of a head, as in `SoftmaxAttention`. Default: E / H.
        qk_norm: Whether queries and keys are normalised before φ, as in `SoftmaxAttention`.
        qk_norm_eps: ε of this normalisation.
    """

    takes_parts = True
    fresh = ("feature_map",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        feature_map: Callable[[int], FeatureMap] = EluFeatureMap,
        chunk_size: int = 64,
        bias: bool = True,
        d_qk: int | None = None,
        n_kv_heads: int | None = None,
        out_bias: bool | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(
            d_model,
            n_heads,
            causal,
            bias=bias,
            d_qk=d_qk,
            n_kv_heads=n_kv_heads,
            out_bias=out_bias,
            head_dim=head_dim,
            qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps,
        )
        if chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size} is not positive; 32 to 128 are fast")
        self.feature_map = feature_map(self.qk_dim)
        self.feature_map.for_heads(n_heads)
        self.divides_heads = next(self.feature_map.parameters(), None) is None  # some have them for each head
        self.chunk_size = chunk_size

    def initial_state(
        self,
        batch_size: int,
        *,
        max_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearState:
        """Return empty sums: see `SequenceModule.initial_state`."""
        device, dtype = self.default(device, dtype)
        h, f, d = self.n_heads, self.feature_map.n_features, self.head_dim
        return LinearState(
            torch.zeros(batch_size, h, f, d, device=device, dtype=accumulator(dtype)),
            torch.zeros(batch_size, h, f, device=device, dtype=accumulator(dtype)),
            torch.zeros(batch_size, dtype=torch.long, device=device),
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, lengths: Tensor | None
    ) -> tuple[Tensor, LinearState | None]:
        """Combine queries, keys and values: see `Attention.attend`."""
        b, _, n, _ = q.shape
        full, eps = accumulator(q.dtype), self.feature_map.eps
        with torch.autocast(q.device.type, enabled=False):
            if not self.causal:
                return linear_attention(*self._features(q, k, lengths), v.to(full), eps=eps).to(v.dtype), None
            if state is None:
                state = self.initial_state(b, device=q.device, dtype=full)
            s, z = state.s.to(full), state.z.to(full)
            if n == 1:
                y, s, z = linear_attention_step(
                    *self._features(q, k, lengths), v.to(full), s, z, eps=eps, in_place=may_overwrite()
                )
            elif use_kernels(q, v, elu=type(self.feature_map) is EluFeatureMap):
                y, s, z = elu_linear_attention(q, k, v, s, z, lengths, eps=eps)
            else:
                y, s, z = causal_linear_attention(
                    *self._features(q, k, lengths), v.to(full), s, z, chunk_size=self.chunk_size, eps=eps
                )
            return y.to(v.dtype), LinearState(s, z, state.length + (n if lengths is None else lengths))

    def summarise(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> LinearState:
        """Return the sums over keys and values: see `Attention.summarise`."""
        b, _, n, _ = k.shape
        full = accumulator(k.dtype)
        with torch.autocast(k.device.type, enabled=False):
            s, z = key_sums(self._keys(k, lengths), v.to(full))
        return LinearState(s, z, torch.full((b,), n, device=k.device) if lengths is None else lengths)

    def combine_states(self, before: LinearState, after: LinearState) -> LinearState:
        """Add the sums: see `Attention.combine_states`."""
        return LinearState(before.s + after.s, before.z + after.z, before.length + after.length)

    def _features(self, q: Tensor, k: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return φ(q) and φ(k), (B, H, N, D_qk) -> (B, H, N, F), in float32 or more."""
        return self.feature_map(q.to(accumulator(q.dtype))), self._keys(k, lengths)

    def _keys(self, k: Tensor, lengths: Tensor | None) -> Tensor:
        phi = self.feature_map.keys(k.to(accumulator(k.dtype)))
        if lengths is None:
            return phi
        # φ(0) is not 0, so it is φ(k) that must be masked; masking v would leave the denominator wrong.
        return phi.masked_fill(~valid_positions(lengths, k.size(2))[:, None, :, None], 0)

    def weigh(self, q: Tensor, k: Tensor, state: LinearState | None, lengths: Tensor | None) -> Tensor:
        """Return φ(q_i)ᵀφ(k_j) / (φ(q_i)ᵀz_i + ε): see `Attention.weigh`.

        The state holds no single keys. With a state M = 1 + N: the first column is the weight of all earlier positions
        together. The rows sum to 1 but for ε.
        """
        before = None if state is None else state.z.to(q.dtype)
        features = self._features(q, k, lengths)
        return linear_attention_weights(*features, before, causal=self.causal, eps=self.feature_map.eps)
