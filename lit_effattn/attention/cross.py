"""Cross-attention: a target reads a source. The source is the state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.attention.base import MultiHead
from lit_effattn.attention.feature_maps import EluFeatureMap, FeatureMap
from lit_effattn.attention.random_features import Features, FeatureSums, RandomFeatures
from lit_effattn.checks import probabilities
from lit_effattn.ops.dot_product import dot_product_attention
from lit_effattn.ops.favor.pytorch import Norms
from lit_effattn.ops.linear.pytorch import key_sums, read_sums
from lit_effattn.sequence import (
    Source,
    State,
    accumulator,
    check_lengths,
    map_tensors,
    reads_values,
    valid_lengths,
    valid_positions,
    without_padding,
)


class KeysValues(NamedTuple):
    """Keys and values."""

    keys: Tensor  # (B, H, S, D_qk)
    values: Tensor  # (B, H, S, D)


class Sums(NamedTuple):
    """Sums over keys and values, in float32 or more. The size does not depend on their number."""

    s: Tensor  # (B, H, F, D), Σ φ(k) vᵀ
    z: Tensor  # (B, H, F), Σ φ(k)


class CrossAttention(MultiHead):
    """Multi-head attention from the positions of a target, x, to those of a source.

        y = W_o concat_h attend(W_q x, W_k source, W_v source)             Vaswani et al. 2017, sections 3.2.2, 3.2.3

    The state is a `Source`: `remember` makes it once, `forward` reads it and returns it unchanged. Each position
    of the target is computed by itself, so the module is causal in the target, whatever its length or split. Rotary
    positions do not apply. The output is 0 in a row without a source, and in one whose source is empty.

    A new kind implements `keep` and `read`.

    Args:
        d_model: Width E of the target and of the output.
        n_heads: Heads H; each has D = E / H dimensions.
        d_source: Width of the source. Default: E.
        bias: Whether the four projections have a bias.
        d_qk: Width of all heads' queries and keys together. Default: E.

    Raises:
        ValueError: If `n_heads` does not divide `d_model`, or `d_qk`.
    """

    takes_parts = True
    reads_source = True

    def __init__(
        self, d_model: int, n_heads: int, d_source: int | None = None, *, bias: bool = True, d_qk: int | None = None
    ) -> None:
        super().__init__()
        width = self._divide(d_model, n_heads, None, d_qk)
        self.d_input = self.d_model = d_model
        self.d_source = d_model if d_source is None else d_source
        self.causal = True
        self.q_proj = nn.Linear(d_model, width, bias=bias)
        self.k_proj = nn.Linear(self.d_source, width, bias=bias)
        self.v_proj = nn.Linear(self.d_source, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)

    def remember(self, source: Tensor, lengths: Tensor | None = None) -> Source:
        """Return the state from which `forward` reads `source`.

        Args:
            source: (B, S, d_source).
            lengths: (B,) integers in 0 … S, the number of valid positions of each row. The rest is padding and has no
                effect. None: all are valid.

        Raises:
            ValueError: If an argument is invalid.
        """
        check_source(self, source, lengths)
        source = without_padding(source, lengths)
        k, v = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))  # (B, S, ·) -> (B, H, S, D_qk or D)
        length = valid_lengths(lengths, source)
        with self._precision(k):
            return Source(self.keep(k, v, length), length, torch.ones_like(length, dtype=torch.bool))

    def forward(self, x: Tensor, state: Source | None = None, lengths: Tensor | None = None) -> tuple[Tensor, Source]:
        """Read the source in `state`, and return `state` as it is: see `SequenceModule.forward`."""
        self.check(x, state, lengths)
        if state is None:
            state = self.initial_state(x.size(0), device=x.device, dtype=x.dtype)
        q = self._heads(self.q_proj(without_padding(x, lengths)))  # (B, N, E) -> (B, H, N, D_qk)
        with self._precision(q):
            y = self.read(q, state)
        y = self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        y = y.masked_fill((state.length == 0)[:, None, None], 0)
        return without_padding(y, lengths), state

    @abstractmethod
    def keep(self, k: Tensor, v: Tensor, length: Tensor) -> State:
        """Return what `read` needs of a source.

        Args:
            k: (B, H, S, D_qk) keys, where D_qk is `qk_dim`: D, unless `d_qk` is given. Values in padding are finite,
                but not zero; in `v` too.
            v: (B, H, S, D).
            length: (B,), valid positions.
        """

    @abstractmethod
    def read(self, q: Tensor, source: Source) -> Tensor:
        """Read the source.

        Args:
            q: (B, H, N, D_qk) queries.
            source: Its field `kept` is a result of `keep`.

        Returns:
            The heads' outputs, (B, H, N, D); any finite values in rows whose source is empty.
        """

    @torch.no_grad()
    def attention_weights(self, x: Tensor, source: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the weight that each position of `x` gives to each position of `source`, to look at: O(N S) memory.

        The output is linear in the values, so reading the unit matrix as values gives the weights, for any kind.

        Args:
            x: (B, N, E).
            source: (B, S, d_source).
            lengths: (B,), valid positions of `source`; None: all.

        Returns:
            (B, H, N, S), in float32 or more: rows add up to 1, columns of padding are 0; all 0 where a source is empty.
            The module must be in evaluation mode, or dropout applies.
        """
        check_source(self, source, lengths)
        full = accumulator(x.dtype)
        b, n, _ = source.shape
        k = self._heads(self.k_proj(without_padding(source, lengths))).to(full)  # (B, S, E) -> (B, H, S, D_qk)
        q = self._heads(self.q_proj(x)).to(full)  # (B, N, E) -> (B, H, N, D_qk)
        length = valid_lengths(lengths, source)
        unit = torch.eye(n, device=x.device, dtype=full).expand(b, self.n_heads, n, n)
        with torch.autocast(x.device.type, enabled=False):
            kept = self.keep(k, unit, length)
            weights = self.read(q, Source(kept, length, torch.ones_like(length, dtype=torch.bool)))
        return weights.masked_fill(~valid_positions(length, n)[:, None, None], 0)

    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> Source:
        """Return the state without a source: see `SequenceModule.initial_state`."""
        own = self.q_proj.weight.device  # `keep` may multiply by features, which are there
        k, v = (
            torch.zeros(batch_size, self.n_heads, 1, dim, device=own, dtype=dtype)
            for dim in (self.qk_dim, self.head_dim)
        )
        length = torch.zeros(batch_size, dtype=torch.long, device=own)
        kept = map_tensors(lambda t: t.to(device), self.keep(k, v, length))
        length = length.to(device)
        return Source(kept, length, torch.zeros_like(length, dtype=torch.bool))

    def grow(self, state: State, max_len: int) -> State:
        """Return `state`, whose size does not depend on the target's length."""
        return state

    def extra_repr(self) -> str:
        """Return the options that the projections do not show."""
        return f"n_heads={self.n_heads}"


