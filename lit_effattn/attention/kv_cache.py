"""Caches and memories with one vector per position, shared by the states of several attention kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.sequence import along, may_overwrite, reads_values, valid_positions


class Cache(NamedTuple):
    """The newest keys and values: slot t mod M holds position t. Slots without a position are undefined."""

    keys: Tensor  # (B, H_kv, M, D_qk)
    values: Tensor  # (B, H_kv, M, D)
    length: Tensor  # (B,), positions seen in all


class FixedCache(Cache):
    """A `Cache` whose number of slots is final, because it was made with `max_len`."""


def attend_window(
    see: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, state: Cache | None, seen: Tensor, window: int
) -> tuple[Tensor, Cache]:
    """Attend to the `window` newest keys, and keep those that later positions may see.

    Args:
        see: Computes the outputs from queries (B, H, N, D), keys and values (B, H_kv, M + N, D), and `past`, the number
            of valid earlier keys (B,), or None: see `windowed_attention`.
        q: (B, H, N, D).
        k: (B, H_kv, N, D).
        v: (B, H_kv, N, D).
        state: State before the first position, or None. Fewer slots than `window` must hold all positions.
        seen: (B,), valid positions.
        window: Number of keys that a position sees, its own included.
    """
    if state is None:
        length, slots = torch.zeros_like(seen), window
        keys, values = (in_slots(t, 0, length, seen, slots) for t in (k, v))
        return see(q, k, v, past=None), Cache(keys, values, seen)
    slots, length = state.keys.size(2), state.length
    if slots < window:
        check_room(slots, length, seen)
    m = slots_used(length, min(slots, window - 1))
    keys, values = (with_earlier(t, new, length, m) for t, new in zip(state[:2], (k, v), strict=True))
    y = see(q, keys, values, past=length.clamp(max=m))
    keys, values = (in_slots(t, m, length, seen, slots).to(state.keys.dtype) for t in (keys, values))
    return y, type(state)(keys, values, length + seen)


def write_one(state: Cache, k: Tensor, v: Tensor, lengths: Tensor | None) -> Cache:
    """Write one position to its slot, over the oldest; `lengths` (B,), or None, are 0 where it is padding."""
    slots = (state.length % state.keys.size(2))[:, None]
    valid = None if lengths is None else lengths[:, None] > 0
    keys, values = (write(t, slots, new, valid) for t, new in zip(state[:2], (k, v), strict=True))
    return type(state)(keys, values, state.length + (1 if lengths is None else lengths))


def with_earlier(stored: Tensor, new: Tensor, length: Tensor, m: int) -> Tensor:
    """Return the M positions before each row's `length` (B,) and the new ones (B, H, N, D): (B, H, M + N, D)."""
    position = length[:, None] + torch.arange(-m, 0, device=new.device)  # (B, M)
    return torch.cat([gather(stored, position % stored.size(2)).to(new.dtype), new], 2)


def in_slots(t: Tensor, m: int, length: Tensor, seen: Tensor, slots: int) -> Tensor:
    """Return the newest of M positions before each row's `length` and (B,) `seen` ones after, in slots t mod `slots`.

    A slot whose position is not in `t` (B, H, M + N, D) holds any.
    """
    return gather(t, latest(length + seen, slots) - length[:, None] + m)


def slots_used(length: Tensor, slots: int) -> int:
    """Return how many of `slots` any row has filled, or `slots` where reading values is not free."""
    return min(slots, int(length.max())) if reads_values(length) else slots


def newer_of_both(before: Cache, after: Cache) -> Cache:
    """Return the cache of both, where `after` was made from an empty one of as many slots."""
    slots, length = before.keys.size(2), before.length + after.length
    index = latest(length, slots) - before.length[:, None]  # (B, M), negative for a position of `before`
    is_new = (index >= 0)[:, None, :, None]
    keys, values = (
        torch.where(is_new, gather(new, index % slots), old.to(new.dtype))
        for old, new in zip(before[:2], after[:2], strict=True)
    )
    return type(before)(keys, values, length)


