"""Transformer-XL's attention: relative positions, and a memory of the inputs before this segment."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.base import Attention
from lit_effattn.attention.kv_cache import (
    Cache,
    FixedCache,
    check_room,
    in_slots,
    newest,
    newest_of_both,
    slots_used,
    with_earlier,
    write_one,
)
from lit_effattn.checks import at_least, probabilities
from lit_effattn.ops.relative import attention_by_distance, furthest, relative_attention, sinusoids
from lit_effattn.sequence import (
    State,
    accumulator,
    parts,
    valid_lengths,
    valid_positions,
    without_padding,
)


class InputMemory(NamedTuple):
    """The newest inputs of the layer, the newest last."""

    inputs: Tensor  # (B, M, E)
    length: Tensor  # (B,), positions seen in all


class ScoreTerms(NamedTuple):
    """The four terms of the scores, (B, H, N, M) each, divided by √D; −∞ where a key is not seen and in padding."""

    content: Tensor  # (a): q_i · k_j
    position: Tensor  # (b): q_i · W_r R_{i−j}
    content_bias: Tensor  # (c): u · k_j, the same for all queries
    position_bias: Tensor  # (d): v · W_r R_{i−j}, the same for all queries and keys at a distance


class TransformerXLAttention(Attention):
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
        d_model: Width E, even.
        n_heads: Heads H.
        causal: Whether a position sees only itself and earlier ones.
        mem_len: Positions in the memory. No parameter depends on it, and `set_memory` changes it.
        clamp_len: Larger distances are clamped to it, for memories longer than in training; None: no clamping.
        same_length: Whether each position sees `mem_len` keys, its own included. Needs `causal`.
        dropout: Probability with which an attention weight is dropped in training.
        position_dropout: Probability with which an element of R is dropped in training.
        chunk_size: Queries computed at once; no effect on the result.
        bias: Whether q_proj, k_proj, v_proj and out_proj have a bias; not in the paper.
        share_uv: Whether all layers of a `Transformer` share u and v, as in the paper; else each layer has its own.
    """

    takes_rotary = False
    has_positions = True
    extra_parameters: tuple[str, ...] = ("r_proj", "u", "v")

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        mem_len: int = 512,
        clamp_len: int | None = None,
        same_length: bool = False,
        dropout: float = 0.0,
        position_dropout: float = 0.0,
        chunk_size: int = 128,
        bias: bool = False,
        share_uv: bool = False,
    ) -> None:
        super().__init__(d_model, n_heads, causal, bias=bias)
        if d_model % 2:
            raise ValueError(f"d_model={d_model} is odd; sinusoidal positions come in pairs of sine and cosine")
        probabilities(dropout=dropout, position_dropout=position_dropout)
        at_least(1, chunk_size=chunk_size)
        self.dropout = dropout
        self.position_dropout = position_dropout
        self.chunk_size = chunk_size
        self.r_proj = nn.Linear(d_model, d_model, bias=False)
        self.u = nn.Parameter(0.02 * torch.randn(n_heads, self.head_dim))
        self.v = nn.Parameter(0.02 * torch.randn(n_heads, self.head_dim))
        self.shared = ("u", "v") if share_uv else ()
        self._norm: tuple[nn.Module, ...] = ()
        self.set_memory(mem_len, clamp_len, same_length)

    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        """See `SequenceModule.forward`."""
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
            r = self._relative_keys(n - 1, 1 - n)
            return self._relative(q, k, v, r, valid), None
        if n == 1:
            return self._step(q, k, v, state, lengths)
        return self._prompt(q, k, v, state, valid_lengths(lengths, q, 2))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        """Attend from the queries to their keys and the M earlier ones, of which the last `length` (B,) are valid."""
        n, m = q.size(2), k.size(2) - q.size(2)
        valid = None if m == 0 else torch.arange(m + n, device=q.device) >= m - length[:, None]  # (B, M + N)
        window = self.mem_len if self.same_length else None
        r = self._relative_keys(furthest(n, m, window, self.chunk_size), 0)
        return self._relative(q, k, v, r, valid, window)

    def _relative(
        self, q: Tensor, k: Tensor, v: Tensor, r: Tensor, valid: Tensor | None, window: int | None = None
    ) -> Tensor:
        return relative_attention(
            q,
            k,
            v,
            r.to(q.dtype),
            self.u.to(q.dtype),
            self.v.to(q.dtype),
            causal=self.causal,
            window=window,
            valid=valid,
            chunk_size=self.chunk_size,
            dropout=self._dropout_now,
        )

    def _relative_keys(self, first: int, last: int) -> Tensor:
        """Return W_r R of the distances first, first − 1, …, last: (H, L, D)."""
        return self.r_proj(self._sinusoids(first, last)).unflatten(1, (self.n_heads, -1)).transpose(0, 1)

    def _sinusoids(self, first: int, last: int) -> Tensor:
        weight = self.r_proj.weight
        r = sinusoids(first, last, self.d_model, clamp=self.clamp_len, dtype=weight.dtype, device=weight.device)
        return F.dropout(r, self.position_dropout, self.training)

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
        y = attention_by_distance(
            q + self.u.to(q.dtype)[:, None],
            after.keys[:, :, :used].to(q.dtype),
            after.values[:, :, :used].to(q.dtype),
            self._scores_by_distance(q, self._positions_for(q, used)),
            (used - 1 - distance)[:, None],
            (slot <= length)[:, None],
            dropout=self._dropout_now,
        )
        return y, after

    def _positions_for(self, q: Tensor, count: int) -> Tensor:
        """Return the argument `r` of `_scores_by_distance` for the distances count − 1, …, 0.

        W_r R, (H, count, D), costs count · E². For few queries it costs less to return R, (count, E), and apply W_r to
        the queries.
        """
        few = q.size(0) * q.size(1) * q.size(2) <= self.d_model
        return (self._sinusoids(count - 1, 0) if few else self._relative_keys(count - 1, 0)).to(q.dtype)

    def _scores_by_distance(self, q: Tensor, r: Tensor) -> Tensor:
        """Return (q + v) · W_r R / √D: (B, H, N, count)."""
        q = (q + self.v.to(q.dtype)[:, None]) * self.head_dim**-0.5
        if r.dim() == 3:
            return torch.einsum("bhnd,hld->bhnl", q, r)
        weight = self.r_proj.weight.view(self.n_heads, self.head_dim, -1).to(q.dtype)  # (H, D, E)
        return torch.einsum("bhnd,hde->bhne", q, weight) @ r.T

    def normalise_with(self, norm: nn.Module) -> None:
        """Apply `norm` to all inputs, to those in the memory again in each call.

            q = W_q norm(x),  k = W_k norm([memory; x]),  v = W_v norm([memory; x])

        The memory holds inputs as they are, so its keys follow the norm's gains, which learn from it too. This is
        `pre_lnorm` in the code of Dai et al. 2019.

        Args:
            norm: (B, N, E) -> (B, N, E), each position by itself. Its parameters remain the caller's.
        """
        self._norm = (norm,)  # in a tuple, because a module's attribute would be registered here too

    def _normed(self, x: Tensor) -> Tensor:
        return self._norm[0](x) if self._norm else x

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.project`."""
        return super().project(self._normed(x))

    @property
    def depends_on_split(self) -> bool:
        """Whether a position of a longer call sees more keys than if each call had one position."""
        return not self.same_length

    def set_memory(self, mem_len: int, clamp_len: int | None = None, same_length: bool = False) -> None:
        """Change the memory, for example for evaluation. The options are those of the constructor.

        Earlier states become invalid, unless `mem_len` and `same_length` are unchanged.

        Raises:
            ValueError: If an option is out of its range, or has no effect with another.
        """
        at_least(0, mem_len=mem_len)
        if same_length and mem_len < 1:
            raise ValueError(
                f"same_length=True with mem_len={mem_len}: a position sees itself, so mem_len must be at least 1"
            )
        if same_length and not self.causal:
            raise ValueError("same_length=True needs causal=True; leave it out if causal=False")
        at_least(0, clamp_len=clamp_len)
        self.mem_len = mem_len
        self.clamp_len = clamp_len
        self.same_length = same_length
        # Otherwise a position sees its whole segment, whose keys in other processes no bounded state holds.
        self.takes_parts = same_length

    @property
    def _reach(self) -> int:
        """Number of earlier positions that the first of a segment sees, which a state has to hold."""
        return self.mem_len - 1 if self.same_length else self.mem_len

    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> State:
        """Return an empty memory, of keys and values if `max_len` is given: see `MultiHead.empty_state`."""
        length = torch.zeros(batch_size, dtype=torch.long, device=device)
        if max_len is None:
            return InputMemory(torch.zeros(batch_size, self._reach, self.d_model, device=device, dtype=dtype), length)
        shape = (batch_size, self.n_heads, min(self._reach + 1, max_len), self.head_dim)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return FixedCache(keys, values, length)

    def check(self, x: Tensor, state: State | None, lengths: Tensor | None) -> None:
        """See `SequenceModule.check`. Also checks that the state has the size of this memory."""
        super().check(x, state, lengths)
        if isinstance(state, FixedCache):
            self._check_room(state.keys.size(2), state.length, x.size(1) if lengths is None else lengths)
        elif state is not None:
            self._check_slots(state.inputs.size(1), self._reach)

    def _check_slots(self, slots: int, wanted: int) -> None:
        if slots != wanted:
            raise ValueError(
                f"the state has room for {slots} positions, but with mem_len={self.mem_len} "
                f"{type(self).__name__} remembers {wanted}: it was made before set_memory; start with state=None"
            )

    def _check_room(self, slots: int, length: Tensor, new: Tensor | int) -> None:
        """Check that `new` positions of each row fit in a state made with `max_len`, which may have few slots."""
        if slots > self._reach + 1:
            self._check_slots(slots, self._reach + 1)
        if slots <= self._reach:
            check_room(slots, length, new)

    def combine_states(self, before: InputMemory, after: InputMemory) -> InputMemory:
        """Keep the newest inputs of both: see `Attention.combine_states`."""
        inputs = newest_of_both(before.inputs, after.inputs, after.length, dim=1)
        return InputMemory(inputs, before.length + after.length)

    def attention_weights(self, x: Tensor, state: State | None = None, lengths: Tensor | None = None) -> Tensor:
        """Return the softmax of the sum of `attention_terms`: see `Attention.attention_weights`."""
        scores = reduce(torch.add, self.attention_terms(x, state, lengths))
        return scores.softmax(-1).masked_fill(scores == -torch.inf, 0)

    @torch.no_grad()
    def attention_terms(self, x: Tensor, state: State | None = None, lengths: Tensor | None = None) -> ScoreTerms:
        """Return the scores' terms (a) to (d) of Dai et al. 2019, section 3.3, apart, without dropout.

        For inspection, not for training: time and memory O(N M), and no gradient. `state` is not changed. The arguments
        are those of `forward`, the columns those of `attention_weights`.
        """
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        q = self._heads(self.q_proj(self._normed(x)))
        k, distance, seen = self._keys(x, state, lengths)
        if lengths is not None:
            seen = seen & valid_positions(lengths, x.size(1))[..., None]
        with torch.autocast(x.device.type, enabled=False):
            full = accumulator(q.dtype)
            terms = self._terms(q.to(full), k.to(full), torch.where(seen, distance, 0))
        shape = (*q.shape[:3], k.size(2))
        return ScoreTerms(*(torch.where(seen[:, None], t, -torch.inf).expand(shape) for t in terms))

    def _terms(self, q: Tensor, k: Tensor, distance: Tensor) -> tuple[Tensor, ...]:
        """Return the four terms of queries (B, H, N, D) and keys (B, H, M, D) at distances (B or 1, N, M)."""
        first, last = int(distance.max()), int(distance.min())
        weight = self.r_proj.weight
        r = sinusoids(first, last, self.d_model, clamp=self.clamp_len, dtype=weight.dtype, device=weight.device)
        r = self.r_proj(r).unflatten(1, (self.n_heads, -1)).transpose(0, 1)  # (L, E) -> (H, L, D)
        r, u, v = (t.to(q.dtype) for t in (r, self.u, self.v))
        q, u, v = (t * self.head_dim**-0.5 for t in (q, u, v))
        row = first - distance  # (B or 1, N, M), of the distance in r
        return (
            q @ k.mT,
            torch.einsum("bhnd,hld->bhnl", q, r).gather(-1, row[:, None].expand(*q.shape[:3], k.size(2))),
            u[:, None] @ k.mT,  # (B, H, 1, M)
            (r @ v[..., None]).squeeze(-1)[:, row].transpose(0, 1),  # (H, L) -> (B or 1, H, N, M)
        )

    def _keys(self, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys of `attention_terms` (B, H, M, D), their distances, and which are seen, (B or 1, N, M)."""
        n, m = x.size(1), 0 if state is None else min(int(state.length.max()), self._reach)
        k = self._heads(self.k_proj(self._normed(x)))
        if isinstance(state, InputMemory):
            earlier = self._heads(self.k_proj(self._normed(state.inputs[:, self._reach - m :].to(x.dtype))))
            k = torch.cat([earlier, k], 2)  # (B, H, M + N, D)
        elif state is not None:
            k = with_earlier(state.keys, k, state.length, m)
        i, j, seen = self._order(n, m, state, lengths, x.device)
        return k, i - j, seen & (i - j < self.mem_len) if self.same_length else seen

    def _order(
        self, n: int, m: int, state: State | None, lengths: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions of N queries and of M + N keys: those of M earlier positions, then those of the queries.

        Returns:
            The queries' positions (B or 1, N, 1), the keys' positions (B or 1, 1, M + N), and whether a key exists and,
            if causal, is not after the query, (B or 1, N or 1, M + N).
        """
        j = torch.arange(-m, n, device=device)[None, None]  # (1, 1, M + N)
        if state is not None:
            j = j + state.length[:, None, None]  # (B, 1, M + N)
        i = j[..., m:].mT  # (B or 1, N, 1)
        if self.causal:
            return i, j, (j >= 0) & (j <= i)
        return i, j, torch.ones_like(j, dtype=torch.bool) if lengths is None else j < lengths[:, None, None]
