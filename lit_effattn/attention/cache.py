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
    elif reads_values(length) and int(length.max()) + n > room:
        raise ValueError(
            f"the cache is full: it was made with max_len={room}, holds {int(length.max())} positions and is "
            f"given {n} more; raise max_len"
        )
    index = (length[:, None] + torch.arange(n, device=length.device))[:, None, :, None]  # (B, 1, N, 1)
    write = Tensor.scatter_ if may_overwrite() else Tensor.scatter
    return [write(t, 2, index.expand_as(s), s.to(t.dtype)) for t, s in zip(stored, new, strict=True)]
