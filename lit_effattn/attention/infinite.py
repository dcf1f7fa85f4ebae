"""The ∞-former's attention: inputs that leave Transformer-XL's memory enter a continuous signal of constant size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.cache import newest
from lit_effattn.attention.transformer_xl import TransformerXLAttention, gather_rows, slots_used
from lit_effattn.ops.continuous import (
    Grid,
    basis_of,
    ends,
    evaluate_signal,
    expected_basis,
    fit_matrix,
    gaussian,
    jitter,
    left_edges,
    midpoints,
    normal_masses,
    pseudorandom,
    quantiles,
    refit_matrix,
    width_divergence,
)
from lit_effattn.ops.relative import furthest, relative_attention, relative_shift
from lit_effattn.sequence import SequenceModule, State, accumulator, reads_values, without_padding

Writes = Literal["evicted", "segment"]
Sampling = Literal["quantiles", "bins"]
ShortTerm = Literal["transformer_xl", "softmax"]

_TOGETHER = 4096
"""Positions that attend to their signals at once, unless `sticky`: fewer operators, with bounded memory."""

_LEAST_VARIANCE = 1e-6  # σ = 0.001, far narrower than any basis function: keeps ln σ² finite


class InfiniteMemory(NamedTuple):
    """The newest inputs, and the signal fitted to older inputs, as the last position saw it."""

    inputs: Tensor  # (B, mem_len + segment_len, E), the newest last
    coefficients: Tensor  # (B, n_basis, E), in float32 or more; zeros before the first segment is written
    histogram: Tensor  # (B, n_bins), where this signal was attended to; (B, 0) unless sticky
    counter: Tensor  # (B,), seeds the samples' jitter or draws in training; differs between updates and rows
    length: Tensor  # (B,), positions seen in all
    loss: Tensor  # (B,), the regulariser of the last call


class InfiniteAttention(TransformerXLAttention):
    """Transformer-XL's attention, and attention to a signal X̄(t) = Bᵀψ(t), t ∈ [0, 1], of all earlier inputs.

        y_i = XL_i + W_o' concat_h Σ_j E_{N(t; μ, σ²)}[ψ_j(t)] W_v' B_j
        μ = sigmoid(w_μ · s + b_μ),  σ² = softplus(w_σ · s + b_σ),  s_j = (W_q' x_i) · (W_k' B_j) / √D, μ and σ a head

    Martins, Marinho & Martins 2022, sections 2.2 and 3; XL is the equation of `TransformerXLAttention`, ψ_j are normal
    densities. The cost per position and the size of the state do not depend on the number of earlier positions.

    Every `segment_len` positions, at fixed positions of the stream, a segment of `segment_len` inputs is written. The
    old signal is sampled at `n_samples` times, these samples are placed evenly on [0, τ] and the segment on [τ, 1], and
    B is fitted to both by ridge regression (section 3.2). The first segment takes all of [0, 1]; before it the term is
    0.

        "evicted": a segment is written when it has left the memory, that is before position t with L = segment_len
            dividing t − mem_len. Until then its inputs are attended to directly: t attends to x_{b(t)}, …, x_t,
            b(t) = L ⌊(t − mem_len) / L⌋, at least 0, and to the signal of x_0, …, x_{b(t)−1}.
        "segment": a segment is written at its end, so the newest inputs are in the memory and in the signal: t attends
            to the signal of x_0, …, x_{L⌊t/L⌋−1}.

    Splitting a stream changes nothing. In calls of L positions that begin at a multiple of L, with `mem_len` a multiple
    of L, XL sees what `TransformerXLAttention` sees.

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
        d_model: Width E, even.
        n_heads: Heads H.
        causal: Must be True, because the memory needs it.
        mem_len: Inputs before a position that are always attended to directly; 0: those since the last multiple of
            `segment_len`.
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
        clamp_len: Larger distances are clamped to it; None: no clamping.
        dropout: Probability with which a weight of XL's attention is dropped in training.
        position_dropout: Probability with which an element of R is dropped in training.
        chunk_size: Queries computed at once; no effect on the result.
        bias: Whether q_proj, k_proj, v_proj and out_proj have a bias; not in Transformer-XL.
        share_uv: Whether all layers of a `Transformer` share u and v: see `TransformerXLAttention`.
        short_term: "transformer_xl" or "softmax". The second has no R, u and v, so `clamp_len`, `position_dropout` and
            `share_uv` must be left out.
        norm_signal: Whether the inputs that are written to the signal are normalised. False needs `normalise_with`,
            that is `norm_memory` of the `Transformer`.
    """

    extra_parameters = (
        *TransformerXLAttention.extra_parameters,
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
        mem_len: int = 512,
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
        clamp_len: int | None = None,
        dropout: float = 0.0,
        position_dropout: float = 0.0,
        chunk_size: int = 128,
        bias: bool = False,
        share_uv: bool = False,
        short_term: ShortTerm = "transformer_xl",
        norm_signal: bool = True,
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
            share_uv=share_uv,
        )
        if not causal:
            raise ValueError("causal=False: InfiniteAttention remembers past positions, so it needs causal=True")
        least = {"segment_len": (segment_len, 1), "n_basis": (n_basis, 0), "n_samples": (n_samples, 1)}
        for name, (value, fewest) in (least | {"n_bins": (n_bins, 1)}).items():
            if value < fewest:
                raise ValueError(f"{name}={value} must be at least {fewest}")
        if not widths or not all(0 < width < math.inf for width in widths):
            raise ValueError(f"widths={widths} must hold at least one width of the basis functions, all above 0")
        if n_basis % len(widths):
            raise ValueError(f"n_basis={n_basis} is not divisible by the {len(widths)} widths {widths}; change one")
        for name, positive in (("ridge", ridge), ("sigma_0", sigma_0)):
            if not 0 < positive < math.inf:
                raise ValueError(f"{name}={positive} must be above 0, and finite")
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"kl_weight={kl_weight} must be at least 0, and finite; 0 turns the regulariser off")
        if not 0 < tau < 1:
            raise ValueError(f"tau={tau} must be between 0 and 1, both excluded: it is the share of the old signal")
        choices = {"writes": (writes, Writes), "sampling": (sampling, Sampling), "grid": (grid, Grid)}
        for name, (choice, known) in (choices | {"short_term": (short_term, ShortTerm)}).items():
            if choice not in get_args(known):
                raise ValueError(f"{name}={choice!r} is not one of {get_args(known)}")
        if sampling != "quantiles" and not sticky:
            raise ValueError(f"sampling={sampling!r} needs sticky=True; without it the samples are even: leave it out")
        self.short_term = short_term
        if short_term == "softmax":
            for name, given in (("position_dropout", position_dropout), ("share_uv", share_uv)):
                if given:
                    raise ValueError(f"{name}={given} with short_term='softmax', which has no R, u and v: leave it out")
            self._check_clamp(clamp_len)
            self.has_positions = False
            del self.r_proj, self.u, self.v
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
        self.grid: Grid = grid
        self.tie_query = tie_query
        self.kl_weight = kl_weight
        self.sigma_0 = sigma_0
        self.norm_signal = norm_signal
        if n_basis:
            # Without biases the term is 0 where there is no signal. Its gradient is then 0, not None.
            if not tie_query:
                self.ltm_q_proj = nn.Linear(d_model, d_model, bias=False)
            self.ltm_k_proj, self.ltm_v_proj, self.ltm_out_proj = (
                nn.Linear(d_model, d_model, bias=False) for _ in range(3)
            )
            self.ltm_density = nn.Linear(n_basis, 2, bias=density_bias)
            self.gate = nn.Conv1d(d_model, d_model, 3, padding=1) if gate else None
            self._solve()

    def _solve(self) -> None:
        """Compute the matrices that fit the signal. They are not buffers, so that `half()` does not round them."""
        weight, basis = self.ltm_density.weight, (self.n_basis, self.widths)
        options: dict[str, Any] = {"dtype": accumulator(weight.dtype), "device": weight.device}
        self._fit_first = fit_matrix(0, self.segment_len, self.tau, *basis, self.ridge, **options)
        later = (self.n_samples, self.segment_len, self.tau, *basis, self.ridge)
        self._fit_next = fit_matrix(*later, **options, grid=self.grid)
        self._refit = refit_matrix(*later, **options, grid=self.grid)
        self._centres_variances = basis_of(*basis, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InfiniteAttention:
        """Recompute the matrices for the parameters' new device and type."""
        super()._apply(fn, recurse)
        if self.n_basis:
            self._solve()
        return self

    @property
    def needs_norm(self) -> str:
        """The option that has an effect only after `normalise_with`, "" for none."""
        return "" if self.norm_signal else "norm_signal=False"

    def set_memory(self, mem_len: int, clamp_len: int | None = None, same_length: bool = False) -> None:
        """See `TransformerXLAttention.set_memory`. `same_length` must be False: the split never has an effect here."""
        if same_length:
            raise ValueError(
                "same_length=True: what InfiniteAttention sees never depends on how a stream is split; leave it out"
            )
        self._check_clamp(clamp_len)
        super().set_memory(mem_len, clamp_len)

    def _check_clamp(self, clamp_len: int | None) -> None:
        if clamp_len is not None and getattr(self, "short_term", "transformer_xl") == "softmax":
            raise ValueError(f"clamp_len={clamp_len} with short_term='softmax', which has no distances: leave it out")

    @property
    def _reach(self) -> int:
        """Number of earlier inputs that a position may see directly, or that may have to be written before it."""
        return self.mem_len + self.segment_len

    def initial_state(
        self,
        batch_size: int,
        *,
        max_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> InfiniteMemory:
        """Return empty memories, of fixed size with or without `max_len`: see `SequenceModule.initial_state`."""
        device, dtype = self.default(device, dtype)
        full = accumulator(dtype)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(batch_size, *shape, device=device, dtype=dtype)

        return InfiniteMemory(
            empty(dtype, self._reach, self.d_model),
            empty(full, self.n_basis, self.d_model),
            empty(full, self.n_bins if self.sticky and self.n_basis else 0),
            2**20 * torch.arange(batch_size, device=device),
            empty(torch.long),
            empty(full),
        )

    def reset(self, state: InfiniteMemory, rows: Tensor) -> InfiniteMemory:
        """See `SequenceModule.reset`. The counter is kept, so the next document's samples have different jitter."""
        return super().reset(state, rows)._replace(counter=state.counter)

    def check(self, x: Tensor, state: State | None, lengths: Tensor | None) -> None:
        """See `SequenceModule.check`. Also checks that the state has the size of this memory."""
        SequenceModule.check(self, x, state, lengths)
        if state is not None:
            self._check_slots(state.inputs.size(1), self._reach)

    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, InfiniteMemory]:
        """See `SequenceModule.forward`."""
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        before = self.initial_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        seen = torch.full_like(before.length, x.size(1)) if lengths is None else lengths
        m = slots_used(before.length, self._reach)
        inputs = torch.cat([before.inputs[:, self._reach - m :].to(x.dtype), x], 1)  # (B, M + N, E)
        x, normed = self._normed(x), self._normed(inputs)
        near = self._short_term(x, normed, before.length)
        y = self.out_proj(near.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        after = before
        if self.n_basis:
            far, after = self._long_term(x, normed if self.norm_signal else inputs, before, seen)
            y = y + self.ltm_out_proj(far.transpose(1, 2).flatten(2).to(x.dtype))
        memory = newest(inputs, m + seen, self._reach, dim=1).to(before.inputs.dtype)
        return without_padding(y, lengths), after._replace(inputs=memory, length=before.length + seen)

    # ------------------------------------------------------------------------------------------------------ the signal

    def signal(self, state: InfiniteMemory, times: Tensor) -> Tensor:
        """Return X̄(t) at `times` (T,), as the last position saw it: (B, T, E)."""
        return evaluate_signal(state.coefficients, times.to(state.coefficients), self._basis(state.coefficients))

    def density(self, x: Tensor, state: InfiniteMemory, times: Tensor) -> Tensor:
        """Return N(t; μ, σ²) at `times` (T,), the attention of inputs `x` (B, N, E) to that signal: (B, H, N, T)."""
        full = state.coefficients.dtype
        q = self._far_queries(self._normed(x)).to(full)
        mean, variance = self._attended(q, state.coefficients)
        return gaussian(times.to(mean), mean[..., None], variance[..., None])

    def sample_times(self, state: InfiniteMemory) -> Tensor:
        """Return the times at which the next update samples the signal, (M,), or (B, M) if sticky."""
        return self._sample_times(state, self._writes_before(state.length - 1, self._delay))

    def _sample_times(self, state: InfiniteMemory, written: Tensor) -> Tensor:
        """Return `sample_times` of the update after (B,) `written` segments."""
        n, histogram = self.n_samples, state.histogram
        if not self.sticky:
            return (ends if self.grid == "ends" else midpoints)(n, dtype=histogram.dtype, device=histogram.device)
        if self.sampling == "bins":
            number = state.counter if self.training else written
            return left_edges(histogram, pseudorandom(number, n, histogram.dtype).sort(1).values)
        within = jitter(state.counter, n, histogram.dtype) if self.training else torch.full_like(histogram[:, :1], 0.5)
        return quantiles(histogram, (torch.arange(n, device=histogram.device) + within) / n)

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
            ValueError: there is no signal, or an argument is invalid: see `check`.
        """
        if not self.n_basis:
            raise ValueError("n_basis=0: there is no signal, so there are no densities; use attention_weights")
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        state = self.initial_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        found = []
        for i, position in enumerate(x.split(1, 1)):
            now = torch.ones_like(state.length) if lengths is None else (i < lengths).long()  # (B,), 0 in padding
            attends = (self._writes_before(state.length, self._delay) > 0) & (now > 0)
            inputs = torch.cat([state.inputs.to(x.dtype), position], 1)  # (B, M + 1, E)
            written = self._normed(inputs) if self.norm_signal else inputs
            _, after = self._long_term(self._normed(position), written, state, now)
            memory = newest(inputs, self._reach + now, self._reach, dim=1).to(state.inputs.dtype)
            state = after._replace(inputs=memory, length=state.length + now)
            found.append(self.density(position, state, times).masked_fill(~attends[:, None, None, None], 0))
        return torch.cat(found, 2)

    # ------------------------------------------------------------------------------------------- the short-term memory

    @property
    def _delay(self) -> int:
        """Number of positions between the end of a segment and its write."""
        return self.mem_len if self.writes == "evicted" else 0

    def _writes_before(self, position: Tensor, delay: int) -> Tensor:
        """Return the number of whole segments that end at least `delay` positions before each `position`."""
        return ((position - delay) // self.segment_len).clamp(min=0)

    def _short_term(self, x: Tensor, inputs: Tensor, length: Tensor) -> Tensor:
        """Attend directly to the inputs x_{b(t)}, …, x_t: (B, N, E), (B, M + N, E) -> (B, H, N, D)."""
        n, m = x.size(1), inputs.size(1) - x.size(1)
        q = self._heads(self.q_proj(x))
        position = length[:, None] + torch.arange(n, device=x.device)  # (B, N)
        first = self.segment_len * self._writes_before(position, self.mem_len) - length[:, None] + m
        if self._is_step(q):
            return self._near_few(q, inputs, first)
        k, v = self._heads(self.k_proj(inputs)), self._heads(self.v_proj(inputs))
        if self.short_term == "softmax":
            return self._softmax(q, k, v, first)
        return relative_attention(
            q,
            k,
            v,
            self._relative_keys(furthest(n, m, self._reach, self.chunk_size), 0).to(q.dtype),
            self.u.to(q.dtype),
            self.v.to(q.dtype),
            window=self._reach,
            first=first,
            chunk_size=self.chunk_size,
            dropout=self._dropout_now,
        )

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        """Attend from q_i to the keys `first_i` (B, N) to M + i: (B, H, N, D), (B, H, M + N, D) -> (B, H, N, D)."""
        n, m, found = q.size(2), k.size(2) - q.size(2), []
        for start in range(0, n, self.chunk_size):
            end = min(start + self.chunk_size, n)
            low = max(0, m + start - self._reach)  # no query of the chunk sees an earlier key
            slot, last = torch.arange(low, m + end, device=q.device), torch.arange(m + start, m + end, device=q.device)
            seen = (slot >= first[:, start:end, None]) & (slot <= last[:, None])  # (B, C, K)
            keys, values = (t[:, :, low : m + end] for t in (k, v))
            found.append(
                F.scaled_dot_product_attention(
                    q[:, :, start:end], keys, values, seen[:, None], dropout_p=self._dropout_now
                )
            )
        return torch.cat(found, 2)

    def _terms(self, q: Tensor, k: Tensor, distance: Tensor) -> tuple[Tensor, ...]:
        """See `TransformerXLAttention._terms`; softmax attention has the first."""
        if self.short_term == "transformer_xl":
            return super()._terms(q, k, distance)
        return q @ k.mT * self.head_dim**-0.5, *3 * (q.new_zeros(()),)

    def _keys(self, x: Tensor, state: InfiniteMemory | None, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `TransformerXLAttention._keys`."""
        n, m = x.size(1), 0 if state is None else min(int(state.length.max()), self._reach)
        if state is not None:
            x = torch.cat([state.inputs[:, self._reach - m :].to(x.dtype), x], 1)  # (B, M + N, E)
        i, j, seen = self._order(n, m, state, lengths, x.device)
        k = self._heads(self.k_proj(self._normed(x)))
        return k, i - j, seen & (j >= self.segment_len * self._writes_before(i, self.mem_len))

    def _is_step(self, q: Tensor) -> bool:
        """Whether it costs less to apply W_k and W_v to each head's queries (B, H, N, D) than to the inputs."""
        return q.size(1) * q.size(2) <= self.d_model

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
        x = inputs.to(q.dtype)[:, None].expand(-1, self.n_heads, -1, -1)  # (B, H, M + N, E)
        found = F.scaled_dot_product_attention(
            torch.einsum("bhnd,hde->bhne", content, key),
            x,
            x,
            scores.masked_fill(~seen[:, None], -torch.inf),
            dropout_p=self._dropout_now,
            scale=self.head_dim**-0.5,
        )
        y = torch.einsum("bhne,hde->bhnd", found, value)
        return y if self.v_proj.bias is None else y + self.v_proj.bias.to(y.dtype).view(self.n_heads, 1, -1)

    # -------------------------------------------------------------------------------------------- the long-term memory

    def _long_term(
        self, x: Tensor, inputs: Tensor, state: InfiniteMemory, seen: Tensor
    ) -> tuple[Tensor, InfiniteMemory]:
        """Attend to the signal from `x` (B, N, E), and write the segments of `inputs` (B, M + N, E) that are due.

        Return (B, H, N, D) and the new state.

        A call of N positions has at most ⌈N / L⌉ updates a row, so at most ⌈N / L⌉ + 1 groups of positions that see the
        same signal. Rows are at different positions, so each has its own group borders. Every group has room for
        P = min(N, L) positions.
        """
        n, size, full = x.size(1), self.segment_len, accumulator(x.dtype)
        room = min(n, size)
        q = self._far_queries(x).to(full)
        written = self._writes_before(state.length - 1, self._delay)[:, None]  # (B, 1)
        due = (
            self._delay + (written + 1) * size - state.length[:, None]
        )  # positions of this call before the next update
        group = torch.arange(-(-n // size) + 1, device=x.device)  # (G,)
        index = (due + (group - 1) * size).masked_fill(group == 0, 0)[..., None]
        index = index + torch.arange(room, device=x.device)  # (B, G, P)
        end = torch.where(group == 0, torch.minimum(due, seen[:, None]), seen[:, None])  # (B, G)
        attends = (index < end[..., None]) & (written + group > 0)[..., None]  # (B, G, P)
        used = range(len(group))
        if reads_values(attends):
            used = range(*_span(attends.any(2).any(0).tolist()))
        state = state._replace(
            coefficients=state.coefficients.to(full),
            histogram=state.histogram.to(full),
            loss=torch.zeros_like(state.loss, dtype=full),
        )
        if not used:
            return self._nothing(q), state

        low, high = used.start, used.stop
        groups = gather_rows(q, index[:, low:high].flatten(1).clamp(max=n - 1))  # (B, H, G P, D)
        groups = groups.unflatten(2, (-1, room)).transpose(1, 2)  # (B, G, H, P, D)
        together = 1 if self.sticky else max(1, _TOGETHER // room)  # a sticky update needs the histogram so far
        out = []
        with torch.autocast(x.device.type, enabled=False):
            new = range(max(low, 1), high)  # groups before which a segment is written
            numbers = written + group[new.start : high]  # (B, K)
            fits = self._fits(
                inputs.to(full), numbers * size - state.length[:, None] + inputs.size(1) - n, numbers == 1
            )
            starts = range(low, high, together)
            parts = zip(starts, groups.split(together, 1), attends[:, low:high].split(together, 1), strict=True)
            for start, queries, attending in parts:
                signals = []
                for k in range(start, start + queries.size(1)):
                    if k > 0:
                        before = numbers[:, k - new.start] - 1
                        state = self._write(state, fits[k - new.start], attends[:, k].any(1), before)
                    signals.append(state.coefficients)
                y, state = self._recall(queries, torch.stack(signals, 1), state, attending)
                out.append(y)
        count = attends.sum((1, 2)).clamp(min=1)
        state = state._replace(loss=self.kl_weight * state.loss / (self.n_heads * count))
        if not new:
            out[0] = out[0] + self._nothing(out[0])
        found = out[0] if len(out) == 1 else torch.cat(out, 1)  # (B, G, H, P, D)
        since = torch.arange(n, device=x.device) - due  # (B, N)
        index = torch.where(since < 0, (since + due).clamp(max=room - 1), room + since) - low * room
        y = gather_rows(found.transpose(1, 2).flatten(2, 3), index.clamp(max=len(used) * room - 1))
        return (y.masked_fill((since < 0)[:, None, :, None], 0) if low else y), state

    def _nothing(self, like: Tensor) -> Tensor:
        """Return zeros that give every parameter of the long-term memory a gradient of 0, since DDP waits for each."""
        parameters = [p for name, p in self.named_parameters() if name.startswith(("ltm_", "gate"))]
        return torch.zeros_like(like) + 0 * sum(p.flatten()[0] for p in parameters)

    def _fits(self, inputs: Tensor, end: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        """Fit the segments of `inputs` (B, M + N, E) before each `end` (B, K), to be added to the old signal's part.

        Segments where `first` (B, K) is True are fitted to all of [0, 1]; for them there is no old signal.

        Returns:
            K tensors (B, n_basis, E).
        """
        size = self.segment_len
        # Segments beyond the end of `inputs` are not written by any row.
        index = end.clamp(max=inputs.size(1))[..., None] + torch.arange(-size, 0, device=end.device)  # (B, K, L)
        index = index.flatten(1).clamp(min=0)[..., None].expand(-1, -1, inputs.size(2))
        segments = self._gated(inputs.gather(1, index).view(-1, size, inputs.size(2)))  # (B K, L, E)
        segments = segments.unflatten(0, end.shape)
        after = self._fit_next[:, self.n_samples :].to(inputs.dtype) @ segments  # (B, K, n_basis, E)
        alone = self._fit_first.to(inputs.dtype) @ segments
        return torch.where(first[..., None, None], alone, after).unbind(1)

    def _write(self, state: InfiniteMemory, fit: Tensor, rows: Tensor, written: Tensor) -> InfiniteMemory:
        """Write a segment with the given `fit` (B, n_basis, E) after the signal of `rows`; other rows are unchanged.

        The signal has (B,) `written` segments. Before the first it is 0, so it adds 0 to the fit.
        """
        if self.sticky:
            old = evaluate_signal(state.coefficients, self._sample_times(state, written), self._basis(fit))  # (B, M, E)
            new = self._fit_next[:, : self.n_samples].to(fit.dtype) @ old + fit
        else:
            new = self._refit.to(fit.dtype) @ state.coefficients + fit  # (B, n_basis, E)
        return state._replace(
            coefficients=torch.where(rows[:, None, None], new, state.coefficients),
            histogram=state.histogram.masked_fill(rows[:, None], 0),
            counter=state.counter + rows,
        )

    def _recall(
        self, q: Tensor, signals: Tensor, state: InfiniteMemory, attends: Tensor
    ) -> tuple[Tensor, InfiniteMemory]:
        """Attend from groups of queries (B, G, H, P, D) to one signal each, (B, G, n_basis, E).

        Returns:
            (B, G, H, P, D), and the state with the loss and histogram of the positions where `attends` (B, G, P) is
            True.
        """
        shape, b = q.shape[:2], signals.flatten(0, 1)
        mean, variance = self._attended(q.flatten(0, 1), b)  # (B G, H, P)
        uncounted = ~attends.flatten(0, 1)[:, None]
        loss = width_divergence(variance, self.sigma_0).masked_fill(uncounted, 0).unflatten(0, shape)
        state = state._replace(loss=state.loss + loss.sum((1, 2, 3)))
        if self.sticky:
            masses = normal_masses(mean, variance, self.n_bins)  # (B G, H, P, n_bins)
            masses = masses.masked_fill(uncounted[..., None], 0).unflatten(0, shape)
            state = state._replace(histogram=state.histogram + masses.sum((1, 2, 3)))
        return self._read(mean, variance, b).unflatten(0, shape), state

    def _basis(self, like: Tensor) -> tuple[Tensor, Tensor]:
        centres, variances = self._centres_variances
        return centres.to(like.dtype), variances.to(like.dtype)

    def _gated(self, segment: Tensor) -> Tensor:
        """(B, L, E) -> (B, L, E)."""
        if self.gate is None:
            return segment
        weight, bias = self.gate.weight.to(segment.dtype), self.gate.bias
        openness = F.conv1d(segment.mT, weight, None if bias is None else bias.to(segment.dtype), padding=1)
        return segment * openness.sigmoid().mT

    def _far_queries(self, x: Tensor) -> Tensor:
        """Return W_q' x: (B, N, E) -> (B, H, N, D)."""
        return self._heads((self.q_proj if self.tie_query else self.ltm_q_proj)(x))

    def _attended(self, q: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and σ² of queries (B, H, P, D) to the signal of `b` (B, n_basis, E): (B, H, P) each."""
        # w · s = q · W_k' (Σ_j w_j B_j) / √D, so no score of each query and basis function is needed.
        key = F.linear(self.ltm_density.weight.to(b.dtype) @ b, self.ltm_k_proj.weight.to(b.dtype))  # (B, 2, E)
        scores = q @ self._heads(key).mT * self.head_dim**-0.5  # (B, H, P, 2)
        if self.ltm_density.bias is not None:
            scores = scores + self.ltm_density.bias.to(b.dtype)
        return scores[..., 0].sigmoid(), F.softplus(scores[..., 1]) + _LEAST_VARIANCE

    def _read(self, mean: Tensor, variance: Tensor, b: Tensor) -> Tensor:
        """Return the expectation of W_v' X̄(t) under N(t; mean, variance): (B, H, P) -> (B, H, P, D)."""
        weights = expected_basis(mean, variance, self._basis(b))  # (B, H, P, n_basis)
        value = self.ltm_v_proj.weight.to(b.dtype)
        if self._is_step(weights):
            return torch.einsum("bhpe,hde->bhpd", weights @ b[:, None], value.unflatten(0, (self.n_heads, -1)))
        return weights @ self._heads(F.linear(b, value))


def _span(used: list[bool]) -> tuple[int, int]:
    """Return the start and the end of the True values, which are adjacent."""
    first = used.index(True) if any(used) else 0
    return first, first + sum(used)
