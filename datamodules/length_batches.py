"""Batches of samples of like length, so that little of a batch is padding."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DistributedSampler

_RATIO = 1.1  # of the longest to the shortest length in a bucket


class LengthBatches(DistributedSampler[list[int]]):
    """Batches of samples of like length, each process its own share, as a pure function of (seed, epoch).

    The lengths fall into buckets, in each of which the longest is at most 1.1 times the shortest. An epoch shuffles
    within the buckets, cuts the samples, longest first, into groups of one batch for every process, and shuffles the
    groups. So every sample comes exactly once an epoch over all processes, the batches of a step have like lengths on
    all of them, each process has the same number of batches, and every epoch the same number, as `ResumableLoader` and
    Lightning want it. The sharing out does not change which samples a step has: two processes with batches of half the
    size see what one sees, up to rounding of the bound.

    ``batch · longest ≤ batch_size`` for every batch, with two exceptions: a sample that is longer than `batch_size` is
    a batch by itself, and if fewer samples than processes are left over at the end, the shortest ones, each goes into
    one of the last batches in addition.

    Args:
        lengths: (n,), of the samples, at least 1.
        batch_size: Positions of a batch of one process, padding included.
        max_samples: Samples of a batch at most.
        num_replicas: Number of processes.
        rank: This process, 0 to ``num_replicas - 1``.
        shuffle: Draw a new order every epoch, and give sample i in epoch e as the index ``i + e * n``, so that what is
            drawn for it can be another each time. Otherwise: longest first.
        seed: Seed of the order, 0 or more.

    Raises:
        ValueError: If an argument is out of its range, or there are fewer samples than processes.

    Example:
        >>> lengths = np.array([9, 5, 5, 2, 4])
        >>> list(LengthBatches(lengths, 10, max_samples=8, num_replicas=1, rank=0, shuffle=False, seed=0))
        [[0], [1, 2], [4, 3]]
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        *,
        max_samples: int,
        num_replicas: int,
        rank: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("max_samples", max_samples, 1), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if len(lengths) < num_replicas:
            raise ValueError(
                f"{len(lengths)} samples cannot give each of {num_replicas} processes one; use fewer processes, or "
                "more samples"
            )
        if lengths.min() < 1:
            raise ValueError(f"lengths has {lengths.min()}; a sample has at least one position")
        super().__init__(
            range(len(lengths)),  # type: ignore[arg-type]  # of the data set, only its length is asked
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
        )
        self.lengths = lengths
        self._buckets, longest = _buckets(lengths)
        self._borders = _borders(longest, batch_size, max_samples, num_replicas)
        self.start = 0  # batches that `ResumableLoader` skips, trained on before the interruption

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __iter__(self) -> Iterator[list[int]]:
        n = len(self.lengths)
        if self.shuffle:
            # A pair as the seed: with a sum, epoch 1 of seed 0 would be epoch 0 of seed 1.
            rng = np.random.default_rng((self.seed, self.epoch))
            order = np.lexsort((rng.random(n), self._buckets)) + self.epoch * n
            groups = rng.permutation(len(self))
        else:
            order, groups = np.lexsort((np.arange(n), -self.lengths)), np.arange(len(self))
        for group in groups[self.start :]:
            yield order[self._borders[group] : self._borders[group + 1]][self.rank :: self.num_replicas].tolist()


def _buckets(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bucket of each sample, 0 having the longest; and, of all samples in that order, its bucket's longest."""
    order = np.argsort(-lengths, kind="stable")
    buckets, longest = np.empty(len(lengths), int), np.empty(len(lengths), int)
    bucket = -1
    most = np.inf
    for place, i in enumerate(order):
        if lengths[i] * _RATIO < most:
            bucket, most = bucket + 1, lengths[i]
        buckets[i], longest[place] = bucket, most
    return buckets, longest


def _borders(longest: np.ndarray, batch_size: int, max_samples: int, num_replicas: int) -> list[int]:
    """Where groups begin, and the end. Nothing in a group is longer than the bucket of its first sample."""
    borders = [0]
    while borders[-1] < len(longest):
        each = max(1, min(max_samples, batch_size // int(longest[borders[-1]])))
        borders.append(min(borders[-1] + num_replicas * each, len(longest)))
    if len(borders) > 2 and borders[-1] - borders[-2] < num_replicas:
        del borders[-2]
    return borders