def append(
    stored: Sequence[Tensor],
    new: Sequence[Tensor],
    length: Tensor,
    lengths: Tensor | None = None,
    *,
    grows: bool,
) -> list[Tensor]:
    """Write each tensor of `new` (B, H, N, ·) to its tensor of `stored` (B, H, M, ·), from each row's `length` on.

    Padding takes a slot only if the cache grows; the next call then overwrites it. Writes in place if the state is
    donated.

    Args:
        stored: Caches; slot t holds position t.
        new: New vectors, one tensor for each of `stored`.
        length: (B,), the number of positions of each row so far.
        lengths: (B,), the number of valid new positions; None: all.
        grows: Whether to add N slots; if False, the M slots are final.

    Raises:
        ValueError: If the valid new positions do not fit in M slots.
    """
    n, room, valid = new[0].size(2), stored[0].size(2), None
    if grows:
        stored = [F.pad(t, (0, 0, 0, n)) for t in stored]
    else:
        check_room(room, length, n if lengths is None else lengths)
        if lengths is not None:
            n = min(n, room)  # what is beyond is padding
            valid = valid_positions(lengths, n)  # (B, N)
    slots = length[:, None] + torch.arange(n, device=length.device)  # (B, N)
    if valid is not None:
        slots = torch.where(valid, slots, slots % room)  # a slot for each, also where padding is beyond the last
    return [write(t, slots, s[:, :, :n], valid) for t, s in zip(stored, new, strict=True)]


def check_room(room: int, length: Tensor, new: Tensor | int, made_with: str = "max_len={room}") -> None:
    """Check that `new` (B,) more positions after each row's `length` fit in `room` slots.

    Raises:
        ValueError: If they do not fit. The message says what the state was `made_with`.
    """
    if not reads_values(length) or int((length + new).max()) <= room:
        return
    row = int((length + new).argmax())
    count = new if isinstance(new, int) else int(new[row])
    raise ValueError(
        f"the cache is full: it was made with {made_with.format(room=room)}, holds {int(length[row])} positions and "
        f"is given {count} more; raise max_len"
    )


def write(stored: Tensor, slots: Tensor, new: Tensor, valid: Tensor | None = None) -> Tensor:
    """Write `new` (B, H, N, ·) to each row's `slots` (B, N) of `stored` (B, H, M, ·), in place if it is donated.

    Slots where `valid` (B, N) is False keep their contents.
    """
    stored = stored if may_overwrite() else stored.clone()
    rows = torch.arange(len(stored), device=stored.device)[:, None]
    new = new.transpose(1, 2).to(stored.dtype)  # (B, H, N, ·) -> (B, N, H, ·)
    if valid is not None:
        new = torch.where(valid[..., None, None], new, stored[rows, :, slots])
    # An assignment, not `scatter_`, for which torch.compile copies all of `stored` twice.
    stored[rows, :, slots] = new
    return stored


def newest(t: Tensor, end: Tensor, count: int, *, dim: int) -> Tensor:
    """Return the `count` entries of `t` along `dim` before each row's `end` (B,), zeros where there are fewer.

    Args:
        t: (B, …, M, D), M being the size of `dim`.
        end: (B,), at most M.
        count: How many.
        dim: The dimension of the entries, not 0.

    Returns:
        (B, …, count, D).
    """
    index = end[:, None] - count + torch.arange(count, device=t.device)  # (B, count)
    return gather(t, index, dim=dim).masked_fill(along(index, t, dim) < 0, 0)


def gather(t: Tensor, index: Tensor, *, dim: int = 2) -> Tensor:
    """Take entries `index` (B, K) of `t` (B, …, M, D) along `dim`: (B, …, K, D). A negative index takes the first."""
    shape = [*t.shape[:dim], index.size(1), *t.shape[dim + 1 :]]
    # Not `take_along_dim`, which also computes the remainder of every index.
    return t.gather(dim, along(index.clamp(min=0), t, dim).expand(shape))


def newest_of_both(before: Tensor, after: Tensor, length: Tensor, *, dim: int) -> Tensor:
    """Return the newest M of M earlier entries and of the M after them, of which the last `length` (B,) are valid.

    Args:
        before: (B, …, M, D), the entries along `dim`, the newest last.
        after: As `before`, and of its type.
        length: (B,), the number of positions that `after` was made of; it holds at most M of them.
        dim: The dimension of the entries.
    """
    m = after.size(dim)
    slot = torch.arange(m, device=after.device)  # (M,)
    valid = length.clamp(max=m)[:, None]  # (B, 1)
    index = torch.where(slot < m - valid, slot + valid, slot + m)  # (B, M), in both
    return gather(torch.cat([before.to(after.dtype), after], dim), index, dim=dim)


def latest(end: Tensor, slots: int) -> Tensor:
    """Return the newest position before `end` (B,) that each slot holds, t in slot t mod slots: (B, slots).

    It is negative if there is none yet; the contents of that slot are not seen.
    """
    newest = end[:, None] - 1
    return newest - (newest - torch.arange(slots, device=end.device)) % slots
