"""How vectors are remembered, one for every position: what the states of several kinds have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.sequence import may_overwrite, reads_values


def append(stored: Sequence[Tensor], new: Sequence[Tensor], length: Tensor, *, grows: bool) -> list[Tensor]:
    """Write each of `new` (B, H, N, ·) behind each row's `length` in its `stored` (B, H, M, ·).

    Padding is written too; the next call overwrites it. In place where the state was given away.

    Args:
        stored: Position t in slot t.
        new: As many.
        length: (B,), the positions of each row so far.
        grows: Whether there is always room for N more; else M slots are all there will ever be.

    Raises:
        ValueError: they are full.
    """
    n, room = new[0].size(2), stored[0].size(2)
    if grows:
        stored = [F.pad(t, (0, 0, 0, n)) for t in stored]
    else:
        check_room(room, length, n)
    slots = length[:, None] + torch.arange(n, device=length.device)  # (B, N)
    return [write(t, slots, s) for t, s in zip(stored, new, strict=True)]


def check_room(room: int, length: Tensor, n: int) -> None:
    """Refuse `n` more positions after each row's `length` in `room` slots.

    Raises:
        ValueError: they are full.
    """
    if reads_values(length) and int(length.max()) + n > room:
        raise ValueError(
            f"the cache is full: it was made with max_len={room}, holds {int(length.max())} positions and is "
            f"given {n} more; raise max_len"
        )


def write(stored: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """Write `new` (B, H, N, ·) to each row's `slots` (B, N) of `stored` (B, H, M, ·), in place if it was given away."""
    stored = stored if may_overwrite() else stored.clone()
    rows = torch.arange(len(stored), device=stored.device)[:, None]
    # An assignment, not `scatter_`: what torch.compile makes of that copies all of `stored`, twice.
    stored[rows, :, slots] = new.transpose(1, 2).to(stored.dtype)  # (B, H, N, ·) -> (B, N, H, ·)
    return stored
