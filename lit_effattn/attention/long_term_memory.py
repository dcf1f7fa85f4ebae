"""The long-term memory of the ∞-former: a continuous signal, to which segments of inputs are added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.kv_cache import gather
from lit_effattn.ops.continuous import (
    Grid,
    basis_of,
    evaluate_signal,
    even_times,
    expected_basis,
    fit_matrices,
    jitter,
    left_edges,
    normal_masses,
    pseudorandom,
    quantiles,
    width_divergence,
)
from lit_effattn.sequence import accumulator, reads_values

Sampling = Literal["quantiles", "bins"]

_TOGETHER = 4096
"""Number of positions that attend to their signals in one operator, unless `sticky`. It bounds the memory."""

_LEAST_VARIANCE = 1e-6  # σ = 0.001, far narrower than any basis function: keeps ln σ² finite


class InfiniteMemory(NamedTuple):
    """The newest inputs, and the signal fitted to older inputs, as the last position saw it."""

    inputs: Tensor  # (B, mem_len + segment_len, E), the newest last
    coefficients: Tensor  # (B, n_basis, E), in float32 or more; zeros before the first segment is written
    histogram: Tensor  # (B, n_bins), where this signal was attended to; (B, 0) unless sticky
    counter: Tensor  # (B,), seeds the samples' jitter or draws in training; differs between updates and rows
    length: Tensor  # (B,), positions seen in all
    loss: Tensor  # (B,), the regulariser of the last call


class Groups(NamedTuple):
    """The N positions of a call in G groups. The positions of a row's group attend to one signal.

    A segment of L positions is written before every group but the first. A call has at most ⌈N / L⌉ such updates in a
    row, so G = ⌈N / L⌉ + 1. A group has at most P = min(N, L) positions. Rows are at different positions of their
    streams, so each row has its own borders.

    Examples:
        Segments of L = 4 are written at their ends, that is before the positions 4, 8, 12, … of a stream. Two rows are
        at positions 6 and 1, so 1 and 0 segments have been written, and a call has N = 5 positions: 6 … 10 and 1 … 5.

        >>> groups = groups_of(torch.tensor([6, 1]), torch.tensor([5, 5]), n=5, size=4, delay=0)
        >>> groups.written.tolist()
        [[1], [0]]

        The next update of the first row is before the call's position 2 (8 in the stream), of the second row before its
        position 3 (4 in the stream). Positions that do not exist in a group, or have no signal yet, are shown as −1.

        >>> groups.positions.masked_fill(~groups.attends, -1)[0].tolist()
        [[0, 1, -1, -1], [2, 3, 4, -1], [-1, -1, -1, -1]]
        >>> groups.positions.masked_fill(~groups.attends, -1)[1].tolist()
        [[-1, -1, -1, -1], [3, 4, -1, -1], [-1, -1, -1, -1]]

        The row of G · P = 12 outputs has those of the five positions at these places:

        >>> groups.place.tolist()
        [[0, 1, 4, 5, 6], [0, 1, 2, 4, 5]]
    """

    written: Tensor  # (B, 1), segments that were written before the call
    positions: Tensor  # (B, G, P), positions of the call; any number where there is none
    attends: Tensor  # (B, G, P), whether the position is valid, in this group, and attends to a signal
    place: Tensor  # (B, N), where each position is among the G · P; below P: in the first group


def groups_of(length: Tensor, seen: Tensor, *, n: int, size: int, delay: int) -> Groups:
    """Return the groups of a call.

    Args:
        length: (B,), positions before the call.
        seen: (B,), valid positions of the call.
        n: N, the positions of the call.
        size: L, positions of a segment.
        delay: Positions between the end of a segment and its write.
    """
    room = min(n, size)  # P
    written = whole_segments(length - 1 - delay, size)[:, None]  # (B, 1)
    due = delay + (written + 1) * size - length[:, None]  # (B, 1), positions of this call before the next update
    group = torch.arange(-(-n // size) + 1, device=length.device)  # (G,)
    index = (due + (group - 1) * size).masked_fill(group == 0, 0)[..., None]
    index = index + torch.arange(room, device=length.device)  # (B, G, P)
    end = torch.where(group == 0, torch.minimum(due, seen[:, None]), seen[:, None])  # (B, G)
    attends = (index < end[..., None]) & (written + group > 0)[..., None]  # (B, G, P)
    position = torch.arange(n, device=length.device)  # (N,)
    place = torch.where(position < due, position.clamp(max=room - 1), room + position - due)  # (B, N)
    return Groups(written, index, attends, place)


def whole_segments(n: Tensor, size: int) -> Tensor:
    """Return the number of whole segments of `size` positions among the first `n`; 0 for a negative `n`."""
    return (n // size).clamp(min=0)


@dataclass(eq=False)
class LongTermMemory:
    """Attention to a signal X̄(t) = Bᵀψ(t), t ∈ [0, 1], and the update of B: see `InfiniteAttention`.

        y_i = W_o' concat_h Σ_j E_{N(t; μ, σ²)}[ψ_j(t)] W_v' B_j                 Martins et al. 2022, sections 2.2 and 3
        μ = sigmoid(w_μ · s + b_μ),  σ² = softplus(w_σ · s + b_σ),  s_j = (W_q' x_i) · (W_k' B_j) / √D

        B ← fit(X̄ at n_samples times → [0, τ], the gated segment → [τ, 1])                                (section 3.2)

    This class is not a module: its parameters belong to the attention, under the names that checkpoints have. See
    `InfiniteAttention` for the options.
    """

    n_heads: int
    q_proj: nn.Linear  # W_q'
    k_proj: nn.Linear  # W_k'
    v_proj: nn.Linear  # W_v'
    out_proj: nn.Linear  # W_o'
    density: nn.Linear  # w_μ, w_σ and their biases: n_basis -> 2
    gate: nn.Conv1d | None  # the convolution over a segment
    segment_len: int
    widths: tuple[float, ...]
    ridge: float
    tau: float
    n_samples: int
    n_bins: int  # of the histogram of a sticky memory; 0: not sticky
    sampling: Sampling
    grid: Grid
    kl_weight: float
    sigma_0: float

    def __post_init__(self) -> None:
        self.sticky = self.n_bins > 0
        self.solve()

    def solve(self) -> None:
        """Compute the matrices that fit the signal. They are not buffers, so that `half()` does not round them."""
        weight, basis = self.density.weight, (self.density.in_features, self.widths)
        options: dict[str, Any] = {"dtype": accumulator(weight.dtype), "device": weight.device}
        self.fit_first, _ = fit_matrices(0, self.segment_len, self.tau, *basis, self.ridge, **options)
        later = (self.n_samples, self.segment_len, self.tau, *basis, self.ridge)
        self.fit_next, self.refit = fit_matrices(*later, **options, grid=self.grid)
        self.centres_variances = basis_of(*basis, **options)

    def __call__(
        self, x: Tensor, inputs: Tensor, state: InfiniteMemory, seen: Tensor, *, delay: int, training: bool
    ) -> tuple[Tensor, InfiniteMemory]:
        """Attend to the signal from `x`, and write the segments that are due.

        Args:
            x: (B, N, E), normalised.
            inputs: (B, M + N, E), what is written of the M positions before the call and of the call.
            state: The state before the call.
            seen: (B,), valid positions of the call.
            delay: Positions between the end of a segment and its write.
            training: Whether samples of a sticky memory are jittered, or drawn, by the state's counter.

        Returns:
            (B, N, E), and the state with the new signal, histogram, counter and loss.
        """
        full, q = accumulator(x.dtype), self.queries(x)
        state = state._replace(
            coefficients=state.coefficients.to(full),
            histogram=state.histogram.to(full),
            loss=torch.zeros_like(state.loss, dtype=full),
        )
        groups = groups_of(state.length, seen, n=x.size(1), size=self.segment_len, delay=delay)
        y, state = self._attend(q.to(full), groups, inputs, state, training)
        return self.out_proj(y.transpose(1, 2).flatten(2).to(x.dtype)), state  # (B, H, N, D) -> (B, N, E)

    def _attend(
        self, q: Tensor, groups: Groups, inputs: Tensor, state: InfiniteMemory, training: bool
    ) -> tuple[Tensor, InfiniteMemory]:
        """Attend from queries (B, H, N, D), group after group, and write a segment before each but the first."""
        n, n_groups, room = q.size(2), groups.positions.size(1), groups.positions.size(2)
        low, high = 0, n_groups  # the groups that any row has
        if reads_values(groups.attends):
            used = groups.attends.any(2).any(0).tolist()  # the True values are adjacent
            low = used.index(True) if any(used) else 0
            high = low + sum(used)
        if low == high:
            return self._nothing(q), state

        queries = gather(q, groups.positions[:, low:high].flatten(1).clamp(max=n - 1))  # (B, H, G P, D)
        queries = queries.unflatten(2, (-1, room)).transpose(1, 2)  # (B, G, H, P, D)
        together = 1 if self.sticky else max(1, _TOGETHER // room)  # a sticky update needs the histogram so far
        first = max(low, 1)  # the first group before which a segment is written
        numbers = groups.written + torch.arange(first, high, device=q.device)  # (B, K), segments written before each
        out = []
        with torch.autocast(q.device.type, enabled=False):
            end = numbers * self.segment_len - state.length[:, None] + inputs.size(1) - n  # (B, K), in `inputs`
            fits = self._fits(inputs.to(q.dtype), end, numbers == 1)
            batches = zip(queries.split(together, 1), groups.attends[:, low:high].split(together, 1), strict=True)
            for start, (group, attending) in zip(range(low, high, together), batches, strict=True):
                signals = []
                for g in range(start, start + group.size(1)):
                    if g > 0:
                        rows, before = groups.attends[:, g].any(1), numbers[:, g - first] - 1
                        state = self._write(state, fits[g - first], rows, before, training)
                    signals.append(state.coefficients)
                y, state = self._recall(group, torch.stack(signals, 1), state, attending)
                out.append(y)
        count = groups.attends.sum((1, 2)).clamp(min=1)
        state = state._replace(loss=self.kl_weight * state.loss / (self.n_heads * count))
        if first == high:  # nothing was written
            out[0] = out[0] + self._nothing(out[0])
        heads = out[0] if len(out) == 1 else torch.cat(out, 1)  # (B, G, H, P, D)
        place = (groups.place - low * room).clamp(max=(high - low) * room - 1)
        y = gather(heads.transpose(1, 2).flatten(2, 3), place)  # (B, H, N, D)
        return (y.masked_fill((groups.place < room)[:, None, :, None], 0) if low else y), state

    def _fits(self, inputs: Tensor, end: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        """Fit the segments of `inputs` (B, M + N, E) before each `end` (B, K), to be added to the old signal's part.

        Segments where `first` (B, K) is True are fitted to all of [0, 1]; for them there is no old signal.

        Returns:
            K tensors (B, n_basis, E).
        """
        size = self.segment_len
        # Segments beyond the end of `inputs` are not written by any row.
        index = end.clamp(max=inputs.size(1))[..., None] + torch.arange(-size, 0, device=end.device)  # (B, K, L)
        segments = self._gated(gather(inputs, index.flatten(1), dim=1).view(-1, size, inputs.size(2)))  # (B K, L, E)
        segments = segments.unflatten(0, end.shape)
        after = self.fit_next[:, self.n_samples :].to(inputs.dtype) @ segments  # (B, K, n_basis, E)
        alone = self.fit_first.to(inputs.dtype) @ segments
        return torch.where(first[..., None, None], alone, after).unbind(1)

    def _gated(self, segment: Tensor) -> Tensor:
        """(B, L, E) -> (B, L, E)."""
        if self.gate is None:
            return segment
        weight, bias = self.gate.weight.to(segment.dtype), self.gate.bias
        openness = F.conv1d(segment.mT, weight, None if bias is None else bias.to(segment.dtype), padding=1)
        return segment * openness.sigmoid().mT

    def _write(
        self, state: InfiniteMemory, fit: Tensor, rows: Tensor, written: Tensor, training: bool
    ) -> InfiniteMemory:
        """Write a segment with the given `fit` (B, n_basis, E) after the signal of `rows`; other rows are unchanged.

        The signal has (B,) `written` segments. Before the first it is 0, so it adds 0 to the fit.
        """
        if self.sticky:
            old = self.signal(state.coefficients, self.sample_times(state, written, training))  # (B, M, E)
            new = self.fit_next[:, : self.n_samples].to(fit.dtype) @ old + fit
        else:
            new = self.refit.to(fit.dtype) @ state.coefficients + fit  # (B, n_basis, E)
        return state._replace(
            coefficients=torch.where(rows[:, None, None], new, state.coefficients),
            histogram=state.histogram.masked_fill(rows[:, None], 0),
            counter=state.counter + rows,
        )

    def sample_times(self, state: InfiniteMemory, written: Tensor, training: bool) -> Tensor:
        """Return the times at which the update after (B,) `written` segments samples the signal: (M,) or (B, M)."""
        n, histogram = self.n_samples, state.histogram
        if not self.sticky:
            return even_times(n, self.grid, dtype=histogram.dtype, device=histogram.device)
        if self.sampling == "bins":
            number = state.counter if training else written
            return left_edges(histogram, pseudorandom(number, n, histogram.dtype).sort(1).values)
        within = jitter(state.counter, n, histogram.dtype) if training else torch.full_like(histogram[:, :1], 0.5)
        return quantiles(histogram, (torch.arange(n, device=histogram.device) + within) / n)

    def _recall(
        self, q: Tensor, signals: Tensor, state: InfiniteMemory, attends: Tensor
    ) -> tuple[Tensor, InfiniteMemory]:
        """Attend from groups of queries (B, G, H, P, D) to one signal each, (B, G, n_basis, E).

        Returns:
            (B, G, H, P, D), and the state with the loss and histogram of the positions where `attends` (B, G, P) is
            True.
        """
        shape, b = q.shape[:2], signals.flatten(0, 1)
        mean, variance = self.attended(q.flatten(0, 1), b)  # (B G, H, P)
        uncounted = ~attends.flatten(0, 1)[:, None]
        loss = width_divergence(variance, self.sigma_0).masked_fill(uncounted, 0).unflatten(0, shape)
        state = state._replace(loss=state.loss + loss.sum((1, 2, 3)))
        if self.sticky:
            masses = normal_masses(mean, variance, self.n_bins)  # (B G, H, P, n_bins)
            masses = masses.masked_fill(uncounted[..., None], 0).unflatten(0, shape)
            state = state._replace(histogram=state.histogram + masses.sum((1, 2, 3)))
        return self._read(mean, variance, b).unflatten(0, shape), state

    def queries(self, x: Tensor) -> Tensor:
        """Return W_q' x: (B, N, E) -> (B, H, N, D)."""
        return self._heads(self.q_proj(x))

    def attended(self, q: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and σ² of queries (B, H, P, D) to the signal of `b` (B, n_basis, E): (B, H, P) each."""
        # w · s = q · W_k' (Σ_j w_j B_j) / √D, so no score of each query and basis function is needed.
        weight = self.density.weight.to(b.dtype).expand(len(b), -1, -1)  # without it `@` would copy b
        key = F.linear(weight @ b, self.k_proj.weight.to(b.dtype))  # (B, 2, E)
        scores = q @ self._heads(key).mT * q.size(-1) ** -0.5  # (B, H, P, 2)
        if self.density.bias is not None:
            scores = scores + self.density.bias.to(b.dtype)
        return scores[..., 0].sigmoid(), F.softplus(scores[..., 1]) + _LEAST_VARIANCE

    def _read(self, mean: Tensor, variance: Tensor, b: Tensor) -> Tensor:
        """Return the expectation of W_v' X̄(t) under N(t; mean, variance): (B, H, P) -> (B, H, P, D)."""
        weights = expected_basis(mean, variance, self.basis(b))  # (B, H, P, n_basis)
        value = self.v_proj.weight.to(b.dtype)
        if weights.size(1) * weights.size(2) <= b.size(2):  # then W_v' costs less after the sum than before
            read = (weights.flatten(1, 2) @ b).unflatten(1, weights.shape[1:3])  # (B, H, P, E); no copy of B per head
            return torch.einsum("bhpe,hde->bhpd", read, value.unflatten(0, (self.n_heads, -1)))
        return weights @ self._heads(F.linear(b, value))

    def signal(self, b: Tensor, times: Tensor) -> Tensor:
        """Return the signal of `b` (B, n_basis, E) at `times` (T,) or (B, T): (B, T, E)."""
        return evaluate_signal(b, times.to(b), self.basis(b))

    def basis(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the centres and variances of the ψ_j, in the type of `like`."""
        centres, variances = self.centres_variances
        return centres.to(like.dtype), variances.to(like.dtype)

    def _nothing(self, like: Tensor) -> Tensor:
        """Return zeros that give every parameter of the long-term memory a gradient of 0, since DDP waits for each."""
        modules = (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.density, self.gate)
        parameters = [p for module in modules if module is not None for p in module.parameters()]
        return torch.zeros_like(like) + 0 * sum(p.flatten()[0] for p in parameters)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.n_heads, -1)).transpose(1, 2)
