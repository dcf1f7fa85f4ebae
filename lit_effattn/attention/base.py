"""The base classes of all attention kinds: projections, heads, rotary positions, and the treatment of padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.attention.kv_cache import latest
from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.checks import at_least, positive
from lit_effattn.sequence import (
    SequenceModule,
    State,
    accumulator,
    donated,
    parts,
    valid_lengths,
    without_padding,
)


class MultiHead(SequenceModule):
    """A sequence module with several heads."""

    n_heads: int
    """Heads H that this process computes: all, unless `keep_heads` was called."""

    n_kv_heads: int
    """Heads of keys and values, in kinds that have fewer of them."""

    head_dim: int
    """Dimensions D of a head's values."""

    qk_dim: int
    """Dimensions of a head's queries and keys."""

    heads: slice | None = None
    """The heads that this process computes, as indices of all heads. None: all."""

    divides_heads = False
    """Whether each process may compute some of the heads: see `lit_effattn.distributed.tensor_parallel`.

    In the kind's state, tensors of two or more dimensions are then (B, H, …).
    """

    without_autocast = False
    """Whether heads are combined without autocast. The kind converts them to float32 or more."""

    jumps = False
    """Whether the kind compares numbers (hashes, draws), so that rounding makes single outputs jump: see `laws`."""

    magnifies = False
    """Whether the kind divides outputs by a norm or a sum that may be near 0: see `laws`."""

    reads_source = False
    """Whether the module reads a source: see `CrossAttention`."""

    split_option = ""
    """The option that, set to true, makes outputs independent of how a stream is split. "": they always are.

    With this option the kind supports `sequence_parallel`.
    """

    def _precision(self, heads: Tensor) -> AbstractContextManager[Any]:
        """Disable autocast within the context if `without_autocast`."""
        return torch.autocast(heads.device.type, enabled=False) if self.without_autocast else nullcontext()

    def _divide(self, d_model: int, n_heads: int, head_dim: int | None, d_qk: int | None) -> int:
        """Set the sizes of the heads, and return the width of all heads' queries together.

        Raises:
            ValueError: If a width is not positive, or `n_heads` does not divide it.
        """
        if n_heads < 1 or d_model < 1 or (head_dim is None and d_model % n_heads):
            raise ValueError(
                f"n_heads={n_heads} does not divide d_model={d_model}: each head has d_model / n_heads dimensions; "
                "change one of them"
            )
        at_least(1, head_dim=head_dim)
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        width = n_heads * self.head_dim if d_qk is None else d_qk
        if width < 1 or width % n_heads:
            raise ValueError(
                f"d_qk={d_qk} is not a multiple of n_heads={n_heads}: heads have d_qk / n_heads dimensions; change one"
            )
        self.qk_dim = width // n_heads
        return width

    def keep_heads(self, rank: int, size: int) -> None:
        """Compute part `rank` of `size` equal parts of the heads, which are also those of the state.

        The caller divides the projections: this process's give and take the dimensions of its heads.

        Raises:
            ValueError: If the kind does not support it, or `size` does not divide the heads.
        """
        if not self.divides_heads:
            raise ValueError(
                f"tensor_parallel_size={size}: {type(self).__name__} does not divide its heads among processes; leave "
                f"it out, or choose {kinds_with('divides_heads')}"
            )
        for option in ("n_heads", "n_kv_heads"):
            if getattr(self, option, size) % size:
                raise ValueError(
                    f"tensor_parallel_size={size} does not divide {option}={getattr(self, option)} of "
                    f"{type(self).__name__}: each process computes as many heads; change one of them"
                )
        self.n_heads //= size
        if hasattr(self, "n_kv_heads"):
            self.n_kv_heads //= size
        self.heads = slice(rank * self.n_heads, (rank + 1) * self.n_heads)

    def _heads(self, x: Tensor, n_heads: int | None = None) -> Tensor:
        """Split the width into heads: (B, N, H · D) -> (B, H, N, D)."""
        return x.unflatten(2, (n_heads or self.n_heads, -1)).transpose(1, 2)


