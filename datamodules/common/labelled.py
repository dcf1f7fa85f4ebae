"""Batches of sequences with one class each, and the `collate_fn` that makes them from an (x, y) data set."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_effattn.datamodules.common.tokens import as_row

_SHOWN = 10  # classes that a message names


class LabelledBatch(NamedTuple):
    """B sequences and their classes, padded on the right.

    Attributes:
        x: (B, N) tokens, or (B, N, F) feature vectors.
        labels: (B,), the number of each row's class, 0 to C − 1; None: they are unknown.
        lengths: (B,), number of valid positions of each row; None: all positions are valid.
        indices: (B,), the position of each row in its split or file, by which the original order can be restored.
        starts: (B, N), True where a sequence begins, if rows hold several: see `nn.packing.packed`. `labels`
            and `indices` are then those of the sequences, in the order of the rows. None: each row is one sequence.
    """

    x: Tensor
    labels: Tensor | None = None
    lengths: Tensor | None = None
    indices: Tensor | None = None
    starts: Tensor | None = None


def pad_labelled(items: Sequence[tuple[Any, int]]) -> LabelledBatch:
    """Make a batch of sequences of any lengths: the `collate_fn` of a `DataLoader` over an (x, y) data set.

    Args:
        items: Pairs of a sequence, (N,) tokens or (N, F) feature vectors, as a tensor, array or list, and its class.

    Returns:
        The batch: `x` (B, N) or (B, N, F), `labels` and `lengths` (B,).

    Examples:
        >>> pad_labelled([([7, 8, 9], 1), ([4], 0)])
        LabelledBatch(x=tensor([[7, 8, 9],
                [4, 0, 0]]), labels=tensor([1, 0]), lengths=tensor([3, 1]), indices=None, starts=None)
    """
    rows = [as_row(x) for x, _ in items]
    lengths = torch.tensor([len(row) for row in rows])
    labels = torch.tensor([int(label) for _, label in items])
    return LabelledBatch(pad_sequence(rows, batch_first=True), labels, lengths)


def warn_of_untrained(splits: Iterable[str], labels: Mapping[str, Sequence[int]], classes: Sequence[str]) -> None:
    """Warn of the items of `splits` whose class no training item has, given the labels of each split."""
    known = {*labels["train"]}
    for split in splits:
        if untrained := [classes[label] for label in labels[split] if label not in known]:
            names = ", ".join(map(repr, sorted({*untrained})[:_SHOWN]))
            rank_zero_warn(f"{split}: {len(untrained):,} have a class that is not in the training data: {names}")
