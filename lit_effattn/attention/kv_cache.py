"""Caches and memories with one vector per position, shared by the states of several attention kinds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.sequence import may_overwrite, reads_values, valid_positions


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
    return gather(t, index, dim=dim).masked_fill(_along(index, t, dim) < 0, 0)


def gather(t: Tensor, index: Tensor, *, dim: int = 2) -> Tensor:
    """Take entries `index` (B, K) of `t` (B, …, M, D) along `dim`: (B, …, K, D). A negative index takes the first."""
    shape = [*t.shape[:dim], index.size(1), *t.shape[dim + 1 :]]
    # Not `take_along_dim`, which also computes the remainder of every index.
    return t.gather(dim, _along(index.clamp(min=0), t, dim).expand(shape))


def _along(index: Tensor, t: Tensor, dim: int) -> Tensor:
    """View `index` (B, K) with the number of dimensions of `t`, K along `dim`."""
    shape = [1] * t.dim()
    shape[0], shape[dim] = index.shape
    return index.view(shape)


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
