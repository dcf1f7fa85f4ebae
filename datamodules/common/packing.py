"""Several sequences in a row, without padding between them."""

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lit_effattn.datamodules.common.labelled import LabelledBatch
from lit_effattn.datamodules.common.tokens import TokenBatch

WINDOW = 1024  # pieces among which `first_fit` fills rows: those of one window are never in a row with those of another

Batch = TypeVar("Batch", TokenBatch, LabelledBatch)


def pack(batch: Batch) -> Batch:
    """Lay the sequences of a padded batch end to end in one row: (B, N) -> (1, Σ lengths).

    `starts` marks the first position of each, so that none depends on another (`lit_effattn.nn.packing.packed`). The
    scores, the loss and its gradient are those of the padded batch, to rounding.

    Args:
        batch: A `TokenBatch` or a `LabelledBatch`.

    Raises:
        ValueError: If the batch can't be packed. The message says why.

    Examples:
        >>> batch = TokenBatch(torch.tensor([[7, 8], [9, 0]]), torch.tensor([[8, 1], [1, -100]]), torch.tensor([2, 1]))
        >>> packed = pack(batch)
        >>> packed.inputs.tolist(), packed.targets.tolist(), packed.starts.tolist()
        ([[7, 8, 9]], [[8, 1, 1]], [[True, False, True]])
    """
    if not isinstance(batch, TokenBatch | LabelledBatch):
        raise ValueError(
            f"pack takes a TokenBatch or a LabelledBatch, not a {type(batch).__name__}, whose rows can't hold several "
            "sequences; use batches of similar length (LengthBatches), which have little padding"
        )
    x = batch[0]
    positions = torch.arange(x.size(1))
    valid = torch.ones(x.shape[:2], dtype=torch.bool) if batch.lengths is None else positions < batch.lengths[:, None]
    starts = (positions == 0).expand_as(valid) if batch.starts is None else batch.starts | (positions == 0)

    def row(t: Tensor) -> Tensor:
        return t[valid][None]  # (B, N, …) -> (1, Σ lengths, …)

    if isinstance(batch, LabelledBatch):
        return batch._replace(x=row(x), lengths=None, starts=row(starts))
    if batch.responses is not None:
        raise ValueError("a TokenBatch with responses can't be packed: they are written row by row; leave it padded")
    if batch.fresh is not None and not batch.fresh[valid[:, 0]].all():
        raise ValueError(
            "a TokenBatch can't be packed if its rows continue those of the batch before, as `fresh` says; use a data "
            "module's option, documents or packed"
        )
    offsets = None if batch.offsets is None else row(batch.offsets)
    return TokenBatch(row(x), row(batch.targets), starts=row(starts), offsets=offsets)


def first_fit(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each piece its row, and its first position there; rows have `size` positions."""
    row, offset = np.empty_like(lengths), np.empty_like(lengths)
    n_rows = 0
    for begin in range(0, len(lengths), WINDOW):
        pieces = lengths[begin : begin + WINDOW]
        room = np.full(len(pieces), size)
        for i, n in enumerate(pieces.tolist()):
            place = int(np.argmax(room >= n))
            row[begin + i], offset[begin + i] = n_rows + place, size - room[place]
            room[place] -= n
        n_rows += int((room < size).sum())
    return row, offset
