"""Sparse attention: a query sees local keys, and distant keys in a fixed pattern."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lit_effattn.attention.base import Attention
from lit_effattn.attention.kv_cache import Cache, FixedCache, append, attend_window, check_room, write
from lit_effattn.checks import at_least, one_of, probabilities
from lit_effattn.ops.sparse import fixed_attention, gather_rows, strided_attention, summary_positions
from lit_effattn.ops.window import windowed_attention
from lit_effattn.sequence import may_overwrite, reads_values, valid_lengths, without_padding

Pattern = Literal["strided", "fixed"]
Combination = Literal["merged", "heads", "local", "distant"]


class SummaryCache(NamedTuple):
    """Keys and values of each row's current block and of its summary columns, for the heads that see them."""

    block_keys: Tensor  # (B, H_local, stride, D_qk), position p in slot p mod stride
    block_values: Tensor  # (B, H_local, stride, D)
    summary_keys: Tensor  # (B, H_distant, blocks · summary, D_qk), in the order of positions
    summary_values: Tensor  # (B, H_distant, blocks · summary, D)
    length: Tensor  # (B,)


class FixedSummaryCache(SummaryCache):
    """A `SummaryCache` whose number of slots is final, because it was made with `max_len`."""


SparseState = Cache | SummaryCache


