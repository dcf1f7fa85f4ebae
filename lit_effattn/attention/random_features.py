"""The random features φ of a Performer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lit_effattn.checks import one_of
from lit_effattn.ops.favor.pytorch import (
    Norms,
    draw_omega,
    favor_sums,
    log_hyperbolic_features,
    log_keys_plus,
    log_positive_features,
    log_queries_plus,
    read_favor_sums,
    relu_features,
    trigonometric_features,
)
from lit_effattn.ops.linear.pytorch import key_sums, read_sums
from lit_effattn.sequence import accumulator

Features = Literal["positive", "hyperbolic", "trigonometric", "relu"]

NOTHING_SEEN = 1e-30  # added to the denominator: avoids 0 / 0 without any key, negligible otherwise

_MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "positive": log_positive_features,
    "hyperbolic": log_hyperbolic_features,
    "trigonometric": trigonometric_features,
}
_LOG_SPACE = ("positive", "hyperbolic")
_EPS = {"relu": 1e-3}
"""What is added to the features, unless another is given; to others 0."""
_PAIRED = ("hyperbolic", "trigonometric")


class FeatureSums(NamedTuple):
    """Sums over keys and values. F features are summed: `RandomFeatures.n_sums`."""

    s: Tensor  # (B, H, F, D), Σ e^{log φ(k) − m} vᵀ
    z: Tensor  # (B, H, F), Σ e^{log φ(k) − m}
    m: Tensor  # (B, H, F), max log φ(k), −∞ without keys; (B, H, 0) for features that are not in log space
    top: Tensor  # (B, H), max ωᵀk̃ over all keys and features, −∞ without keys or unless `stabilised`
    drawn: Tensor  # (B,), how often the features had been redrawn when the sums were gathered


class RandomFeatures(nn.Module):
    """Random features φ: φ(q)ᵀφ(k) estimates exp(q·k / √D), or is a kernel of its own.

        positive:       φ(x) = F^(−½) exp(ωᵀx̃ − ‖x̃‖²/2)                         Choromanski et al. 2020, lemma 1
        hyperbolic:     φ(x) = F^(−½) exp(±ωᵀx̃ − ‖x̃‖²/2), F/2 vectors ω                                 (lemma 1)
        trigonometric:  φ(x) = (F/2)^(−½) exp(‖x̃‖²/2) (sin ωᵀx̃, cos ωᵀx̃), F/2 vectors ω             (section 2.3)
        relu:           φ(x) = F^(−½) (relu(ωᵀx) + eps)                                             (section 2.2)

    with x̃ = D^(−¼) x and ω ~ N(0, I). Positive and hyperbolic features are computed as their logarithms. The vectors ω
    are a buffer, drawn for each head from torch's random generator, which keeps at least float32 in a module that is
    cast to fewer bits. The attention that owns the features calls `name_buffers_in`.

    Args:
        n_heads: Heads H.
        head_dim: D, the dimension of a head's queries and keys.
        n_features: F; None: D ln D, rounded up to a multiple of 8.
        features: Which φ.
        orthogonal: Whether the ω of a block of D are orthogonal.
        norms: Norms of the ω: see `draw_omega`.
        eps: What is added to positive features (see `PerformerAttention`) or to ReLU features; None: 0 and 10⁻³.

    Raises:
        ValueError: If an option is out of its range.
    """

    omega: Tensor
    draws: Tensor

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        n_features: int | None,
        features: Features,
        orthogonal: bool,
        norms: Norms,
        eps: float | None,
    ) -> None:
        super().__init__()
        one_of(Features, features=features)
        one_of(Norms, norms=norms)
        if n_features is None:
            n_features = 8 * max(1, math.ceil(head_dim * math.log(head_dim) / 8))
        if n_features < 1:
            raise ValueError(f"n_features={n_features} is not positive; D ln D or more are accurate")
        if features in _PAIRED and n_features % 2:
            raise ValueError(f"n_features={n_features} is odd; features={features!r} come in pairs: make it even")
        if eps is not None and (not 0 <= eps < math.inf or (eps > 0 and features in _PAIRED)):
            raise ValueError(
                f"eps={eps} with features={features!r}: it must be at least 0, and is for positive and relu features"
            )
        self.head_dim = head_dim
        self.n_features = n_features
        self.features = features
        self.orthogonal = orthogonal
        self.norms: Norms = norms
        self.eps = _EPS.get(features, 0.0) if eps is None else eps
        self.magnifies = features in ("trigonometric", "relu")  # sums of either sign, or of features that may all be 0
        self.in_log_space = features in _LOG_SPACE
        """Whether `queries` and `keys` return logarithms."""
        self.stabilised = self.in_log_space and self.eps > 0
        """Whether `eps` is added to features in log space, which takes one feature more."""
        self.n_sums = n_features + self.stabilised
        """Number of features that are summed."""
        self.heads: slice | None = None
        """The heads that this process computes. None: all."""
        self.register_buffer("omega", self._drawn(n_heads, None).to(accumulator(torch.get_default_dtype())))
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))  # redraws so far

    def queries(self, q: Tensor) -> Tensor:
        """Return φ(q) or its logarithm: (B, H, N, D) -> (B, H, N, F)."""
        omega = self._vectors(q.dtype)
        if self.features == "relu":
            return relu_features(q, omega, self.eps)
        return _MAPS[self.features](self.scaled(q), omega)

    def keys(self, k: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return φ(k) or its logarithm, (B, H, N, D) -> (B, H, N, F); 0 or −∞ where `valid` (B, 1, N) is False."""
        phi = self.queries(k)
        return phi if valid is None else phi.masked_fill(~valid[..., None], -torch.inf if self.in_log_space else 0.0)

    def stabilised_keys(self, k: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logarithms (B, H, N, F + 1) of keys' features with `eps`, and max_f ωᵀk̃, (B, H, N)."""
        return log_keys_plus(self.scaled(k), self._vectors(k.dtype), valid)

    def stabilised_queries(self, q: Tensor, top: Tensor) -> Tensor:
        """Return the logarithms (B, H, N, F + 1) of queries' features with `eps`, where `top` (B, H, N or 1) is M_i."""
        return log_queries_plus(self.scaled(q), self._vectors(q.dtype), top, self.eps)

    def sums(self, k: Tensor, v: Tensor, valid: Tensor | None = None) -> FeatureSums:
        """Return the sums over keys and values (B, H, N, D) where `valid` (B, 1, N) is True."""
        top, drawn = v.new_full(v.shape[:2], -torch.inf), self.draws.to(v.device).repeat(len(v))
        if self.stabilised:
            phi, tops = self.stabilised_keys(k, valid)
            top = tops.amax(2)
        else:
            phi = self.keys(k, valid)
        if self.in_log_space:
            return FeatureSums(*favor_sums(phi, v), top, drawn)
        s, z = key_sums(phi, v)
        return FeatureSums(s, z, z[..., :0], top, drawn)

    def read(self, q: Tensor, sums: FeatureSums) -> Tensor:
        """Return φ(q)ᵀs / φ(q)ᵀz: (B, H, N, D) -> (B, H, N, D)."""
        s, z, m, top = (t.to(q.dtype) for t in sums[:4])
        if not self.in_log_space:
            return read_sums(self.queries(q), s, z, eps=NOTHING_SEEN)
        phi = self.stabilised_queries(q, top[..., None]) if self.stabilised else self.queries(q)
        return read_favor_sums(phi, s, z, m)

    def no_sums(self, batch_size: int, dim: int, device: torch.device, dtype: torch.dtype) -> FeatureSums:
        """Return the sums of no keys and no values of `dim` dimensions."""
        n_heads = len(self._vectors(self.omega.dtype))
        z = torch.zeros(batch_size, n_heads, self.n_sums, device=device, dtype=dtype)
        m = torch.full_like(z if self.in_log_space else z[..., :0], -torch.inf)
        top = z.new_full(z.shape[:2], -torch.inf)
        return FeatureSums(z.new_zeros(*z.shape, dim), z, m, top, self.draws.to(device).repeat(batch_size))

    def emptied(self, sums: Any, rows: Tensor) -> Any:
        """Return `sums` or a state with the maxima and the draw of no keys in the rows where `rows` (B,) is True."""
        return sums._replace(
            m=sums.m.masked_fill(rows[:, None, None], -torch.inf),
            top=sums.top.masked_fill(rows[:, None], -torch.inf),
            drawn=torch.where(rows, self.draws, sums.drawn),
        )

    def scaled(self, x: Tensor) -> Tensor:
        """Return x̃."""
        return x * self.head_dim**-0.25

    def directions(self, dtype: torch.dtype) -> Tensor:
        """Return the vectors (H, F, D) whose positive features are these features, which must be in log space."""
        omega = self._vectors(dtype)
        return torch.cat([omega, -omega], 1) if self.features == "hyperbolic" else omega  # (H, F/2, D) -> (H, F, D)

    def _vectors(self, dtype: torch.dtype) -> Tensor:
        """Return the ω of the heads that this process computes."""
        return (self.omega if self.heads is None else self.omega[self.heads]).to(dtype)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw new vectors from `generator`, in place."""
        self.omega.copy_(self._drawn(len(self.omega), generator))
        self.draws.add_(1)

    def _drawn(self, n_heads: int, generator: torch.Generator | None) -> Tensor:
        n = self.n_features // 2 if self.features in _PAIRED else self.n_features
        return draw_omega(n_heads, n, self.head_dim, orthogonal=self.orthogonal, norms=self.norms, generator=generator)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RandomFeatures:
        """Keep `omega` in at least float32 where the parameters are cast to fewer bits, as by `half`."""
        before = self.omega
        super()._apply(fn, recurse)
        wide = accumulator(self.omega.dtype)
        if self.omega.dtype != wide:
            self.omega = before.to(self.omega.device, wide)
        return self

    @staticmethod
    def name_buffers_in(attention: nn.Module) -> None:
        """Save the buffers of `attention.feature_map` as those of `attention`: `omega` and `draws`, as checkpoints do.

        They were buffers of the attention once, and checkpoints keep these names.
        """
        attention.register_state_dict_post_hook(_to_attention)
        attention.register_load_state_dict_pre_hook(_to_features)


_BUFFERS = ("omega", "draws")


def _to_attention(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
    own = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    state_dict.update({prefix + name: own.pop(f"{prefix}feature_map.{name}") for name in _BUFFERS})  # the first, too
    state_dict.update(own)


def _to_features(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    for name in _BUFFERS:
        if prefix + name in state_dict:
            state_dict[f"{prefix}feature_map.{name}"] = state_dict.pop(prefix + name)
