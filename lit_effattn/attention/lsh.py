"""Reformer's attention: a query attends to the keys with the same hash."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_effattn.attention.base import Attention
from lit_effattn.attention.kv_cache import append
from lit_effattn.checks import at_least
from lit_effattn.ops.lsh import (
    attend_in_chunks,
    attend_recent,
    earlier_slots,
    hash_buckets,
    ranked_chunks,
    recent_of,
    sorted_chunks,
)
from lit_effattn.sequence import accumulator, may_overwrite, valid_lengths, valid_positions, without_padding


class LSHCache(NamedTuple):
    """All vectors so far and their hashes. Slot t holds position t; slots from `length` on are undefined."""

    shared: Tensor  # (B, H, M, D), queries and keys in one
    values: Tensor  # (B, H, M, D)
    places: Tensor  # (B, H, M, R), chunk and bucket in each round
    recent: Tensor  # (B, H, R, n_buckets · 2C), the newest 2C positions of each bucket: all that the next can see
    counts: Tensor  # (B, H, R, n_buckets), number of positions in each bucket so far
    drawn: Tensor  # (B,), number of redraws of the rotations before the hashes were computed
    length: Tensor  # (B,)


class FixedLSHCache(LSHCache):
    """An `LSHCache` whose number of slots is final, because it was made with `max_len`."""


class LSHAttention(Attention):
    """Attention among positions whose shared queries and keys fall into the same bucket of a random hash.

        y_i = Σ_{j ∈ P_i} softmax_j(x_i · x_j / (|x_j| √D)) v_j,  P_i = ∪_r P_i^r without i, or i where that is empty,
        P_i^r = {j: h_r(x_j) = h_r(x_i), chunk_r(i) − 1 ≤ chunk_r(j) ≤ chunk_r(i), j ≤ i if causal},
        h_r(x) = argmax [x R_r; −x R_r]                               Kitaev et al. 2020, section 2 and appendix A

    with x the shared queries and keys, and chunks of C positions. A key seen in several of the rounds r counts once, as
    in the paper. If not causal, chunks are cut from all positions sorted by bucket, as published; later positions then
    move the borders of chunks. If causal, each bucket is therefore cut separately: chunk_r(i) is the number of earlier
    positions in i's bucket, div C. Splitting a stream then changes nothing.

    Time O(R N (C + n_buckets C² / N) (C + D)) for R rounds. Memory is the same, but on the CPU only
    O(N D + R (N + n_buckets C)) plus that of a few chunks. Hashing takes time O(R N n_buckets D) and memory
    O(R N n_buckets) besides. All are linear in N if R, C and n_buckets are fixed, but a query then sees a smaller share
    of the keys as N grows; with n_buckets = N / C hashing is O(N²). State: all shared vectors and values. A single
    position reads only the at most 2 R C positions that it sees. Hashes, scores and sums are computed in float32 at
    least, regardless of autocast. The first positions of a stream see one other or none, so their outputs may not
    depend on their queries.

    The rotations R_r are a buffer, drawn for each round and head from torch's random generator. `redraw` draws new
    ones, for example by the callback `FeatureRedraw`. Old hashes are invalid under new rotations: a row whose state is
    of another draw sees only positions of the call, but its positions continue to count.

    Args:
        n_hashes: Rounds R. Each further round finds more of the relevant keys, at the cost of the first.
        n_buckets: An even number, or 1: no hashing. About N / C fills each bucket with one chunk.
        chunk_size: C.
        bias: Whether the projections have a bias.

    Raises:
        ValueError: If an option is out of its range.
    """

    without_autocast = True
    jumps = True
    lacks: ClassVar = {"k_proj": "its keys are its queries, normalised (shared q/k, Kitaev et al. 2020, section 2)"}

    rotations: Tensor
    draws: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        *,
        n_hashes: int = 4,
        n_buckets: int = 16,
        chunk_size: int = 64,
        bias: bool = True,
    ) -> None:
        super().__init__(d_model, n_heads, causal, bias=bias)
        at_least(1, n_hashes=n_hashes)
        if n_buckets < 1 or (n_buckets % 2 and n_buckets != 1):
            raise ValueError(
                f"n_buckets={n_buckets}: buckets come in pairs, one for each direction of a rotated axis; choose an "
                "even number, or 1 for no hashing"
            )
        at_least(1, chunk_size=chunk_size)
        del self.k_proj  # keys are the queries
        self.n_hashes = n_hashes
        self.n_buckets = n_buckets
        self.chunk_size = chunk_size
        self.register_buffer("rotations", torch.randn(n_hashes, n_heads, self.head_dim, n_buckets // 2))
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LSHCache | None, lengths: Tensor | None
    ) -> tuple[Tensor, LSHCache | None]:
        """Combine the shared vectors (`q` and `k` are the same) and the values: see `Attention.attend`."""
        full = accumulator(q.dtype)
        buckets = self._buckets(q.to(full), lengths)
        if self.causal:
            y, state = self._attend_causal(q, v, state, buckets, lengths)
            return y.to(v.dtype), state
        chunks = sorted_chunks(buckets, self.n_buckets, self.chunk_size)
        y = attend_in_chunks(q, v, chunks.places, chunks, self.n_buckets, self.chunk_size, causal=False)
        return y.to(v.dtype), None

    def _attend_causal(
        self, x: Tensor, v: Tensor, state: LSHCache | None, buckets: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, LSHCache]:
        b, _, n, _ = x.shape
        seen = valid_lengths(lengths, x, 2)
        drawn = self.draws.repeat(b)
        if state is None:
            chunks, ranks, _, counts = ranked_chunks(buckets, self.n_buckets, self.chunk_size)
            y = attend_in_chunks(x, v, chunks.places, chunks, self.n_buckets, self.chunk_size, causal=True)
            newest = buckets.new_zeros(*buckets.shape[:3], self.n_buckets * 2 * self.chunk_size)
            newest = self._remember(newest, buckets, ranks, torch.zeros_like(seen))
            return y, LSHCache(x, v, chunks.places, newest, counts, drawn, seen)

        before = self._counts(state)
        chunks, ranks, first, counts = ranked_chunks(buckets, self.n_buckets, self.chunk_size, before)
        old, new = (state.shared, state.values, state.places), (x, v, chunks.places)
        shared, values, places = append(old, new, state.length, lengths, grows=not isinstance(state, FixedLSHCache))
        positions = state.recent.unflatten(-1, (self.n_buckets, -1))  # (B, H, R, n_buckets, 2C)
        if n == 1:
            bucket = buckets.clamp(max=self.n_buckets - 1)  # (B, H, R, 1)
            positions = positions.take_along_dim(bucket[..., None], 3).squeeze(3)  # (B, H, R, 2C)
            recent = recent_of(positions, before.gather(-1, bucket).squeeze(-1))
            own = state.length.clamp(max=shared.size(2) - 1)  # padding may be beyond the last
            y = attend_recent(shared, values, places, own, recent, self.n_buckets)
        else:
            slots = earlier_slots(recent_of(positions, before), before, first)
            y = attend_in_chunks(
                shared,
                values,
                places,
                chunks,
                self.n_buckets,
                self.chunk_size,
                causal=True,
                before=state.length,
                earlier=(slots, positions),
            )
        newest = self._remember(state.recent, buckets, ranks, state.length)
        return y, type(state)(shared, values, places, newest, counts, drawn, state.length + seen)

    def _buckets(self, shared: Tensor, lengths: Tensor | None) -> Tensor:
        """Hash the shared vectors: (B, H, N, D) -> (B, H, R, N), `n_buckets` in padding."""
        buckets = hash_buckets(shared, self.rotations.to(shared.dtype))
        if lengths is None:
            return buckets
        return buckets.masked_fill(~valid_positions(lengths, shared.size(2))[:, None, None], self.n_buckets)

    def _remember(self, recent: Tensor, buckets: Tensor, ranks: Tensor, before: Tensor) -> Tensor:
        """Write the new positions to the newest 2C of their buckets, over older ones."""
        twice = 2 * self.chunk_size
        positions = before[:, None, None, None] + torch.arange(buckets.size(-1), device=before.device)
        padding = buckets == self.n_buckets
        positions = positions.expand_as(buckets).masked_fill(padding, -1)  # older than all, so not written
        index = buckets.masked_fill(padding, 0) * twice + ranks % twice
        write = Tensor.scatter_reduce_ if may_overwrite() else Tensor.scatter_reduce
        return write(recent, -1, index, positions, "amax")

    def _counts(self, state: LSHCache) -> Tensor:
        """Return the positions in each bucket, (B, H, R, n_buckets). Those hashed under other rotations are in none."""
        return state.counts.masked_fill((state.drawn != self.draws)[:, None, None, None], 0)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shared vectors as queries and as keys, and the values: see `Attention.project`."""
        shared = self._heads(self.q_proj(x))
        return shared, shared, self._heads(self.v_proj(x))

    def redraw(self, generator: torch.Generator) -> None:
        """Draw new rotations from `generator` on the CPU, so that they are the same on every device and process."""
        self.rotations.copy_(torch.randn(self.rotations.shape, generator=generator))
        self.draws.add_(1)

    @property
    def bounded_by(self) -> str:
        """The state grows with every position, and no option bounds it."""
        return ""

    @override
    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> LSHCache:

        def empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(batch_size, *shape, device=device, dtype=dtype)

        h, r, slots = self.n_heads, self.n_hashes, max_len or 0
        return (LSHCache if max_len is None else FixedLSHCache)(
            empty(h, slots, self.head_dim, dtype=dtype),
            empty(h, slots, self.head_dim, dtype=dtype),
            empty(h, slots, r, dtype=torch.int32),
            empty(h, r, self.n_buckets * 2 * self.chunk_size),
            empty(h, r, self.n_buckets),
            empty(),
            empty(),
        )

    @torch.no_grad()
    def attention_buckets(self, x: Tensor, state: LSHCache | None = None, lengths: Tensor | None = None) -> Tensor:
        """Return h_r(x_j), the bucket of each position of `x` in each round: (B, H, R, N), `n_buckets` in padding.

        The arguments are those of `attention_weights`.

        Raises:
            ValueError: If an argument is invalid: see `check`.
        """
        self.check(x, state, lengths)
        q, k, _ = self.project(without_padding(x, lengths))
        q, _ = self._rotated(q, k, None if state is None else state.length)
        with self._precision(q):
            return self._buckets(q.to(accumulator(q.dtype)), lengths)
