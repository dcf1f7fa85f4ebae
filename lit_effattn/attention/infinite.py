"""The ∞-former's attention: inputs that leave Transformer-XL's memory enter a continuous signal of constant size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.attention.kv_cache import newest, slots_used
from lit_effattn.attention.long_term_memory import InfiniteMemory, LongTermMemory, Sampling, whole_segments
from lit_effattn.attention.memory import MemoryAttention
from lit_effattn.checks import at_least, one_of, positive
from lit_effattn.ops.continuous import Grid, gaussian
from lit_effattn.ops.relative import furthest, relative_shift
from lit_effattn.sequence import State, accumulator, valid_lengths, without_padding

Writes = Literal["evicted", "segment"]
ShortTerm = Literal["transformer_xl", "softmax"]


class InfiniteAttention(MemoryAttention):
    """Transformer-XL's attention, and attention to a signal X̄(t) = Bᵀψ(t), t ∈ [0, 1], of all earlier inputs.

        y_i = XL_i + W_o' concat_h Σ_j E_{N(t; μ, σ²)}[ψ_j(t)] W_v' B_j
        μ = sigmoid(w_μ · s + b_μ),  σ² = softplus(w_σ · s + b_σ),  s_j = (W_q' x_i) · (W_k' B_j) / √D, μ and σ a head

    Martins, Marinho & Martins 2022, sections 2.2 and 3; XL is the equation of `TransformerXLAttention`, ψ_j are normal
    densities. The cost per position and the size of the state do not depend on the number of earlier positions.

    Every `segment_len` positions, at fixed positions of the stream, a segment of `segment_len` inputs is written. The
    old signal is sampled at `n_samples` times, these samples are placed evenly on [0, τ] and the segment on [τ, 1], and
    B is fitted to both by ridge regression (section 3.2). The first segment takes all of [0, 1]; before it the term is
    0. The `mem_len` inputs before a position are always attended to directly; with `mem_len` 0, those since the last
    multiple of L.

        "evicted": a segment is written when it has left the memory, that is before position t with L = segment_len
            dividing t − mem_len. Until then its inputs are attended to directly: t attends to x_{b(t)}, …, x_t,
            b(t) = L ⌊(t − mem_len) / L⌋, at least 0, and to the signal of x_0, …, x_{b(t)−1}.
        "segment": a segment is written at its end, so the newest inputs are in the memory and in the signal: t attends
            to the signal of x_0, …, x_{L⌊t/L⌋−1}.

    Splitting a stream changes nothing. In calls of L positions that begin at a multiple of L, with `mem_len` a multiple
    of L, XL sees the same inputs as `TransformerXLAttention`.

    After `normalise_with` the memory holds inputs that are not normalised. What is written to the signal is normalised
    with the gains of that time, unless `norm_signal` is False: then the signal is of the inputs as they were, as in the
    authors' code for GPT-2, and only the queries to it are of normalised inputs.

    With `sticky` (section 3.3) the old signal is sampled at the quantiles of a histogram of the densities, that is,
    where it was attended to. The histogram is summed over the heads and over the positions since the last update, and a
    thousandth of it is spread evenly. In evaluation the quantiles are the midpoints of `n_samples` equal parts. In
    training each is jittered within its part. The jitter follows from a counter in the state, so a recomputation
    repeats it, and it differs between rows and updates.

    With `short_term="softmax"` the inputs are attended to by softmax attention without positions of its own, not by XL:
    that of GPT-2, from which the paper's language model starts. With `mem_len` 0 it is attention within segments. The
    projections are those of `SoftmaxAttention`; the term of the signal is 0 in the first segment. Positions are the
    model's: a table of learned ones begins again in each segment with `LearnedPositions(period=segment_len)`.

    The authors' code (github.com/deep-spin/infinite-former) differs from the paper, and from the defaults, in what five
    options say: `tie_query`, `density_bias`, `grid`, `sampling` and, with GPT-2, `norm_signal`. Their least σ² is 10⁻⁶
    (10⁻⁴ with GPT-2); here 10⁻⁶ is added.

    A module never detaches its state, so gradients flow through all updates of a call. The caller detaches the state
    between calls (the paper's memories have no gradient). A segment is written by the call that first attends to it, so
    the gate learns even with a detached state.

    The state's `loss` is `kl_weight` times the mean of ½ (σ²/σ₀² − ln(σ²/σ₀²) − 1) over the heads and positions of a
    call that attend to a signal: it keeps densities from becoming uniform.

    Args:
        segment_len: L, inputs written at once.
        n_basis: Number of ψ_j, equally many of each width, with evenly spaced centres. 0: no signal, only XL.
        widths: Standard deviations of the ψ_j. The paper has (0.01, 0.05) for sorting, the default for language.
        ridge: λ, the penalty on B. The paper has 1 for sorting, the default for language.
        tau: τ, the part of [0, 1] that the old signal keeps. The paper has 0.75 for sorting, the default for language.
        n_samples: Samples of the old signal.
        writes: "evicted" or "segment".
        gate: Write x ⊙ sigmoid(conv(x)), a convolution of width 3 over the segment, instead of x.
        sticky: Sample the old signal where it was attended to.
        n_bins: Bins of the histogram.
        sampling: With `sticky`, "quantiles", or "bins": as in the authors' code, bins are drawn by their mass, with
            repetition, in evaluation too, and the signal is sampled at the left edges of the bins drawn, in order. In
            training the draws follow from the counter. In evaluation they follow from the number of the update since
            the start of the stream, so that an output depends on the row's inputs alone. No mass is spread evenly. A
            bin's left edge has no gradient.
        grid: Where the M samples and the L inputs of a segment are placed when the signal is fitted again: at the
            middles of M equal parts of [0, τ] and of L of [τ, 1], or, as in the authors' code, at their right "ends",
            which are then also where the old signal is sampled. The first segment is at midpoints in both.
        tie_query: Whether W_q' is W_q, as in the authors' code, which has no other query for the signal. The query then
            has the bias of W_q, if there is one.
        density_bias: Whether there are b_μ and b_σ. The paper has an affine map (section 3), the authors' code none.
        kl_weight: Weight of the regulariser.
        sigma_0: σ₀, the width that the regulariser pulls the densities towards.
        short_term: "transformer_xl" or "softmax". The second has no R, u and v, so `clamp_len`, `position_dropout` and
            `share_uv` must be left out.
        norm_signal: Whether the inputs that are written to the signal are normalised. False needs `normalise_with`,
            that is `norm_memory` of the `Transformer`.
    """

    extra_parameters = (
        *MemoryAttention.extra_parameters,
        "ltm_q_proj",
        "ltm_k_proj",
        "ltm_v_proj",
        "ltm_out_proj",
        "ltm_density",
        "gate",
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        segment_len: int = 512,
        n_basis: int = 512,
        widths: tuple[float, ...] = (0.005, 0.01),
        ridge: float = 0.5,
        tau: float = 0.5,
        n_samples: int = 512,
        writes: Writes = "evicted",
        gate: bool = False,
        sticky: bool = False,
        n_bins: int = 128,
        sampling: Sampling = "quantiles",
        grid: Grid = "midpoints",
        tie_query: bool = False,
        density_bias: bool = True,
        kl_weight: float = 1e-6,
        sigma_0: float = 0.05,
        short_term: ShortTerm = "transformer_xl",
        norm_signal: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, causal, **options)
        if not causal:
            raise ValueError("causal=False: InfiniteAttention remembers past positions, so it needs causal=True")
        at_least(1, segment_len=segment_len, n_samples=n_samples, n_bins=n_bins)
        at_least(0, n_basis=n_basis)
        if not widths or not all(0 < width < math.inf for width in widths):
            raise ValueError(f"widths={widths} must hold at least one width of the basis functions, all above 0")
        if n_basis % len(widths):
            raise ValueError(f"n_basis={n_basis} is not divisible by the {len(widths)} widths {widths}; change one")
        positive(ridge=ridge, sigma_0=sigma_0)
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"kl_weight={kl_weight} must be at least 0, and finite; 0 turns the regulariser off")
        if not 0 < tau < 1:
            raise ValueError(f"tau={tau} must be between 0 and 1, both excluded: it is the share of the old signal")
        one_of(Writes, writes=writes)
        one_of(Sampling, sampling=sampling)
        one_of(Grid, grid=grid)
        one_of(ShortTerm, short_term=short_term)
        if sampling != "quantiles" and not sticky:
            raise ValueError(f"sampling={sampling!r} needs sticky=True; without it the samples are even: leave it out")
        self.short_term = short_term
        self.has_positions = short_term == "transformer_xl"
        if self.has_positions:
            self._add_positions()
        else:
            self.set_memory(self.mem_len, self.clamp_len)
            for name, given in (("position_dropout", self.position_dropout), ("share_uv", bool(self.shared))):
                if given:
                    raise ValueError(f"{name}={given} with short_term='softmax', which has no R, u and v: leave it out")
        self.segment_len = segment_len
        self.n_basis = n_basis
        self.widths = tuple(widths)
        self.ridge = ridge
        self.tau = tau
        self.n_samples = n_samples
        self.writes = writes
        self.sticky = sticky
        self.n_bins = n_bins
        self.sampling = sampling
        self.jumps = sampling == "bins"  # a bin is drawn or not
        self.grid: Grid = grid
        self.tie_query = tie_query
        self.norm_signal = norm_signal
        self.long_term: LongTermMemory | None = None
        if n_basis:
            # Without biases the term is 0 where there is no signal. Its gradient is then 0, not None.
            if not tie_query:
                self.ltm_q_proj = nn.Linear(d_model, d_model, bias=False)
            self.ltm_k_proj, self.ltm_v_proj, self.ltm_out_proj = (
                nn.Linear(d_model, d_model, bias=False) for _ in range(3)
            )
            self.ltm_density = nn.Linear(n_basis, 2, bias=density_bias)
            self.gate = nn.Conv1d(d_model, d_model, 3, padding=1) if gate else None
            self.long_term = LongTermMemory(
                n_heads,
                self.q_proj if tie_query else self.ltm_q_proj,
                self.ltm_k_proj,
                self.ltm_v_proj,
                self.ltm_out_proj,
                self.ltm_density,
                self.gate,
                segment_len=segment_len,
                widths=self.widths,
                ridge=ridge,
                tau=tau,
                n_samples=n_samples,
                n_bins=n_bins if sticky else 0,
                sampling=sampling,
                grid=grid,
                kl_weight=kl_weight,
                sigma_0=sigma_0,
            )

    @override
    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, InfiniteMemory]:
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        before = self.initial_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        seen = valid_lengths(lengths, x)
        m = slots_used(before.length, self._reach)
        inputs = torch.cat([before.inputs[:, self._reach - m :].to(x.dtype), x], 1)  # (B, M + N, E)
        x, normed = self._normed(x), self._normed(inputs)
        near = self._short_term(x, normed, before.length)
        y = self.out_proj(near.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        after = before
        if self.long_term is not None:
            written = normed if self.norm_signal else inputs
            far, after = self.long_term(x, written, before, seen, delay=self._delay, training=self.training)
            y = y + far
        memory = newest(inputs, m + seen, self._reach, dim=1).to(before.inputs.dtype)
        _, coefficients, histogram, counter, _, loss = after
        # PyTorch 2.11 does not trace `_replace` here.
        after = InfiniteMemory(memory, coefficients, histogram, counter, before.length + seen, loss)
        return without_padding(y, lengths), after

    def _short_term(self, x: Tensor, inputs: Tensor, length: Tensor) -> Tensor:
        """Attend directly to the inputs x_{b(t)}, …, x_t: (B, N, E), (B, M + N, E) -> (B, H, N, D)."""
        n, m = x.size(1), inputs.size(1) - x.size(1)
        q = self._heads(self.q_proj(x))
        position = length[:, None] + torch.arange(n, device=x.device)  # (B, N)
        first = self.segment_len * whole_segments(position - self.mem_len, self.segment_len) - length[:, None] + m
        if self._is_step(q):
            return self._near_few(q, inputs, first)
        k, v = self._heads(self.k_proj(inputs)), self._heads(self.v_proj(inputs))
        if self.short_term == "softmax":
            return self._softmax(q, k, v, first)
        return self._relative(q, k, v, furthest(n, m, self._reach, self.chunk_size), window=self._reach, first=first)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        """Attend from q_i to the keys `first_i` (B, N) to M + i: (B, H, N, D), (B, H, M + N, D) -> (B, H, N, D)."""
        n, m, results = q.size(2), k.size(2) - q.size(2), []
        for start in range(0, n, self.chunk_size):
            end = min(start + self.chunk_size, n)
            low = max(0, m + start - self._reach)  # no query of the chunk sees an earlier key
            slot, last = torch.arange(low, m + end, device=q.device), torch.arange(m + start, m + end, device=q.device)
            seen = (slot >= first[:, start:end, None]) & (slot <= last[:, None])  # (B, C, K)
            keys, values = (t[:, :, low : m + end] for t in (k, v))
            results.append(
                F.scaled_dot_product_attention(
                    q[:, :, start:end], keys, values, seen[:, None], dropout_p=self._dropout_now
                )
            )
        return torch.cat(results, 2)

    def _near_few(self, q: Tensor, inputs: Tensor, first: Tensor) -> Tensor:
        """Compute `_short_term` with (W_kᵀ q) · x instead of q · (W_k x), and W_v (Σ w x) instead of Σ w (W_v x).

        x are the inputs. A generated token then costs O(H (mem_len + segment_len) E), not E² for each input, without a
        cache of keys.
        """
        n, slots = q.size(2), torch.arange(inputs.size(1), device=q.device)
        seen = (slots >= first[..., None]) & (slots <= slots[-n:, None])  # (B, N, M + N)
        if self.short_term == "softmax":
            scores, content = torch.zeros_like(seen, dtype=q.dtype)[:, None], q  # (B, 1, N, M + N)
        else:
            distances = self._positions_for(q, len(slots))
            scores = relative_shift(self._scores_by_distance(q, distances))  # (B, H, N, M + N)
            content = q + self.u.to(q.dtype)[:, None]
        key, value = (p.weight.to(q.dtype).unflatten(0, (self.n_heads, -1)) for p in (self.k_proj, self.v_proj))
        if self.k_proj.bias is not None:
            bias = self.k_proj.bias.to(q.dtype).view(self.n_heads, -1, 1)
            scores = scores + content @ bias * self.head_dim**-0.5
        x = inputs.to(q.dtype)[:, None]  # (B, 1, M + N, E), the keys and values of all heads
        content = torch.einsum("bhnd,hde->bhne", content, key)
        scores = scores.masked_fill(~seen[:, None], -torch.inf).expand(-1, self.n_heads, -1, -1)
        results = F.scaled_dot_product_attention(
            content.flatten(1, 2)[:, None],
            x,
            x,
            scores.flatten(1, 2)[:, None],
            dropout_p=self._dropout_now,
            scale=self.head_dim**-0.5,
        )
        results = results.view(content.shape)
        y = torch.einsum("bhne,hde->bhnd", results, value)
        return y if self.v_proj.bias is None else y + self.v_proj.bias.to(y.dtype).view(self.n_heads, 1, -1)

    def _is_step(self, q: Tensor) -> bool:
        """Whether it costs less to apply W_k and W_v to each head's queries (B, H, N, D) than to the inputs."""
        return q.size(1) * q.size(2) <= self.d_model

    @property
    def _delay(self) -> int:
        """Number of positions between the end of a segment and its write."""
        return self.mem_len if self.writes == "evicted" else 0

    @property
    def _reach(self) -> int:
        """Number of earlier inputs that a position may see directly, or that may have to be written before it."""
        return self.mem_len + self.segment_len

    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> InfiniteMemory:
        """Return empty memories, of fixed size with or without `max_len`: see `SequenceModule.initial_state`."""
        full = accumulator(dtype)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(batch_size, *shape, device=device, dtype=dtype)

        return InfiniteMemory(
            empty(dtype, self._reach, self.d_model),
            empty(full, self.n_basis, self.d_model),
            empty(full, self.n_bins if self.sticky and self.n_basis else 0),
            1_000_003 * torch.arange(batch_size, device=device),
            empty(torch.long),
            empty(full),
        )

    def reset(self, state: InfiniteMemory, rows: Tensor) -> InfiniteMemory:
        """See `SequenceModule.reset`. The counter is kept, so the next document's samples have different jitter."""
        return super().reset(state, rows)._replace(counter=state.counter)

    @override
    def set_memory(self, mem_len: int, clamp_len: int | None = None) -> None:
        if clamp_len is not None and not self.has_positions:
            raise ValueError(f"clamp_len={clamp_len} with short_term='softmax', which has no distances: leave it out")
        super().set_memory(mem_len, clamp_len)

    @property
    def needs_norm(self) -> str:
        """The option that has an effect only after `normalise_with`, "" for none."""
        return "" if self.norm_signal else "norm_signal=False"

    def signal(self, state: InfiniteMemory, times: Tensor) -> Tensor:
        """Return X̄(t) at `times` (T,), as the last position saw it: (B, T, E)."""
        return self._memory.signal(state.coefficients, times)

    def density(self, x: Tensor, state: InfiniteMemory, times: Tensor) -> Tensor:
        """Return N(t; μ, σ²) at `times` (T,), the attention of inputs `x` (B, N, E) to that signal: (B, H, N, T)."""
        q = self._memory.queries(self._normed(x)).to(state.coefficients.dtype)
        mean, variance = self._memory.attended(q, state.coefficients)
        return gaussian(times.to(mean), mean[..., None], variance[..., None])

    def sample_times(self, state: InfiniteMemory) -> Tensor:
        """Return the times at which the next update samples the signal, (M,), or (B, M) if sticky."""
        written = whole_segments(state.length - 1 - self._delay, self.segment_len)
        return self._memory.sample_times(state, written, self.training)

    @torch.no_grad()
    def attention_densities(
        self, x: Tensor, state: InfiniteMemory | None = None, lengths: Tensor | None = None, *, times: Tensor
    ) -> Tensor:
        """Return N(t; μ, σ²) at `times` (T,), with which each position of `x` attends to the signal in `forward`.

        A position attends to the signal of its own time, which changes when a segment is written. For inspection, not
        for training: it goes through the positions one by one, and has no gradient. `state` is not changed.
        `attention_weights` and `attention_terms` are those of the short-term memory.

        Args:
            x: (B, N, E), as in `forward`.
            state: As in `forward`.
            lengths: As in `forward`.
            times: (T,), the t at which the densities are computed; the signal is on [0, 1].

        Returns:
            (B, H, N, T), in float32 or more; 0 in padding and while nothing has been written.

        Raises:
            ValueError: If there is no signal, or an argument is invalid: see `check`.
        """
        self.check(x, None, lengths)  # `forward` checks the state
        x = without_padding(x, lengths)
        state = self.initial_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        results = []
        for i, position in enumerate(x.split(1, 1)):
            now = torch.ones_like(state.length) if lengths is None else (i < lengths).long()  # (B,), 0 in padding
            attends = (whole_segments(state.length - self._delay, self.segment_len) > 0) & (now > 0)
            _, state = self.forward(position, state, now)
            results.append(self.density(position, state, times).masked_fill(~attends[:, None, None, None], 0))
        return torch.cat(results, 2)

    def _terms(self, q: Tensor, k: Tensor, distance: Tensor) -> tuple[Tensor, ...]:
        if self.has_positions:
            return super()._terms(q, k, distance)
        return q @ k.mT * self.head_dim**-0.5, *3 * (q.new_zeros(()),)

    def _keys(self, x: Tensor, state: InfiniteMemory | None, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        n, m = x.size(1), 0 if state is None else min(int(state.length.max()), self._reach)
        if state is not None:
            x = torch.cat([state.inputs[:, self._reach - m :].to(x.dtype), x], 1)  # (B, M + N, E)
        i, j, seen = self._order(n, m, state, lengths, x.device)
        k = self._heads(self.k_proj(self._normed(x)))
        return k, i - j, seen & (j >= self.segment_len * whole_segments(i - self.mem_len, self.segment_len))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InfiniteAttention:
        """Recompute the matrices for the parameters' new device and type."""
        super()._apply(fn, recurse)
        if self.long_term is not None:
            self.long_term.solve()
        return self

    @property
    def _memory(self) -> LongTermMemory:
        if self.long_term is None:
            raise ValueError("n_basis=0: there is no signal, so there are no densities; use attention_weights")
        return self.long_term
