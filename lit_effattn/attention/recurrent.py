"""The base class of the kinds whose state is a matrix with a decay or the delta rule, and the parts that they share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.attention.base import Attention
from lit_effattn.attention.kv_cache import newest
from lit_effattn.checks import at_least, positive
from lit_effattn.ops.gated_linear import fla
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention, gated_linear_step
from lit_effattn.ops.runtime.operators import default_form
from lit_effattn.sequence import (
    State,
    accumulator,
    may_overwrite,
    reversed_rows,
    valid_lengths,
    valid_positions,
    without_padding,
)


class RecurrentState(NamedTuple):
    """The matrix S, in float32 or more, and the newest inputs of the convolution. The size is constant."""

    s: Tensor  # (B, H, D_qk, D)
    recent: Tensor  # (B, K − 1, C), the newest last; (B, 0, C) without a convolution
    length: Tensor  # (B,)


class Gates(NamedTuple):
    """Factors of the recurrence, in float32 or more. None: 1, and without β no delta rule."""

    log_decay: Tensor | None = None
    """log A_t ≤ 0: (H,), (B, N, H), or (B, N, H, D_qk)."""
    beta: Tensor | None = None
    """(B, N, H), β of the delta rule."""
    step: Tensor | None = None
    """(B, N, H), multiplies the keys."""


class _Heads(NamedTuple):
    """The arguments of the recurrence."""

    q: Tensor  # (B, H, N, D_qk)
    k: Tensor  # (B, H, N, D_qk)
    v: Tensor  # (B, H, N, D)
    log_decay: Tensor | None  # as `gated_linear_attention` takes it
    beta: Tensor | None  # (B, H, N)
    skip: Tensor | None  # (H, 1, 1)


class RecurrentAttention(Attention):
    """Attention whose state is a matrix for each head, with a decay A_t, and with or without the delta rule.

        S_t = A_t S_{t−1} + k_t u_tᵀ,  y_t = S_tᵀ q_t
        u_t = v_t, or with the delta rule β_t (v_t − S_{t−1}ᵀ A_tᵀ k_t)

    Queries, keys and values are projections, which may pass through a short causal convolution. The outputs of the
    heads are normalised, which takes the place of softmax's division, and multiplied by a gate. The inputs of the
    convolution that later positions read are part of the state. So splitting a stream changes nothing, and padding and
    resets have no other rules than for the other kinds.

    Not causal, the heads 0, 2, 4, … read the sequence from the first position to the last, and the heads 1, 3, 5, …
    from the last to the first, convolutions included. Parameters and cost are those of the causal layer. A position is
    seen by itself and, in each head, by the positions on one side.

    Convolution, gates, recurrence and norm are computed in float32 at least, regardless of autocast.

    Time O(N (C + D) D H) with chunks of C positions; state: a matrix D_qk × D for each head, and K − 1 inputs of the
    convolution. The memory reaches back to the start.

    A new kind implements `gates`, and may override `features`, `activated` and `conv_bias`.

    Args:
        d_model: Width E.
        n_heads: Heads H of values, each with a matrix S. Even if not causal.
        causal: Whether a position sees only itself and earlier ones.
        qk_dim: Dimensions of a head's queries and keys. Default: E / H.
        head_dim: Dimensions D of a head's values. Default: E / H.
        n_qk_heads: Heads of queries and keys, each shared by H / n_qk_heads heads of values. Default: H.
        conv_size: Positions K that the convolution reads, its own included. None: no convolution.
        norm_eps: ε of the norm.
        chunk_size: Positions computed at once; no effect on the result.
        bias: Whether the projections of queries, keys, values and outputs have a bias.

    Raises:
        ValueError: If a size is not positive, `n_qk_heads` does not divide `n_heads`, or `n_heads` is odd and the
            module is not causal.
    """

    has_positions = True
    without_autocast = True
    magnifies = True
    extra_parameters = ("convolution", "beta_proj", "decay_proj", "a_log", "dt_bias", "norm", "gate_proj", "skip")

    activated = False
    """Whether SiLU follows the projections or the convolution."""

    conv_bias = False
    """Whether the convolution has a bias."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        qk_dim: int | None = None,
        head_dim: int | None = None,
        n_qk_heads: int | None = None,
        conv_size: int | None = None,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        bias: bool = False,
    ) -> None:
        at_least(1, qk_dim=qk_dim, n_qk_heads=n_qk_heads, conv_size=conv_size, chunk_size=chunk_size)
        qk_dim = per_head(d_model, n_heads) if qk_dim is None else qk_dim
        super().__init__(d_model, n_heads, causal, bias=bias, head_dim=head_dim, d_qk=n_heads * qk_dim)
        self.n_qk_heads = n_heads if n_qk_heads is None else n_qk_heads
        if n_heads % self.n_qk_heads:
            raise ValueError(
                f"n_qk_heads={n_qk_heads} does not divide n_heads={n_heads}: n_heads / n_qk_heads heads of values "
                "share queries and keys; change one of them"
            )
        if not causal and n_heads % 2:
            raise ValueError(
                f"n_heads={n_heads} must be even, because with causal=False every other one reads backwards"
            )
        if self.n_qk_heads < n_heads:
            self.q_proj = nn.Linear(d_model, self.n_qk_heads * qk_dim, bias=bias)
            self.k_proj = nn.Linear(d_model, self.n_qk_heads * qk_dim, bias=bias)
        self.n_channels = 2 * self.n_qk_heads * qk_dim + n_heads * self.head_dim
        self.convolution = None if conv_size is None else ShortConvolution(self.n_channels, conv_size, self.conv_bias)
        self.register_module("beta_proj", None)  # that of the delta rule is before `norm` in checkpoints
        self.chunk_size = chunk_size
        self.norm = GatedNorm((self.head_dim,), norm_eps)
        self.gate_proj: nn.Module | None = None
        self.skip: nn.Parameter | None = None

    @abstractmethod
    def gates(self, x: Tensor) -> Gates:
        """Compute the factors of the recurrence from `x` (B, N, E)."""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Transform queries and keys (B, N, H_qk, D_qk), after the convolution."""
        return q, k

    @override
    def forward(
        self, x: Tensor, state: RecurrentState | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, RecurrentState | None]:
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        y, state = self._each_way(self._read, x, state, lengths, dims=[2])
        gate = None if self.gate_proj is None else self.gate_proj(x)
        with self._precision(y):
            y = self.norm(y.transpose(1, 2), gate)  # (B, H, N, D) -> (B, N, H D)
        y = self.out_proj(y.to(self.out_proj.weight.dtype))
        return without_padding(y, lengths), state if self.causal else None

    def _each_way(
        self,
        compute: Callable[..., tuple[Tensor, Any]],
        x: Tensor,
        state: RecurrentState | None,
        lengths: Tensor | None,
        dims: list[int],
    ) -> tuple[Tensor, Any]:
        """Call `compute` without autocast: if causal once, else for the heads of each direction.

        Args:
            compute: From channels (B, N, C), gates, state, lengths and a slice of heads to (B, H, …) of these heads.
            x: (B, N, E).
            state: The state before `x`, or None.
            lengths: (B,) valid positions, or None.
            dims: The dimensions of the result that are positions.
        """
        channels = torch.cat([p(x) for p in (self.q_proj, self.k_proj, self.v_proj)], -1)  # (B, N, C)
        gates = self.gates(x)
        with self._precision(channels):
            if state is None:
                state = self.empty_state(len(x), None, x.device, channels.dtype)
            if self.causal:
                return compute(channels, gates, state, lengths, slice(None))
            even, after = compute(channels, gates, state, lengths, slice(0, None, 2))
            gates = Gates(*(t if t is None or t.dim() == 1 else reversed_rows(t, lengths) for t in gates))
            odd, _ = compute(reversed_rows(channels, lengths), gates, state, lengths, slice(1, None, 2))
            for dim in dims:
                odd = reversed_rows(odd, lengths, dim)
            return torch.stack([even, odd], 2).flatten(1, 2), after

    def _read(
        self, channels: Tensor, gates: Gates, state: RecurrentState, lengths: Tensor | None, of: slice
    ) -> tuple[Tensor, RecurrentState]:
        """Compute the recurrence of the heads `of`: (B, N, C) -> (B, H, N, D), and the state after it."""
        heads, recent = self._heads_of(channels, gates, state, lengths, of)
        s = (state.s if self.causal else state.s[:, of]).to(accumulator(heads.q.dtype))
        options: dict[str, Any] = {"log_decay": heads.log_decay, "beta": heads.beta, "lengths": lengths}
        if channels.size(1) == 1:
            y, s = gated_linear_step(*heads[:3], s, in_place=may_overwrite(), **options)
        else:
            y, s = gated_linear_attention(*heads[:3], s, chunk_size=self.chunk_size, **options)
        y = y.to(accumulator(y.dtype))
        if heads.skip is not None:
            y = y + heads.skip * heads.v
        return y, RecurrentState(s, recent, state.length + valid_lengths(lengths, channels))

    @torch.no_grad()
    def attention_weights(self, x: Tensor, state: State | None = None, lengths: Tensor | None = None) -> Tensor:
        """Return the weights w of the values in y_i = Σ_j w_ij v_j + R_i S_0, before norm and gate.

        They are exact for the delta rule too, where the weight of a value is what later keys have left of it. They may
        be negative, and do not sum to 1. M = N, with a state too: S_0 holds no single values, so its term R_i S_0 has
        no column. See `Attention.attention_weights`.
        """
        self.check(x, state, lengths)
        weights, _ = self._each_way(self._weights_of, without_padding(x, lengths), state, lengths, dims=[2, 3])
        if lengths is None:
            return weights
        valid = valid_positions(lengths, x.size(1))[:, None]  # (B, 1, N)
        return weights.masked_fill(~(valid[..., None] & valid[:, :, None]), 0)

    def _weights_of(
        self, channels: Tensor, gates: Gates, state: RecurrentState, lengths: Tensor | None, of: slice
    ) -> tuple[Tensor, Tensor]:
        """Compute the weights of the heads `of`, (B, H, N, N), and the newest inputs of the convolution.

        The outputs are linear in the values, so unit vectors as values give the weights.
        """
        heads, recent = self._heads_of(channels, gates, state, lengths, of)
        b, h, n, d = heads.q.shape
        unit = torch.eye(n, dtype=heads.q.dtype, device=heads.q.device)  # (N, N)
        options: dict[str, Any] = {"log_decay": heads.log_decay, "beta": heads.beta, "lengths": lengths}
        arguments = (
            *heads[:2],
            unit.expand(b, h, n, n),
            heads.q.new_zeros(b, h, d, n, dtype=accumulator(heads.q.dtype)),
        )
        weights, _ = gated_linear_attention(*arguments, **options)
        return weights if heads.skip is None else weights + heads.skip * unit, recent

    def _heads_of(
        self, channels: Tensor, gates: Gates, state: RecurrentState, lengths: Tensor | None, of: slice
    ) -> tuple[_Heads, Tensor]:
        """Compute the arguments of the recurrence for the heads `of`, and the newest inputs of the convolution."""
        given, full = channels.dtype, accumulator(channels.dtype)
        channels, recent = channels.to(full), state.recent
        if self.convolution is not None:
            channels, recent = self.convolution(channels, recent, lengths)
        if self.activated:
            channels = F.silu(channels)
        width = self.n_qk_heads * self.qk_dim
        q, k, v = channels.split([width, width, self.n_heads * self.head_dim], -1)
        q, k = self.features(*(t.unflatten(2, (self.n_qk_heads, -1)) for t in (q, k)))
        q, k = self._rotated(q.transpose(1, 2), k.transpose(1, 2), state.length)
        q, k, v = self._for_all_heads(q), self._for_all_heads(k), self._heads(v)  # (B, H, N, D_qk or D)
        log_decay, beta, step = (
            t if t is None or t.dim() == 1 else t.transpose(1, 2) for t in gates
        )  # (H,), (B, H, N) or (B, H, N, D_qk)
        if not self.causal:
            q, k, v, log_decay, beta, step = (
                t if t is None else t[of] if t.dim() == 1 else t[:, of] for t in (q, k, v, log_decay, beta, step)
            )
        if step is not None:
            k = k * step[..., None]
        gated = fla.is_gated(log_decay, beta, lengths)
        if q.is_cuda and fla.use(q.device, given, self.qk_dim, gated=gated):
            q, k, v = (t.to(given) for t in (q, k, v))
        skip = None if self.skip is None else self.skip[of, None, None].to(full)
        return _Heads(q, k, v, log_decay, beta, skip), recent

    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        """Return zeros: see `SequenceModule.initial_state`."""
        recent = 0 if self.convolution is None else self.convolution.size - 1
        return RecurrentState(
            torch.zeros(batch_size, self.n_heads, self.qk_dim, self.head_dim, device=device, dtype=accumulator(dtype)),
            torch.zeros(batch_size, recent, self.n_channels, device=device, dtype=dtype),
            torch.zeros(batch_size, dtype=torch.long, device=device),
        )


class ShortConvolution(nn.Module):
    """A causal convolution of each channel by itself, with a state.

        y_t = b + Σ_{j<K} w_j ⊙ x_{t−j}

    Args:
        n_channels: Number of channels C.
        size: K.
        bias: Whether there is a b.
    """

    def __init__(self, n_channels: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(size, n_channels).uniform_(-(size**-0.5), size**-0.5))
        self.bias = nn.Parameter(torch.zeros(n_channels)) if bias else None

    def forward(self, x: Tensor, recent: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve `x` (B, N, C).

        Args:
            x: (B, N, C).
            recent: (B, K − 1, C), the inputs before `x`, the newest last.
            lengths: (B,) valid positions, or None.

        Returns:
            y (B, N, C), and the newest K − 1 inputs after the last valid position, in the type of `recent`.
        """
        bias = None if self.bias is None else self.bias.to(x.dtype)
        before = recent.to(x.dtype)
        convolve = torch.ops.lit_effattn.short_convolution if default_form(x.device) == "onnx" else _convolve
        y, newest_inputs = convolve(x, before, self.weight.to(x.dtype), bias)
        if lengths is not None:
            k = self.size - 1
            newest_inputs = newest(torch.cat([before, x], 1), lengths + k, k, dim=1)
        return y, newest_inputs.to(recent.dtype)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.weight.size(1)}, size={self.size}, bias={self.bias is not None}"


