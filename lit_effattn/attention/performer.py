"""Performer: softmax attention estimated by random features, at linear attention's cost."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_effattn.attention.base import Attention
from lit_effattn.attention.random_features import NOTHING_SEEN, Features, RandomFeatures
from lit_effattn.ops.favor.pytorch import Norms, causal_favor, favor_step, positive_favor
from lit_effattn.ops.linear.pytorch import causal_linear_attention, linear_attention_step
from lit_effattn.sequence import accumulator, may_overwrite, reads_values, valid_lengths, valid_positions


class PerformerState(NamedTuple):
    """The `FeatureSums` over all positions seen, in float32 or more."""

    s: Tensor  # (B, H, F, D), Σ e^{log φ(k) − m} vᵀ
    z: Tensor  # (B, H, F), Σ e^{log φ(k) − m}
    m: Tensor  # (B, H, F), max log φ(k), −∞ before the first key; (B, H, 0) for features that are not in log space
    top: Tensor  # (B, H), what `eps` is scaled by: max ωᵀk̃ over all keys and features; else −∞
    drawn: Tensor  # (B,), how often the features had been redrawn when the sums were gathered
    length: Tensor  # (B,)


class PerformerAttention(Attention):
    """Softmax attention with the exponential estimated by random features φ (FAVOR+).

        y_i = Σ_j φ(q_i)ᵀφ(k_j) v_j / Σ_j φ(q_i)ᵀφ(k_j),  j ≤ i if causal           Choromanski et al. 2020, section 2.2

        positive:       φ(x) = F^(−½) exp(ωᵀx̃ − ‖x̃‖²/2)                                               (lemma 1)
        hyperbolic:     φ(x) = F^(−½) exp(±ωᵀx̃ − ‖x̃‖²/2), F/2 vectors ω                                 (lemma 1)
        trigonometric:  φ(x) = (F/2)^(−½) exp(‖x̃‖²/2) (sin ωᵀx̃, cos ωᵀx̃), F/2 vectors ω             (section 2.3)
        relu:           φ(x) = F^(−½) (relu(ωᵀx) + eps), a kernel of its own                        (section 2.2)

    with x̃ = D^(−¼) x and ω ~ N(0, I), so that E φ(q)ᵀφ(k) = exp(q·k / √D) for the first three. The parameters are those
    of `SoftmaxAttention`, so a model trained with it can continue with this kind. The estimate of each exponential is
    unbiased, that of their ratio is not quite. Positive and hyperbolic features are summed in log space with a running
    maximum per feature, which is exact and finite for all norms: see `ops.favor.pytorch.causal_favor`, and
    `positive_favor` for the kernels of causal attention. Trigonometric features are included for comparison: they
    may be negative, so a denominator may be near 0 or change sign, and exp(‖k̃‖²/2) may overflow.

    The authors' code adds `eps` to positive features that were scaled by their maxima, which is another function:

        φ(q_i) = exp(ωᵀq̃_i − ‖q̃_i‖²/2 − max_f ωᵀq̃_i) + eps,  φ(k_j) = exp(ωᵀk̃_j − ‖k̃_j‖²/2 − M_i) + eps

    There M_i is the largest ωᵀk̃ of all keys, so with a causal mask the future changes the past. Here it is the largest
    of those that query i sees: causal output i is that of the authors' code for the sequence up to i. These maxima do
    not cancel, so they have a gradient.

    Time O(N F (C + D)), state O(F D) for every head of queries, constant. Splitting a stream changes nothing: the
    memory reaches back to the start, or to the last redraw. Features, sums and division are computed in float32 at
    least, regardless of autocast.

    The vectors ω are a buffer, saved in checkpoints. They are drawn from torch's random generator, separately for each
    head, so the errors of the heads are independent, at no cost. The buffer keeps at least float32 in a module that is
    cast to fewer bits. `redraw` draws new vectors, for example by the callback `FeatureRedraw`. Sums of the old
    features are invalid under the new ones: each row of an earlier draw counts as empty, but its positions continue to
    count.

    Args:
        n_features: F, even for hyperbolic and trigonometric features. Default: D ln D, which suffices whatever the
            sequence's length (theorem 4), rounded up to a multiple of 8; the paper's experiments have 256.
        features: Which φ.
        orthogonal: Whether the ω of a block of D are orthogonal: less variance, still unbiased (theorem 2).
        norms: Norms of the ω: "gaussian", those of Gaussian vectors, or "sqrt_d", all √D: biased, less so for large D.
        chunk_size: Positions computed at once when causal and without kernels, a power of 2; no effect on the result.
        eps: What is added to positive features, as above, or to ReLU features. Default: 0 for positive features, which
            is exact, 10⁻³ for ReLU features. The authors' code for positive features has 10⁻⁴ (JAX) or 10⁻⁶
            (TensorFlow). For ReLU features their JAX code has relu(ωᵀx) + 10⁻³, which is the default here, and their
            TensorFlow code relu(F^(−½) ωᵀx) + 10⁻³, which is 10⁻³ √F here. performer-pytorch has
            relu(D^(−¼) ωᵀx) + 10⁻³, which is 10⁻³ D^(¼). Above 0 for positive features, no kernel is used: causal
            attention is `ops.favor.pytorch.causal_favor`, slower and with more memory.
    """

    takes_parts = True
    without_autocast = True
    divides_heads = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        n_features: int | None = None,
        features: Features = "positive",
        orthogonal: bool = True,
        norms: Norms = "gaussian",
        chunk_size: int = 64,
        eps: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, causal, d_qk=None, **options)
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            raise ValueError(f"chunk_size={chunk_size} is not a power of 2, so it can't be halved; 32 to 128 are fast")
        self.chunk_size = chunk_size
        self.feature_map = RandomFeatures(n_heads, self.head_dim, n_features, features, orthogonal, norms, eps)
        RandomFeatures.name_buffers_in(self)

    @override
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: PerformerState | None, lengths: Tensor | None
    ) -> tuple[Tensor, PerformerState | None]:
        phi, (b, _, n, _) = self.feature_map, q.shape
        full = accumulator(q.dtype)
        valid = None if lengths is None else valid_positions(lengths, n)[:, None]  # (B, 1, N)
        if not self.causal:
            return phi.read(q.to(full), phi.sums(k.to(full), v.to(full), valid)).to(v.dtype), None
        state = self.initial_state(b, device=q.device, dtype=full) if state is None else self._current(state, n)
        sums = state.s.to(full), state.z.to(full), state.m.to(full)
        top = state.top.to(full)
        if phi.stabilised:
            log_q, log_k, top = self._plus_eps(q.to(full), k.to(full), valid, top)
            if n == 1:
                y, s, z, m = favor_step(log_q, log_k, v.to(full), *sums, in_place=may_overwrite())
            else:
                y, s, z, m = causal_favor(log_q, log_k, v.to(full), *sums, chunk_size=self.chunk_size)
        elif phi.in_log_space and n > 1:
            scale, omega = self.head_dim**-0.25, phi.directions(full)
            y, s, z, m = positive_favor(q, k, v, omega, *sums, lengths, scale=scale, chunk_size=self.chunk_size)
        else:
            y, s, z, m = self._sum(q.to(full), k.to(full), v.to(full), valid, *sums)
        length = state.length + (n if lengths is None else lengths)
        return y.to(v.dtype), PerformerState(s, z, m, top, state.drawn, length)

    def _plus_eps(self, q: Tensor, k: Tensor, valid: Tensor | None, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logs of queries' and keys' features with `eps`, (B, H, N, F + 1), and M after the last, (B, H).

        `before` (B, H) is M before the first position.
        """
        log_k, top = self.feature_map.stabilised_keys(k, valid)
        top = top.cummax(2).values if top.size(2) > 1 else top  # (B, H, N); ONNX has no cumulative maximum
        top = torch.maximum(top, before[..., None])
        return self.feature_map.stabilised_queries(q, top), log_k, top[..., -1].clone()  # no view

    def _sum(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, s: Tensor, z: Tensor, m: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Continue the sums over one position, or of features that are not in log space."""
        features = self.feature_map.queries(q), self.feature_map.keys(k, valid)  # (B, H, N, F), or their logarithms
        if self.feature_map.in_log_space:
            return favor_step(*features, v, s, z, m, in_place=may_overwrite())
        if q.size(2) == 1:
            return *linear_attention_step(*features, v, s, z, eps=NOTHING_SEEN, in_place=may_overwrite()), m
        return *causal_linear_attention(*features, v, s, z, eps=NOTHING_SEEN, chunk_size=self.chunk_size), m

    @override
    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> PerformerState:
        sums = self.feature_map.no_sums(batch_size, self.head_dim, device, accumulator(dtype))
        return PerformerState(*sums, torch.zeros(batch_size, dtype=torch.long, device=device))

    def _current(self, state: PerformerState, n: int | None = None) -> PerformerState:
        """Empty the rows whose features have been redrawn since, before `n` positions, which continue to count."""
        stale = state.drawn != self.feature_map.draws
        if reads_values(stale) and not stale.any():
            return state
        if n == 1 and self.feature_map.in_log_space:  # `favor_step` scales s by e^{m − m'} = 0; zeros would be a copy
            return self.feature_map.emptied(state, stale)
        return self.reset(state, stale)._replace(length=state.length)

    def reset(self, state: PerformerState, rows: Tensor) -> PerformerState:
        """Empty the sums of the rows where `rows` is True: see `SequenceModule.reset`."""
        return self.feature_map.emptied(super().reset(state, rows), rows)

    def summarise(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> PerformerState:
        """Return the sums over keys and values: see `Attention.summarise`."""
        full = accumulator(k.dtype)
        valid = None if lengths is None else valid_positions(lengths, k.size(2))[:, None]  # (B, 1, N)
        sums = self.feature_map.sums(k.to(full), v.to(full), valid)
        return PerformerState(*sums, valid_lengths(lengths, k, 2))

    def combine_states(self, before: PerformerState, after: PerformerState) -> PerformerState:
        """Add the sums, scaled to the greater maximum: see `Attention.combine_states`.

            m = max(m₁, m₂),  s = Σ e^{mᵢ − m} sᵢ,  z = Σ e^{mᵢ − m} zᵢ

        Sums of an earlier draw of the features count as empty.
        """
        earlier = self.reset(before, before.drawn != after.drawn)
        length = before.length + after.length
        if not self.feature_map.in_log_space:
            return after._replace(s=earlier.s + after.s, z=earlier.z + after.z, length=length)
        m = torch.maximum(earlier.m, after.m)
        (s, z), (s_2, z_2) = (_rescaled(state, m) for state in (earlier, after))
        return PerformerState(s + s_2, z + z_2, m, torch.maximum(earlier.top, after.top), after.drawn, length)

    def redraw(self, generator: torch.Generator) -> None:
        """Draw new features from `generator`, in place. Earlier states then count as empty."""
        self.feature_map.draw(generator)

    @override
    def keep_heads(self, rank: int, size: int) -> None:
        super().keep_heads(rank, size)
        self.feature_map.heads = self.heads


def _rescaled(state: PerformerState, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return `s` and `z` as if `m` had been the maximum; those of no key remain 0."""
    scale = (state.m - m).masked_fill(state.m == -torch.inf, -torch.inf).exp()  # (B, H, F)
    return state.s * scale[..., None], state.z * scale