class Attention(MultiHead):
    """Multi-head attention. `attend` defines how queries, keys and values are combined.

        y = W_o concat_h attend(W_q x, W_k x, W_v x)                          Vaswani et al. 2017, section 3.2.2

    A new kind implements `attend` and `empty_state`. Its state has a field `length` (B,), the
    number of positions seen.

    Args:
        d_model: Width E.
        n_heads: Heads H; each has D = E / H dimensions, unless `head_dim` is given.
        causal: Whether a position sees only itself and earlier ones.
        bias: Whether the projections have a bias.
        d_qk: Width of all heads' queries and keys together: H d_k in Vaswani et al. 2017, Table 3 (B), and H times the
            `query_dimensions` of fast-transformers. Default: H D.
        n_kv_heads: Heads of keys and values H_kv, each shared by H / H_kv heads of queries (grouped-query attention,
            Ainslie et al. 2023). Default: H.
        out_bias: Whether the output's projection has a bias. Default: as `bias` says.
        head_dim: Dimensions D of a head's queries, keys and values; the projections have width H D. Default: E / H.
        qk_norm: Whether a head's queries and keys are normalised before rotary positions: q ← g ⊙ q / √(mean(q²) + ε),
            with a gain g (D_qk,) for all heads' queries and one for the keys (Qwen3, Yang et al. 2025, section 2).
        qk_norm_eps: ε of this normalisation.

    Raises:
        ValueError: If `n_heads` does not divide `d_model` and `head_dim` is None, `n_heads` does not divide `d_qk`,
            `n_kv_heads` does not divide `n_heads`, or `head_dim` or `qk_norm_eps` is not positive.
    """

    takes_rotary = True
    """Whether this kind supports rotary positions."""

    has_positions = False
    """Whether this kind has relative positions of its own."""

    takes_groups = False
    """Whether `attend` takes `n_kv_heads` heads of keys and values; if not, they are repeated for all heads."""

    extra_parameters: tuple[str, ...] = ()
    """Names of parameters, or of modules with parameters, that softmax attention does not have.

    `--init_weights` keeps their initial values if the file does not have them. Buffers are not listed."""

    keeps_start = False
    """Whether a `Transformer` leaves the projections as they start, whatever its `init` (gpt2 scales `out_proj`)."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """Modules of other kinds that this kind does not have, each with the reason, for error messages."""

    dropout: float
    """Probability with which an attention weight is dropped in training."""

    _weighs = False
    """Whether `attention_weights` calls `attend`."""

    shared: tuple[str, ...] = ()
    """Names of the parameters that all layers of a `Transformer` share."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        bias: bool = True,
        d_qk: int | None = None,
        n_kv_heads: int | None = None,
        out_bias: bool | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        positive(qk_norm_eps=qk_norm_eps)
        width = self._divide(d_model, n_heads, head_dim, d_qk)
        if n_kv_heads is not None and (n_kv_heads < 1 or n_heads % n_kv_heads):
            raise ValueError(
                f"n_kv_heads={n_kv_heads} does not divide n_heads={n_heads}: n_heads / n_kv_heads heads share each; "
                "change one of them"
            )
        self.d_input = self.d_model = d_model
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.causal = causal
        self.dropout = 0.0
        self.q_proj = nn.Linear(d_model, width, bias=bias)
        self.k_proj = nn.Linear(d_model, self.n_kv_heads * self.qk_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, self.n_kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(n_heads * self.head_dim, d_model, bias=bias if out_bias is None else out_bias)
        self.q_norm = nn.RMSNorm(self.qk_dim, eps=qk_norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.qk_dim, eps=qk_norm_eps) if qk_norm else None
        self.rotary: RotaryPositions | None = None
        """Rotates queries and keys by their position. Set by a `Transformer` with rotary positions."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State | None]:
        """Combine queries, keys and values.

        Args:
            q: (B, H, N, D_qk), where D_qk is `qk_dim`: D, unless `d_qk` is given. Values in padding are finite, but not
                zero; in `k` and `v` too.
            k: (B, H, N, D_qk), or with `takes_groups` (B, H_kv, N, D_qk), where H_kv is `n_kv_heads`.
            v: (B, H, N, D), or with `takes_groups` (B, H_kv, N, D).
            state: State before the first position, or None.
            lengths: (B,) valid positions, or None.

        Returns:
            The heads' outputs (B, H, N, D), any finite values in padding, and the state after the last valid position.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither `attend` nor `forward`")

    @override
    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        q, k, v = self.project(x)
        with self._precision(q):
            if parts() is None:
                q, k = self._rotated(q, k, None if state is None else state.length)
                y, state = self.attend(q, k, v, state, lengths)
            else:
                y, state = self._attend_in_parts(q, k, v, state, lengths)
        y = self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        return without_padding(y, lengths), state

    def _attend_in_parts(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """Call `attend` from the state before this process's part; return the state after all parts."""
        group, (b, _, n, _) = parts(), q.shape
        if not self.causal:
            raise NotImplementedError(
                f"{type(self).__name__}: sequence_parallel needs causal=True; set it, or call the module outside"
            )
        if state is None:
            state = self.initial_state(b, device=q.device, dtype=q.dtype)
        seen = valid_lengths(lengths, q, 2)
        if self.rotary is not None:
            q, k = self._rotated(q, k, state.length + group.count(seen)[0])
        if self.bounded_by is None:
            local = self.summarise(k, v, lengths)
        else:  # all keys: each message is as long as the longest
            room = (0, 0, 0, group.longest(seen) - n)
            local = self.summarise(F.pad(k, room), F.pad(v, room), seen)
        before, after = group.join(self.combine_states, local, state)
        return self.attend(q, k, v, before, lengths)[0], after

    def summarise(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> State:
        """Return the state that `attend` of these keys and values leads to from an empty one, without outputs.

        A kind whose states can be combined overrides this method and `combine_states`, and sets `takes_parts`.

        Args:
            k: (B, H, N, D_qk): see `attend`.
            v: (B, H, N, D).
            lengths: (B,) valid positions, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} sets `takes_parts` but does not override `summarise`")

    def combine_states(self, before: State, after: State) -> State:
        """Return the state that leads through both: `after` was made from an empty state, of the positions after.

        Associative; an empty state on either side changes nothing. Lengths add. Both arguments are kept.
        """
        raise NotImplementedError(f"{type(self).__name__} sets `takes_parts` but does not override `combine_states`")

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as `attend` takes them: (B, N, E) -> (B, H or H_kv, N, D_qk or D)."""
        q = self._heads(self.q_proj(x))
        k, v = (self._heads(projection(x), self.n_kv_heads) for projection in (self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normalised(self.q_norm, q), _normalised(self.k_norm, k)
        return (q, k, v) if self.takes_groups else (q, self._for_all_heads(k), self._for_all_heads(v))

    def _rotated(self, q: Tensor, k: Tensor, earlier: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys (B, H, N, D_qk) by their positions, after (B,) `earlier` ones, if `rotary` is set."""
        if self.rotary is None:
            return q, k
        position = torch.arange(q.size(2), device=q.device)[None]  # (1, N)
        if earlier is not None:
            position = position + earlier[:, None]  # (B, N)
        rotated = self.rotary.turn(q, position)
        return rotated, rotated if k is q else self.rotary.turn(k, position)

    @torch.no_grad()
    def attention_weights(self, x: Tensor, state: State | None = None, lengths: Tensor | None = None) -> Tensor:
        """Return the weight that each position of `x` gives to each key in `forward`, without dropout.

        The heads' outputs are linear in the values, so `attend` with unit vectors as values gives the weights of D keys
        at a time. For inspection, not for training: time O(N M) or more whatever the kind, and no gradient. `state` is
        not changed. The arguments are those of `forward`.

        Returns:
            (B, H, N, M), in float32 or more. The last N columns are the positions of `x`. The M − N columns before
            them are the positions right before `x`, the newest last, as far back as any row can see. Positions before
            a row's first have weight 0. Without a state M = N. The weights of a valid position sum to 1; those of
            padding are 0. A kind with other columns, or whose weights do not sum to 1, says so.

        Raises:
            NotImplementedError: If the kind's state has other fields than `unit_values` knows.
            ValueError: If an argument is invalid: see `check`.
        """
        self.check(x, state, lengths)
        q, k, _ = self.project(without_padding(x, lengths))
        return self._weights(*self._rotated(q, k, None if state is None else state.length), state, lengths)

    def _weights(self, q: Tensor, k: Tensor, state: State | None, lengths: Tensor | None) -> Tensor:
        """Return `attention_weights` of queries and keys as `attend` takes them."""
        full, d, n = accumulator(q.dtype), self.head_dim, q.size(2)
        units = {} if state is None else self.unit_values(state)
        m = max((unit.size(-1) for unit in units.values()), default=0)
        units["x"] = torch.eye(n, dtype=torch.bool, device=q.device)
        weights, self._weighs = [], True
        try:
            with torch.autocast(q.device.type, enabled=False), donated(False):
                for start in range(0, m + n, d):
                    values = {}
                    for name, unit in units.items():
                        shape = (*(k if name == "x" else getattr(state, name)).shape[:-1], d)
                        padded = F.pad(unit, (m, 0) if name == "x" else (0, n))[..., start : start + d].to(full)
                        values[name] = F.pad(padded, (0, d - padded.size(-1))).expand(shape)
                    v = values.pop("x")
                    before = None if state is None else state._replace(**values)
                    weights.append(self.attend(q.to(full), k.to(full), v, before, lengths)[0])
        finally:
            self._weighs = False
        return without_padding(torch.cat(weights, -1)[..., : m + n], lengths, dim=2)

    def unit_values(self, state: State) -> dict[str, Tensor]:
        """Return values with which `attend` gives the weights of M columns before the call's positions.

        Known are a `Cache`, and sums `s` of values with sums `z` of their weights, which have one column in all.

        Returns:
            For each field of `state` that holds values a tensor that broadcasts to (B, H, slots, M).
        """
        if hasattr(state, "z"):
            return {"s": state.z[..., None]}
        if not hasattr(state, "values"):
            raise NotImplementedError(
                f"{type(self).__name__} defines no attention weights with a state; it does not override `unit_values`"
            )
        length, slots = state.length, state.values.size(2)
        m = int(length.max()) if self._reach is None else min(int(length.max()), self._reach)
        column = latest(length, slots) - length[:, None] + m  # (B, slots), negative where no later position sees it
        return {"values": (column[..., None] == torch.arange(m, device=column.device))[:, None]}

    @property
    def _reach(self) -> int | None:
        """The number of earlier positions that a position may see, or None: all."""
        return None

    def normalise_with(self, norm: nn.Module) -> None:
        """Apply `norm` to all inputs, to remembered ones again in each call. `forward` then takes inputs without it.

        A kind that remembers inputs overrides this method.

        Args:
            norm: (B, N, E) -> (B, N, E), each position by itself. Its parameters remain the caller's.
        """
        raise NotImplementedError(f"{type(self).__name__} remembers no inputs; it does not override `normalise_with`")

    @property
    def remembers_inputs(self) -> bool:
        """Whether this kind overrides `normalise_with`."""
        return type(self).normalise_with is not Attention.normalise_with

    @property
    def needs_norm(self) -> str:
        """The option that has an effect only after `normalise_with`, "" for none."""
        return ""

    @property
    def _dropout_now(self) -> float:
        """Return the present probability of dropout: 0 in evaluation."""
        return self.dropout if self.training and not self._weighs else 0.0

    def _for_all_heads(self, t: Tensor) -> Tensor:
        """Repeat keys or values for the queries' heads that share them: (B, H_kv, M, D) -> (B, H, M, D)."""
        groups = self.n_heads // t.size(1)
        return t if groups == 1 else t.repeat_interleave(groups, 1)

    def extra_repr(self) -> str:
        """Return the options that the projections do not show."""
        return f"n_heads={self.n_heads}, causal={self.causal}"


def kinds_with(attribute: str) -> str:
    """Return the names of the library's kinds whose class has a true `attribute`, for messages.

    An attribute that is a text is an option, which is named, too.
    """
    kinds: list[Any] = [MultiHead]
    for kind in kinds:
        kinds.extend(below for below in kind.__subclasses__() if below.__module__.startswith("lit_effattn."))
    values = {kind.__name__: getattr(kind, attribute) for kind in kinds if not inspect.isabstract(kind)}
    return ", ".join(
        f"{name} with {value}" if isinstance(value, str) else name for name, value in sorted(values.items()) if value
    )


def _normalised(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalise `x` in the type of the gain, which autocast does not lower."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


AttentionFactory = Callable[[int, int, bool], Attention]
"""Makes an attention from width, heads and causality: a class, or `functools.partial(Class, option=…)`."""
