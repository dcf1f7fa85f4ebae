"""Batches of samples of similar length, which need little padding, or packed ones, which need none."""

import zlib
from collections.abc import Iterator

import numpy as np

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.packing import first_fit
from lit_effattn.datamodules.common.sampling import BatchSampler

_RATIO = 1.1  # maximum ratio of the longest to the shortest length in a bucket


class LengthBatches(BatchSampler):
    """Batches of samples of similar length, sharded over processes, as a pure function of (seed, epoch).

    Samples are divided into buckets. In each bucket the longest sample is at most 1.1 times as long as the shortest. An
    epoch shuffles within the buckets, cuts the samples, longest first, into groups of one batch per process, and
    shuffles the groups. Over all processes, every sample occurs exactly once per epoch. The batches of a step have
    similar lengths on all processes. The number of batches is the same on all processes and in every epoch, as
    `ResumableLoader` and Lightning require. The sharding does not change the samples of a step: two processes with
    batches of half the size see the same samples as one, up to rounding of the bound.

    `batch · longest ≤ batch_size` for every batch, with two exceptions. A sample longer than `batch_size` is a batch of
    one. If fewer samples than processes remain at the end (the shortest ones), each is added to one of the last
    batches.

    If batches are `packed`, samples of all lengths are in a batch, and `batch_size` bounds the sum of their lengths:
    batches are filled by first fit. An epoch exchanges samples of the same bucket, so every epoch has batches of almost
    the same lengths, of other samples. Here the samples of a step do depend on the number of processes.

    Args:
        lengths: (n,), lengths of the samples, at least 1.
        batch_size: Maximum number of positions in a batch of one process, padding included unless `packed`.
        max_samples: Maximum number of samples in a batch.
        num_replicas: Number of processes.
        rank: This process, 0 to `num_replicas - 1`.
        shuffle: Draw a new order every epoch, and return sample i in epoch e as the index `i + e * n`, so that its
            augmentation can depend on the epoch. Otherwise: longest first.
        seed: Seed of the order, 0 or more.
        packed: Whether the samples of a batch will lie end to end: see `pack`.

    Raises:
        ValueError: If an argument is out of its range, or there are fewer samples than processes.

    Examples:
        >>> lengths = np.array([9, 5, 5, 2, 4])
        >>> options = {"max_samples": 8, "num_replicas": 1, "rank": 0, "shuffle": False, "seed": 0}
        >>> list(LengthBatches(lengths, 10, **options))
        [[0], [1, 2], [4, 3]]
        >>> list(LengthBatches(lengths, 10, **options, packed=True))
        [[2, 3], [4, 1], [0]]
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
        packed: bool = False,
    ) -> None:
        at_least(1, batch_size=batch_size, max_samples=max_samples)
        at_least(0, seed=seed)
        if len(lengths) < num_replicas:
            raise ValueError(
                f"{len(lengths)} samples cannot give each of {num_replicas} processes one; use fewer processes, or "
                "more samples"
            )
        if lengths.min() < 1:
            raise ValueError(f"lengths has {lengths.min()}; a sample has at least one position")
        super().__init__(len(lengths), num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.lengths = lengths
        self._buckets, longest = _buckets(lengths)
        # For each batch of this process the places of its samples, if samples are sorted by bucket.
        if packed:
            batches = _filled(longest, batch_size, max_samples, num_replicas, seed)
            self._places = batches[rank::num_replicas]
        else:
            borders = _borders(longest, batch_size, max_samples, num_replicas)
            batches = np.split(np.arange(len(lengths)), borders[1:-1])  # of all processes together
            self._places = [step[rank::num_replicas] for step in batches]
        self.division = zlib.crc32(np.concatenate([*batches, [len(batch) for batch in batches]]).tobytes())

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[list[int]]:
        n = len(self.lengths)
        if self.shuffle:
            # The seed is a pair: with a sum, epoch 1 of seed 0 would equal epoch 0 of seed 1.
            rng = np.random.default_rng((self.seed, self.epoch))
            order = np.lexsort((rng.random(n), self._buckets)) + self.epoch * n
            steps = rng.permutation(len(self))
        else:
            order, steps = np.lexsort((np.arange(n), -self.lengths)), np.arange(len(self))
        for step in steps[self.start :]:
            yield order[self._places[step]].tolist()


def _buckets(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide samples into buckets of similar length.

    Returns:
        (n,), the bucket of each sample, 0 with the longest samples; and (n,), from the longest sample to the shortest,
        the maximum length in its bucket.
    """
    values, inverse, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    buckets, maxima = np.empty(len(values), int), np.empty(len(values), int)  # of each different length
    bucket, maximum = -1, np.inf
    for i in reversed(range(len(values))):
        if values[i] * _RATIO < maximum:
            bucket, maximum = bucket + 1, values[i]
        buckets[i], maxima[i] = bucket, maximum
    return buckets[inverse], np.repeat(maxima[::-1], counts[::-1])


def _borders(longest: np.ndarray, batch_size: int, max_samples: int, num_replicas: int) -> list[int]:
    """Return the starts of the groups, and the end. `longest` at a group's first sample bounds its lengths."""
    borders = [0]
    while borders[-1] < len(longest):
        each = max(1, min(max_samples, batch_size // int(longest[borders[-1]])))
        borders.append(min(borders[-1] + num_replicas * each, len(longest)))
    if len(borders) > 2 and borders[-1] - borders[-2] < num_replicas:
        del borders[-2]
    return borders


def _filled(longest: np.ndarray, batch_size: int, max_samples: int, num_replicas: int, seed: int) -> list[np.ndarray]:
    """Fill batches by first fit, as many for each process, and return the places of the samples of each."""
    order = np.random.default_rng(seed).permutation(len(longest))  # so that all lengths are in a window
    row, _ = first_fit(np.minimum(longest[order], batch_size), batch_size)
    filled = np.split(order[row.argsort(kind="stable")], np.bincount(row).cumsum()[:-1])
    batches = [part for batch in filled for part in np.array_split(batch, -(-len(batch) // max_samples))]
    while missing := -len(batches) % num_replicas:
        batches.sort(key=len)
        if len(batches[-1]) == 1:  # one sample each: more processes than samples in the last step
            for i in range(num_replicas - missing):
                batches[i] = np.append(batches[i], batches.pop())
        else:
            batches += np.array_split(batches.pop(), 2)
    return batches
