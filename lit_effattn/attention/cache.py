"""Caches with one vector per position, shared by the states of several attention kinds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.sequence import may_overwrite, reads_values


def append(stored: Sequence[Tensor], new: Sequence[Tensor], length: Tensor, *, grows: bool) -> list[Tensor]:
    """Write each tensor of `new` (B, H, N, ·) to its tensor of `stored` (B, H, M, ·), from each row's `length` on.

    Padding is written too; the next call overwrites it. Writes in place if the state is donated.

    Args:
        stored: Caches; slot t holds position t.
        new: New vectors, one tensor for each of `stored`.
        length: (B,), the number of positions of each row so far.
        grows: Whether to add N slots; if False, the M slots are final.

    Raises:
        ValueError: the N new positions do not fit in M slots.
    """
    n, room = new[0].size(2), stored[0].size(2)
    if grows:
        stored = [F.pad(t, (0, 0, 0, n)) for t in stored]
    else:
        check_room(room, length, n)
    slots = length[:, None] + torch.arange(n, device=length.device)  # (B, N)
    return [write(t, slots, s) for t, s in zip(stored, new, strict=True)]


def check_room(room: int, length: Tensor, n: int) -> None:
    """Check that `n` more positions after each row's `length` fit in `room` slots.

    Raises:
        ValueError: they do not fit.
    """
    if reads_values(length) and int(length.max()) + n > room:
        raise ValueError(
            f"the cache is full: it was made with max_len={room}, holds {int(length.max())} positions and is "
            f"given {n} more; raise max_len"
        )


def write(stored: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """Write `new` (B, H, N, ·) to each row's `slots` (B, N) of `stored` (B, H, M, ·), in place if it is donated."""
    stored = stored if may_overwrite() else stored.clone()
    rows = torch.arange(len(stored), device=stored.device)[:, None]
    # An assignment, not `scatter_`, for which torch.compile copies all of `stored` twice.
    stored[rows, :, slots] = new.transpose(1, 2).to(stored.dtype)  # (B, H, N, ·) -> (B, N, H, ·)
    return stored
