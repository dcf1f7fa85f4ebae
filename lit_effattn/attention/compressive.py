"""The Compressive Transformer's attention: inputs that leave Transformer-XL's memory are compressed, not discarded."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lit_effattn.attention.kv_cache import gather, latest, newest, write
from lit_effattn.attention.memory import MemoryAttention
from lit_effattn.checks import at_least, one_of
from lit_effattn.ops.window import slices
from lit_effattn.sequence import (
    State,
    accumulator,
    may_overwrite,
    reads_values,
    valid_lengths,
    valid_positions,
    without_padding,
)

Compression = Literal["conv", "mean", "max"]


class CompressiveMemory(NamedTuple):
    """The newest inputs of the layer, and summaries of c older inputs each; the newest is last in both."""

    inputs: Tensor  # (B, S, E), S = mem_len + segment_len − 1 + c − 1
    compressed: Tensor  # (B, compressed_len, E)
    length: Tensor  # (B,), positions seen in all
    loss: Tensor  # (B,), the reconstruction loss of the last call


class ProjectedCompressiveMemory(NamedTuple):
    """The same memory as keys and values, in two ring buffers.

    Summary number i is in slot i mod R of the first R slots. Position t is in slot R + t mod M of the M slots after
    them, which are the last so that `grow` can add to them.
    """

    keys: Tensor  # (B, H, R + M, D)
    values: Tensor  # (B, H, R + M, D)
    inputs: Tensor  # (B, M, E), inputs that are not compressed yet
    length: Tensor  # (B,), positions seen in all
    loss: Tensor  # (B,), the reconstruction loss of the last call


class CompressiveAttention(MemoryAttention):
    """Transformer-XL's attention with a second memory, of older inputs that are compressed.

        y_i = W_o concat_h Σ_j softmax_j(((q_i + u) · k_j + (q_i + v) · W_r R_{i−j}) / √D) v_j
        k, v = W_k, W_v [compressed; memory; x],  compressed_b = f(x_{bc}, …, x_{bc+c−1})

    Rae et al. 2019, section 3 and algorithm 1. f is a convolution of width and stride c, or the mean or maximum.

    The memories are updated at fixed positions of the stream, so splitting it changes nothing. Position t sees its own
    input and the `mem_len` inputs before it. Older inputs stay uncompressed until there are c of them; then one summary
    replaces them. The `compressed_len` newest summaries are seen. So t sees x_{b(t)}, …, x_t uncompressed, with
    b(t) = c ⌊(t − mem_len) / c⌋, at least 0. As in the paper, a summary takes one place in the row of keys, so each
    summary in between adds 1 to i − j. The reach of one layer is mem_len + c · compressed_len; time
    O(N (mem_len + compressed_len)). As in `TransformerXLAttention`, a state made with `max_len` holds keys and values.

    The paper compresses once a segment of n_s positions: then the n_s oldest inputs leave the memory, and n_s / c
    summaries replace them. With `segment_len` L = n_s the memories are updated before the positions L, 2 L, … alone,
    and b(t) = c ⌊(L ⌊t/L⌋ − mem_len) / c⌋. Position t then sees the same memories as all positions of its segment, and
    up to L − 1 inputs more. In calls of L positions that begin at a multiple of L this is algorithm 1, but for zeros
    that the paper's memories hold at first.

    f is trained by the reconstruction loss (section 3.2, algorithm 2), which is the state's field `loss`. It is the
    mean squared difference (a norm in the paper) between content-based attention to the inputs that a call compresses
    and content-based attention to their summaries. The queries are those of the call, at most `chunk_size` at a time.
    Its gradient reaches only f. It depends on how the stream is split, and is best with calls of many times c
    positions; with calls of L positions and a `chunk_size` of at least L it is the paper's. It is 0 if gradients are
    disabled, nothing was compressed, or f has no parameters. The task's gradient also reaches f where a call sees
    summaries that it made itself: modules never detach.

    After `normalise_with` the memories hold inputs, and summaries of inputs, that are not normalised.

    The first columns of `attention_weights` and `attention_terms` are summaries, the newest last: those that the state
    holds, and those that the call makes and that a position sees. Then come the inputs before the call, at
    most mem_len + L − 1 + c − 1, and the N of the call.

    Args:
        compressed_len: Number of summaries.
        compression_rate: c, inputs per summary.
        compression: f: "conv", "mean" or "max".
        segment_len: L, see above. Default: 1, as if positions were fed one at a time. Above 1 a generated token costs
            O(L E²) more where reading values waits for the device, as on a GPU.
    """

    extra_parameters = (*MemoryAttention.extra_parameters, "compressor")

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        compressed_len: int = 512,
        compression_rate: int = 4,
        compression: Compression = "conv",
        segment_len: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, causal, **options)
        self._add_positions()
        if not causal:
            raise ValueError("causal=False: CompressiveAttention compresses past positions, so it needs causal=True")
        if compressed_len < 1:
            raise ValueError(
                f"compressed_len={compressed_len} must be at least 1; use TransformerXLAttention for no summaries"
            )
        at_least(1, compression_rate=compression_rate, segment_len=segment_len)
        one_of(Compression, compression=compression)
        self.compressed_len = compressed_len
        self.segment_len = segment_len
        self.compression_rate = compression_rate
        self.compression = compression
        # A convolution whose stride equals its width is one matrix, applied to adjacent windows.
        self.compressor: nn.Linear | None = None
        if compression == "conv":
            bias = self.k_proj.bias is not None
            self.compressor = nn.Linear(compression_rate * d_model, d_model, bias=bias)

    @override
    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, CompressiveMemory | ProjectedCompressiveMemory]:
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        if state is None:
            state = self.initial_state(len(x), device=x.device, dtype=x.dtype)
        seen = valid_lengths(lengths, x)
        q = self._heads(self.q_proj(self._normed(x)))
        after: CompressiveMemory | ProjectedCompressiveMemory
        if isinstance(state, CompressiveMemory):
            y, after = self._segment(q, x, state, seen)
        elif x.size(1) == 1 and self.segment_len == 1:  # else a step may make several summaries
            y, after = self._one(q, x, state, seen, None if lengths is None else lengths[:, None] > 0)
        else:
            y, after = self._several(q, x, state, seen)
        y = self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        return without_padding(y, lengths), after

    def _segment(
        self, q: Tensor, x: Tensor, state: CompressiveMemory, seen: Tensor
    ) -> tuple[Tensor, CompressiveMemory]:
        """Attend with a memory of inputs."""
        inputs = torch.cat([state.inputs.to(x.dtype), x], 1)  # (B, S + N, E)
        windows = self._windows(inputs, state.length, x.size(1))  # (B, K, c, E)
        compressed = torch.cat([state.compressed.to(x.dtype), self._compress(windows).to(x.dtype)], 1)
        y = self._see(q, *self._keys_values(torch.cat([compressed, inputs], 1)), state.length)
        length = state.length + seen
        made = self._summaries(length) - self._summaries(state.length)
        return y, CompressiveMemory(
            newest(inputs, self._reach + seen, self._reach, dim=1).to(state.inputs.dtype),
            newest(compressed, self.compressed_len + made, self.compressed_len, dim=1).to(state.compressed.dtype),
            length,
            self._reconstruction_loss(q, windows, state.length, seen).to(state.loss.dtype),
        )

    def _see(self, q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        """Attend from each query to its own input, the uncompressed inputs before it, and the newest summaries.

        `k` and `v` (B, H, compressed_len + K + S + N, D) are those of the state's summaries, this call's summaries, the
        state's inputs, and this call's inputs.
        """
        reach, n = self._reach, q.size(2)
        summaries = k.size(2) - reach - n  # compressed_len + K
        count = reach + 1 + self.compressed_len  # distances from 0 to the largest
        r = self._positions_for(q, count)
        # For each chunk of queries: its end, and the ranges of summaries and of inputs that any row sees.
        starts = range(0, n, self.chunk_size)
        ends = [min(start + self.chunk_size, n) for start in starts]
        far_bounds = [
            (
                min(summaries, self._summaries_within(start)[0]),
                min(summaries, self.compressed_len + self._summaries_within(end - 1)[1]),
            )
            for start, end in zip(starts, ends, strict=True)
        ]
        near_bounds = [(summaries + start, summaries + reach + end) for start, end in zip(starts, ends, strict=True)]
        pieces = zip(*(slices(t, bounds, 2) for t in (k, v) for bounds in (far_bounds, near_bounds)), strict=True)
        out = []
        for start, end, chunk, (low, high), piece in zip(
            starts, ends, q.split(self.chunk_size, 2), far_bounds, pieces, strict=True
        ):
            keys, values = (torch.cat(pair, 2) for pair in (piece[:2], piece[2:]))  # (B, H, M' + M, D)
            distance, seen = self._distances(length, (start, end), (low, high))
            out.append(self._by_distance(chunk, keys, values, r, distance, seen))
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def _distances(self, length: Tensor, queries: tuple[int, int], summaries: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the distances from a chunk of C queries to M' summaries and to the inputs that any of them may see.

        Args:
            length: (B,), positions before the call.
            queries: The first query and the end of the chunk.
            summaries: The first slot and the end of the summaries.

        Returns:
            Two tensors (B, C, M' + S + C), distances and whether the query sees the key.
        """
        (start, end), device = queries, length.device
        made = self._summaries(length)[:, None]  # (B, 1), summaries made before this call, numbered from 0
        position = length[:, None] + torch.arange(start, end, device=device)  # (B, C)
        new = self._summaries(position) - made  # (B, C), summaries of this call that the query sees
        waiting = position - self.compression_rate * (made + new)  # (B, C), t − b(t)

        # The input at slot s is S + i − s positions before query i.
        slot = torch.arange(start, self._reach + end, device=device)
        distance = self._reach + torch.arange(start, end, device=device)[:, None] - slot  # (C, M)
        near = (distance >= 0) & (distance <= waiting[..., None])  # (B, C, M)

        # The summary at slot s is number made − compressed_len + s. A query sees those at slots new … new +
        # compressed_len − 1. The distance of the nearest is that of x_{b(t)}, plus 1.
        slot = torch.arange(*summaries, device=device)
        back = (new + self.compressed_len)[..., None] - slot  # (B, C, M'), 1 for the nearest
        far = (back > 0) & (back <= self.compressed_len) & (slot + (made - self.compressed_len)[..., None] >= 0)
        distance = torch.cat([waiting[..., None] + back, distance.expand(len(length), -1, -1)], -1)
        return distance, torch.cat([far, near], -1)

    def _summaries(self, position: Tensor) -> Tensor:
        """Return b(t) / c, the number of summaries before each position t."""
        start = position - position % self.segment_len
        return ((start - self.mem_len) // self.compression_rate).clamp(min=0)

    def _summaries_within(self, n: int) -> tuple[int, int]:
        """Return the least and the largest number of summaries that n positions make, wherever they are."""
        extra = self.segment_len - 1
        c = self.compression_rate
        return max(0, (n - extra - self.mem_len) // c), (n + extra + c - 1) // c

    def _windows(self, inputs: Tensor, length: Tensor, n: int) -> Tensor:
        """Return the K windows of c inputs that this call may compress: (B, K, c, E)."""
        c = self.compression_rate
        oldest = self._reach - (length - c * self._summaries(length))  # (B,), the index of x_{b(length)}
        count = self._summaries_within(n)[1]
        if self.segment_len > 1 and reads_values(length):
            count = int((self._summaries(length + n) - self._summaries(length)).max())
        index = oldest[:, None] + torch.arange(count * c, device=inputs.device)  # (B, K c)
        # Windows beyond the end are not compressed yet, and their contents are not seen.
        index = index.clamp(max=inputs.size(1) - 1)
        return gather(inputs, index, dim=1).unflatten(1, (count, c))

    def _compress(self, windows: Tensor) -> Tensor:
        """(B, K, c, E) -> (B, K, E)."""
        if self.compressor is not None:
            return self.compressor(windows.flatten(2))
        return windows.mean(2) if self.compression == "mean" else windows.amax(2)

    def _keys_values(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(B, M, E) -> two of (B, H, M, D)."""
        inputs = self._normed(inputs)
        return self._heads(self.k_proj(inputs)), self._heads(self.v_proj(inputs))

    def _several(
        self, q: Tensor, x: Tensor, state: ProjectedCompressiveMemory, seen: Tensor
    ) -> tuple[Tensor, ProjectedCompressiveMemory]:
        """Attend several positions with a memory of keys and values."""
        slots, length, far = state.inputs.size(1), state.length, self.compressed_len
        keys, values, inputs, windows = self._in_order(x, state)
        y = self._see(q, keys, values, length)

        after, made, n_new = length + seen, self._summaries(length), windows.size(1)
        held = latest(after, slots) - length[:, None] + self._reach  # (B, M)
        held_far = latest(self._summaries(after), far) - made[:, None] + far  # (B, R)
        index = torch.cat([held_far, held.clamp(min=0) + far + n_new], 1)
        return y, ProjectedCompressiveMemory(
            gather(keys, index).to(state.keys.dtype),
            gather(values, index).to(state.values.dtype),
            gather(inputs, held, dim=1).to(state.inputs.dtype),
            after,
            self._reconstruction_loss(q, windows, length, seen).to(state.loss.dtype),
        )

    def _in_order(self, x: Tensor, state: ProjectedCompressiveMemory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys and values as `_see` expects them, the state's inputs and `x`, and the windows to compress."""
        slots, length, far = state.inputs.size(1), state.length, self.compressed_len
        made = self._summaries(length)
        earlier = (torch.arange(-self._reach, 0, device=x.device) + length[:, None]) % slots  # (B, S)
        before = (torch.arange(-far, 0, device=x.device) + made[:, None]) % far  # (B, R)
        inputs = torch.cat([gather(state.inputs, earlier, dim=1).to(x.dtype), x], 1)
        windows = self._windows(inputs, length, x.size(1))
        new_pair = self._keys_values(torch.cat([self._compress(windows).to(x.dtype), x], 1))
        n_new = windows.size(1)
        keys, values = (
            torch.cat(
                [
                    gather(t, before).to(new.dtype),
                    new[:, :, :n_new],
                    gather(t, far + earlier).to(new.dtype),
                    new[:, :, n_new:],
                ],
                2,
            )
            for t, new in zip((state.keys, state.values), new_pair, strict=True)
        )
        return keys, values, inputs, windows

    def _one(
        self, q: Tensor, x: Tensor, state: ProjectedCompressiveMemory, seen: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, ProjectedCompressiveMemory]:
        """Attend one position in the ring buffers, then compress the inputs that it pushed out. `segment_len` is 1.

        Only rows where `valid` (B, 1) is True are written; None: all.
        """
        slots, far, c = state.inputs.size(1), self.compressed_len, self.compression_rate
        length = state.length[:, None]  # (B, 1)
        k, v = self._keys_values(x)
        keys, values = (write(t, far + length % slots, new, valid) for t, new in ((state.keys, k), (state.values, v)))
        inputs = write(state.inputs[:, None], length % slots, x[:, None], valid)[:, 0]
        if may_overwrite():  # the tensor itself: compiled generation would copy a view of it
            inputs = state.inputs

        made = self._summaries(length)  # (B, 1)
        waiting = length - c * made  # (B, 1), t − b(t)
        low, high = 0, keys.size(2)
        if reads_values(length) and int(length.max()) < slots:  # then no row has a summary yet
            low, high = far, far + int(length.max()) + 1
        slot = torch.arange(low, high, device=x.device)
        back = (made - 1 - slot) % far + 1  # (B, used), 1 for the nearest summary
        near = (length - (slot - far)) % slots  # (B, used)
        distance = torch.where(slot < far, waiting + back, near)
        sees = torch.where(slot < far, back <= made, near <= waiting)
        count = self.mem_len + c + self.compressed_len
        k, v, r = keys[:, :, low:high], values[:, :, low:high], self._positions_for(q, count)
        y = self._by_distance(q, k, v, r, distance[:, None], sees[:, None])

        window = (c * made + torch.arange(c, device=x.device)) % slots  # (B, c)
        windows = gather(inputs, window, dim=1)[:, None].to(x.dtype)  # (B, 1, c, E)
        full = self._summaries(length + seen[:, None]) > made  # (B, 1)
        if not reads_values(length) or full.any():
            new = self._keys_values(self._compress(windows).to(x.dtype))
            keys, values = (write(t, made % far, summary, full) for t, summary in zip((keys, values), new, strict=True))
        loss = self._reconstruction_loss(q, windows, state.length, seen).to(state.loss.dtype)
        return y, ProjectedCompressiveMemory(keys, values, inputs, state.length + seen, loss)

    def _reconstruction_loss(self, q: Tensor, windows: Tensor, length: Tensor, seen: Tensor) -> Tensor:
        """Return the mean squared error of attention by content to the summaries, (B,), 0 if nothing is compressed.

        Everything but the compressor is detached, so nothing else learns from this loss. The weights are detached as
        copies, never with `detach_`, because they also learn from the task.
        """
        full = accumulator(q.dtype)
        total = torch.zeros(len(q), device=q.device, dtype=full)
        if self.compressor is None or not torch.is_grad_enabled():
            return total
        c, n = self.compression_rate, q.size(2)
        q, windows, queries = q.detach(), windows.detach(), torch.zeros_like(length)
        new = self._compress(windows)  # (B, K, E)
        starts = range(0, n, self.chunk_size)
        # For each chunk, the windows that its inputs pushed out of the memory.
        bounds = [
            (
                min(windows.size(1), self._summaries_within(start)[0]),
                min(windows.size(1), self._summaries_within(start + self.chunk_size)[1]),
            )
            for start in starts
        ]
        for start, (low, high), summaries in zip(starts, bounds, slices(new, bounds, 1), strict=True):
            end = min(start + self.chunk_size, n)
            if low >= high:
                continue
            first, last = (
                self._summaries(length + seen.clamp(max=i)) - self._summaries(length) for i in (start, end)
            )  # (B,)
            number = torch.arange(low, high, device=q.device)
            chosen = (number >= first[:, None]) & (number < last[:, None])  # (B, K')
            chunk = q[:, :, start:end]
            with torch.no_grad():
                target = self._by_content(chunk, windows[:, low:high].flatten(1, 2), chosen.repeat_interleave(c, 1))
            error = self._by_content(chunk, summaries, chosen).to(full) - target.to(full)
            valid = valid_positions((seen - start).clamp(min=0), end - start) & chosen.any(1)[:, None]  # (B, C)
            total = total + error.square().mean((1, 3)).masked_fill(~valid, 0).sum(1)
            queries = queries + valid.sum(1)
        return total / queries.clamp(min=1)

    def _by_content(self, q: Tensor, inputs: Tensor, chosen: Tensor) -> Tensor:
        """Attend to the `chosen` (B, M) `inputs` (B, M, E) without positions: (B, H, N, D)."""
        for norm in self._norm:
            inputs = functional_call(norm, {name: p.detach() for name, p in norm.named_parameters()}, inputs)
        k, v = (
            self._heads(F.linear(inputs, p.weight.detach(), None if p.bias is None else p.bias.detach()))
            for p in (self.k_proj, self.v_proj)
        )
        chosen = chosen | ~chosen.any(1, keepdim=True)  # a row without any sees all: avoids a softmax of 0 / 0
        return F.scaled_dot_product_attention(q, k, v, chosen[:, None, None])

    @property
    def _reach(self) -> int:
        """S, the number of earlier inputs that a position may see uncompressed."""
        return self.mem_len + self.segment_len - 1 + self.compression_rate - 1

    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> CompressiveMemory | ProjectedCompressiveMemory:
        """Return empty memories, of keys and values if `max_len` is given: see `SequenceModule.initial_state`."""

        def empty(*shape: int) -> Tensor:
            return torch.zeros(batch_size, *shape, device=device, dtype=dtype)

        length = torch.zeros(batch_size, dtype=torch.long, device=device)
        loss = torch.zeros(batch_size, device=device, dtype=accumulator(dtype))
        if max_len is None:
            return CompressiveMemory(
                empty(self._reach, self.d_model), empty(self.compressed_len, self.d_model), length, loss
            )
        slots = min(self._reach + 1, max_len)
        shape = (self.n_heads, self.compressed_len + slots, self.head_dim)
        return ProjectedCompressiveMemory(empty(*shape), empty(*shape), empty(slots, self.d_model), length, loss)

    def _check_size(self, state: CompressiveMemory | ProjectedCompressiveMemory, new: Tensor | int) -> None:
        if isinstance(state, ProjectedCompressiveMemory):
            self._check_room(state.inputs.size(1), state.length, new)
        else:
            super()._check_size(state, new)

    def _keys(self, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        n, far = x.size(1), self.compressed_len
        state = self.initial_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        if isinstance(state, CompressiveMemory):
            inputs = torch.cat([state.inputs.to(x.dtype), x], 1)  # (B, S + N, E)
            new = self._compress(self._windows(inputs, state.length, n)).to(x.dtype)
            k, _ = self._keys_values(torch.cat([state.compressed.to(x.dtype), new, inputs], 1))
        else:
            k = self._in_order(x, state)[0]
        slots = k.size(2) - self._reach - n  # compressed_len + K
        distance, seen = self._distances(state.length, (0, n), (0, slots))
        made = self._summaries(state.length)
        first = far - min(far, int(made.max()))
        end = far + int((self._summaries(state.length + n - 1) - made).max())
        m = min(self._reach, int(state.length.max()))
        column = torch.arange(k.size(2), device=x.device)
        shown = ((column >= first) & (column < end)) | (column >= slots + self._reach - m)
        return k[:, :, shown], distance[..., shown], seen[..., shown]
