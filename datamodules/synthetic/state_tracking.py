"""State tracking: the running product of permutations (Merrill et al. 2024, "The Illusion of State")."""

from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

import numpy as np

from lit_effattn.checks import one_of
from lit_effattn.datamodules.synthetic.lengths import LengthSequences, LengthTask

DEGREES = {"parity": 2, "S3": 3, "S5": 5}  # number of elements that the permutations of each group permute


class StateTracking(LengthTask):
    """Random permutations; the target at each position is the product of all so far.

        y_t = x_t ∘ y_{t−1},  y_0 = 1,  (a ∘ b)(i) = a(b(i))

    The group is S₃ (6 permutations), S₅ (120), or parity: S₂, where 1 is the swap and y_t = x_1 + … + x_t mod 2. Tokens
    and targets are the numbers of the permutations in lexicographic order; 0 is the identity. All positions are
    scored. `test` reports the accuracy at each of `test_lengths`.

    The product of S₅ is complete for NC¹, so no model of constant depth that computes its states in parallel (TC⁰), as
    Transformers do, gets it right at all lengths, unless TC⁰ = NC¹. A recurrent network can. A model that
    guesses reaches 1 / vocab_size.

    A batch is a `TokenBatch`.

    Args:
        group: "parity", "S3" or "S5".
        length: Tokens of a sequence in training and validation.
        options: Arguments of `LengthTask`.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> data = StateTracking("parity", length=4, test_lengths=[6], batch_size=1)
        >>> batch = next(iter(data.test_dataloader()))
        >>> bool((batch.inputs.cumsum(1) % 2 == batch.targets).all())
        True
    """

    min_length = 1
    """One permutation."""

    def __init__(self, group: Literal["parity", "S3", "S5"] = "S3", *, length: int = 32, **options: Any) -> None:
        one_of(DEGREES, group=group)
        super().__init__(length, **options)
        self.save_hyperparameters(logger=False)
        self.group = group

    @property
    def vocab_size(self) -> int:
        """Number of permutations."""
        return len(products(DEGREES[self.group]))

    def sequences(self, split: str) -> "ProductSequences":
        """Return the sequences of "train", "val" or "test"."""
        return ProductSequences(*self.lengths_of(split), self._stream(split), products(DEGREES[self.group]))


@dataclass(eq=False)
class ProductSequences(LengthSequences):
    """Sequences drawn by index: the i-th is always the same, for any non-negative integer i.

    The first three arguments are those of `LengthSequences`; `table` is the result of `products`, (n, n).
    """

    table: np.ndarray

    def draw(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and the targets of a sequence: (length,) integers each."""
        inputs = rng.integers(len(self.table), size=length)
        targets, product = np.empty_like(inputs), 0
        for t, element in enumerate(inputs):
            targets[t] = product = self.table[element, product]
        return inputs, targets


def products(degree: int) -> np.ndarray:
    """Return the multiplication table of S_degree: (degree!, degree!), the number of a ∘ b in row a and column b."""
    elements = np.array(list(permutations(range(degree))))  # (n, degree), in lexicographic order
    composed = elements[np.arange(len(elements))[:, None, None], elements]  # (n, n, degree)
    place = degree ** np.arange(degree)[::-1]
    return np.searchsorted(elements @ place, composed @ place)
