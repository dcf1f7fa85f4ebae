"""The copy task: repeat a sequence (Kitaev et al. 2020; Katharopoulos et al. 2020, section 4.1)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch, pad_tokens
from lit_effattn.datamodules.synthetic.base import SyntheticTask

SEPARATOR = 0


class CopyTask(SyntheticTask):
    """Sequences `0 w 0 w`: a separator, a word of random symbols, a separator, the word again.

    A batch is a `TokenBatch` of sequences padded on the right. Only the second word is scored, since only it can be
    predicted. A model without context reaches a loss of ln n_symbols nats, a model that copies reaches 0.

    Args:
        max_len: Maximum length of a sequence in tokens, separators included. Words have at most ⌊max_len / 2⌋ − 1
            symbols. The paper's value is 128.
        min_len: Minimum length of a sequence in tokens. Lengths are even. Default: that of one-symbol words. If equal
            to `max_len`, all words have the same length.
        n_symbols: Number of symbols, which are 1 … n_symbols.
        n_val: Validation sequences, always the same.
        n_test: Test sequences, always the same.
        options: Arguments of `SyntheticTask`.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> data = CopyTask(max_len=8, min_len=8, batch_size=1, n_train=1)
        >>> data.setup("fit")
        >>> batch = next(iter(data.val_dataloader()))
        >>> batch.inputs.shape, int(batch.lengths[0]), int((batch.targets[0] != IGNORE).sum())
        (torch.Size([1, 7]), 7, 3)
    """

    def __init__(
        self,
        max_len: int = 128,
        *,
        min_len: int | None = None,
        n_symbols: int = 10,
        n_val: int = 1000,
        n_test: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(n_val=n_val, n_test=n_test, **options)
        self.save_hyperparameters(logger=False)
        at_least(4, max_len=max_len)
        at_least(2, n_symbols=n_symbols)
        min_len = 4 if min_len is None else min_len
        if not 4 <= min_len <= max_len:
            raise ValueError(f"min_len={min_len} must be from 4 (a separator and a symbol, twice) to max_len={max_len}")
        self.words = (-(-min_len // 2) - 1, max_len // 2 - 1)
        if self.words[0] > self.words[1]:
            raise ValueError(f"min_len={min_len} must be below max_len={max_len}, since lengths are even")
        self.n_symbols = n_symbols

    @property
    def vocab_size(self) -> int:
        """Number of symbols plus 1, the separator."""
        return self.n_symbols + 1

    def sequences(self, split: str) -> "CopySequences":
        """Return the sequences of "train", "val" or "test"."""
        return CopySequences(self.words, self.n_symbols, self._stream(split))


@dataclass(eq=False)
class CopySequences(Dataset[TokenBatch]):
    """Sequences drawn by index: the i-th is always the same, for any integer i."""

    words: tuple[int, int]
    n_symbols: int
    stream: int

    def __getitem__(self, indices: list[int]) -> TokenBatch:
        return pad_tokens([self._sequence(self._word(i)) for i in indices])

    def _sequence(self, word: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of a word (m,), (2 m + 1,) each. Its last symbol is only predicted."""
        separator = torch.full((1,), SEPARATOR)
        unscored = torch.full((len(word) + 1,), IGNORE)
        return torch.cat([separator, word, separator, word[:-1]]), torch.cat([unscored, word])

    def _word(self, i: int) -> Tensor:
        # Multiplication by odd constants keeps the seeds of (stream, i) pairs and of neighbours different.
        mixed = (self.stream * 0x9E3779B97F4A7C15 + i * 0xD1B54A32D192ED03) % 2**63
        generator = torch.Generator().manual_seed(mixed)
        least, most = self.words
        m = int(torch.randint(least, most + 1, (), generator=generator))
        return torch.randint(1, self.n_symbols + 1, (m,), generator=generator)
