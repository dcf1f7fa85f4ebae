"""The Compressive Transformer's attention: what leaves Transformer-XL's memory is compressed, not forgotten."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.transformer_xl import TransformerXLAttention, newest
from lit_effattn.ops.relative import attention_by_distance
from lit_effattn.sequence import State, accumulator, valid_positions, without_padding

Compression = Literal["conv", "mean", "max"]


class CompressiveMemory(NamedTuple):
    """The newest inputs of the layer and, of those before, summaries of c each; the newest last in both."""

    inputs: Tensor  # (B, mem_len + c − 1, E)
    compressed: Tensor  # (B, compressed_len, E)
    length: Tensor  # (B,), positions seen in all
    loss: Tensor  # (B,), the reconstruction loss of the last call


class CompressiveAttention(TransformerXLAttention):
    """Transformer-XL's attention, with a second memory of compressed inputs behind the first.

        y_i = W_o concat_h Σ_j softmax_j(((q_i + u) · k_j + (q_i + v) · W_r R_{i−j}) / √D) v_j
        k, v = W_k, W_v [compressed; memory; x],  compressed_b = f(x_{bc}, …, x_{bc+c−1})

    Rae et al. 2019, section 3 and algorithm 1. f is a convolution of width and stride c, or the mean or maximum.

    The memories are those of feeding one position at a time. The position t sees its own input and the `mem_len`
    before it. Older inputs gather, still seen as they are; as soon as there are c of them they are replaced by one
    summary, and the `compressed_len` newest summaries are seen. So x_{b(t)}, …, x_t are seen uncompressed, with
    b(t) = c ⌊(t − mem_len) / c⌋, at least 0. Nothing depends on where a call begins: splitting a stream changes
    nothing. As in the paper, a summary takes one place in the row of keys, so i − j counts one for each summary
    between. The reach of one layer is mem_len + c · compressed_len; time O(N (mem_len + compressed_len)).

    f learns from the reconstruction loss (section 3.2, algorithm 2), in the state's field `loss`: the mean squared
    difference between attention, by content alone, to the inputs that a call compresses and to their summaries, for
    the queries of that call, at most `chunk_size` at a time. Its gradient reaches f alone. Like any training on
    segments it depends on how the stream is split, and is best with calls of many c. It is 0 where no gradient is
    wanted, nothing was compressed, or f has no parameters. The task's gradient reaches f, too, where a call sees
    summaries that it made itself: modules never detach.

    Args:
        d_model: Width E, even.
        n_heads: Heads H.
        causal: True; there is no memory without.
        mem_len: Inputs remembered as they are; c − 1 more while they wait for their compression.
        compressed_len: Summaries remembered.
        compression_rate: c, inputs in a summary.
        compression: f: "conv", "mean" or "max".
        clamp_len: Distances beyond it look like it; None: none do.
        dropout: Probability with which an attention weight is dropped in training.
        position_dropout: Probability with which a number of R is dropped in training.
        chunk_size: Queries computed at once; no effect on the result, but see above for the loss of longer calls.
        bias: Whether q_proj, k_proj, v_proj, out_proj and the convolution have a bias; not in Transformer-XL.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        mem_len: int = 512,
        compressed_len: int = 512,
        compression_rate: int = 4,
        compression: Compression = "conv",
        clamp_len: int | None = None,
        dropout: float = 0.0,
        position_dropout: float = 0.0,
        chunk_size: int = 128,
        bias: bool = False,
    ) -> None:
        super().__init__(
            d_model,
            n_heads,
            causal,
            mem_len=mem_len,
            clamp_len=clamp_len,
            dropout=dropout,
            position_dropout=position_dropout,
            chunk_size=chunk_size,
            bias=bias,
        )
        if not causal:
            raise ValueError("causal=False leaves nothing to compress: CompressiveAttention is of the past alone")
        if compressed_len < 1:
            raise ValueError(f"compressed_len={compressed_len}; without summaries this is TransformerXLAttention")
        if compression_rate < 1:
            raise ValueError(
                f"compression_rate={compression_rate}; a summary is of 1 input at least, of 2 to 4 usually"
            )
        if compression not in get_args(Compression):
            raise ValueError(f"compression={compression!r} is none of {get_args(Compression)}")
        self.compressed_len = compressed_len
        self.compression_rate = compression_rate
        self.compression = compression
        # A convolution whose stride is its width is one matrix for windows that lie side by side.
        self.compressor = nn.Linear(compression_rate * d_model, d_model, bias=bias) if compression == "conv" else None

    def set_memory(self, mem_len: int, clamp_len: int | None = None, same_length: bool = False) -> None:
        """See `TransformerXLAttention.set_memory`; what a position sees never depends on the split here."""
        if same_length:
            raise ValueError(
                "same_length=True: CompressiveAttention sees the same however a stream is split; leave it out"
            )
        super().set_memory(mem_len, clamp_len)

    def initial_state(
        self,
        batch_size: int,
        *,
        max_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> CompressiveMemory:
        """Return empty memories: see `SequenceModule.initial_state`."""
        device, dtype = self.default(device, dtype)
        return CompressiveMemory(
            torch.zeros(batch_size, self._slots, self.d_model, device=device, dtype=dtype),
            torch.zeros(batch_size, self.compressed_len, self.d_model, device=device, dtype=dtype),
            torch.zeros(batch_size, dtype=torch.long, device=device),
            torch.zeros(batch_size, device=device, dtype=accumulator(dtype)),
        )

    @property
    def _slots(self) -> int:
        """Earlier inputs that a position may see uncompressed: S."""
        return self.mem_len + self.compression_rate - 1

    def check(self, x: Tensor, state: State | None, lengths: Tensor | None) -> None:
        """See `SequenceModule.check`; the state has to be one of this `mem_len`."""
        super().check(x, state, lengths)
        if state is not None and state.inputs.size(1) != self._slots:
            raise ValueError(
                f"the state has {state.inputs.size(1)} inputs, but mem_len={self.mem_len} with "
                f"compression_rate={self.compression_rate} wants {self._slots}: it was made before set_memory; "
                "start afresh"
            )

    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, CompressiveMemory]:
        """See `SequenceModule.forward`."""
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        before = self.initial_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        seen = torch.full_like(before.length, x.size(1)) if lengths is None else lengths
        inputs = torch.cat([before.inputs.to(x.dtype), x], 1)  # (B, S + N, E)
        windows = self._windows(inputs, before.length, x.size(1))  # (B, K, c, E)
        compressed = torch.cat([before.compressed.to(x.dtype), self._compress(windows).to(x.dtype)], 1)

        remembered = torch.cat([compressed, inputs], 1)
        q, k, v = (
            self._heads(self.q_proj(x)),
            self._heads(self.k_proj(remembered)),
            self._heads(self.v_proj(remembered)),
        )
        y = self.out_proj(self._see(q, k, v, before.length).transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)

        length = before.length + seen
        fresh = self._summaries(length) - self._summaries(before.length)
        after = CompressiveMemory(
            newest(inputs, self._slots + seen, self._slots).to(before.inputs.dtype),
            newest(compressed, self.compressed_len + fresh, self.compressed_len).to(before.compressed.dtype),
            length,
            self._reconstruction_loss(q, windows, before.length, seen).to(before.loss.dtype),
        )
        return without_padding(y, lengths), after

    def _summaries(self, position: Tensor) -> Tensor:
        """Return b(t) / c: how many summaries there are before each position t."""
        return ((position - self.mem_len) // self.compression_rate).clamp(min=0)

    def _windows(self, inputs: Tensor, length: Tensor, n: int) -> Tensor:
        """Return what is next compressed, and as many times c as this call can fill: (B, K, c, E)."""
        c = self.compression_rate
        oldest = self._slots - (length - c * self._summaries(length))  # (B,), where x_{b(length)} lies
        index = oldest[:, None] + torch.arange((n + c - 1) // c * c, device=inputs.device)  # (B, K c)
        # Beyond the end nothing is compressed yet, and what stands there is not seen.
        index = index.clamp(max=inputs.size(1) - 1)
        return inputs.gather(1, index[..., None].expand(-1, -1, inputs.size(2))).unflatten(1, (-1, c))

    def _compress(self, windows: Tensor) -> Tensor:
        """(B, K, c, E) -> (B, K, E)."""
        if self.compressor is not None:
            return self.compressor(windows.flatten(2))
        return windows.mean(2) if self.compression == "mean" else windows.amax(2)

    def _see(self, q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        """Let each query see its own input, those before that are not compressed, and the newest summaries.

        `k` and `v` (B, H, compressed_len + K + S + N, D) are of the state's summaries, of this call's, of the state's
        inputs, and of this call's.
        """
        c, reach, n, device = self.compression_rate, self._slots, q.size(2), q.device
        summaries = k.size(2) - reach - n  # compressed_len + K
        count = self.mem_len + c + self.compressed_len  # the largest distance, and 0
        r, u = self._positions_for(q, count), self.u.to(q.dtype)[:, None]
        made = self._summaries(length)[:, None]  # (B, 1), before this call; the first of them is number 0
        out = []
        for start in range(0, n, self.chunk_size):
            end = min(start + self.chunk_size, n)
            position = length[:, None] + torch.arange(start, end, device=device)  # (B, C)
            new = self._summaries(position) - made  # (B, C), summaries of this call that the query sees
            waiting = position - c * (made + new)  # (B, C), t − b(t)

            # Input at slot s is S + i − s before query i.
            slot = torch.arange(start, reach + end, device=device)
            distance = reach + torch.arange(start, end, device=device)[:, None] - slot  # (C, M)
            near = (distance >= 0) & (distance <= waiting[..., None])  # (B, C, M)

            # The summary at a slot is number made − compressed_len + slot, and a query sees those at slots new … new +
            # compressed_len − 1; the nearest is a step beyond x_{b(t)}. No row sees those outside low … high − 1.
            low = max(0, (start - self.mem_len) // c)
            high = min(summaries, self.compressed_len + (end - 1 + c - 1) // c)
            slot = torch.arange(low, high, device=device)
            back = (new + self.compressed_len)[..., None] - slot  # (B, C, M'), 1 for the nearest
            far = (back > 0) & (back <= self.compressed_len) & (slot + (made - self.compressed_len)[..., None] >= 0)

            chunk, inputs = q[:, :, start:end], slice(summaries + start, summaries + reach + end)
            keys, values = (torch.cat([t[:, :, low:high], t[:, :, inputs]], 2) for t in (k, v))  # (B, H, M' + M, D)
            distance = torch.cat([waiting[..., None] + back, distance.expand(len(q), -1, -1)], -1)
            seen = torch.cat([far, near], -1)
            scores = self._scores_by_distance(chunk, r)
            index = count - 1 - distance
            out.append(attention_by_distance(chunk + u, keys, values, scores, index, seen, dropout=self._dropout_now))
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def _reconstruction_loss(self, q: Tensor, windows: Tensor, length: Tensor, seen: Tensor) -> Tensor:
        """Return the mean squared difference that compression makes to attention by content, (B,), 0 without any.

        Everything but the compressor is a constant here, so that nothing else learns from it. Detached copies, never
        `detach_`: the weights go on learning from the task.
        """
        full = accumulator(q.dtype)
        total = torch.zeros(len(q), device=q.device, dtype=full)
        if self.compressor is None or not torch.is_grad_enabled():
            return total
        c, n = self.compression_rate, q.size(2)
        q, windows, queries = q.detach(), windows.detach(), torch.zeros_like(length)
        new = self._compress(windows)  # (B, K, E)
        for start in range(0, n, self.chunk_size):
            end = min(start + self.chunk_size, n)
            # The chunk's queries, and the windows that its inputs pushed out of the memory.
            low, high = max(0, (start - self.mem_len) // c), min(windows.size(1), (end + c - 1) // c)
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
            error = self._by_content(chunk, new[:, low:high], chosen).to(full) - target.to(full)
            valid = valid_positions((seen - start).clamp(min=0), end - start) & chosen.any(1)[:, None]  # (B, C)
            total = total + error.square().mean((1, 3)).masked_fill(~valid, 0).sum(1)
            queries = queries + valid.sum(1)
        return total / queries.clamp(min=1)

    def _by_content(self, q: Tensor, inputs: Tensor, chosen: Tensor) -> Tensor:
        """Attend to the `chosen` (B, M) `inputs` (B, M, E) without positions: (B, H, N, D)."""
        k, v = (
            self._heads(F.linear(inputs, p.weight.detach(), None if p.bias is None else p.bias.detach()))
            for p in (self.k_proj, self.v_proj)
        )
        chosen = chosen | ~chosen.any(1, keepdim=True)  # a row without any sees all, lest its softmax be 0 / 0
        return F.scaled_dot_product_attention(q, k, v, chosen[:, None, None])
