"""Sequences of equal length that are read segment by segment, for synthetic tasks with a memory."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lit_effattn.datamodules.common.sampling import BatchSampler, ShardedBatches
from lit_effattn.datamodules.common.tokens import IGNORE, Response, TokenBatch

_EMPTY = -1  # index of an empty row, instead of a sequence's


class DrawnSequence(NamedTuple):
    """A whole sequence, before it is cut into segments."""

    inputs: np.ndarray  # (length,) tokens
    targets: np.ndarray  # (length,), the next token at each position; `IGNORE` where it is not scored
    responses: Iterable[Response] = ()  # the responses that begin in it


class SegmentedSequences(Dataset[TokenBatch]):
    """Sequences drawn by index and cut into segments. Only the first segment may be shorter."""

    training = False  # whether the segments are for training, without `offsets`

    def __init__(self, length: int, segment_len: int | None) -> None:
        self.length = length
        self.segment_len = segment_len or length

    @property
    def n_segments(self) -> int:
        """Segments of a sequence."""
        return -(-self.length // self.segment_len)

    @abstractmethod
    def draw(self, i: int) -> DrawnSequence:
        """Return the i-th sequence, which is always the same, for any non-negative integer i."""

    def __getitem__(self, item: tuple[list[int], int]) -> TokenBatch:
        """Return segment item[1] of the sequences item[0]."""
        indices, segment = item
        end = self.length - (self.n_segments - 1 - segment) * self.segment_len
        begin = max(0, end - self.segment_len)
        inputs = np.zeros((len(indices), end - begin), np.int64)
        targets, offsets = np.full_like(inputs, IGNORE), np.zeros_like(inputs)
        responses: list[list[Response]] = [[] for _ in indices]
        for row, i in enumerate(indices):
            if i == _EMPTY:
                continue
            whole = self.draw(i)
            inputs[row], targets[row] = whole.inputs[begin:end], whole.targets[begin:end]
            offsets[row] = i * self.length + np.arange(begin, end)
            responses[row] = [
                r._replace(position=r.position - begin) for r in whole.responses if begin <= r.position < end
            ]
        present = np.array(indices) != _EMPTY
        return TokenBatch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            None if present.all() else torch.from_numpy(present * (end - begin)),
            torch.full((len(indices),), segment == 0),
            responses if any(responses) else None,
            offsets=None if self.training else torch.from_numpy(offsets),
        )


class Segments(BatchSampler):
    """A sampler that returns every batch of sequences once per segment.

    Memories are carried by row, so all batches have the same number of rows. If a batch has fewer sequences, its last
    rows are empty.
    """

    def __init__(self, batches: ShardedBatches, n_segments: int) -> None:
        super().__init__(batches.n_samples, num_replicas=batches.num_replicas, rank=batches.rank)
        self.division = batches.division
        self.batches = batches
        self.n_segments = n_segments

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        super().set_epoch(epoch)
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches) * self.n_segments

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        batches = list(self.batches)
        rows = self.batches.batch_size
        if not self.batches.drop_last:
            n_sequences = -(-self.batches.n_samples // self.batches.num_replicas)  # of a process, at most
            rows = -(-n_sequences // len(batches))
        for number in range(self.start, len(self)):
            batch, segment = divmod(number, self.n_segments)
            yield batches[batch] + [_EMPTY] * (rows - len(batches[batch])), segment
