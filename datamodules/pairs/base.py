"""Base class of the data modules whose batches hold texts of similar length."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import Dataset

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.base import DataModule
from lit_effattn.datamodules.common.faults import Faults
from lit_effattn.datamodules.common.length_batches import LengthBatches
from lit_effattn.datamodules.common.sampling import processes
from lit_effattn.datamodules.common.splits import PURPOSES, SPLITS_OF
from lit_effattn.datamodules.pairs.sources import source_lines
from lit_effattn.datamodules.text.tokenizers import Tokenizer

_NAMED = 10  # unknown words or characters in a warning


class Items(Dataset[Any]):
    """A data set that maps a list of indices to a batch. With n items, index i + e · n is item i in epoch e."""

    @abstractmethod
    def __len__(self) -> int:
        """Return n, the number of items."""

    @abstractmethod
    def lengths(self) -> np.ndarray:
        """(n,), number of positions of each item."""


class LengthBatched(DataModule):
    """Items of a corpus, or in prediction the lines of a file, in batches of similar length.

    Args:
        max_items: Maximum number of items in a batch. Default: no maximum.
        batch_tokens: Maximum number of positions of a training batch of one process, padding included.
        eval_batch_tokens: The same in validation, test and prediction. Default: `batch_tokens`.
        source_file: predict: a file with one text a line, used instead of the test split. What is to be predicted is
            unknown. The corpus is then not needed if the checkpoint is given. The file is held in memory.
        sources: predict: the texts themselves, instead of a file: `lit-effattn predict TEXT ...`.
        seed: Seed of the order of the training items.
        num_workers: Worker processes that load data; 0: none.
    """

    takes_inputs = "sources"
    packed = False  # whether the items of a training batch lie end to end

    def __init__(
        self,
        max_items: int | None,
        *,
        batch_tokens: int,
        eval_batch_tokens: int | None = None,
        source_file: str | None = None,
        sources: list[str] | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_workers, seed)
        at_least(1, batch_tokens=batch_tokens, eval_batch_tokens=eval_batch_tokens)
        self.batch_tokens = batch_tokens
        self.eval_batch_tokens = batch_tokens if eval_batch_tokens is None else eval_batch_tokens
        self.max_items = max_items
        self.source_file = None if source_file is None else Path(source_file)
        self.left_out: dict[str, Faults] = {}
        self.sources = sources
        self._lines = sources or []  # or those of `source_file`
        if sources is not None and source_file is not None:
            raise ValueError(f"sources={sources} and source_file={source_file!r} were both given; give only one")
        if sources is not None and not (sources and all(source.strip() for source in sources)):
            raise ValueError(f"sources={sources} must be texts that are not empty; give at least one")
        for source in sources or ():
            try:
                source.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"sources: {source!a} is not UTF-8; give the text in UTF-8") from error

    def setup(self, stage: str) -> None:
        """Read the items of a stage, and report the numbers of those that are used and left out.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If no training item can be used, or `source_file` has a line that is empty or not UTF-8.
        """
        if not self._reads_own_texts:
            splits = SPLITS_OF[stage]
            counts = self._open(splits)
            self._report(splits, ", ".join(f"{n:,} {PURPOSES[split]}" for split, n in counts.items()))
            return
        name = "sources" if self.source_file is None else f"source_file={str(self.source_file)!r}"
        if stage != "predict":
            raise ValueError(f"{name} is for predict only; leave it out to use the corpus")
        if self.source_file is not None:
            self._lines = source_lines(self.source_file)
            rank_zero_info(f"{self.source_file}: {len(self._lines):,} texts")

    @property
    def _reads_own_texts(self) -> bool:
        """Whether the texts to predict are the user's, not those of the corpus."""
        return self.source_file is not None or self.sources is not None

    @abstractmethod
    def _open(self, splits: tuple[str, ...]) -> dict[str, int]:
        """Read splits, and return the number of items of each."""

    @abstractmethod
    def _report(self, splits: tuple[str, ...], counts: str) -> None:
        """Log the numbers of items, given as a text, and warn of what is left out."""

    @abstractmethod
    def _items(self, split: str) -> Items:
        """Return the items of a split; for "test", the user's own texts if there are any."""

    def _warn_of_unknown(self, tokenizer: Tokenizer) -> None:
        """Warn of words, characters or letters of the user's own texts that the model reads as another."""
        per_line = [tokenizer.unknown(line) for line in self._lines]
        if unknown := list(dict.fromkeys(unit for line in per_line for unit in line)):
            more = f" and {len(unknown) - _NAMED:,} more" if len(unknown) > _NAMED else ""
            n, name = sum(map(bool, per_line)), self.source_file or "sources"
            rank_zero_warn(
                f"{name}: {n:,} of {len(per_line):,} lines have {tokenizer.replaces[0]} that the model's vocabulary "
                f"lacks, which it reads as {tokenizer.replaces[1]}: {', '.join(map(repr, unknown[:_NAMED]))}{more}"
            )

    def _batches(self, split: str, training: bool) -> tuple[Items, LengthBatches]:
        items = self._items(split)
        batch_tokens = self.batch_tokens if training else self.eval_batch_tokens
        sampler = LengthBatches(
            items.lengths(),
            batch_tokens,
            max_samples=self.max_items or batch_tokens,
            shuffle=training,
            seed=self.seed,
            packed=self.packed and training,
            **processes(self.trainer),
        )
        return items, sampler