class SparseAttention(Attention):
    """Softmax attention to a fixed pattern of keys.

        y_i = Σ_j softmax_j(q_i · k_j / √D) v_j,  j ∈ A_i                           Child et al. 2019, equations 2 to 4

                     local                        distant
        strided:     i − l < j ≤ i                j ≤ i, (i − j) mod l = 0
        fixed:       j ≤ i, ⌊j/l⌋ = ⌊i/l⌋         j ≤ i, j mod l ≥ l − c

    with l = `stride` and c = `summary`. The strided local set holds l keys, i's own included, as in the authors' code
    (the paper's formula has l + 1). Fixed distant sets hold i too: they would be empty before the first summary column.
    Without `causal`, j ≤ i is dropped and strided local is |i − j| < l, so the pattern extends to both sides.

    Time and memory O(N (l + N/l)) strided, O(N (l + c N/l)) fixed: O(N √N) for l = √N, training included. State:
    all keys and values if strided (local alone: the newest l); the current block and the summary columns if fixed.
    If the state is made with `max_len` and donated, one more position costs O(l + N/l) or O(l + c N/l). A state that
    grows is copied at each call. With the fixed pattern it grows by whole blocks: except on the CPU, each call that
    continues it waits for the device. Splitting a stream changes nothing; the pattern follows each row's position.

    Args:
        pattern: "strided" suits data with a period (images: a row, or √N), "fixed" data without (text).
        stride: l.
        summary: c, of the fixed pattern only. Default: 1.
        combine: "merged": every head sees the union. "heads": the first ⌈H/2⌉ heads see local keys, the others distant
            ones. "local", "distant": one set alone; a `Transformer` that lists both alternates them over its layers
            ("interleaved").
        distinct: Whether each head has its own summary columns: `num_verts` H.
        num_verts: V, which must divide H: the heads take V sub-blocks of c summary columns in turn. Those of head
            h = 0 … H − 1 have l − (h mod V + 1) c ≤ j mod l < l − (h mod V) c. Needs V c ≤ l. Fixed only. The name is
            that of the authors' code, which calls c, in blocks, `vertsize`. Default: 1.
        dropout: Probability with which an attention weight is dropped in training.
        bias: Whether the projections have a bias.
        d_qk: Width of all heads' queries and keys together. Default: E. Another width replaces D in √D by d_qk / H.

    Raises:
        ValueError: If an option is out of range, or has no meaning with another.
    """

    without_autocast = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        pattern: Pattern = "strided",
        stride: int = 128,
        summary: int | None = None,
        combine: Combination = "merged",
        distinct: bool = False,
        num_verts: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        d_qk: int | None = None,
    ) -> None:
        super().__init__(d_model, n_heads, causal, bias=bias, d_qk=d_qk)
        one_of(Pattern, pattern=pattern)
        one_of(Combination, combine=combine)
        at_least(1, stride=stride)
        if pattern == "strided" and (summary is not None or distinct or num_verts is not None):
            raise ValueError(
                f"summary={summary}, distinct={distinct}, num_verts={num_verts} with pattern='strided', which has no "
                "summary columns; leave them out, or choose pattern='fixed'"
            )
        if distinct and num_verts is not None:
            raise ValueError(
                f"distinct=True with num_verts={num_verts}: it means num_verts={n_heads}; give one of them"
            )
        verts = (n_heads if distinct else 1) if num_verts is None else num_verts
        if verts < 1 or n_heads % verts:
            raise ValueError(f"num_verts={num_verts} does not divide n_heads={n_heads} into equal groups; change one")
        columns = summary if summary is not None else 1
        if not 1 <= columns <= stride:
            raise ValueError(
                f"summary={summary} columns in a block of stride={stride} positions; choose from 1 to {stride}"
            )
        if verts * columns > stride:
            option = f"distinct=True with n_heads={n_heads}" if distinct else f"num_verts={num_verts}"
            raise ValueError(
                f"{option}, summary={columns}, stride={stride}: the heads' summary columns take {verts * columns} "
                f"positions of a block of {stride}; lower summary or raise stride"
            )
        if combine == "heads" and n_heads < 2:
            raise ValueError(
                f"combine='heads' with n_heads={n_heads}; it divides two sets of keys among at least 2 heads"
            )
        probabilities(dropout=dropout)
        self._said_that_all_is_covered = False
        self.pattern, self.stride, self.summary = pattern, stride, columns
        self.combine, self.num_verts, self.dropout = combine, verts, dropout
        vert = torch.arange(n_heads if verts > 1 else 1)[:, None] % verts
        # (H or 1, c), the positions of a block that summarise it
        self.register_buffer("columns", stride - (vert + 1) * columns + torch.arange(columns), persistent=False)
        self.columns: Tensor

        half = (n_heads + 1) // 2
        every, none = slice(0, n_heads), slice(0, 0)
        self._local, self._distant = {
            "merged": (every, every),
            "heads": (slice(0, half), slice(half, n_heads)),
            "local": (every, none),
            "distant": (none, every),
        }[combine]
        """The heads that see each set."""

    @override
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: SparseState | None, lengths: Tensor | None
    ) -> tuple[Tensor, SparseState | None]:
        if self.training and state is None and not torch.compiler.is_compiling():
            self._say_if_all_is_covered(q.size(2))
        if not self.causal:
            return self._see(q, k, v, lengths=lengths), None
        seen = valid_lengths(lengths, q, 2)
        if self.pattern == "fixed":
            assert state is None or isinstance(state, SummaryCache)
            return self._attend_fixed(q, k, v, state, seen, lengths)
        if self.combine == "local":
            assert state is None or isinstance(state, Cache)
            see = partial(windowed_attention, window=self.stride, dropout=self._dropout_now)
            return attend_window(see, q, k, v, state, seen, self.stride)
        assert state is None or isinstance(state, Cache)
        return self._attend_strided(q, k, v, state, seen, lengths)

    def _see(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Compute the outputs (B, H, N, D) for each group of heads: see `strided_attention` and `fixed_attention`."""
        attend = strided_attention if self.pattern == "strided" else partial(fixed_attention, columns=self._columns)
        options |= {"causal": self.causal, "dropout": self._dropout_now}
        return torch.cat(
            [
                attend(q[:, h], k[:, h], v[:, h], self.stride, local=local, distant=distant, **options)
                for h, local, distant in self._groups
            ],
            1,
        )

    @property
    def _groups(self) -> list[tuple[slice, bool, bool]]:
        """Return the groups of heads that see the same keys: the heads, whether they see local and distant keys."""
        if self.combine == "heads":
            return [(self._local, True, False), (self._distant, False, True)]
        return [(slice(0, self.n_heads), self.combine != "distant", self.combine != "local")]

    def _attend_strided(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Cache | None,
        seen: Tensor,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Cache]:
        """Attend in the strided pattern. The state holds all keys and values."""
        if state is None:
            return self._see(q, k, v), Cache(k, v, seen)
        grows = not isinstance(state, FixedCache)
        keys, values = append((state.keys, state.values), (k, v), state.length, lengths, grows=grows)
        after = type(state)(keys, values, state.length + seen)
        if reads_values(state.length):
            used = int(state.length.max()) + q.size(2)  # skips slots that no row has reached
            keys, values = keys[:, :, :used], values[:, :, :used]
        y = self._see(q, keys.to(q.dtype), values.to(q.dtype), start=state.length)
        return y, after

    def _attend_fixed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SummaryCache | None,
        seen: Tensor,
        lengths: Tensor | None,
    ) -> tuple[Tensor, SummaryCache]:
        """Attend in the fixed pattern. The state holds the current block and the summary columns."""
        start = None if state is None else state.length
        before = self.initial_state(q.size(0), device=q.device, dtype=k.dtype) if state is None else state
        assert isinstance(before, SummaryCache)
        cache = self._with_room(before, q.size(2), seen, begun=state is not None)
        summary = [
            _with_summaries(stored, new[:, self._distant], before.length, lengths, self.stride, self._columns)
            for stored, new in ((cache.summary_keys, k), (cache.summary_values, v))
        ]
        y = self._see(
            q, k, v, start=start, block=(cache.block_keys, cache.block_values), summary=(summary[0], summary[1])
        )
        block = [
            _with_block(stored, new[:, self._local], before.length, seen)
            for stored, new in ((cache.block_keys, k), (cache.block_values, v))
        ]
        return y, type(cache)(block[0], block[1], summary[0], summary[1], before.length + seen)

    @property
    def _columns(self) -> Tensor:
        """Return the summary columns of the heads that see them, (H_distant or 1, c)."""
        return self.columns[self._distant] if self.num_verts > 1 else self.columns

    def _with_room(self, cache: SummaryCache, n: int, seen: Tensor, *, begun: bool) -> SummaryCache:
        """Add summary slots for `n` more positions, or check that there are enough for the (B,) `seen` ones of them.

        `begun` is False if the cache holds no positions yet.
        """
        if cache.summary_keys.size(1) == 0:
            return cache
        room = cache.summary_keys.size(2) // self.summary  # blocks
        if isinstance(cache, FixedSummaryCache):
            check_room(room * self.stride, cache.length, seen, "a max_len of at most {room}")
            return cache
        if torch.compiler.is_compiling() or not begun:
            more = -(-n // self.stride)  # enough for any row, at any position
        else:
            more = max(0, -(-(int(cache.length.max()) + n) // self.stride) - room)
        more *= self.summary
        return cache._replace(
            summary_keys=F.pad(cache.summary_keys, (0, 0, 0, more)),
            summary_values=F.pad(cache.summary_values, (0, 0, 0, more)),
        )

    def _say_if_all_is_covered(self, n: int) -> None:
        if n <= self.stride and self.combine in ("merged", "local") and not self._said_that_all_is_covered:
            self._said_that_all_is_covered = True
            warnings.warn(
                f"SparseAttention: stride={self.stride} covers all {n} positions, so this is softmax attention; "
                f"choose a stride near √N, such as {round(n**0.5)}",
                stacklevel=2,
            )

    @property
    def bounded_by(self) -> str | None:
        """Return None for local sets alone, whose state is bounded, else "": no option bounds distant sets."""
        return None if self.combine == "local" else ""

    @override
    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> SparseState:
        length = torch.zeros(batch_size, dtype=torch.long, device=device)

        def empty(heads: slice, slots: int) -> tuple[Tensor, Tensor]:
            shape = (batch_size, heads.stop - heads.start, slots)
            return (
                torch.zeros(*shape, self.qk_dim, device=device, dtype=dtype),
                torch.zeros(*shape, self.head_dim, device=device, dtype=dtype),
            )

        every = slice(0, self.n_heads)
        if self.pattern == "fixed":
            slots = -(-(max_len or 0) // self.stride) * self.summary
            summaries = SummaryCache if max_len is None else FixedSummaryCache
            return summaries(*empty(self._local, self.stride), *empty(self._distant, slots), length)
        kind = Cache if max_len is None else FixedCache
        if self.combine == "local":
            return kind(*empty(every, self.stride if max_len is None else min(self.stride, max_len)), length)
        return kind(*empty(every, max_len or 0), length)

    @torch.no_grad()
    def attention_pattern(self, x: Tensor, state: SparseState | None = None, lengths: Tensor | None = None) -> Tensor:
        """Return whether key j is in A_i, the given pattern: the keys that may have a weight in `attention_weights`.

        The arguments and the columns are those of `attention_weights`.

        Returns:
            (B, H, N, M) booleans, False in padding.

        Raises:
            ValueError: If an argument is invalid: see `check`.
        """
        self.check(x, state, lengths)
        q, k, _ = self.project(without_padding(x, lengths))
        return self._weights(torch.zeros_like(q), k, state, lengths) > 0  # equal scores: each key seen has a weight

    def unit_values(self, state: SparseState) -> dict[str, Tensor]:
        """Return the units of a `Cache`, or of the current block and the summary columns."""
        if not isinstance(state, SummaryCache):
            return super().unit_values(state)
        length, m = state.length[:, None, None], int(state.length.max())
        m = m if self._reach is None else min(m, self._reach)
        block = length - length % self.stride + torch.arange(self.stride, device=length.device)  # (B, 1, stride)
        blocks = state.summary_keys.size(2) // self.summary
        columns = summary_positions(self._columns, self.stride, blocks)[None]  # (1, H_distant or 1, S)
        slots = torch.arange(m, device=length.device)
        block, columns = ((position - length + m)[..., None] == slots for position in (block, columns))
        return {"block_values": block, "summary_values": columns}

    @property
    def _reach(self) -> int | None:
        return self.stride - 1 if self.combine == "local" else None


def _with_block(stored: Tensor, new: Tensor, start: Tensor, seen: Tensor) -> Tensor:
    """Return each row's current block after new positions.

    Args:
        stored: (B, H, stride, D), the block before; position p in slot p mod stride.
        new: (B, H, N, D), keys or values of the new positions.
        start: (B,), the first new position.
        seen: (B,), number of new positions that are valid.
    """
    stride, n = stored.size(2), new.size(2)
    new = new.to(stored.dtype)
    if n == 1 and may_overwrite():
        # Padding is written too: that slot holds no position of the row's current block yet.
        return write(stored, (start % stride)[:, None], new)
    last = (start + seen - 1)[:, None]  # (B, 1)
    position = last - (last - torch.arange(stride, device=new.device)) % stride  # (B, stride), the newest in each slot
    offset = position - start[:, None]
    new_slot = (offset >= 0)[:, None, :, None]  # (B, 1, stride, 1)
    return torch.where(new_slot, gather_rows(new, offset.clamp(0, n - 1)[:, None]), stored)


def _with_summaries(
    stored: Tensor, new: Tensor, start: Tensor, lengths: Tensor | None, stride: int, columns: Tensor
) -> Tensor:
    """Return the summary columns after new positions. Padding may be written to slots that are overwritten later.

    Args:
        stored: (B, H, S, D), the columns before, with slots for those of the new positions.
        new: (B, H, N, D), keys or values of the new positions.
        start: (B,), the first new position.
        lengths: (B,), number of new positions that are valid; None: all.
        stride: l.
        columns: (H or 1, c), the positions of a block that summarise it.
    """
    c, n = columns.size(1), new.size(2)
    new = new.to(stored.dtype)
    if n == 1 and may_overwrite():
        slot = (start // stride * c)[:, None, None] + torch.arange(c, device=new.device)  # (B, 1, C)
        new_slot = (start % stride)[:, None, None] == columns  # (B, H or 1, C)
        if lengths is not None:
            slot = slot.clamp(max=stored.size(2) - 1)  # padding may be beyond the last
            new_slot = new_slot & (lengths > 0)[:, None, None]
        index = slot[..., None].expand(-1, new.size(1), -1, new.size(3))  # (B, H, C, D)
        return stored.scatter_(2, index, torch.where(new_slot[..., None], new, stored.gather(2, index)))
    offset = summary_positions(columns, stride, stored.size(2) // c) - start[:, None, None]  # (B, H or 1, S)
    new_slot = offset >= 0  # also slots that are not reached yet: they are overwritten later
    return torch.where(new_slot[..., None], gather_rows(new, offset.clamp(0, n - 1)), stored)
