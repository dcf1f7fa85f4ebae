"""The batches of tokens: of text and synthetic tasks, and of pairs of sequences."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORE = -100
"""A target that is not scored: the default `ignore_index` of torch's losses."""


class Response(NamedTuple):
    """A part of a sequence that a model may generate.

    Attributes:
        position: The position in the segment from which its first token is predicted.
        text: The text, without the token that ends it.
        number: Its index in the split, by which the original order can be restored.
    """

    position: int
    text: str
    number: int


class TokenBatch(NamedTuple):
    """A segment of each of B sequences, with the target after every token.

    Attributes:
        inputs: (B, N) input tokens.
        targets: (B, N), the next token at each position; `IGNORE` where it is not scored, padding included.
        lengths: (B,), number of valid positions in each row; None: all positions are valid.
        fresh: (B,), True where the row starts a new sequence, so that its memory must be reset; None: all rows do.
        responses: The responses that begin in each of the B rows; None: there are none.
        starts: (B, N), True where a sequence begins that must not depend on what is before it in the row: see
            `lit_effattn.nn.packing.packed`. None: nowhere.
        offsets: (B, N), the position of each target in the text of its split, in evaluation; None: unknown.
    """

    inputs: Tensor
    targets: Tensor
    lengths: Tensor | None = None
    fresh: Tensor | None = None
    responses: Sequence[Sequence[Response]] | None = None
    starts: Tensor | None = None
    offsets: Tensor | None = None


def pad_tokens(items: Sequence[tuple[Any, Any]]) -> TokenBatch:
    """Make a batch of sequences of any lengths: the `collate_fn` of a `DataLoader` over an (x, y) data set.

    Args:
        items: Pairs of tokens and their targets, (N,) each, as tensors, arrays or lists. A target is the next token, or
            `IGNORE` where it is not scored.

    Returns:
        The batch: `inputs` and `targets` (B, N), and `lengths` (B,).

    Examples:
        >>> batch = pad_tokens([([7, 8, 9], [8, 9, 7]), ([4], [5])])
        >>> batch.inputs.tolist(), batch.targets.tolist(), batch.lengths.tolist()
        ([[7, 8, 9], [4, 0, 0]], [[8, 9, 7], [5, -100, -100]], [3, 1])
    """
    inputs, targets = (list(map(as_row, side)) for side in zip(*items, strict=True))
    return TokenBatch(
        pad_sequence(inputs, batch_first=True),
        pad_sequence(targets, batch_first=True, padding_value=IGNORE),
        torch.tensor([len(row) for row in inputs]),
    )


def as_row(row: Any) -> Tensor:
    """Return a sequence as a tensor. An empty list has tokens, too, where PyTorch takes numbers."""
    return torch.as_tensor(row, dtype=torch.long if isinstance(row, list | tuple) and not row else None)


class PairBatch(NamedTuple):
    """B pairs of sequences, a source and its target, padded on the right.

    The token `<start>` of a vocabulary is the border of a sequence: it begins the decoder's input, and it ends sources
    and targets, as in fairseq. With source tokens x and target tokens y:

        source = x1 … xm <start>,   inputs = <start> y1 … yn,   targets = y1 … yn <start>

    If the targets are unknown, `inputs` is `<start>` alone, the prompt of a generated target, and no target is scored.

    Attributes:
        source: (B, S) source tokens and the end token, which also fills the padding.
        source_lengths: (B,), number of valid positions in each row of `source`, the end token included.
        inputs: (B, N) the start token and the target's tokens. The start token also fills the padding.
        targets: (B, N) the target's tokens and the end token; `IGNORE` in the padding.
        lengths: (B,), number of valid positions in each row of `inputs` and `targets`.
        sources: The B source texts.
        references: Of each row, all accepted target texts, that of `targets` first; none if they are unknown.
        indices: (B,), the position of each row in its split or file, by which the original order can be restored.
    """

    source: Tensor
    source_lengths: Tensor
    inputs: Tensor
    targets: Tensor
    lengths: Tensor
    sources: list[str]
    references: list[list[str]]
    indices: Tensor | None = None
