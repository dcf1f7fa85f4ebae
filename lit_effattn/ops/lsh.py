"""Attention among vectors that hash alike (Kitaev et al. 2020, section 2 and appendix A).

There are H heads, R rounds of hashing, and chunks of C positions. Where a position is in a round is one number, its
place: `chunk · n_buckets + bucket`. A position sees another if their places differ by 0 (the same chunk of the same
bucket) or by `n_buckets` (the chunk before).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.sequence import accumulator, reads_values

NOWHERE = -(2**30)
"""The place of what is not there: no difference to a place is 0 or `n_buckets`."""
SELF = -1e5
"""The score of a position with itself: so little that it counts where nothing else is seen, and then all."""


class Chunks(NamedTuple):
    """Where the positions of a call are, in every round."""

    places: Tensor  # (B, H, N, R), in int32; `NOWHERE`: padding
    slots: Tensor  # (B, H, R, N), index in the grid of chunks, (R, T · C) flat; T · C: padding
    n_chunks: int  # T


def hash_buckets(x: Tensor, rotations: Tensor) -> Tensor:
    """Hash vectors, so that those in similar directions likely fall together: argmax [x R; −x R].

    Args:
        x: (B, H, N, D).
        rotations: (R, H, D, n_buckets / 2), random; without columns all fall together.

    Returns:
        (B, H, R, N), the bucket of each vector in each round.
    """
    b, h, n, _ = x.shape
    if rotations.size(-1) == 0:
        return torch.zeros(b, h, rotations.size(0), n, dtype=torch.long, device=x.device)
    turned = torch.einsum("bhnd,rhdf->bhrnf", x.detach(), rotations)
    return torch.cat([turned, -turned], -1).argmax(-1)


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
    """What `ranked_chunks` finds."""

    chunks: Chunks
    ranks: Tensor  # (B, H, R, N), of each position in its bucket
    first: Tensor  # (B, H, R, n_buckets), each bucket's first slot
    counts: Tensor  # (B, H, R, n_buckets), how many positions each bucket has now had


def ranked_chunks(buckets: Tensor, n_buckets: int, chunk_size: int, before: Tensor | None = None) -> RankedChunks:
    """Cut each bucket by itself: a position's chunk is its rank, the number of earlier ones in its bucket, div C.

    No later position moves a border. Each chunk of each bucket has slots of its own, some of them empty; with `before`,
    each bucket's first ones are two chunks for `earlier_slots`.

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

    # The last, unfinished chunk of the past is gone on with; the finished one before it is seen from there.
    n, lead = buckets.size(-1), 0 if before is None else 1
    if before is None:
        before = torch.zeros_like(counts)
    begun = before % chunk_size
    n_chunks = lead + (begun + counts + chunk_size - 1) // chunk_size  # (B, H, R, n_buckets)
    first = (n_chunks.cumsum(-1) - n_chunks) * chunk_size
    most = lead * n_buckets + (n + (1 + lead) * n_buckets * (chunk_size - 1)) // chunk_size
    most = most if lead else min(most, n)
    if reads_values(n_chunks):
        most = max(int(n_chunks.sum(-1).max()), 1)  # fewer than there might be

    slots = _of_bucket(first + lead * chunk_size + begun, buckets) + ranks
    ranks = ranks + _of_bucket(before, buckets)
    chunks = _chunks(buckets, ranks // chunk_size, slots, n_buckets, most * chunk_size, most)
    return RankedChunks(chunks, ranks, first, before + counts)


class Recent(NamedTuple):
    """The newest 2C positions of buckets, C being the chunk size: a bucket's position of rank r at index r mod 2C."""

    positions: Tensor  # (…, 2C)
    ranks: Tensor  # (…, 2C), below 0 where there is none
    seen: Tensor  # (…, 2C), whether the bucket's next position sees it


def recent_of(positions: Tensor, counts: Tensor) -> Recent:
    """Say what buckets with `counts` (…) positions hold in `positions` (…, 2C)."""
    twice = positions.size(-1)
    last = counts[..., None] - 1
    ranks = last - (last - torch.arange(twice, device=counts.device)) % twice
    seen = (ranks >= 0) & (ranks // (twice // 2) >= (last + 1) // (twice // 2) - 1)
    return Recent(positions, ranks, seen)


def earlier_slots(recent: Recent, counts: Tensor, first: Tensor) -> Tensor:
    """Return the slots (B, H, R, n_buckets, 2C) of what is seen of earlier calls, −1 for the rest.

    Args:
        recent: What the buckets hold.
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
) -> Tensor:
    """Let each position see those of its bucket in its own chunk and the one before, in R rounds together.

        out_i = Σ_r exp(z_i^r − z_i) o_i^r,  o_i^r = Σ_{j ∈ P_i^r} exp(s_ij − log N_ij − z_i^r) v_j

    (appendix A), where s_ij = x_i · x_j / (|x_j| √D), P_i^r is what i sees in round r, N_ij the number of rounds in
    which i sees j, exp z_i^r normalises and z_i = log Σ_r exp z_i^r. This equals softmax attention to the union of the
    P_i^r. Time and memory O(R T C (C + D)) for T chunks; the N_ij take R integer comparisons for each score.

    Args:
        x: (B, H, M, D), queries and, before they are normalised, keys.
        v: (B, H, M, D).
        places: (B, H, M, R), as in `Chunks`.
        chunks: Of the N positions that ask.
        n_buckets: Number of buckets.
        chunk_size: C.
        causal: Whether a position sees no later one.
        before: (B,), how many of the M come before the N; None: none.
        earlier: Slots (B, H, R, …), −1 for none, and positions of earlier ones that may be seen.

    Returns:
        (B, H, N, D); finite in padding.
    """
    index = _count(chunks.slots)
    if before is not None:
        index = before[:, None, None, None] + index
    size = chunks.n_chunks * chunk_size
    grid = index.new_full((*chunks.slots.shape[:3], size + 1), -1)  # the last slot takes what is not there
    grid = grid.scatter(-1, chunks.slots, index.expand_as(chunks.slots))
    if earlier is not None:
        slots, positions = (t.flatten(3) for t in earlier)
        grid = grid.scatter(-1, torch.where(slots < 0, size, slots), positions)
    grid = grid[..., :-1].unflatten(-1, (-1, chunk_size))  # (B, H, R, T, C)

    there = grid.clamp(min=0)
    full = accumulator(x.dtype)
    q, v = rows(x, there).to(full), rows(v, there).to(full)  # (B, H, R, T, C, D)
    place = rows(places, there).masked_fill(grid[..., None] < 0, NOWHERE)  # (B, H, R, T, C, R)
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
    return _rounds_together(out.flatten(3, 4), z.flatten(3), chunks.slots.clamp(max=size - 1))


def attend_recent(x: Tensor, v: Tensor, places: Tensor, before: Tensor, recent: Recent, n_buckets: int) -> Tensor:
    """Do what `attend_in_chunks` does, causal, for one position: what generating one more token costs, O(R C D).

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
    """Divide by the length, but leave 0 alone: `F.normalize` would multiply its gradient by 10¹²."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.masked_fill(length == 0, 1)


def _count(t: Tensor) -> Tensor:
    """0, 1, … along the last dimension of `t`."""
    return torch.arange(t.size(-1), device=t.device)


def _of_bucket(t: Tensor, buckets: Tensor) -> Tensor:
    """Look up `t` (B, H, R, n_buckets) at `buckets` (B, H, R, N), 0 for the bucket of padding."""
    return F.pad(t, (0, 1)).gather(-1, buckets)


def _chunks(buckets: Tensor, chunk: Tensor, slots: Tensor, n_buckets: int, size: int, n_chunks: int) -> Chunks:
    padding = buckets == n_buckets
    places = (chunk * n_buckets + buckets).masked_fill(padding, NOWHERE)
    return Chunks(places.transpose(2, 3).to(torch.int32), slots.masked_fill(padding, size), n_chunks)


def _sees(place: Tensor, other: Tensor, n_buckets: int) -> Tensor:
    difference = place - other
    return (difference == 0) | (difference == n_buckets)


def _with_previous(t: Tensor, fill: int = 0) -> Tensor:
    """Put before each chunk the one before it: (B, H, R, T, C, …) -> (B, H, R, T, 2C, …); before the first, `fill`."""
    before = F.pad(t, [0, 0] * (t.dim() - 4) + [1, -1], value=fill)
    return torch.cat([before, t], 4)


def _rounds_together(out: Tensor, z: Tensor, slots: Tensor) -> Tensor:
    """Sum rounds (B, H, R, T · C, D) by their normalisers' logarithms (B, H, R, T · C), at `slots` (B, H, R, N)."""
    shape = slots.shape
    out = rows(out.flatten(1, 2), slots.flatten(1, 2)).unflatten(1, shape[1:3])  # (B, H, R, N, D)
    share = z.gather(-1, slots).softmax(2)  # exp(z_i^r − z_i)
    return (share[..., None] * out).sum(2)