class SoftmaxCrossAttention(CrossAttention):
    """Scaled dot-product attention to a source.

        y_i = Σ_j softmax_j(q_i · k_j / √D) v_j                                 Vaswani et al. 2017, equation 1

    Time O(N S); state: all keys and values of the source.

    Args:
        dropout: Probability with which an attention weight is dropped in training.
    """

    divides_heads = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_source: int | None = None,
        *,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, d_source, **options)
        probabilities(dropout=dropout)
        self.dropout = dropout

    def keep(self, k: Tensor, v: Tensor, length: Tensor) -> KeysValues:
        """Keep the keys and values: see `CrossAttention.keep`."""
        return KeysValues(k, v)

    def read(self, q: Tensor, source: Source) -> Tensor:
        """Attend to the keys: see `CrossAttention.read`."""
        keys, values = (t.to(q.dtype) for t in source.kept)
        mask, slots = None, keys.size(2)
        if not reads_values(source.length) or int(source.length.min()) < slots:
            # An empty row sees the first key, which avoids a softmax of 0 / 0.
            mask = valid_positions(source.length.clamp(min=1), slots)[:, None, None]  # (B, 1, 1, S)
        return dot_product_attention(q, keys, values, mask, dropout=self.dropout if self.training else 0.0)


class LinearCrossAttention(CrossAttention):
    """Attention to a source with a feature map φ.

        y_i = φ(q_i)ᵀ S / (φ(q_i)ᵀ z + ε),  S = Σ_j φ(k_j) v_jᵀ,  z = Σ_j φ(k_j)

    Katharopoulos et al. 2020, equations 4 to 6, of a source's keys and values. ε is the feature map's `eps`. Time
    O((N + S) F D), state O(F D): a position of the target costs the same for a source of any length. Feature map, sums
    and division are computed in float32 at least, regardless of autocast.

    Args:
        feature_map: Makes φ from the dimension of a head's queries and keys.
    """

    divides_heads = True
    without_autocast = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_source: int | None = None,
        *,
        feature_map: Callable[[int], FeatureMap] = EluFeatureMap,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, d_source, **options)
        self.feature_map = feature_map(self.qk_dim)
        self.feature_map.for_heads(n_heads)
        self.divides_heads = next(self.feature_map.parameters(), None) is None

    def keep(self, k: Tensor, v: Tensor, length: Tensor) -> Sums:
        """Sum the features of the keys: see `CrossAttention.keep`."""
        full = accumulator(k.dtype)
        # φ(0) is not 0, so it is φ(k) that must be masked.
        phi = self.feature_map.keys(k.to(full)).masked_fill(~_mask(k, length), 0)  # (B, H, S, F)
        return Sums(*key_sums(phi, v.to(full)))

    def read(self, q: Tensor, source: Source) -> Tensor:
        """Read the sums: see `CrossAttention.read`."""
        full = accumulator(q.dtype)
        s, z = (t.to(full) for t in source.kept)
        return read_sums(self.feature_map(q.to(full)), s, z, eps=self.feature_map.eps).to(q.dtype)


