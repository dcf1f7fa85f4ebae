"""Softmax attention, with all keys or a window of the newest."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_effattn.attention.base import Attention
from lit_effattn.attention.kv_cache import (
    Cache,
    FixedCache,
    append,
    attend_window,
    check_room,
    in_slots,
    latest,
    newer_of_both,
    slots_used,
    write_one,
)
from lit_effattn.checks import at_least, probabilities
from lit_effattn.ops.dot_product import dot_product_attention, in_groups_of_queries
from lit_effattn.ops.window import windowed_attention
from lit_effattn.sequence import reads_values, valid_lengths, valid_positions


class SoftmaxAttention(Attention):
    """Scaled dot-product attention.

        y_i = Σ_j softmax_j(q_i · k_j / √D) v_j,  j ≤ i if causal               Vaswani et al. 2017, equation 1

    Time O(N²), or O(N · window); state: all keys and values, or the newest `window`. It calls
    `torch.nn.functional.scaled_dot_product_attention`, so memory is O(N) wherever a fused kernel applies. With a
    `window`, splitting a stream changes nothing: every position sees the `window` newest, itself included. If the state
    is made with `max_len` and donated, one more position costs only its attention; otherwise the state is also copied.
    With `n_kv_heads` the state is smaller by H / H_kv. With `d_qk` D in √D is d_qk / H, and some devices have no fused
    kernel.

    Args:
        window: Number of keys a position sees, its own included; None: all. Needs `causal`. Bounds the state.
        dropout: Probability with which an attention weight is dropped in training.
    """

    takes_groups = True
    takes_parts = True
    divides_heads = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        window: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, causal, **options)
        at_least(1, window=window)
        probabilities(dropout=dropout)
        if window is not None and not causal:
            raise ValueError(f"window={window} needs causal=True; leave it out if causal=False")
        self.window = window
        self.dropout = dropout

    @override
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Cache | None, lengths: Tensor | None
    ) -> tuple[Tensor, Cache | None]:
        n, seen = q.size(2), valid_lengths(lengths, q, 2)
        if not self.causal:
            # A row without any key sees the first: avoids a softmax of 0 / 0.
            mask = None if lengths is None else valid_positions(lengths.clamp(min=1), n)[:, None, None]  # (B, 1, 1, N)
            return self._see(q, k, v, mask), None
        if self.window is not None:
            if state is not None and n == 1 and state.keys.size(2) > 0:
                return self._step(q, k, v, state, lengths, self.window)
            return attend_window(partial(self._see_window, window=self.window), q, k, v, state, seen, self.window)
        if state is None:
            # A padded key comes after every valid query, so the causal mask hides it.
            return self._see(q, k, v), Cache(k, v, seen)
        grows = not isinstance(state, FixedCache)
        keys, values = append((state.keys, state.values), (k, v), state.length, lengths, grows=grows)
        position = state.length[:, None] + torch.arange(n, device=q.device)  # (B, N)
        y = in_groups_of_queries(self._see_earlier, q, keys, values, position)
        return y, type(state)(keys, values, state.length + seen)

    def _see(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        position: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Attend to the keys where `mask` (B, 1, N or 1, M) is True; None: all, or those up to the query if causal.

        `position` (B, N) and `at` (B, M) are the positions of the queries and of the keys; None: from 0 on. Subclasses
        with relative positions use them.
        """
        is_causal = self.causal and mask is None
        return dot_product_attention(q, k, v, mask, is_causal=is_causal, dropout=self._dropout_now)

    def _see_earlier(self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """Attend from queries at `position` (B, N) to the keys in slots up to their own."""
        if reads_values(position):
            used = int(position.max()) + 1  # skips slots that no row has reached
            keys, values = keys[:, :, :used], values[:, :, :used]
        mask = torch.arange(keys.size(2), device=q.device) <= position[..., None]  # (B, N, M)
        return self._see(q, keys.to(q.dtype), values.to(q.dtype), mask[:, None], position)

    def _see_window(self, q: Tensor, k: Tensor, v: Tensor, past: Tensor | None, window: int) -> Tensor:
        """Attend from each query to the `window` newest keys: see `windowed_attention`."""
        return windowed_attention(q, k, v, window, past=past, dropout=self._dropout_now)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: Cache, lengths: Tensor | None, window: int
    ) -> tuple[Tensor, Cache]:
        """Attend one position within the window. Its key overwrites the oldest, which it does not see."""
        slots, position = state.keys.size(2), state.length[:, None]  # (B, 1)
        if slots < window:
            check_room(slots, state.length, 1 if lengths is None else lengths)
        state = write_one(state, k, v, lengths)
        used = slots_used(position + 1, slots)
        at = latest(position[:, 0] + 1, slots)[:, :used]  # (B, used)
        keys, values = (t[:, :, :used].to(q.dtype) for t in state[:2])
        return self._see(q, keys, values, (at >= 0)[:, None, None], position, at), state

    @override
    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> Cache:
        slots = max_len or 0
        if self.window is not None:
            slots = min(self.window, max_len or self.window)
        keys, values = (
            torch.zeros(batch_size, self.n_kv_heads, slots, dim, device=device, dtype=dtype)
            for dim in (self.qk_dim, self.head_dim)
        )
        length = torch.zeros(batch_size, dtype=torch.long, device=device)
        return (Cache if max_len is None else FixedCache)(keys, values, length)

    @property
    def bounded_by(self) -> str | None:
        """The cache grows with every position, unless a window bounds it."""
        return "window" if self.window is None else None

    def summarise(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> Cache:
        """Return the keys and values, or with a window the newest: see `Attention.summarise`."""
        seen = valid_lengths(lengths, k, 2)
        if self.window is None:
            return Cache(k, v, seen)
        keys, values = (in_slots(t, 0, torch.zeros_like(seen), seen, self.window) for t in (k, v))
        return Cache(keys, values, seen)

    def combine_states(self, before: Cache, after: Cache) -> Cache:
        """Keep both, or with a window the newest: see `Attention.combine_states`."""
        if self.window is not None:
            return newer_of_both(before, after)
        keys, values = append(before[:2], after[:2], before.length, grows=True)
        return Cache(keys, values, before.length + after.length)

    @property
    def _reach(self) -> int | None:
        return None if self.window is None else self.window - 1
