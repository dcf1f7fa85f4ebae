"""Base class of the synthetic tasks, whose sequences are drawn at random."""

from abc import abstractmethod
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.base import DataModule
from lit_effattn.datamodules.common.sampling import ResumableLoader, ShardedBatches, loader_options, processes
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
        super().__init__()
        at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        at_least(1, n_train=n_train, n_val=n_val, n_test=n_test)
        at_least(0, seed=seed, num_workers=num_workers)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.sizes = {"train": n_train, "val": n_val, "test": n_test}
        self.seed = seed
        self.num_workers = num_workers

    def train_dataloader(self) -> ResumableLoader:
        """Return a loader of new sequences each epoch, in batches of equal size."""
        return ResumableLoader(**self._options("train", self.batch_size, shuffle=True, variants=_DRAWS, drop_last=True))

    @abstractmethod
    def sequences(self, split: str) -> Dataset[Any]:
        """Return the sequences of "train", "val" or "test"."""

    def _stream(self, split: str) -> int:
        """Return a number that is unique to the split and, in training, to the seed."""
        number = list(self.sizes).index(split)
        return number if number else len(self.sizes) + self.seed

    def _eval_dataloader(self, split: str) -> DataLoader[Any]:
        return DataLoader(**self._options(split, self.eval_batch_size, shuffle=False, drop_last=False))

    def _options(self, split: str, batch_size: int, **order: Any) -> dict[str, Any]:
        order |= processes(self.trainer)
        sequences = self.sequences(split)
        batches = ShardedBatches(self.sizes[split], batch_size, seed=self.seed, **order)
        sampler = Segments(batches, sequences.n_segments) if isinstance(sequences, SegmentedSequences) else batches
        return {"dataset": sequences, "sampler": sampler, **loader_options(self.num_workers)}
