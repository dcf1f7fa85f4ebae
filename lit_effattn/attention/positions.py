"""Encodings of token positions: sinusoidal, learned, on a grid, rotary."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.checks import at_least, positive
from lit_effattn.hparams import HasInitArgs
from lit_effattn.sequence import accumulator, reads_values


class Positions(HasInitArgs, nn.Module, ABC):
    """Maps positions to vectors: (B or 1, N) integers -> (B or 1, N, width).

    Positions count from the start of each row's stream, so rows that were reset or had longer prompts differ.

    Args:
        width: Dimensions of a vector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @abstractmethod
    def forward(self, position: Tensor) -> Tensor:
        """Return the vectors of `position`."""

    def bind(self, shape: Sequence[int]) -> None:
        """Set the shape of the data if it was not given: `(length,)`, or `(height, width, channels)`."""

    @property
    def n_positions(self) -> int | None:
        """Number of positions of a stream that have a vector, from 0; None: all have."""
        return None


class SinusoidalPositions(Positions):
    """Sinusoids (Vaswani et al. 2017, section 3.5), for streams of any length.

        p(t)_{2i} = sin(t / 10000^{2i/width}),  p(t)_{2i+1} = cos(t / 10000^{2i/width})

    Args:
        width: Dimensions of a vector, even.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        if width % 2:
            raise ValueError(f"width={width} is odd; sinusoidal positions come in pairs of sine and cosine")

    def forward(self, position: Tensor) -> Tensor:
        """Return the vectors of `position`."""
        angle = _angles(position, self.width, 10000.0)  # (B, N, width / 2)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(torch.get_default_dtype())


class LearnedPositions(Positions):
    """One learned vector per position.

    Args:
        width: Dimensions of a vector.
        max_len: Number of positions; None: as many as the data has.
        period: Count again from 0 after so many positions of a stream: for attention within segments of this length,
            which begin at its multiples. None: never.

    Raises:
        ValueError: If `max_len` or `period` is not positive.
    """

    def __init__(self, width: int, max_len: int | None = None, period: int | None = None) -> None:
        super().__init__(width)
        at_least(1, max_len=max_len)
        if period is not None and period < 1:
            raise ValueError(f"period={period} is not positive; give the length of a segment, or leave it out")
        self.period = period
        self.table: nn.Embedding | None = None
        if max_len is not None:
            self.bind([max_len])

    def bind(self, shape: Sequence[int]) -> None:
        """Create the table, unless `max_len` was given."""
        if self.table is None:
            self.table = _table(math.prod(shape), self.width)

    @property
    @override
    def n_positions(self) -> int | None:
        size = 0 if self.table is None else self.table.num_embeddings
        return None if self.period is not None and self.period <= size else size

    def forward(self, position: Tensor) -> Tensor:
        """Return the vectors of `position`."""
        if self.table is None:
            raise ValueError("LearnedPositions: max_len is not known; give it, or use a task that binds it to its data")
        position = position if self.period is None else position % self.period
        _check_range(position, self.table.num_embeddings, "LearnedPositions", "max_len")
        return self.table(position)


class GridPositions(Positions):
    """Learned vectors for row, column and channel of an image in raster order, added (Child et al. 2019, section 5.3).

        p(t) = row[t div (W C)] + column[(t div C) mod W] + channel[t mod C]

    Args:
        width: Dimensions of a vector.
        shape: Height H, width W, channels C of the image; None: those of the data.
    """

    def __init__(self, width: int, shape: tuple[int, int, int] | None = None) -> None:
        super().__init__(width)
        self.row: nn.Embedding | None = None
        if shape is not None:
            self.bind(shape)

    def bind(self, shape: Sequence[int]) -> None:
        """Create the tables, unless `shape` was given."""
        if self.row is not None:
            return
        if len(shape) != 3:
            raise ValueError(f"GridPositions: shape={tuple(shape)} is not (height, width, channels)")
        self.row, self.column, self.channel = (_table(size, self.width) for size in shape)

    @property
    @override
    def n_positions(self) -> int | None:
        if self.row is None:
            return 0
        return self.row.num_embeddings * self.column.num_embeddings * self.channel.num_embeddings

    def forward(self, position: Tensor) -> Tensor:
        """Return the vectors of `position`."""
        if self.row is None:
            raise ValueError("GridPositions: shape is not known; give it, or use a task that binds it to its data")
        w, c = self.column.num_embeddings, self.channel.num_embeddings
        _check_range(position, self.n_positions, "GridPositions", "shape")
        return self.row(position // (w * c)) + self.column(position // c % w) + self.channel(position % c)


class RotaryPositions(Positions):
    """Rotates pairs of dimensions of queries and keys by an angle proportional to position (Su et al. 2021, eq. 34).

        (x_i, x_{i+D/2}) -> (x_i cos a − x_{i+D/2} sin a, x_i sin a + x_{i+D/2} cos a),  a = t · base^{−2i/D}

    The dot product of a query and a key then depends only on the difference of their positions. Nothing is added to the
    input: a `Transformer` passes the positions to its attentions, which rotate q and k before any feature map. In heads
    of odd width the last dimension stays as it is, and D is the number of the others.

    Args:
        width: Dimensions of a head, at least 2.
        base: Base of the geometric series of frequencies.

    Raises:
        ValueError: If `width` is below 2, or `base` is not positive.
    """

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__(width)
        if width < 2:
            raise ValueError(f"width={width} must be at least 2: rotary positions rotate pairs of a head's dimensions")
        positive(base=base)
        self.base = base

    def forward(self, position: Tensor) -> Tensor:
        """Return cosines and sines of the angles, (B or 1, N, D): the D / 2 cosines first."""
        angle = _angles(position, self.width // 2 * 2, self.base)  # (B, N, D / 2)
        return torch.cat([angle.cos(), angle.sin()], -1)

    def turn(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate `x` (B, H, N, width) by `position` (B or 1, N)."""
        cos, sin = self(position)[:, None].chunk(2, dim=-1)  # (B, 1, N, D / 2)
        a, b, *rest = x.to(accumulator(x.dtype)).split(cos.size(-1), dim=-1)  # with an odd width, the last one is left
        return torch.cat([a * cos - b * sin, a * sin + b * cos, *rest], -1).to(x.dtype)


PositionsFactory = Callable[[int], Positions]
"""Makes positions from their width: a class, or `functools.partial(Class, option=…)`."""


def bind(module: nn.Module, shape: Sequence[int]) -> None:
    """Set the shape of the data in all positions in `module`, so that it need not be configured again."""
    for part in module.modules():
        if isinstance(part, Positions):
            part.bind(shape)


def n_positions(module: nn.Module) -> int | None:
    """Return the number of positions of a stream for which all positions in `module` have vectors; None: any number."""
    sizes = (part.n_positions for part in module.modules() if isinstance(part, Positions))
    return min((size for size in sizes if size is not None), default=None)


def _angles(position: Tensor, width: int, base: float) -> Tensor:
    """(B, N) -> (B, N, width / 2), in float64: float32 is off by 0.06 at position 10⁶."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=position.device) / width
    return position[..., None] * base**-exponent


def _table(size: int, width: int) -> nn.Embedding:
    table = nn.Embedding(size, width)
    nn.init.normal_(table.weight, std=0.02)
    return table


def _check_range(position: Tensor, size: int | None, kind: str, option: str) -> None:
    if size is not None and reads_values(position) and int(position.max()) >= size:
        raise ValueError(f"{kind}: position {int(position.max())} is beyond the last, {size - 1}; raise `{option}`")
