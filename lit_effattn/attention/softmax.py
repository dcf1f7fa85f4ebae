"""Softmax attention, with all keys or a window of the newest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_effattn.attention.base import Attention, softmax_over
from lit_effattn.attention.kv_cache import append, check_room, gather, latest, newest, newest_of_both, write
from lit_effattn.checks import at_least, probabilities
from lit_effattn.ops.dot_product import dot_product_attention, in_groups_of_queries
from lit_effattn.ops.window import windowed_attention
from lit_effattn.sequence import reads_values, valid_lengths, valid_positions


class KeyValueCache(NamedTuple):
    """All keys and values so far. Slot t holds position t; slots from `length` on are undefined."""

    keys: Tensor  # (B, H_kv, M, D_qk)
    values: Tensor  # (B, H_kv, M, D)
    length: Tensor  # (B,)


class FixedCache(NamedTuple):
    """A `KeyValueCache` with a fixed number of slots M."""

    keys: Tensor  # (B, H_kv, M, D_qk)
    values: Tensor  # (B, H_kv, M, D)
    length: Tensor  # (B,)


class WindowCache(NamedTuple):
    """The newest window − 1 keys and values, the newest last."""

    keys: Tensor  # (B, H_kv, window − 1, D_qk)
    values: Tensor  # (B, H_kv, window − 1, D)
    length: Tensor  # (B,), positions seen in all


class RingCache(NamedTuple):
    """The newest keys and values in a ring buffer of M = min(window, max_len) slots: slot t mod M holds position t."""

    keys: Tensor  # (B, H_kv, M, D_qk)
    values: Tensor  # (B, H_kv, M, D)
    length: Tensor  # (B,), positions seen in all


SoftmaxState = KeyValueCache | FixedCache | WindowCache | RingCache


class SoftmaxAttention(Attention):
    """Scaled dot-product attention.

        y_i = Σ_j softmax_j(q_i · k_j / √D) v_j,  j ≤ i if causal               Vaswani et al. 2017, equation 1

    Time O(N²), or O(N · window); state: all keys and values, or the newest window − 1. It calls
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

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState | None, lengths: Tensor | None
    ) -> tuple[Tensor, SoftmaxState | None]:
        """Combine queries, keys and values: see `Attention.attend`."""
        n = q.size(2)
        if not self.causal:
            # A row without any key sees the first: avoids a softmax of 0 / 0.
            mask = None if lengths is None else valid_positions(lengths.clamp(min=1), n)[:, None, None]  # (B, 1, 1, N)
            return self._see(q, k, v, mask), None
        seen = valid_lengths(lengths, q, 2)
        if self.window is not None:
            if isinstance(state, RingCache):
                if n == 1:
                    return self._step(q, k, v, state, lengths, self.window)
                return self._attend_ring(q, k, v, state, seen, self.window)
            assert state is None or isinstance(state, WindowCache)
            return attend_window(partial(self._see_window, window=self.window), q, k, v, state, seen, self.window)
        if state is None:
            # A padded key comes after every valid query, so the causal mask hides it.
            return self._see(q, k, v), KeyValueCache(k, v, seen)
        assert isinstance(state, KeyValueCache | FixedCache)
        grows = isinstance(state, KeyValueCache)
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

    def _attend_ring(
        self, q: Tensor, k: Tensor, v: Tensor, state: RingCache, seen: Tensor, window: int
    ) -> tuple[Tensor, RingCache]:
        """Attend several positions in time order, then write the newest to their slots."""
        slots, length = state.keys.size(2), state.length[:, None]  # (B, 1)
        if slots < window:
            check_room(slots, state.length, seen)
        m = min(slots, window - 1)
        earlier = (torch.arange(-m, 0, device=q.device) + length) % slots  # (B, M)
        k = torch.cat([gather(state.keys, earlier).to(k.dtype), k], 2)  # (B, H, M + N, D)
        v = torch.cat([gather(state.values, earlier).to(v.dtype), v], 2)
        y = self._see_window(q, k, v, state.length.clamp(max=m), window=window)
        # A position before the first of `k` is outside all later windows, so its slot may hold anything.
        index = latest(state.length + seen, slots) - length + m  # (B, slots)
        keys, values = (gather(t, index).to(state.keys.dtype) for t in (k, v))
        return y, RingCache(keys, values, state.length + seen)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: RingCache, lengths: Tensor | None, window: int
    ) -> tuple[Tensor, RingCache]:
        """Attend one position in the ring buffer. Its key overwrites the oldest, which it does not see."""
        slots, position = state.keys.size(2), state.length[:, None]  # (B, 1)
        seen = 1 if lengths is None else lengths
        if slots < window:
            check_room(slots, state.length, seen)
        valid = None if lengths is None else lengths[:, None] > 0
        keys, values = (write(t, position % slots, new, valid) for t, new in ((state.keys, k), (state.values, v)))
        used = min(slots, int(position.max()) + 1) if reads_values(position) else slots
        at = latest(state.length + 1, slots)[:, :used]  # (B, used)
        seen_keys, seen_values = keys[:, :, :used].to(q.dtype), values[:, :, :used].to(q.dtype)
        y = self._see(q, seen_keys, seen_values, (at >= 0)[:, None, None], position, at)
        return y, RingCache(keys, values, state.length + seen)

    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> SoftmaxState:
        """Return an empty cache: see `MultiHead.empty_state`."""
        length = torch.zeros(batch_size, dtype=torch.long, device=device)

        def empty(slots: int, dim: int) -> Tensor:
            return torch.zeros(batch_size, self.n_kv_heads, slots, dim, device=device, dtype=dtype)

        kind: type[SoftmaxState]
        if max_len is None:
            kind, slots = (KeyValueCache, 0) if self.window is None else (WindowCache, self.window - 1)
        else:
            kind, slots = (FixedCache, max_len) if self.window is None else (RingCache, min(self.window, max_len))
        return kind(empty(slots, self.qk_dim), empty(slots, self.head_dim), length)

    @property
    def bounded_by(self) -> str | None:
        """The cache grows with every position, unless a window bounds it."""
        return "window" if self.window is None else None

    def summarise(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> KeyValueCache | WindowCache:
        """Return the keys and values, or with a window the newest: see `Attention.summarise`."""
        seen = valid_lengths(lengths, k, 2)
        if self.window is None:
            return KeyValueCache(k, v, seen)
        keys, values = (newest(t, seen, self.window - 1, dim=2) for t in (k, v))
        return WindowCache(keys, values, seen)

    def combine_states(
        self, before: KeyValueCache | WindowCache, after: KeyValueCache | WindowCache
    ) -> KeyValueCache | WindowCache:
        """Keep both, or with a window the newest: see `Attention.combine_states`."""
        if isinstance(before, KeyValueCache):
            keys, values = append((before.keys, before.values), after[:2], before.length, grows=True)
            return KeyValueCache(keys, values, before.length + after.length)
        return WindowCache(
            newest_of_both(before.keys, after.keys, after.length, dim=2),
            newest_of_both(before.values, after.values, after.length, dim=2),
            before.length + after.length,
        )

    def compute_weights(self, q: Tensor, k: Tensor, state: SoftmaxState | None, lengths: Tensor | None) -> Tensor:
        """Return softmax(q_i · k_j / √D): see `Attention.compute_weights`."""
        if state is not None:
            k = torch.cat([earlier_keys(state, self.window).to(k.dtype), k], 2)  # (B, H_kv, M + N, D)
        k = self._for_all_heads(k)  # (B, H_kv, M + N, D) -> (B, H, M + N, D)
        n = q.size(2)
        i, j, seen = self._order(n, k.size(2) - n, state, lengths, q.device)
        if self.window is not None:
            seen = seen & (i - j < self.window)
        return softmax_over(self._scores(q, k, j - i), seen[:, None])

    def _scores(self, q: Tensor, k: Tensor, distance: Tensor) -> Tensor:
        """Return the scores (B, H, N, M) of keys at `distance` (1, N, M) from the queries."""
        return q @ k.mT * self.qk_dim**-0.5


def attend_window(
    see: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, state: WindowCache | None, seen: Tensor, window: int
) -> tuple[Tensor, WindowCache]:
    """Attend to the `window` newest keys, and keep those that the next position may see.

    Args:
        see: Computes the outputs from queries (B, H, N, D), keys and values (B, H_kv, M + N, D), and `past`, the number
            of valid earlier keys (B,), or None: see `windowed_attention`.
        q: (B, H, N, D).
        k: (B, H_kv, N, D).
        v: (B, H_kv, N, D).
        state: State before the first position, or None.
        seen: (B,), valid positions.
        window: Number of keys that a position sees, its own included.
    """
    past, before, m, stored = None, torch.zeros_like(seen), 0, k.dtype
    if state is not None:
        before, m, stored = state.length, state.keys.size(2), state.keys.dtype
        past = before.clamp(max=m)
        k = torch.cat([state.keys.to(k.dtype), k], 2)  # (B, H_kv, M + N, D)
        v = torch.cat([state.values.to(v.dtype), v], 2)
    y = see(q, k, v, past=past)
    keys, values = (newest(t, seen + m, window - 1, dim=2).to(stored) for t in (k, v))
    return y, WindowCache(keys, values, before + seen)


def earlier_keys(state: SoftmaxState, window: int | None) -> Tensor:
    """Return the keys of each row's newest M positions, (B, H, M, D), undefined where a row has fewer.

    M is the number of positions of the longest row, at most `window` − 1.
    """
    slots, m = state.keys.size(2), int(state.length.max())
    m = m if window is None else min(m, window - 1)
    if isinstance(state, WindowCache):
        return state.keys[:, :, slots - m :]
    slot = (state.length[:, None] + torch.arange(-m, 0, device=state.keys.device)) % max(slots, 1)  # (B, M)
    return gather(state.keys, slot)
