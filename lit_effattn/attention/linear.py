"""Linear attention: a feature map replaces softmax's exponential, so the state consists of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_effattn.attention.base import Attention
from lit_effattn.attention.feature_maps import EluFeatureMap, FeatureMap
from lit_effattn.checks import at_least
from lit_effattn.ops.linear.pytorch import (
    causal_linear_attention,
    key_sums,
    linear_attention,
    linear_attention_step,
)
from lit_effattn.sequence import accumulator, may_overwrite, valid_lengths, without_padding


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
    reaches back to the start. The state has the sums of every head of queries, H F (D + 1) numbers; F is `d_qk` / H for
    elu + 1. Feature map, sums and division are computed in float32 at least, regardless of autocast: in float16 the
    denominator overflows near N = 1024, and a running sum in bfloat16 drifts by a quarter. Causal
    attention has its own kernels, on CUDA for elu + 1, on the CPU for any feature map: see `ops.runtime.operators`.

    Args:
        feature_map: Makes φ from the dimension of a head's queries and keys: `EluFeatureMap`, `ReluFeatureMap`,
            `HedgehogFeatureMap`.
        chunk_size: Positions computed at once when causal and without kernels; no effect on the result.
    """

    takes_parts = True
    without_autocast = True
    divides_heads = True
    extra_parameters = ("feature_map",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        feature_map: Callable[[int], FeatureMap] = EluFeatureMap,
        chunk_size: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, causal, **options)
        at_least(1, chunk_size=chunk_size)
        self.feature_map = feature_map(self.qk_dim)
        self.feature_map.for_heads(n_heads)
        self.divides_heads = next(self.feature_map.parameters(), None) is None  # some have them for each head
        self.chunk_size = chunk_size

    @override
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, lengths: Tensor | None
    ) -> tuple[Tensor, LinearState | None]:
        b, _, n, _ = q.shape
        full, eps = accumulator(q.dtype), self.feature_map.eps
        if not self.causal:
            return linear_attention(*self._features(q, k, lengths), v.to(full), eps=eps).to(v.dtype), None
        if state is None:
            state = self.initial_state(b, device=q.device, dtype=full)
        s, z = state.s.to(full), state.z.to(full)
        if n == 1:
            y, s, z = linear_attention_step(
                *self._features(q, k, lengths), v.to(full), s, z, eps=eps, in_place=may_overwrite()
            )
        else:
            elu = type(self.feature_map) is EluFeatureMap  # the kernels compute it
            q, k = (q, k) if elu else self._features(q, k, lengths)
            y, s, z = causal_linear_attention(q, k, v, s, z, lengths, elu=elu, chunk_size=self.chunk_size, eps=eps)
        return y.to(v.dtype), LinearState(s, z, state.length + (n if lengths is None else lengths))

    def _features(self, q: Tensor, k: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return φ(q) and φ(k), (B, H, N, D_qk) -> (B, H, N, F), in float32 or more."""
        return self.feature_map(q.to(accumulator(q.dtype))), self._keys(k, lengths)

    def _keys(self, k: Tensor, lengths: Tensor | None) -> Tensor:
        # φ(0) is not 0, so it is φ(k) that must be masked; masking v would leave the denominator wrong.
        return without_padding(self.feature_map.keys(k.to(accumulator(k.dtype))), lengths, dim=2)

    @override
    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> LinearState:
        h, f, d = self.n_heads, self.feature_map.n_features, self.head_dim
        return LinearState(
            torch.zeros(batch_size, h, f, d, device=device, dtype=accumulator(dtype)),
            torch.zeros(batch_size, h, f, device=device, dtype=accumulator(dtype)),
            torch.zeros(batch_size, dtype=torch.long, device=device),
        )

    def summarise(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> LinearState:
        """Return the sums over keys and values: see `Attention.summarise`."""
        full = accumulator(k.dtype)
        s, z = key_sums(self._keys(k, lengths), v.to(full))
        return LinearState(s, z, valid_lengths(lengths, k, 2))

    def combine_states(self, before: LinearState, after: LinearState) -> LinearState:
        """Add the sums: see `Attention.combine_states`."""
        return LinearState(before.s + after.s, before.z + after.z, before.length + after.length)
