"""Transformer-XL's attention: relative positions, and a memory of the inputs before this segment."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_effattn.attention.kv_cache import (
    Cache,
    FixedCache,
    in_slots,
    newest,
    newest_of_both,
    slots_used,
    with_earlier,
    write_one,
)
from lit_effattn.attention.memory import MemoryAttention
from lit_effattn.ops.relative import furthest
from lit_effattn.sequence import State, parts, valid_lengths, valid_positions, without_padding


class InputMemory(NamedTuple):
    """The newest inputs of the layer, the newest last."""

    inputs: Tensor  # (B, M, E)
    length: Tensor  # (B,), positions seen in all


class TransformerXLAttention(MemoryAttention):
    """Attention with relative positions to a segment and the `mem_len` inputs before it.

        y_i = W_o concat_h Σ_j softmax_j(((q_i + u) · k_j + (q_i + v) · W_r R_{i−j}) / √D) v_j
        q = W_q x,  k = W_k [memory; x],  v = W_v [memory; x],  R_d = [sin(d ω), cos(d ω)],  ω_i = 10000^{−2i/E}

    Dai et al. 2019, sections 3.2 and 3.3. It has its own positions: give the `Transformer` `positions: auto` or null.

    A position sees the earlier positions of its segment (call) and `mem_len` positions before the segment. By this
    definition the outputs depend on how a stream is split, unless the memory holds all the past. With `same_length` a
    position sees `mem_len` keys, its own included, as in the paper's evaluation: splitting a stream then changes
    nothing, and a call much longer than the memory costs O(N · mem_len). A stack of L layers reaches L · mem_len
    positions back.

    The state holds inputs, so W_k and W_v also learn from the memory, even if the caller detaches it. A LayerNorm
    before the attention does not, without `normalise_with`. A state made with `max_len` holds their keys and values
    instead: a generated token then costs O(mem_len · E), not O(mem_len · E²). The outputs are the same, and so are
    gradients through a state that was not detached.

    With causal=False (an encoder) the distances are negative too, and there is no memory.

    Args:
        same_length: Whether each position sees `mem_len` keys, its own included. Needs `causal`.
    """

    split_option = "same_length"

    def __init__(
        self, d_model: int, n_heads: int, causal: bool = True, *, same_length: bool = False, **options: Any
    ) -> None:
        super().__init__(d_model, n_heads, causal, **options)
        self._add_positions()
        self.set_memory(self.mem_len, self.clamp_len, same_length)

    @override
    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        if not self.causal or isinstance(state, FixedCache):
            return super().forward(x, state, lengths)
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        if state is None:
            before = InputMemory(x[:, :0], torch.zeros(len(x), dtype=torch.long, device=x.device))
        else:
            before = state
        seen = valid_lengths(lengths, x)
        group, after = parts(), None
        if group is not None:
            part = InputMemory(newest(x, seen, self._reach, dim=1), seen)
            empty = self.initial_state(len(x), device=x.device, dtype=x.dtype)
            before, after = group.join(self.combine_states, part, empty if state is None else state)
        m = slots_used(before.length, before.inputs.size(1))
        inputs = torch.cat([before.inputs[:, before.inputs.size(1) - m :].to(x.dtype), x], 1)  # (B, M + N, E)
        normed = self._normed(inputs)
        q = self._heads(self.q_proj(self._normed(x)))  # (B, N, E) -> (B, H, N, D)
        k, v = self._heads(self.k_proj(normed)), self._heads(self.v_proj(normed))  # (B, M + N, E) -> (B, H, M + N, D)
        y = self.out_proj(self._mix(q, k, v, before.length).transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)

        if after is not None:
            return without_padding(y, lengths), after
        memory = newest(inputs, m + seen, self._reach, dim=1)
        memory = memory if state is None else memory.to(state.inputs.dtype)
        return without_padding(y, lengths), InputMemory(memory, before.length + seen)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: FixedCache | None, lengths: Tensor | None
    ) -> tuple[Tensor, Cache | None]:
        """Combine queries, keys and values, without a memory of inputs: see `Attention.attend`."""
        n = q.size(2)
        if state is None:
            # A row without any key sees the first: avoids a softmax of 0 / 0.
            valid = None if lengths is None else valid_positions(lengths.clamp(min=1), n)
            return self._relative(q, k, v, n - 1, 1 - n, causal=False, valid=valid), None
        if n == 1:
            return self._step(q, k, v, state, lengths)
        return self._prompt(q, k, v, state, valid_lengths(lengths, q, 2))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        """Attend from the queries to their keys and the M earlier ones, of which the last `length` (B,) are valid."""
        n, m = q.size(2), k.size(2) - q.size(2)
        valid = None if m == 0 else torch.arange(m + n, device=q.device) >= m - length[:, None]  # (B, M + N)
        window = self.mem_len if self.same_length else None
        return self._relative(q, k, v, furthest(n, m, window, self.chunk_size), valid=valid, window=window)

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor, state: FixedCache, seen: Tensor) -> tuple[Tensor, FixedCache]:
        """Attend several positions with a memory of keys and values."""
        slots, length = state.keys.size(2), state.length
        m = slots_used(length, min(slots, self._reach))
        k, v = (with_earlier(t, new, length, m) for t, new in zip(state[:2], (k, v), strict=True))
        y = self._mix(q, k, v, length)
        keys, values = (in_slots(t, m, length, seen, slots).to(state.keys.dtype) for t in (k, v))
        return y, FixedCache(keys, values, length + seen)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: FixedCache, lengths: Tensor | None) -> tuple[Tensor, Cache]:
        """Attend one position. Its key overwrites the oldest, which it does not see."""
        slots, length = state.keys.size(2), state.length[:, None]  # (B, 1)
        used = slots_used(length + 1, slots)
        after = write_one(state, k, v, lengths)
        slot = torch.arange(used, device=q.device)
        distance = (length - slot) % slots  # (B, M)
        keys, values = (t[:, :, :used] for t in after[:2])
        r = self._positions_for(q, used)
        return self._by_distance(q, keys, values, r, distance[:, None], (slot <= length)[:, None]), after

    @override
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().project(self._normed(x))

    @property
    def depends_on_split(self) -> bool:
        """Whether a position of a longer call sees more keys than if each call had one position."""
        return not self.same_length

    def set_memory(self, mem_len: int, clamp_len: int | None = None, same_length: bool = False) -> None:
        """See `MemoryAttention.set_memory`. Earlier states become invalid if `same_length` changes, too."""
        super().set_memory(mem_len, clamp_len)
        if same_length and mem_len < 1:
            raise ValueError(
                f"same_length=True with mem_len={mem_len}: a position sees itself, so mem_len must be at least 1"
            )
        if same_length and not self.causal:
            raise ValueError("same_length=True needs causal=True; leave it out if causal=False")
        self.same_length = same_length
        # Otherwise a position sees its whole segment, whose keys in other processes no bounded state holds.
        self.takes_parts = same_length

    @property
    def _reach(self) -> int:
        """Number of earlier positions that the first of a segment sees, which a state has to hold."""
        return self.mem_len - 1 if self.same_length else self.mem_len

    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> State:
        """Return an empty memory, of keys and values if `max_len` is given: see `SequenceModule.initial_state`."""
        length = torch.zeros(batch_size, dtype=torch.long, device=device)
        if max_len is None:
            return InputMemory(torch.zeros(batch_size, self._reach, self.d_model, device=device, dtype=dtype), length)
        shape = (batch_size, self.n_heads, min(self._reach + 1, max_len), self.head_dim)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return FixedCache(keys, values, length)

    def _check_size(self, state: InputMemory | FixedCache, new: Tensor | int) -> None:
        if isinstance(state, FixedCache):
            self._check_room(state.keys.size(2), state.length, new)
        else:
            super()._check_size(state, new)

    def combine_states(self, before: InputMemory, after: InputMemory) -> InputMemory:
        """Keep the newest inputs of both: see `Attention.combine_states`."""
        inputs = newest_of_both(before.inputs, after.inputs, after.length, dim=1)
        return InputMemory(inputs, before.length + after.length)

    def _keys(self, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        n, m = x.size(1), 0 if state is None else min(int(state.length.max()), self._reach)
        k = self._heads(self.k_proj(self._normed(x)))
        if isinstance(state, InputMemory):
            earlier = self._heads(self.k_proj(self._normed(state.inputs[:, self._reach - m :].to(x.dtype))))
            k = torch.cat([earlier, k], 2)  # (B, H, M + N, D)
        elif state is not None:
            k = with_earlier(state.keys, k, state.length, m)
        i, j, seen = self._order(n, m, state, lengths, x.device)
        return k, i - j, seen & (i - j < self.mem_len) if self.same_length else seen
