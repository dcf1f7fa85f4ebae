"""Base class of the synthetic tasks, whose sequences are drawn at random."""

from abc import abstractmethod
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.base import DataModule
from lit_effattn.datamodules.common.sampling import BatchSampler, ShardedBatches, processes
from lit_effattn.datamodules.synthetic.segments import SegmentedSequences, Segments

_DRAWS = 2**20  # variants of a training sequence; every epoch draws one, so repetitions are rare


class SyntheticTask(DataModule):
    """Sequences of tokens that do not represent text, drawn on access.

    Args:
        batch_size: Sequences per step and process.
        eval_batch_size: The same in validation, test and prediction. Default: `batch_size`.
        n_train: Sequences per epoch. Every epoch draws new ones.
        n_val: Validation sequences, always the same.
        n_test: Test sequences, always the same.
        seed: Seed of the training sequences. Validation and test sequences do not depend on it.
        num_workers: Worker processes; 0: none.

    Raises:
        ValueError: If an argument is out of its range.
    """

    unit = "token"
    """Name of the unit that a token represents."""
    tokenizer = None
    """None, since the tokens do not represent text."""

    def __init__(
        self,
        *,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        n_train: int = 64_000,
        n_val: int = 320,
        n_test: int = 320,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_workers, seed)
        at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        at_least(1, n_train=n_train, n_val=n_val, n_test=n_test)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.sizes = {"train": n_train, "val": n_val, "test": n_test}

    @abstractmethod
    def sequences(self, split: str) -> Dataset[Any]:
        """Return the sequences of "train", "val" or "test"."""

    def documents_at(self, split: str, offsets: np.ndarray) -> tuple[np.ndarray, int, list[str]]:
        """Return the numbers of the sequences at offsets of a split, and how many it has. They have no titles."""
        sequences: Any = self.sequences(split)
        return offsets // sequences.length, self.sizes[split], []

    def _stream(self, split: str) -> int:
        """Return a number that is unique to the split and, in training, to the seed."""
        number = list(self.sizes).index(split)
        return number if number else len(self.sizes) + self.seed

    def _batches(self, split: str, training: bool) -> tuple[Dataset[Any], BatchSampler]:
        sequences: Any = self.sequences(split)
        plain = {name: value for name, value in vars(sequences).items() if isinstance(value, int | float | str | tuple)}
        sequences.identity = {"n_train": self.sizes["train"], **plain}  # see `ResumableLoader`
        variants = _DRAWS if training else 1
        order: dict[str, Any] = {"shuffle": training, "drop_last": training, **processes(self.trainer)}
        batch_size = self.batch_size if training else self.eval_batch_size
        batches = ShardedBatches(self.sizes[split], batch_size, seed=self.seed, variants=variants, **order)
        if isinstance(sequences, SegmentedSequences):
            sequences.training = training
            return sequences, Segments(batches, sequences.n_segments)
        return sequences, batches
