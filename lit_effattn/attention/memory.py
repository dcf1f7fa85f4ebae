"""The base class of the kinds that remember inputs: relative positions, and the options of a memory."""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.base import Attention
from lit_effattn.attention.kv_cache import check_room
from lit_effattn.checks import at_least, probabilities
from lit_effattn.ops.relative import attention_by_distance, relative_attention, sinusoids
from lit_effattn.sequence import State, accumulator, valid_positions, without_padding


class ScoreTerms(NamedTuple):
    """The four terms of the scores, (B, H, N, M) each, divided by √D; −∞ where a key is not seen and in padding."""

    content: Tensor  # (a): q_i · k_j
    position: Tensor  # (b): q_i · W_r R_{i−j}
    content_bias: Tensor  # (c): u · k_j, the same for all queries
    position_bias: Tensor  # (d): v · W_r R_{i−j}, the same for all queries and keys at a distance


class MemoryAttention(Attention):
    """Attention to a memory of inputs and to the inputs of a call, by content and by relative positions.

        score_ij = ((q_i + u) · k_j + (q_i + v) · W_r R_{i−j}) / √D,  k = W_k [memory; x]
        R_d = [sin(d ω), cos(d ω)],  ω_i = 10000^{−2i/E}

    Dai et al. 2019, section 3.3. The state holds inputs, so W_k and W_v also learn from the memory, even if the caller
    detaches it.

    A new kind implements `forward`, `empty_state` and `_keys`, and calls `_add_positions` in its constructor.

    Args:
        d_model: Width E, even.
        n_heads: Heads H.
        causal: Whether a position sees only itself and earlier ones.
        mem_len: Positions in the memory. No parameter depends on it, and `set_memory` changes it.
        clamp_len: Larger distances are clamped to it, for memories longer than in training; None: no clamping.
        dropout: Probability with which an attention weight is dropped in training.
        position_dropout: Probability with which an element of R is dropped in training.
        chunk_size: Queries computed at once; no effect on the result.
        bias: Whether q_proj, k_proj, v_proj and out_proj have a bias; not in the paper.
        share_uv: Whether all layers of a `Transformer` share u and v, as in the paper; else each layer has its own.
    """

    takes_rotary = False
    has_positions = True
    extra_parameters: tuple[str, ...] = ("r_proj", "u", "v")

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        mem_len: int = 512,
        clamp_len: int | None = None,
        dropout: float = 0.0,
        position_dropout: float = 0.0,
        chunk_size: int = 128,
        bias: bool = False,
        share_uv: bool = False,
    ) -> None:
        super().__init__(d_model, n_heads, causal, bias=bias)
        if d_model % 2:
            raise ValueError(f"d_model={d_model} is odd; sinusoidal positions come in pairs of sine and cosine")
        probabilities(dropout=dropout, position_dropout=position_dropout)
        at_least(1, chunk_size=chunk_size)
        self.dropout = dropout
        self.position_dropout = position_dropout
        self.chunk_size = chunk_size
        self.shared = ("u", "v") if share_uv else ()
        self._norm: tuple[nn.Module, ...] = ()
        self.set_memory(mem_len, clamp_len)

    def _add_positions(self) -> None:
        """Add W_r, u and v."""
        self.r_proj = nn.Linear(self.d_model, self.d_model, bias=False)
        self.u = nn.Parameter(0.02 * torch.randn(self.n_heads, self.head_dim))
        self.v = nn.Parameter(0.02 * torch.randn(self.n_heads, self.head_dim))

    def set_memory(self, mem_len: int, clamp_len: int | None = None) -> None:
        """Change the memory, for example for evaluation. The options are those of the constructor.

        Earlier states become invalid, unless `mem_len` is unchanged.

        Raises:
            ValueError: If an option is out of its range, or has no effect with another.
        """
        at_least(0, mem_len=mem_len, clamp_len=clamp_len)
        self.mem_len = mem_len
        self.clamp_len = clamp_len

    @property
    def _reach(self) -> int:
        """Number of earlier positions that a state has to hold."""
        return self.mem_len

    def _relative(self, q: Tensor, k: Tensor, v: Tensor, largest: int, least: int = 0, **options: Any) -> Tensor:
        """Attend to keys at distances from `least` to `largest`: see `relative_attention`."""
        r = self._relative_keys(largest, least)
        u, w = self.u.to(q.dtype), self.v.to(q.dtype)
        options |= {"chunk_size": self.chunk_size, "dropout": self._dropout_now}
        return relative_attention(q, k, v, r.to(q.dtype), u, w, **options)

    def _by_distance(self, q: Tensor, k: Tensor, v: Tensor, r: Tensor, distance: Tensor, seen: Tensor) -> Tensor:
        """Attend to keys in any order: see `attention_by_distance`. `r` is a result of `_positions_for`."""
        return attention_by_distance(
            q + self.u.to(q.dtype)[:, None],
            k.to(q.dtype),
            v.to(q.dtype),
            self._scores_by_distance(q, r),
            r.size(-2) - 1 - distance,
            seen,
            dropout=self._dropout_now,
        )

    def _relative_keys(self, first: int, last: int, dropout: float | None = None) -> Tensor:
        """Return W_r R of the distances first, first − 1, …, last: (H, L, D)."""
        return self.r_proj(self._sinusoids(first, last, dropout)).unflatten(1, (self.n_heads, -1)).transpose(0, 1)

    def _sinusoids(self, first: int, last: int, dropout: float | None = None) -> Tensor:
        """Return R of these distances, (L, E), with `dropout`; None: `position_dropout`."""
        weight = self.r_proj.weight
        r = sinusoids(first, last, self.d_model, clamp=self.clamp_len, dtype=weight.dtype, device=weight.device)
        return F.dropout(r, self.position_dropout if dropout is None else dropout, self.training)

    def _positions_for(self, q: Tensor, count: int) -> Tensor:
        """Return the argument `r` of `_scores_by_distance` for the distances count − 1, …, 0.

        W_r R, (H, count, D), costs count · E². For few queries it costs less to return R, (count, E), and apply W_r to
        the queries.
        """
        few = q.size(0) * q.size(1) * q.size(2) <= self.d_model
        return (self._sinusoids(count - 1, 0) if few else self._relative_keys(count - 1, 0)).to(q.dtype)

    def _scores_by_distance(self, q: Tensor, r: Tensor) -> Tensor:
        """Return (q + v) · W_r R / √D: (B, H, N, count)."""
        q = (q + self.v.to(q.dtype)[:, None]) * self.head_dim**-0.5
        if r.dim() == 3:
            return torch.einsum("bhnd,hld->bhnl", q, r)
        weight = self.r_proj.weight.view(self.n_heads, self.head_dim, -1).to(q.dtype)  # (H, D, E)
        return torch.einsum("bhnd,hde->bhne", q, weight) @ r.T

    def normalise_with(self, norm: nn.Module) -> None:
        """Apply `norm` to all inputs, to those in the memory again in each call.

            q = W_q norm(x),  k = W_k norm([memory; x]),  v = W_v norm([memory; x])

        The memory holds inputs as they are, so its keys follow the norm's gains, which learn from it too. This is
        `pre_lnorm` in the code of Dai et al. 2019.

        Args:
            norm: (B, N, E) -> (B, N, E), each position by itself. Its parameters remain the caller's.
        """
        self._norm = (norm,)  # in a tuple, because a module's attribute would be registered here too

    def _normed(self, x: Tensor) -> Tensor:
        return self._norm[0](x) if self._norm else x

    def check(self, x: Tensor, state: State | None, lengths: Tensor | None) -> None:
        """Check that the state has the size of this memory, too: see `SequenceModule.check`."""
        super().check(x, state, lengths)
        if state is not None:
            self._check_size(state, x.size(1) if lengths is None else lengths)

    def _check_size(self, state: State, new: Tensor | int) -> None:
        """Check that the state before `new` positions of each row has the size of this memory."""
        self._check_slots(state.inputs.size(1), self._reach)

    def _check_slots(self, slots: int, wanted: int) -> None:
        if slots != wanted:
            raise ValueError(
                f"the state has room for {slots} positions, but with mem_len={self.mem_len} "
                f"{type(self).__name__} remembers {wanted}: it was made before set_memory; start with state=None"
            )

    def _check_room(self, slots: int, length: Tensor, new: Tensor | int) -> None:
        """Check that `new` positions of each row fit in a state made with `max_len`, which may have few slots."""
        if slots > self._reach + 1:
            self._check_slots(slots, self._reach + 1)
        if slots <= self._reach:
            check_room(slots, length, new)

    def attention_weights(self, x: Tensor, state: State | None = None, lengths: Tensor | None = None) -> Tensor:
        """Return the softmax of the sum of `attention_terms`: see `Attention.attention_weights`."""
        scores = reduce(torch.add, self.attention_terms(x, state, lengths))
        return scores.softmax(-1).masked_fill(scores == -torch.inf, 0)

    @torch.no_grad()
    def attention_terms(self, x: Tensor, state: State | None = None, lengths: Tensor | None = None) -> ScoreTerms:
        """Return the scores' terms (a) to (d) of Dai et al. 2019, section 3.3, apart, without dropout.

        For inspection, not for training: time and memory O(N M), and no gradient. `state` is not changed. The arguments
        are those of `forward`, the columns those of `attention_weights`.
        """
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        q = self._heads(self.q_proj(self._normed(x)))
        k, distance, seen = self._keys(x, state, lengths)
        if lengths is not None:
            seen = seen & valid_positions(lengths, x.size(1))[..., None]
        with torch.autocast(x.device.type, enabled=False):
            full = accumulator(q.dtype)
            terms = self._terms(q.to(full), k.to(full), torch.where(seen, distance, 0))
        shape = (*q.shape[:3], k.size(2))
        return ScoreTerms(*(torch.where(seen[:, None], t, -torch.inf).expand(shape) for t in terms))

    def _terms(self, q: Tensor, k: Tensor, distance: Tensor) -> tuple[Tensor, ...]:
        """Return the four terms of queries (B, H, N, D) and keys (B, H, M, D) at distances (B or 1, N, M)."""
        first, last = int(distance.max()), int(distance.min())
        r = self._relative_keys(first, last, dropout=0.0)  # (H, L, D)
        r, u, v = (t.to(q.dtype) for t in (r, self.u, self.v))
        q, u, v = (t * self.head_dim**-0.5 for t in (q, u, v))
        row = first - distance  # (B or 1, N, M), of the distance in r
        return (
            q @ k.mT,
            torch.einsum("bhnd,hld->bhnl", q, r).gather(-1, row[:, None].expand(*q.shape[:3], k.size(2))),
            u[:, None] @ k.mT,  # (B, H, 1, M)
            (r @ v[..., None]).squeeze(-1)[:, row].transpose(0, 1),  # (H, L) -> (B or 1, H, N, M)
        )

    @abstractmethod
    def _keys(self, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys of `attention_terms` (B, H, M, D), their distances, and which are seen, (B or 1, N, M)."""

    def _order(
        self, n: int, m: int, state: State | None, lengths: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions of N queries and of M + N keys: those of M earlier positions, then those of the queries.

        Returns:
            The queries' positions (B or 1, N, 1), the keys' positions (B or 1, 1, M + N), and whether a key exists and,
            if causal, is not after the query, (B or 1, N or 1, M + N).
        """
        j = torch.arange(-m, n, device=device)[None, None]  # (1, 1, M + N)
        if state is not None:
            j = j + state.length[:, None, None]  # (B, 1, M + N)
        i = j[..., m:].mT  # (B or 1, N, 1)
        if self.causal:
            return i, j, (j >= 0) & (j <= i)
        return i, j, torch.ones_like(j, dtype=torch.bool) if lengths is None else j < lengths[:, None, None]
