"""Attention among vectors with the same hash (Kitaev et al. 2020, section 2 and appendix A).

There are H heads, R rounds of hashing, and chunks of C positions. In each round a position has one number, its place:
`chunk · n_buckets + bucket`. A position sees another if their places differ by 0 (the same chunk of the same bucket)
or by `n_buckets` (the chunk before).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.runtime.operators import Operator, in_forward_mode
from lit_effattn.sequence import accumulator, reads_values

NOWHERE = -(2**30)
"""The place of padding: its difference to any place is neither 0 nor `n_buckets`."""
SELF = -1e5
"""The score of a position with itself: so low that its weight is 0, unless nothing else is seen; it is then 1."""


class Chunks(NamedTuple):
    """The chunks of a call's positions, in every round."""

    places: Tensor  # (B, H, N, R), in int32; `NOWHERE`: padding
    slots: Tensor  # (B, H, R, N), index in the grid of chunks, (R, T · C) flat; T · C: padding
    n_chunks: int  # T


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """Hash vectors, so that similar directions are likely in the same bucket: argmax [x R; −x R].

    Args:
        x: (B, H, N, D).
        rotations: (R, H, D, n_buckets / 2), random; without columns all fall together.

    Returns:
        (B, H, R, N), the bucket of each vector in each round.
    """
    b, h, n, _ = x.shape
    if rotations.size(-1) == 0:
        return torch.zeros(b, h, rotations.size(0), n, dtype=torch.long, device=x.device)
    turned = torch.einsum("bhnd,rhdf->bhrnf", x.detach(), rotations)  # not [x R; −x R], which is twice as large
    (largest, first), (least, last) = turned.max(-1), turned.min(-1)
    return torch.where(largest >= -least, first, turned.size(-1) + last)


