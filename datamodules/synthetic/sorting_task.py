"""The sorting task: list a long stream's token types by frequency (Martins et al. 2022, section 4.1)."""

from typing import Any

import numpy as np

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.tokens import IGNORE
from lit_effattn.datamodules.synthetic.base import SyntheticTask
from lit_effattn.datamodules.synthetic.segments import DrawnSequence, SegmentedSequences

SEPARATOR = 0


class SortingTask(SyntheticTask):
    """Streams of types whose distribution drifts, a separator, and the types in falling order of frequency.

        x_i ~ (1 − r) p_0 + r p_1,  r = i / length,  0 ≤ i < length

    p_0 and p_1 are n_types integers from 1 to 9 each, drawn for each sequence and normalised. Types of equal frequency
    are ordered by their first appearance. Types that do not occur come last, ordered by number. The token of type k is
    k + 1, the separator's is 0.

    A batch is a `TokenBatch` with one segment of each of `batch_size` sequences, at the same position in all of them;
    `fresh` marks the first segment of a sequence. The callback `MemoryCarry` carries the memory from segment to
    segment. Only the n_types answers are scored. If the length of a sequence is not a multiple of `segment_len`, its
    *first* segment is shorter, so that the last is full: with truncated back-propagation only the last has a gradient.
    With `accumulate_grad_batches` equal to the number of segments there is one optimiser step per sequence. For
    back-propagation through the whole sequence, set `segment_len` to null: a batch then has whole sequences.

    A model that guesses reaches an accuracy of 1/n Σ 1/k, .18 for 20 types. A model that counts the tokens it sees
    reaches `counting_accuracy`.

    Args:
        length: Tokens of a stream, without separator and answers. The paper uses 4k, 8k and 16k.
        n_types: Number of types.
        segment_len: Maximum length of a segment in tokens; null: the whole sequence.
        batch_size: Sequences per step and process.
        n_train: Sequences per epoch. Every epoch draws new ones.
        n_val: Validation sequences, always the same.
        n_test: Test sequences, always the same.
        options: Arguments of `SyntheticTask`.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> data = SortingTask(length=6, n_types=3, segment_len=4, batch_size=1)
        >>> batches = iter(data.test_dataloader())
        >>> [(batch.inputs.tolist(), bool(batch.fresh)) for batch in (next(batches), next(batches))]
        [([[1]], True), ([[1, 1, 2, 3]], False)]
        >>> last = next(batches)
        >>> last.inputs.tolist(), last.targets.tolist()
        ([[2, 0, 1, 2]], [[-100, 1, 2, 3]])
    """

    def __init__(
        self,
        length: int = 4096,
        *,
        n_types: int = 20,
        segment_len: int | None = 1024,
        batch_size: int = 8,
        n_train: int = 8000,
        n_val: int = 800,
        n_test: int = 800,
        **options: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, n_train=n_train, n_val=n_val, n_test=n_test, **options)
        self.save_hyperparameters(logger=False)
        at_least(1, length=length, segment_len=segment_len)
        at_least(2, n_types=n_types)
        self.length = length
        self.n_types = n_types
        self.segment_len = segment_len or length + n_types

    @property
    def vocab_size(self) -> int:
        """Number of types plus 1, the separator."""
        return self.n_types + 1

    def sequences(self, split: str) -> "SortingSequences":
        """Return the sequences of "train", "val" or "test"."""
        return SortingSequences(self.length, self.n_types, self.segment_len, self._stream(split))


class SortingSequences(SegmentedSequences):
    """Sequences drawn by index: the i-th is always the same, for any non-negative integer i.

    An input has length + n_types tokens, since the last answer is not read.
    """

    def __init__(self, length: int, n_types: int, segment_len: int, stream: int) -> None:
        super().__init__(length + n_types, segment_len)
        self.n_drawn = length
        self.n_types = n_types
        self.stream = stream

    def types(self, i: int) -> np.ndarray:
        """Return the types of the i-th stream: (length,)."""
        rng = np.random.default_rng((self.stream, i))
        weights = rng.integers(1, 10, (2, self.n_types))
        ends = weights.cumsum(1) / weights.sum(1, keepdims=True)
        from_second = rng.random(self.n_drawn) < np.arange(self.n_drawn) / self.n_drawn
        # The last end is exactly 1, and every draw is below 1.
        draws = rng.random(self.n_drawn)
        return np.where(from_second, *(np.searchsorted(end, draws, side="right") for end in ends[::-1]))

    def draw(self, i: int) -> DrawnSequence:
        """Return a stream, the separator and the answers."""
        types = self.types(i)
        answers = by_frequency(types, self.n_types) + 1
        return DrawnSequence(
            np.concatenate([types + 1, [SEPARATOR], answers[:-1]]),
            np.concatenate([np.full(self.n_drawn, IGNORE), answers]),
        )


def by_frequency(types: np.ndarray, n_types: int) -> np.ndarray:
    """Order all types by their frequency in `types`, the most frequent first: (n_types,).

    Types of equal frequency are ordered by their first appearance, absent types by number.
    """
    counts = np.bincount(types, minlength=n_types)
    first = len(types) + np.arange(n_types)
    present, first_index = np.unique(types, return_index=True)
    first[present] = first_index
    return np.lexsort((first, -counts))


def counting_accuracy(streams: np.ndarray, n_types: int, last: int) -> float:
    """Return the accuracy of counting the `last` tokens of each stream: the upper bound for a short memory.

    As in the task, each answer is given after the correct previous ones: the most frequent type among the tokens seen,
    of the types not listed yet.

    Args:
        streams: (S, length) types.
        n_types: Number of types.
        last: Tokens seen before the separator. If the stream has fewer, all are seen.
    """
    n_correct = 0
    for types in streams:
        order = by_frequency(types, n_types)
        rank = np.empty(n_types, np.int64)
        rank[by_frequency(types[max(0, len(types) - last) :], n_types)] = np.arange(n_types)
        n_correct += sum(rank[answer] == rank[order[k:]].min() for k, answer in enumerate(order))
    return float(n_correct) / (len(streams) * n_types)
