"""What a batch of tokens is, whatever it was made from."""

from typing import NamedTuple

from torch import Tensor

IGNORE = -100
"""A target that is not scored; the value that torch's losses leave out."""


class TokenBatch(NamedTuple):
    """A segment of each of B sequences, and what a model should say after every token of it.

    Attributes:
        inputs: (B, N) tokens to read.
        targets: (B, N), the token that follows each; `IGNORE` where none is scored, padding included.
        lengths: (B,), valid positions of each row; None: all are.
        fresh: (B,), True where the row starts a new sequence, so that nothing remembered belongs to it; None: all do.
    """

    inputs: Tensor
    targets: Tensor
    lengths: Tensor | None = None
    fresh: Tensor | None = None
