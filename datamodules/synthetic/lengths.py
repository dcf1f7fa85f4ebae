"""Base class of the synthetic tasks that are trained at one length and tested at longer ones."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.tokens import TokenBatch, pad_tokens
from lit_effattn.datamodules.synthetic.base import SyntheticTask

FACTORS = (1, 2, 4, 8)  # the default test lengths are the training length times these


class LengthTask(SyntheticTask):
    """Sequences of `length` tokens in training and validation, and of each of `test_lengths` in test and prediction.

    The test split has `n_test` sequences of each length, in the order of `test_lengths`. A batch with sequences of
    several lengths is padded on the right.

    Args:
        length: Tokens of a sequence in training and validation.
        test_lengths: Tokens of a sequence in test and prediction. Default: 1, 2, 4 and 8 times `length`.
        options: Arguments of `SyntheticTask`.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, length: int, *, test_lengths: Sequence[int] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.length = length
        self.test_lengths = tuple(factor * length for factor in FACTORS) if test_lengths is None else (*test_lengths,)
        at_least(self.min_length, length=length, test_lengths=min(self.test_lengths, default=None))
        if not self.test_lengths or len(set(self.test_lengths)) < len(self.test_lengths):
            raise ValueError(f"test_lengths={self.test_lengths} must name at least one length, and each only once")
        self.n_each = self.sizes["test"]
        self.sizes["test"] *= len(self.test_lengths)

    @property
    @abstractmethod
    def min_length(self) -> int:
        """Smallest possible length."""

    def lengths_of(self, split: str) -> tuple[tuple[int, ...], int]:
        """Return the lengths of "train", "val" or "test", and the number of consecutive sequences of each."""
        return (self.test_lengths, self.n_each) if split == "test" else ((self.length,), 1)


@dataclass(eq=False)
class LengthSequences(Dataset[TokenBatch], ABC):
    """Sequences drawn by index: the i-th is always the same, for any non-negative integer i."""

    lengths: tuple[int, ...]  # of the sequences, which take turns
    n_each: int  # number of consecutive sequences of one length
    stream: int  # number of the random stream; different streams have different sequences

    @abstractmethod
    def draw(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and the targets of a sequence: (length,) integers each."""

    def __getitem__(self, indices: list[int]) -> TokenBatch:
        lengths = [self.lengths[i // self.n_each % len(self.lengths)] for i in indices]
        rngs = [np.random.default_rng((self.stream, i)) for i in indices]
        batch = pad_tokens([self.draw(rng, n) for rng, n in zip(rngs, lengths, strict=True)])
        return batch if len(set(lengths)) > 1 else batch._replace(lengths=None)