def sorted_chunks(buckets: Tensor, n_buckets: int, chunk_size: int) -> Chunks:
    """Cut each round's positions, sorted by bucket and then by position, into chunks: the published form.

    A bucket may begin within a chunk. Padding, in bucket `n_buckets`, is last and so moves no border.

    Args:
        buckets: (B, H, R, N).
        n_buckets: Number of buckets without that of padding.
        chunk_size: C.
    """
    n_chunks = -(-buckets.size(-1) // chunk_size)
    order = buckets.argsort(dim=-1, stable=True)
    slots = torch.zeros_like(order).scatter(-1, order, _count(buckets).expand_as(order))
    return _chunks(buckets, slots // chunk_size, slots, n_buckets, n_chunks * chunk_size, n_chunks)


class RankedChunks(NamedTuple):
    """The result of `ranked_chunks`."""

    chunks: Chunks
    ranks: Tensor  # (B, H, R, N), of each position in its bucket
    first: Tensor  # (B, H, R, n_buckets), each bucket's first slot
    counts: Tensor  # (B, H, R, n_buckets), how many positions each bucket has now had


def ranked_chunks(buckets: Tensor, n_buckets: int, chunk_size: int, before: Tensor | None = None) -> RankedChunks:
    """Cut each bucket by itself: a position's chunk is its rank, the number of earlier ones in its bucket, div C.

    The borders do not depend on later positions. Each chunk of each bucket has its own slots, some of them empty. With
    `before`, each bucket's first two chunks are for `earlier_slots`.

    Args:
        buckets: (B, H, R, N); padding in bucket `n_buckets`.
        n_buckets: Number of buckets without that of padding.
        chunk_size: C.
        before: (B, H, R, n_buckets), how many positions each bucket had before these; None: none.
    """
    order = buckets.argsort(dim=-1, stable=True)
    counts = buckets.new_zeros(*buckets.shape[:3], n_buckets + 1)
    counts = counts.scatter_add(-1, buckets, torch.ones_like(buckets))
    ranks = _count(buckets) - (counts.cumsum(-1) - counts).gather(-1, buckets.gather(-1, order))
    ranks = torch.zeros_like(ranks).scatter(-1, order, ranks)
    counts = counts[..., :-1]  # (B, H, R, n_buckets)

    # The unfinished last chunk of earlier calls is continued, and sees the complete chunk before it.
    n, lead = buckets.size(-1), 0 if before is None else 1
    if before is None:
        before = torch.zeros_like(counts)
    begun = before % chunk_size
    n_chunks = lead + (begun + counts + chunk_size - 1) // chunk_size  # (B, H, R, n_buckets)
    first = (n_chunks.cumsum(-1) - n_chunks) * chunk_size
    limit = lead * n_buckets + (n + (1 + lead) * n_buckets * (chunk_size - 1)) // chunk_size
    limit = limit if lead else min(limit, n)
    if reads_values(n_chunks):
        limit = max(int(n_chunks.sum(-1).max()), 1)  # fewer than there might be

    slots = _of_bucket(first + lead * chunk_size + begun, buckets) + ranks
    ranks = ranks + _of_bucket(before, buckets)
    chunks = _chunks(buckets, ranks // chunk_size, slots, n_buckets, limit * chunk_size, limit)
    return RankedChunks(chunks, ranks, first, before + counts)


class Recent(NamedTuple):
    """The newest 2C positions of buckets, C being the chunk size: a bucket's position of rank r at index r mod 2C."""

    positions: Tensor  # (…, 2C)
    ranks: Tensor  # (…, 2C), below 0 where there is none
    seen: Tensor  # (…, 2C), whether the bucket's next position sees it


def recent_of(positions: Tensor, counts: Tensor) -> Recent:
    """Describe `positions` (…, 2C), the newest ones of buckets that have had `counts` (…) positions."""
    twice = positions.size(-1)
    last = counts[..., None] - 1
    ranks = last - (last - torch.arange(twice, device=counts.device)) % twice
    seen = (ranks >= 0) & (ranks // (twice // 2) >= (last + 1) // (twice // 2) - 1)
    return Recent(positions, ranks, seen)


def earlier_slots(recent: Recent, counts: Tensor, first: Tensor) -> Tensor:
    """Return the slots (B, H, R, n_buckets, 2C) of the visible positions of earlier calls, −1 for the rest.

    Args:
        recent: The newest positions of the buckets.
        counts: (B, H, R, n_buckets), their numbers of positions.
        first: (B, H, R, n_buckets), their first slots: see `ranked_chunks`.
    """
    chunk_size = recent.positions.size(-1) // 2
    start = first - (counts // chunk_size - 1) * chunk_size
    return torch.where(recent.seen, start[..., None] + recent.ranks, -1)


def attend_in_chunks(
    x: Tensor,
    v: Tensor,
    places: Tensor,
    chunks: Chunks,
    n_buckets: int,
    chunk_size: int,
    *,
    causal: bool,
    before: Tensor | None = None,
    earlier: tuple[Tensor, Tensor] | None = None,
    plain: bool = False,
) -> Tensor:
    """Compute attention of each position to its bucket, in its own chunk and the one before, over R rounds jointly.

        out_i = Σ_r exp(z_i^r − z_i) o_i^r,  o_i^r = Σ_{j ∈ P_i^r} exp(s_ij − log N_ij − z_i^r) v_j

    (appendix A), where s_ij = x_i · x_j / (|x_j| √D), P_i^r is what i sees in round r, N_ij the number of rounds in
    which i sees j, exp z_i^r normalises and z_i = log Σ_r exp z_i^r. This equals softmax attention to the union of the
    P_i^r. Time O(R T C (C + D)) for T chunks; the N_ij take R integer comparisons for each score.

    On the CPU it is computed a few chunks at a time, with a hand-written backward pass: beside inputs, outputs and
    their gradients, O(N D), and the places, O(R T C), only the memory of these chunks is needed. Blocks without queries
    or visible keys are skipped. The backward pass recomputes the scores and can't be differentiated. The plain form, on
    other devices, computes all chunks at once, in memory O(R T C (C + D)), and autograd differentiates it any number of
    times.

    Args:
        x: (B, H, M, D), queries and, before they are normalised, keys.
        v: (B, H, M, D).
        places: (B, H, M, R), as in `Chunks`.
        chunks: Chunks of the N query positions, by `ranked_chunks` if causal, else by `sorted_chunks`.
        n_buckets: Number of buckets.
        chunk_size: C.
        causal: Whether a position sees no later one.
        before: (B,), how many of the M come before the N; None: none.
        earlier: Slots (B, H, R, …), −1 for none, and positions of earlier ones that may be seen.
        plain: Whether to use the plain form on the CPU too.

    Returns:
        (B, H, N, D); finite in padding.

    Raises:
        NotImplementedError: On the CPU, if the gradient is differentiated; the plain form supports that.
    """
    grid = _grid(chunks, chunk_size, before, earlier)
    if plain or x.device.type != "cpu" or in_forward_mode():
        return _attend_at_once(x, v, places, grid, chunks.slots, n_buckets, causal)
    if before is None:
        before = grid.new_zeros(len(x))
    out, _, _ = _OPERATOR.forward(x, v, places, grid, chunks.slots, before, n_buckets, causal)
    return out


def _attend_at_once(
    x: Tensor, v: Tensor, places: Tensor, grid: Tensor, slots: Tensor, n_buckets: int, causal: bool
) -> Tensor:
    """Compute the plain form of `attend_in_chunks`; `grid` is the result of `_grid`."""
    index = grid.clamp(min=0)
    full = accumulator(x.dtype)
    q, v = rows(x, index).to(full), rows(v, index).to(full)  # (B, H, R, T, C, D)
    place = rows(places, index).masked_fill(grid[..., None] < 0, NOWHERE)  # (B, H, R, T, C, R)
    k, v = _with_previous(_unit(q)), _with_previous(v)  # (B, H, R, T, 2C, D)
    key_place, key_index = _with_previous(place, NOWHERE), _with_previous(grid, -1)

    own, key_own = (t.diagonal(dim1=2, dim2=-1).movedim(-1, 2) for t in (place, key_place))  # (B, H, R, T, C or 2C)
    seen = _sees(own[..., None], key_own[..., None, :], n_buckets)  # (B, H, R, T, C, 2C)
    if causal:
        seen &= key_index[..., None, :] <= grid[..., None]
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-1, -2)  # (B, H, R, T, C, 2C)
    if places.size(-1) > 1:
        times = torch.zeros_like(seen, dtype=torch.uint8)
        for a, b in zip(place.unbind(-1), key_place.unbind(-1), strict=True):
            times += _sees(a[..., None], b[..., None, :], n_buckets)
        scores.sub_(times.to(scores.dtype).log_())
    scores.masked_fill_(key_index[..., None, :] == grid[..., None], SELF)
    scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)  # not −∞: in an empty slot all are

    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)  # (B, H, R, T, C, 1)
    out, z = (weights @ v) / total, total.log() + top
    out, z = out.flatten(3, 4), z.flatten(3)  # (B, H, R, T · C, ·)
    return _rounds_together(out, z, slots.clamp(max=z.size(-1) - 1))


def attend_recent(x: Tensor, v: Tensor, places: Tensor, before: Tensor, recent: Recent, n_buckets: int) -> Tensor:
    """Compute causal `attend_in_chunks` for one position, as in generation, in O(R C D).

    Args:
        x: (B, H, M, D), its own included, as in `v` and `places`.
        v: (B, H, M, D).
        places: (B, H, M, R).
        before: (B,), its index.
        recent: Of its buckets, (B, H, R, 2C).
        n_buckets: Number of buckets.

    Returns:
        (B, H, 1, D).
    """
    b, h = x.shape[:2]
    own = before[:, None, None].expand(b, h, 1)
    index = torch.cat([recent.positions.flatten(2), own], -1)  # (B, H, 2C R + 1), the last its own
    seen = F.pad(recent.seen.flatten(2), (0, 1), value=True)
    full = accumulator(x.dtype)
    times = _sees(rows(places, own), rows(places, index), n_buckets).sum(-1)  # (B, H, 2C R + 1)
    q, k = rows(x, own).to(full), _unit(rows(x, index).to(full))
    scores = (k @ q.transpose(-1, -2)).squeeze(-1) / math.sqrt(x.size(-1))  # (B, H, 2C R + 1)
    scores = scores - times.clamp(min=1).to(full).log()
    scores = torch.cat([scores[..., :-1], torch.full_like(scores[..., -1:], SELF)], -1)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights[..., None, :] @ rows(v, index).to(full)  # (B, H, 1, D)


def rows(t: Tensor, index: Tensor) -> Tensor:
    """Look up vectors: `t` (B, H, M, F) at `index` (B, H, …) -> (B, H, …, F)."""
    b, h, m, _ = t.shape
    start = (torch.arange(b * h, device=t.device) * m).view(b, h, *[1] * (index.dim() - 2))
    return t.flatten(0, 2).index_select(0, (start + index).flatten()).unflatten(0, index.shape)


def _unit(x: Tensor) -> Tensor:
    """Divide vectors (…, D) by their norms. 0 stays 0: `F.normalize` would multiply its gradient by 10¹²."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.masked_fill(length == 0, 1)


def _count(t: Tensor) -> Tensor:
    """Return 0, 1, …, as many as the last dimension of `t` has entries."""
    return torch.arange(t.size(-1), device=t.device)


def _of_bucket(t: Tensor, buckets: Tensor) -> Tensor:
    """Return the entries of `t` (B, H, R, n_buckets) for `buckets` (B, H, R, N): (B, H, R, N); 0 for padding."""
    return F.pad(t, (0, 1)).gather(-1, buckets)


def _grid(chunks: Chunks, chunk_size: int, before: Tensor | None, earlier: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the position in each slot, (B, H, R, T, C), −1 for none: see `attend_in_chunks`."""
    index = _count(chunks.slots)
    if before is not None:
        index = before[:, None, None, None] + index
    size = chunks.n_chunks * chunk_size
    grid = index.new_full((*chunks.slots.shape[:3], size + 1), -1)  # the last slot takes padding
    grid = grid.scatter(-1, chunks.slots, index.expand_as(chunks.slots))
    if earlier is not None:
        slots, positions = (t.flatten(3) for t in earlier)
        grid = grid.scatter(-1, torch.where(slots < 0, size, slots), positions)
    return grid[..., :-1].unflatten(-1, (-1, chunk_size))


def _chunks(buckets: Tensor, chunk: Tensor, slots: Tensor, n_buckets: int, size: int, n_chunks: int) -> Chunks:
    """Return the `Chunks` of positions with the given buckets, chunks of their buckets and slots, (B, H, R, N) each.

    Padding gets the place `NOWHERE` and the slot `size`.
    """
    padding = buckets == n_buckets
    places = (chunk * n_buckets + buckets).masked_fill(padding, NOWHERE)
    return Chunks(places.transpose(2, 3).to(torch.int32), slots.masked_fill(padding, size), n_chunks)


def _sees(place: Tensor, other: Tensor, n_buckets: int) -> Tensor:
    """Return whether place − other, with broadcasting, is 0 or `n_buckets`: the position at `place` sees the other."""
    difference = place - other
    return (difference == 0) | (difference == n_buckets)


def _with_previous(t: Tensor, fill: int = 0) -> Tensor:
    """Put before each chunk the chunk before it, and `fill` before the first.

    (B, H, R, T, C, …) -> (B, H, R, T, 2C, …).
    """
    before = F.pad(t, [0, 0] * (t.dim() - 4) + [1, -1], value=fill)
    return torch.cat([before, t], 4)


def _rounds_together(out: Tensor, z: Tensor, slots: Tensor) -> Tensor:
    """Return the outputs (B, H, N, D) over all rounds.

    The rounds' outputs `out` (B, H, R, T · C, D) are taken at `slots` (B, H, R, N) and summed with weights
    exp(z_i^r − z_i), where `z` (B, H, R, T · C) are the logarithms of the rounds' normalisers.
    """
    shape = slots.shape
    out = rows(out.flatten(1, 2), slots.flatten(1, 2)).unflatten(1, shape[1:3])  # (B, H, R, N, D)
    share = z.gather(-1, slots).softmax(2)  # exp(z_i^r − z_i)
    return (share[..., None] * out).sum(2)


# ------------------------------------------------------------------------------------------------- on the CPU, by hand

_SCORES = 2**17
"""Scores computed at once per thread: few enough for a core's cache, enough to outweigh a call's overhead."""


class _Tiles(NamedTuple):
    """G blocks of S query slots, and the key slots of each: the W slots up to its own last one."""

    blocks: Tensor  # (G, W / S), the last is the query block, numbered over all rows and heads
    queries: Tensor  # (G, S), rows of (B · H · N, …); B · H · N: empty slot
    keys: Tensor  # (G, W), rows of (B · H · M, …), the last S are the queries; arbitrary in empty slots
    places: Tensor  # (R, G, W), of the keys


class _Layout:
    """The slots of all rounds, cut into blocks, with the keys of each block.

    A causal chunk has several blocks. The keys of a block are those of the chunk before, if its bucket has one, and of
    its own chunk up to itself. These are full and in order, so a triangular mask hides later keys. Without causality a
    block is a chunk. Its keys are those of the chunk and the one before, and keys of other buckets are masked.
    """

    def __init__(self, places: Tensor, grid: Tensor, before: Tensor, n: int, n_buckets: int, causal: bool) -> None:
        b, h, m, n_rounds = places.shape
        c = grid.size(-1)
        size = _block_size(c) if causal else c
        start = torch.arange(b * h).view(b, h, 1, 1, 1)
        position = grid - before.view(b, 1, 1, 1, 1)
        asks = (grid >= 0) & (position >= 0)
        if causal:  # a bucket's first chunk has places below n_buckets; a chunk that is not empty has a first slot
            first = rows(places, grid[..., 0].clamp(min=0))  # (B, H, R, T, R)
            follows = first.diagonal(dim1=2, dim2=-1).movedim(-1, 2) >= n_buckets  # (B, H, R, T)
        else:
            follows = (torch.arange(grid.size(3)) > 0).expand(grid.shape[:4])
        widths = follows[..., None] * (c // size) + torch.arange(1, c // size + 1)  # (B, H, R, T, C/S)
        widths = widths * asks.unflatten(-1, (-1, size)).any(-1)

        self.size, self.n_buckets, self.causal = size, n_buckets, causal
        self.places = places.flatten(0, 2)  # (BHM, R)
        self.later = F.pad(torch.full((size, size), -torch.inf).triu_(1), (2 * c - size, 0))  # (S, 2C)
        self.widths = widths.movedim(2, 0).reshape(n_rounds, -1)  # (R, L), in blocks; 0: no queries
        # (B, H, R, T, C) -> (R, L, S)
        self.queries, self.keys, self.filled = (
            t.movedim(2, 0).reshape(n_rounds, -1, size)
            for t in (torch.where(asks, start * n + position, b * h * n), start * m + grid.clamp(min=0), grid >= 0)
        )

    def tiles(self, r: int) -> Iterator[_Tiles]:
        """Yield the tiles of round r. All blocks of a tile have the same number of keys."""
        widths = self.widths[r]
        for width in widths[widths > 0].unique().tolist():
            at_once = max(1, _SCORES * torch.get_num_threads() // (width * self.size**2))
            for asking in (widths == width).nonzero().squeeze(1).split(at_once):
                blocks = asking[:, None] + torch.arange(1 - width, 1)
                queries = _look_up(self.queries[r], asking)
                keys = _look_up(self.keys[r], blocks).flatten(1)
                places = _look_up(self.places, keys).movedim(-1, 0).contiguous()
                yield _Tiles(blocks, queries, keys, places)

    def scores(self, q: Tensor, k: Tensor, tiles: _Tiles, r: int) -> Tensor:
        """Return the products of `q` (G, S, D) and `k` (G, W, D), as good as −∞ where a query does not see a key."""
        if self.causal:
            hidden = self.later[:, -k.size(1) :].to(q.dtype)
        else:
            filled = _look_up(self.filled[r], tiles.blocks).flatten(1)
            seen = self._seen(tiles.places[r].masked_fill(~filled, NOWHERE))
            hidden = seen.to(q.dtype).sub_(1).mul_(torch.finfo(q.dtype).max)  # 0 or −max
        scores = torch.baddbmm(hidden, q, k.mT)
        _own(scores).fill_(SELF / math.log(2))
        return scores

    def times(self, tiles: _Tiles, r: int, dtype: torch.dtype) -> Tensor | None:
        """Return in how many rounds queries see keys, (G, S, W), for those that they see in round r; None: in one."""
        rest = [place for i, place in enumerate(tiles.places) if i != r]
        if not rest:
            return None
        times = self._seen(rest[0])
        for place in rest[1:]:
            times += self._seen(place)
        return times.to(dtype).add_(1)

    def _seen(self, place: Tensor) -> Tensor:
        """Return 1 where queries see keys at `place` (G, W), else 0, (G, S, W): see `_sees`.

        As integers throughout: torch then compares six times as fast as with booleans for outcomes.
        """
        query, key = place[:, -self.size :, None], place[:, None]
        same = place.new_empty(len(place), self.size, place.size(1))
        before = torch.eq(query - self.n_buckets, key, out=torch.empty_like(same))
        return torch.eq(query, key, out=same).add_(before)


def _block_size(chunk_size: int) -> int:
    """Return S: a chunk has at most four blocks, of at least 32 slots each, since small products are slow."""
    parts = [n for n in (4, 3, 2) if chunk_size % n == 0 and chunk_size // n >= 32]
    return chunk_size // max(parts, default=1)


def _look_up(t: Tensor, index: Tensor) -> Tensor:
    """Return the entries `index` (…) of `t` (M, …) along its first dimension."""
    return t.index_select(0, index.flatten()).unflatten(0, index.shape)


def _own(scores: Tensor) -> Tensor:
    """Return a view of the scores of queries with themselves, (G, S, W) -> (G, S)."""
    return scores[..., -scores.size(1) :].diagonal(dim1=1, dim2=2)


def _queries_and_keys(x: Tensor, tiles: _Tiles, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the queries (G, S, D) and the unit keys (G, W, D) of the tiles.

    The queries are scaled by 1 / (ln 2 √D), so that the weights are powers of 2: exp2 is faster than exp.
    """
    k = _look_up(x, tiles.keys).to(dtype)
    q = k[:, -tiles.queries.size(1) :] / (math.log(2) * math.sqrt(x.size(-1)))
    length = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
    return q, k.div_(length.masked_fill_(length == 0, 1))


def _forward(
    x: Tensor, v: Tensor, places: Tensor, grid: Tensor, slots: Tensor, before: Tensor, n_buckets: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs (B, H, N, D), and each query's highest score and sum of exponentials, (B, H, N) each.

    The sum is divided by the exponential of the highest score. The normalisers' logarithms are not returned, since the
    logarithm of R would be lost in rounding beside `SELF`.
    """
    out, highest, total = _forward_shapes(x, v, places, grid, slots)
    layout = _Layout(places, grid, before, out.size(2), n_buckets, causal)
    x, v = x.flatten(0, 2), v.flatten(0, 2)  # (BHM, D)
    y, top, below = out.zero_().flatten(0, 2), highest.fill_(-torch.inf).flatten(), total.zero_().flatten()  # (BHN, ·)
    with torch.autocast("cpu", enabled=False):
        for r in range(grid.size(2)):
            y_round, top_round, below_round = _round(x, v, layout, slots[:, :, r], r, out.dtype)
            both = torch.maximum(top, top_round)
            share, of_round = (top - both).exp2_(), (top_round - both).exp2_()
            y.mul_(share[:, None]).addcmul_(y_round, of_round[:, None])
            below.mul_(share).addcmul_(below_round, of_round)
            top.copy_(both)
        y.div_(below[:, None])
    return out, highest, total


def _round(
    x: Tensor, v: Tensor, layout: _Layout, slots: Tensor, r: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numerators (BHN, D), highest scores (BHN,) and denominators (BHN,) of round r.

    The numerators are 0 in padding.
    """
    size, widths = layout.size, layout.widths[r]
    nowhere = int((widths > 0).sum()) * size  # the row that is padding's
    y, top = x.new_zeros(nowhere + 1, v.size(-1), dtype=dtype), x.new_zeros(nowhere + 1, dtype=dtype)
    below = torch.ones_like(top)
    start, done = torch.zeros_like(widths), 0  # (L,), where each block's rows are
    for tiles in layout.tiles(r):
        q, k = _queries_and_keys(x, tiles, dtype)
        scores, times = layout.scores(q, k, tiles, r), layout.times(tiles, r, dtype)
        highest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(highest).exp2_()
        if times is not None:
            weights.div_(times)
        span = slice(done, done + highest.numel())
        torch.bmm(weights, _look_up(v, tiles.keys).to(dtype), out=y[span].view(len(q), size, -1))
        top[span] = highest.flatten()
        below[span] = weights.sum(-1).flatten()
        start[tiles.blocks[:, -1]] = torch.arange(span.start, span.stop, size)
        done = span.stop

    slots = slots.flatten(0, 1)  # (BH, N)
    n_blocks = len(widths) // len(slots)  # of a row and head
    block = torch.arange(len(slots))[:, None] * n_blocks + (slots // size).clamp(max=n_blocks - 1)
    index = (_look_up(start, block) + slots % size).masked_fill(slots == n_blocks * size, nowhere).flatten()  # (BHN,)
    return y.index_select(0, index), top.index_select(0, index), below.index_select(0, index)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and v.

    With w_ij^r = exp(s_ij − log N_ij − z_i), the weights after all rounds, and k_j = x_j / |x_j|, summing over r too,

        dv_j = Σ_i w_ij^r g_i,  ds_ij^r = w_ij^r (g_i · v_j − g_i · out_i), and 0 for j = i,
        dx_i = Σ_j ds_ij^r k_j / √D + (dk_i − (dk_i · k_i) k_i) / |x_i|,  dk_j = Σ_i ds_ij^r x_i / √D
    """
    g, x, v, places, grid, before, out, highest, total, n_buckets, causal = arguments
    layout = _Layout(places, grid, before, out.size(2), n_buckets, causal)
    dtype, x_flat, v_flat = out.dtype, x.flatten(0, 2), v.flatten(0, 2)  # (BHM, D)
    g_q, g_k, g_v = (torch.zeros_like(t, dtype=dtype) for t in (x_flat, x_flat, v_flat))
    g = g / total[..., None]
    # The last row is for empty slots, whose weights are 0.
    g_total = F.pad((g * out).sum(-1).neg_().flatten(), (0, 1))  # (BHN + 1,)
    top, g = F.pad(highest.flatten(), (0, 1), value=torch.inf), F.pad(g.flatten(0, 2), (0, 0, 0, 1))
    with torch.autocast("cpu", enabled=False):
        for r in range(grid.size(2)):
            for tiles in layout.tiles(r):
                q, k = _queries_and_keys(x_flat, tiles, dtype)
                scores, times = layout.scores(q, k, tiles, r), layout.times(tiles, r, dtype)
                weights = scores.sub_(_look_up(top, tiles.queries)[..., None]).exp2_()  # (G, S, W)
                if times is not None:
                    weights.div_(times)
                g_y, g_scores = _look_up(g, tiles.queries), _look_up(g_total, tiles.queries)[..., None]
                g_scores = torch.baddbmm(g_scores, g_y, _look_up(v_flat, tiles.keys).to(dtype).mT).mul_(weights)
                _own(g_scores).zero_()
                keys, own = tiles.keys.flatten(), tiles.keys[:, -layout.size :].flatten()
                g_v.index_add_(0, keys, torch.bmm(weights.mT, g_y).flatten(0, 1))
                g_q.index_add_(0, own, torch.bmm(g_scores, k).flatten(0, 1))
                g_k.index_add_(0, keys, torch.bmm(g_scores.mT, q).flatten(0, 1))

    k = x_flat.to(dtype)
    length = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
    length.masked_fill_(length == 0, 1)
    k = k / length
    g_k.addcmul_(k, (g_k * k).sum(-1, keepdim=True), value=-1).mul_(math.log(2)).div_(length)
    g_x = g_k.add_(g_q, alpha=1 / math.sqrt(x.size(-1)))
    return g_x.to(x.dtype).view(x.shape), g_v.to(v.dtype).view(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, v, places, grid, _, before, ctx.n_buckets, ctx.causal = inputs
    ctx.save_for_backward(x, v, places, grid, before, *output)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    g_x, g_v = _OPERATOR.backward(g, *ctx.saved_tensors, ctx.n_buckets, ctx.causal)
    return g_x, g_v, None, None, None, None, None, None


def _forward_shapes(
    x: Tensor, v: Tensor, places: Tensor, grid: Tensor, slots: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, _, n = slots.shape
    dtype = accumulator(x.dtype)
    highest, total = (v.new_empty(b, h, n, dtype=dtype) for _ in range(2))
    return v.new_empty(b, h, n, v.size(-1), dtype=dtype), highest, total


def _backward_shapes(g: Tensor, x: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), v.new_empty(v.shape)


# A custom operator, so that torch.compile does not unroll the loops over chunks, whose number depends on the hashes.
_OPERATOR = Operator(
    "lsh",
    "(Tensor x, Tensor v, Tensor places, Tensor grid, Tensor slots, Tensor before, int n_buckets, bool causal) "
    "-> (Tensor, Tensor, Tensor)",
    "(Tensor g, Tensor x, Tensor v, Tensor places, Tensor grid, Tensor before, Tensor out, Tensor highest, "
    "Tensor total, int n_buckets, bool causal) -> (Tensor, Tensor)",
    _forward,
    _backward,
    shapes=_forward_shapes,
    backward_shapes=_backward_shapes,
    keep=_keep,
    gradients=_gradients,
    refusal="attend_in_chunks has no second derivative on the CPU; plain=True has one",
)
