"""Softmax attention within a window and linear attention before it, with one denominator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.attention.base import Attention
from lit_effattn.attention.feature_maps import FeatureMap, HedgehogFeatureMap
from lit_effattn.attention.kv_cache import newest, newest_of_both
from lit_effattn.checks import at_least
from lit_effattn.ops.linear.pytorch import key_sums
from lit_effattn.ops.windowed_linear import windowed_linear_attention
from lit_effattn.sequence import accumulator, valid_lengths

_GAMMA = 0.1
"""γ at the start, as in the authors' code."""


class WindowedLinearState(NamedTuple):
    """The newest window − 1 keys and values, the newest last, and the sums over all before them in float32 or more."""

    keys: Tensor  # (B, H_kv, window − 1, D)
    values: Tensor  # (B, H_kv, window − 1, D)
    s: Tensor  # (B, H, F, D), Σ φ(k) vᵀ
    z: Tensor  # (B, H, F), Σ φ(k)
    length: Tensor  # (B,), positions seen in all


class WindowedLinearAttention(Attention):
    """Softmax terms for the w newest positions and linear terms for all before, in one quotient (LoLCATs).

        y_i = (Σ_{i−w<j≤i} γ e_ij v_j + Σ_{j≤i−w} φ(q_i)ᵀφ(k_j) v_j) / (Σ_{i−w<j≤i} γ e_ij + Σ_{j≤i−w} φ(q_i)ᵀφ(k_j))

        e_ij = exp(q_i·k_j / √D − c_i),  c_i = max_{i−w<j≤i} q_i·k_j / √D             Zhang et al. 2024, section 3.3

    (arXiv 2410.10254.) c_i does not cancel: the largest softmax term is γ. γ = σ(`mixing`) is learned, one number per
    head, and 0.1 at the start, as in the authors' code. Up to w positions this is softmax attention. Projections are
    those of `SoftmaxAttention`, so a trained model can continue with this kind; first train φ and γ to give its
    outputs (`fit --transfer_from`).

    Time O(N (w + C + F) D); state: w − 1 keys and values of H_kv heads and the sums of H heads, constant. Splitting a
    stream changes nothing: the memory reaches back to the start. Scores, features, sums and the division are computed
    in float32 at least.

    Args:
        causal: Must be True.
        window: w, how many positions have softmax terms, a position's own included.
        feature_map: Makes φ from the dimension of a head's queries and keys.
        chunk_size: Positions of the linear terms computed at once; no effect on the result.

    Raises:
        ValueError: If `causal` is False, or `window` is not positive.
    """

    takes_groups = True
    takes_parts = True
    without_autocast = True
    extra_parameters = ("feature_map", "mixing")
    no_weight_decay = ("mixing",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        window: int = 64,
        feature_map: Callable[[int], FeatureMap] = HedgehogFeatureMap,
        chunk_size: int = 64,
        **options: Any,
    ) -> None:
        if not causal:
            raise ValueError(
                "causal=False: WindowedLinearAttention sees the past, in and before a window; set causal=True"
            )
        at_least(1, window=window, chunk_size=chunk_size)
        super().__init__(d_model, n_heads, causal, d_qk=None, **options)
        self.window = window
        self.chunk_size = chunk_size
        self.feature_map = feature_map(self.head_dim)
        self.feature_map.for_heads(n_heads)
        self.mixing = nn.Parameter(torch.full((n_heads,), math.log(_GAMMA / (1 - _GAMMA))))

    @override
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: WindowedLinearState | None, lengths: Tensor | None
    ) -> tuple[Tensor, WindowedLinearState]:
        b, _, n, _ = q.shape
        m, full = self.window - 1, accumulator(q.dtype)
        if state is None:
            state = self.initial_state(b, device=q.device, dtype=k.dtype)
        seen = valid_lengths(lengths, q, 2)
        k = torch.cat([state.keys.to(k.dtype), k], 2)  # (B, H_kv, M + N, D)
        v = torch.cat([state.values.to(v.dtype), v], 2)
        past = state.length.clamp(max=m)
        queries, keys, values = q.to(full), self._for_all_heads(k).to(full), self._for_all_heads(v).to(full)
        y, s, z = windowed_linear_attention(
            queries,
            keys,
            values,
            self.feature_map(queries),
            self._leaving(keys[:, :, :n], past, seen),
            state.s.to(full),
            state.z.to(full),
            self._gamma(full),
            self.window,
            past=past,
            chunk_size=self.chunk_size,
        )
        stored = state.keys.dtype
        held_keys, held_values = (newest(t, seen + m, m, dim=2).to(stored) for t in (k, v))
        return y.to(v.dtype), WindowedLinearState(held_keys, held_values, s, z, state.length + seen)

    def _leaving(self, keys: Tensor, past: Tensor, seen: Tensor) -> Tensor:
        """Return φ of the first N of the cached and new keys, (B, H, N, D), 0 for those that stay in the window.

        The last `past` (B,) of the cached keys are valid. In a row with `seen` (B,) new positions the first `seen`
        slots leave the window, valid or not.
        """
        leaves = self._leaves(keys.size(2), past, seen)  # (B, N)
        return self.feature_map.keys(keys).masked_fill(~leaves[:, None, :, None], 0)

    def _leaves(self, n: int, past: Tensor, seen: Tensor) -> Tensor:
        """Return which of the first `n` slots exist and leave the window, (B, n): see `_leaving`."""
        slot = torch.arange(n, device=past.device)  # (N,)
        return (slot >= self.window - 1 - past[:, None]) & (slot < seen[:, None])

    def _gamma(self, dtype: torch.dtype) -> Tensor:
        return self.mixing.to(dtype).sigmoid()

    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> WindowedLinearState:
        """Return an empty window and empty sums: see `SequenceModule.initial_state`."""
        cache = batch_size, self.n_kv_heads, self.window - 1, self.head_dim
        sums = batch_size, self.n_heads, self.feature_map.n_features, self.head_dim
        full = accumulator(dtype)
        return WindowedLinearState(
            torch.zeros(cache, device=device, dtype=dtype),
            torch.zeros(cache, device=device, dtype=dtype),
            torch.zeros(sums, device=device, dtype=full),
            torch.zeros(sums[:3], device=device, dtype=full),
            torch.zeros(batch_size, dtype=torch.long, device=device),
        )

    def summarise(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> WindowedLinearState:
        """Return the newest keys and values, and the sums over those before them: see `Attention.summarise`."""
        m, n = self.window - 1, k.size(2)
        seen = valid_lengths(lengths, k, 2)
        before = max(n - m, 0)  # only these can have left the window
        slot = torch.arange(before, device=k.device)
        s, z = self._sums(k[:, :, :before], v[:, :, :before], slot < seen[:, None] - m)
        keys, values = (newest(t, seen, m, dim=2) for t in (k, v))
        return WindowedLinearState(keys, values, s, z, seen)

    def combine_states(self, before: WindowedLinearState, after: WindowedLinearState) -> WindowedLinearState:
        """Keep the newest of both, and add sums and the terms that leave: see `Attention.combine_states`."""
        past = before.length.clamp(max=self.window - 1)
        s, z = self._sums(before.keys, before.values, self._leaves(before.keys.size(2), past, after.length))
        return WindowedLinearState(
            newest_of_both(before.keys, after.keys, after.length, dim=2),
            newest_of_both(before.values, after.values, after.length, dim=2),
            before.s + after.s + s,
            before.z + after.z + z,
            before.length + after.length,
        )

    def _sums(self, k: Tensor, v: Tensor, leaves: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over the keys and values (B, H_kv, M, D) where `leaves` (B, M) is True."""
        full = accumulator(k.dtype)
        phi = self.feature_map.keys(self._for_all_heads(k).to(full)).masked_fill(~leaves[:, None, :, None], 0)
        return key_sums(phi, self._for_all_heads(v).to(full))

    def unit_values(self, state: WindowedLinearState) -> dict[str, Tensor]:
        """Return units for the sums in the first column, and for the window in those after it."""
        m = self.window - 1
        window = torch.eye(m, dtype=torch.bool, device=state.z.device)
        return {"s": F.pad(state.z[..., None], (0, m)), "values": F.pad(window, (1, 0))}
