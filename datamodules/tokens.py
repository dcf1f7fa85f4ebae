"""The batch of tokens shared by text and synthetic tasks."""

from typing import NamedTuple

from torch import Tensor

IGNORE = -100
"""A target that is not scored: the default `ignore_index` of torch's losses."""


class TokenBatch(NamedTuple):
    """A segment of each of B sequences, with the target after every token.

    Attributes:
        inputs: (B, N) input tokens.
        targets: (B, N), the next token at each position; `IGNORE` where it is not scored, padding included.
        lengths: (B,), number of valid positions in each row; None: all positions are valid.
        fresh: (B,), True where the row starts a new sequence, so that its memory must be reset; None: all rows do.
    """

    inputs: Tensor
    targets: Tensor
    lengths: Tensor | None = None
    fresh: Tensor | None = None
