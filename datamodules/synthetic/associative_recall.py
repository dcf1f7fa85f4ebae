"""Multi-query associative recall, MQAR: look up the values of many keys (Arora et al. 2023, "Zoology")."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_effattn.checks import at_least, positive
from lit_effattn.datamodules.common.tokens import IGNORE
from lit_effattn.datamodules.synthetic.lengths import LengthSequences, LengthTask

FILLER = 0


class AssociativeRecall(LengthTask):
    """Key–value pairs, then each key once more as a query, whose target is its value.

        k_1 v_1 … k_m v_m | queries at 2 m + 2 g_j, fillers elsewhere,  p(g) ∝ (g + 1)^(power − 1)

    g_j are different slots 0 … ⌊(length − 2 m) / 2⌋ − 1, drawn in turn without replacement: most queries come soon
    after the pairs, some late, as words recur in text. The keys of a sequence are different. Keys are the tokens
    1 … n_keys, values the next n_values. Only the queries are scored. `test` reports the accuracy at each of
    `test_lengths`; longer sequences have equally many pairs and later queries.

    The runs of the paper's figure 2 have `distinct_values` and fillers of 0; those of Arora et al. 2024 ("Based") have
    `distinct_values` and `random_fillers`. Both have a vocabulary of 8,192 tokens, half of them keys.

    A model that guesses reaches an accuracy of 1 / n_values. To answer all queries a state must hold m pairs, that is
    m log2(n_keys · n_values) bits.

    A batch is a `TokenBatch`.

    Args:
        length: Tokens of a sequence in training and validation, at least 4 · n_pairs.
        n_pairs: Number m of pairs in a sequence.
        n_keys: Number of keys.
        n_values: Number of values.
        power: Exponent of the distribution of the gaps, positive. That of the paper's code is 0.01; 1 draws uniformly.
        distinct_values: Whether the values of a sequence are different, as its keys are. Else they are drawn with
            repetition.
        random_fillers: Whether fillers are drawn from the whole vocabulary, keys and values included, instead of 0. If
            the vocabulary is not much larger than a sequence, keys of the sequence occur among them, before tokens that
            are not their values.
        options: Arguments of `LengthTask`.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> data = AssociativeRecall(8, n_pairs=2, n_keys=4, n_values=4, batch_size=1)
        >>> batch = next(iter(data.val_dataloader()))
        >>> batch.inputs.shape, int((batch.targets != IGNORE).sum())
        (torch.Size([1, 8]), 2)
    """

    def __init__(
        self,
        length: int = 64,
        *,
        n_pairs: int = 8,
        n_keys: int = 32,
        n_values: int = 32,
        power: float = 0.01,
        distinct_values: bool = False,
        random_fillers: bool = False,
        **options: Any,
    ) -> None:
        at_least(1, n_pairs=n_pairs)
        at_least(n_pairs, n_keys=n_keys)
        at_least(max(2, n_pairs) if distinct_values else 2, n_values=n_values)
        positive(power=power)
        self.n_pairs = n_pairs
        super().__init__(length, **options)
        self.save_hyperparameters(logger=False)
        self.n_keys = n_keys
        self.n_values = n_values
        self.power = power
        self.distinct_values = distinct_values
        self.random_fillers = random_fillers

    @property
    def min_length(self) -> int:
        """Tokens of the pairs, and of a slot for each query."""
        return 4 * self.n_pairs

    @property
    def vocab_size(self) -> int:
        """Number of keys and values plus 1, for the token 0."""
        return 1 + self.n_keys + self.n_values

    def sequences(self, split: str) -> "RecallSequences":
        """Return the sequences of "train", "val" or "test"."""
        sizes = self.n_pairs, self.n_keys, self.n_values
        lengths, n_each = self.lengths_of(split)
        return RecallSequences(
            lengths, n_each, self._stream(split), *sizes, self.power, self.distinct_values, self.random_fillers
        )


@dataclass(eq=False)
class RecallSequences(LengthSequences):
    """Sequences drawn by index: the i-th is always the same, for any non-negative integer i.

    The first three arguments are those of `LengthSequences`, the others those of `AssociativeRecall`.
    """

    n_pairs: int
    n_keys: int
    n_values: int
    power: float
    distinct_values: bool
    random_fillers: bool

    def draw(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and the targets of a sequence: (length,) integers each."""
        m = self.n_pairs
        keys = 1 + rng.choice(self.n_keys, m, replace=False)
        values = 1 + self.n_keys + rng.choice(self.n_values, m, replace=not self.distinct_values)
        weights = np.arange(1, (length - 2 * m) // 2 + 1) ** (self.power - 1)
        places = 2 * m + 2 * rng.choice(len(weights), m, replace=False, p=weights / weights.sum())
        inputs = np.full(length, FILLER)
        if self.random_fillers:
            inputs = rng.integers(1 + self.n_keys + self.n_values, size=length)
        inputs[0 : 2 * m : 2], inputs[1 : 2 * m : 2] = keys, values
        inputs[places] = keys
        targets = np.full(length, IGNORE)
        targets[places] = values
        return inputs, targets
