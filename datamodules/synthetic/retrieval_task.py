"""The retrieval task: list the few symbols among the fillers of a long source (Gu & Dao 2023, section 3.1)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.tokens import PairBatch
from lit_effattn.datamodules.synthetic.base import SyntheticTask


class RetrievalTask(SyntheticTask):
    """Sources of fillers with a few needles at random positions, and targets that list the needles in their order.

    This is selective copying (Gu & Dao 2023, sections 3.1 and 4.1.1; Jing et al. 2019, "denoise") for an encoder and a
    decoder: the source and the target are two sequences. A needle is recognised by its token. The model must find the
    needles and know their order. The paper has sequences of length=4096 with n_needles=16, n_symbols=15, n_fillers=1.

    A batch is a `PairBatch` of sources of length + 1 tokens and targets of n_needles + 1 tokens, end tokens included. A
    token represents no text; texts are the tokens' numbers, separated by spaces. In the source, the symbols are
    0 … n_symbols − 1 and the fillers the next n_fillers numbers; in the target, the symbols have the same numbers. The
    last token of each vocabulary begins and ends a sequence.

    A model that does not read the source reaches a perplexity of n_symbols^(n_needles / (n_needles + 1)), 9.2 for 16
    symbols and 4 needles, and an exact match of n_symbols^−n_needles. A model that finds the needles without their
    order has an exact match of about 1 / n_needles!, 0.04 for 4.

    Args:
        length: Tokens of a source, without the end token.
        n_needles: Number of needles in each source.
        n_symbols: Number of symbols that a needle can be; a symbol may occur more than once.
        n_fillers: Number of symbols that a filler can be.
        batch_size: Sequences per step and process.
        n_train: Sequences per epoch. Every epoch draws new ones.
        n_test: Test sequences, always the same.
        options: Arguments of `SyntheticTask`.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> data = RetrievalTask(length=8, n_needles=2, n_symbols=10, n_fillers=1, batch_size=1)
        >>> batch = next(iter(data.test_dataloader()))
        >>> batch.source.tolist(), batch.targets.tolist(), batch.references
        ([[8, 10, 2, 10, 10, 10, 10, 10, 11]], [[8, 2, 10]], [['8 2']])
    """

    source_tokenizer = target_tokenizer = None
    """None, since the tokens do not represent text."""

    def __init__(
        self,
        length: int = 4096,
        *,
        n_needles: int = 4,
        n_symbols: int = 16,
        n_fillers: int = 16,
        batch_size: int = 16,
        n_train: int = 16_000,
        n_test: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, n_train=n_train, n_test=n_test, **options)
        self.save_hyperparameters(logger=False)
        at_least(1, n_needles=n_needles, n_symbols=n_symbols, n_fillers=n_fillers)
        if length < n_needles:
            raise ValueError(f"length={length} must be at least n_needles={n_needles}")
        self.length = length
        self.n_needles = n_needles
        self.n_symbols = n_symbols
        self.n_fillers = n_fillers

    @property
    def source_vocab_size(self) -> int:
        """Number of symbols and fillers plus 1, the end token."""
        return self.n_symbols + self.n_fillers + 1

    @property
    def target_vocab_size(self) -> int:
        """Number of symbols plus 1, the start and end token."""
        return self.n_symbols + 1

    def sequences(self, split: str) -> "RetrievalSequences":
        """Return the pairs of "train", "val" or "test"."""
        return RetrievalSequences(self.length, self.n_needles, self.n_symbols, self.n_fillers, self._stream(split))


@dataclass(eq=False)
class RetrievalSequences(Dataset[PairBatch]):
    """Pairs drawn by index: the i-th is always the same, for any non-negative integer i.

    The arguments are those of `RetrievalTask`, and the number of the random stream: different streams have different
    pairs.
    """

    length: int
    n_needles: int
    n_symbols: int
    n_fillers: int
    stream: int

    def __getitem__(self, indices: list[int]) -> PairBatch:
        pairs = [self._pair(i) for i in indices]
        sources, needles = (np.stack(side) for side in zip(*pairs, strict=True))  # (B, length), (B, n_needles)
        source = _with_end(sources, self.n_symbols + self.n_fillers)
        targets = _with_end(needles, self.n_symbols)
        return PairBatch(
            source=source,
            source_lengths=torch.full((len(indices),), source.size(1)),
            inputs=targets.roll(1, 1),  # the last token of a row is the border
            targets=targets,
            lengths=torch.full((len(indices),), targets.size(1)),
            sources=[_numbers(row) for row in sources],
            references=[[_numbers(row)] for row in needles],
            indices=torch.tensor(indices),
        )

    def _pair(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source (length,) and its needles (n_needles,)."""
        rng = np.random.default_rng((self.stream, i))
        source = rng.integers(self.n_symbols, self.n_symbols + self.n_fillers, self.length)
        needles = rng.integers(self.n_symbols, size=self.n_needles)
        source[np.sort(rng.choice(self.length, self.n_needles, replace=False))] = needles
        return source, needles


def _with_end(rows: np.ndarray, end: int) -> Tensor:
    return torch.from_numpy(np.pad(rows, ((0, 0), (0, 1)), constant_values=end))  # (B, N) -> (B, N + 1)


def _numbers(row: np.ndarray) -> str:
    return " ".join(map(str, row.tolist()))