class PerformerCrossAttention(CrossAttention):
    """Softmax attention to a source with the exponential estimated by random features φ (FAVOR+).

        y_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j)                        Choromanski et al. 2020, section 2.2

    See `PerformerAttention` for the features, their redraw and the options; the parameters are those of
    `SoftmaxCrossAttention`. Time O((N + S) F D), state O(F D), constant.

    The sums of a source become invalid when the features are redrawn. Reading them then raises a ValueError on the CPU;
    on a GPU, where a check would wait for the device, the output is NaN.

    Args:
        n_features: F: see `PerformerAttention`.
        features: Which φ.
        orthogonal: Whether the ω of a block of D are orthogonal.
        norms: Norms of the ω.
        eps: What is added to positive or ReLU features: see `PerformerAttention`. M_i is that of the source.
    """

    divides_heads = True
    without_autocast = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_source: int | None = None,
        *,
        n_features: int | None = None,
        features: Features = "positive",
        orthogonal: bool = True,
        norms: Norms = "gaussian",
        eps: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, d_source, d_qk=None, **options)
        self.feature_map = RandomFeatures(n_heads, self.head_dim, n_features, features, orthogonal, norms, eps)
        RandomFeatures.name_buffers_in(self)

    def keep(self, k: Tensor, v: Tensor, length: Tensor) -> FeatureSums:
        """Sum the features of the keys: see `CrossAttention.keep`."""
        full = accumulator(k.dtype)
        return self.feature_map.sums(k.to(full), v.to(full), _mask(k, length)[..., 0])

    def read(self, q: Tensor, source: Source) -> Tensor:
        """Read the sums: see `CrossAttention.read`."""
        stale = (source.kept.drawn != self.feature_map.draws) & source.given  # (B,)
        if reads_values(stale) and stale.any():
            raise ValueError(
                f"{type(self).__name__}: the features were redrawn after `remember` read the source; call it again"
            )
        full = accumulator(q.dtype)
        y = self.feature_map.read(q.to(full), source.kept)
        return y.to(q.dtype).masked_fill(stale[:, None, None, None], torch.nan)

    def reset(self, state: Source, rows: Tensor) -> Source:
        """Remove the source of the rows where `rows` is True: see `SequenceModule.reset`."""
        zeroed = super().reset(state, rows)
        return zeroed._replace(kept=self.feature_map.emptied(zeroed.kept, rows))

    def redraw(self, generator: torch.Generator) -> None:
        """Draw new features from `generator`, in place. Sources that were read before are then invalid."""
        self.feature_map.draw(generator)

    @override
    def keep_heads(self, rank: int, size: int) -> None:
        super().keep_heads(rank, size)
        self.feature_map.heads = self.heads


CrossAttentionFactory = Callable[[int, int, int], CrossAttention]
"""Makes a cross-attention from width, heads and width of the source: `Kind`, or `functools.partial(Kind, option=…)`."""


def check_source(module: Any, source: Tensor, lengths: Tensor | None) -> None:
    """Check the arguments of `remember`.

    Raises:
        ValueError: If an argument is invalid. The message names it, its value and what was expected.
    """
    name = type(module).__name__
    if source.dim() != 3 or source.size(-1) != module.d_source or 0 in source.shape[:2]:
        raise ValueError(
            f"{name}: source has shape {tuple(source.shape)}; expected (batch, length, {module.d_source}) and at least "
            "one row and one position"
        )
    check_lengths(name, lengths, source)


def _mask(k: Tensor, length: Tensor) -> Tensor:
    """Return the mask of valid keys, (B, 1, S, 1)."""
    return valid_positions(length, k.size(2))[:, None, :, None]