def _convolve(x: Tensor, recent: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y and the newest inputs: see `ShortConvolution`. `weight` is (K, C)."""
    n, k = x.size(1), weight.size(0)
    joined = torch.cat([recent, x], 1)  # (B, K − 1 + N, C)
    y = joined[:, k - 1 :] * weight[0]
    for j in range(1, k):
        y = torch.addcmul(y, joined[:, k - 1 - j : k - 1 - j + n], weight[j])
    return y if bias is None else y + bias, joined[:, n:].clone()


def _shapes_of_convolution(x: Tensor, recent: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(recent)


# In programs for ONNX, whose translation of this operator is one node.
torch.library.define(
    "lit_effattn::short_convolution", "(Tensor x, Tensor recent, Tensor weight, Tensor? bias) -> (Tensor, Tensor)"
)
torch.library.impl("lit_effattn::short_convolution", "cpu", _convolve)
torch.library.register_fake("lit_effattn::short_convolution", _shapes_of_convolution)


class GatedNorm(nn.Module):
    """Normalises groups of dimensions, and multiplies by a gate.

        norm(y) ⊙ a(z), or with `gate_first` norm(y ⊙ a(z));  norm(y) = g ⊙ y / √(mean(y²) + ε)

    Args:
        shape: Shape of the gain g, (D,) or (groups, D). The groups are consecutive, of D dimensions each.
        eps: ε.
        gain: Whether there is a g. A matrix that follows norm and gate can take it in.
        centred: Whether the mean is subtracted first, as LayerNorm does.
        gate_first: Whether the gate precedes the norm.
        activation: a.

    Raises:
        ValueError: If `eps` is not positive, or D is 1 and the mean is subtracted.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        eps: float = 1e-5,
        *,
        gain: bool = True,
        centred: bool = False,
        gate_first: bool = False,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        positive(norm_eps=eps)
        at_least(2 if centred else 1, head_dim=shape[-1])  # one number less its mean is 0
        self.width, self.eps, self.centred, self.gate_first = shape[-1], eps, centred, gate_first
        self.activation = activation
        self.gain = nn.Parameter(torch.ones(shape)) if gain else None

    def forward(self, y: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise y (B, N, H, D), with a gate (B, N, H · D) or without: (B, N, H · D), in the type of y."""
        y = y.flatten(2)
        factor = None if gate is None else self.activation(gate.to(y.dtype))
        if factor is not None and self.gate_first:
            y = y * factor
        y = y.unflatten(2, (-1, self.width))
        norm = F.layer_norm if self.centred else F.rms_norm
        y = norm(y, (self.width,), eps=self.eps)
        if self.gain is not None:
            y = y * self.gain.to(y.dtype)
        y = y.flatten(2)
        return y if factor is None or self.gate_first else y * factor


def per_head(d_model: int, n_heads: int, factor: float = 1.0) -> int:
    """Return `factor` · E / H, rounded up, at least 1. `Attention` checks E and H."""
    return max(1, math.ceil(factor * d_model / max(1, n_heads)))


def unit_length(x: Tensor) -> Tensor:
    """Divide vectors by their length, x / √(‖x‖² + 10⁻⁶); the gradient is finite at 0."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def decay_parameters(n_heads: int, width: int, least: float = 1.0) -> tuple[nn.Parameter, nn.Parameter]:
    """Return log a, with a uniform from `least` to 16, (n_heads,), and the bias b of `log_decay`, (width,).

    softplus(b) is log-uniform from 0.001 to 0.1, as in the authors' code of Mamba-2.
    """
    step = torch.empty(width).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    a_log = torch.empty(n_heads).uniform_(least, 16).log()
    return nn.Parameter(a_log), nn.Parameter(step + (-torch.expm1(-step)).log())


def step_sizes(raw: Tensor, dt_bias: Tensor) -> Tensor:
    """Return Δ = softplus(raw + b) of (B, N, H) or, for a step per channel, (B, N, H, D_qk), in float32 or more."""
    full = accumulator(raw.dtype)
    shifted = raw.to(full) + dt_bias.to(full).view(raw.shape[2:])
    # Flat: PyTorch compiles softplus' backward pass for other strides than a transposed gradient has.
    return F.softplus(shifted.flatten()).view_as(shifted)


def log_decay(raw: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return −a softplus(raw + b) of (B, N, H) or, for a decay per channel, (B, N, H, D_qk), in float32 or more."""
    step = step_sizes(raw, dt_bias)
    a = a_log.to(step.dtype).exp()  # (H,)
    return -(a if raw.dim() == 3 else a[:, None]) * step
