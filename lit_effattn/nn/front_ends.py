"""Front ends map feature vectors of sound to a model's input: fewer frames, of the model's width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.checks import at_least
from lit_effattn.hparams import HasInitArgs
from lit_effattn.sequence import without_padding


class FrontEnd(HasInitArgs, nn.Module, ABC):
    """Maps T feature vectors to ⌈T / factor⌉ frames of the model's input.

    A frame depends only on its own utterance: padding has no effect.

    Attributes:
        factor: Number of feature vectors for each frame.
        context: Frame t depends on the feature vectors from factor · t − context[0] to factor · t + context[1]. None:
            it may depend on all, so the front end can't be applied to a stream.
    """

    factor: int
    context: tuple[int, int] | None = None

    @abstractmethod
    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Transform `x`.

        Args:
            x: (B, T, F).
            lengths: (B,), frames of each row; the rest is padding, with any values.

        Returns:
            (B, ⌈T / factor⌉, E), 0 in the padding, and the rows' lengths, ⌈lengths / factor⌉.
        """


class Projection(FrontEnd):
    """One matrix, applied to every frame: y_t = W x_t + b.

    Args:
        n_features: Width F of a frame.
        d_model: Width E of the model's input.
    """

    factor = 1
    context = (0, 0)

    def __init__(self, n_features: int, d_model: int) -> None:
        super().__init__()
        self.proj = nn.Linear(n_features, d_model)

    @override
    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return without_padding(self.proj(without_padding(x, lengths)), lengths), lengths


class FrameStacking(FrontEnd):
    """One matrix on adjacent frames: y_t = W [x_{st}; …; x_{st+s−1}] + b, 0 beyond the end (Sak et al. 2015).

    Args:
        n_features: Width F of a frame.
        d_model: Width E of the model's input.
        factor: s.

    Raises:
        ValueError: If `factor` is not positive.
    """

    def __init__(self, n_features: int, d_model: int, *, factor: int = 3) -> None:
        super().__init__()
        at_least(1, factor=factor)
        self.factor = factor
        self.context = (0, factor - 1)
        self.proj = nn.Linear(factor * n_features, d_model)

    @override
    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = F.pad(without_padding(x, lengths), (0, 0, 0, -x.size(1) % self.factor))
        stacked = x.reshape(x.size(0), -1, self.proj.in_features)  # (B, T, F) -> (B, T / s, s F)
        lengths = _divided(lengths, self.factor)
        return without_padding(self.proj(stacked), lengths), lengths


class ConvSubsampling(FrontEnd):
    """Convolutions over time and frequency, each of which halves both, then one matrix.

        y_t = W [z_t1; …; z_tF'] + b,  z = relu(conv(relu(conv(x)))), 3 × 3 with stride 2    as in Dong et al. 2018

    Args:
        n_features: Width F of a frame.
        d_model: Width E of the model's input.
        factor: 2 (one convolution) or 4 (two).
        channels: Channels of each convolution.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(self, n_features: int, d_model: int, *, factor: int = 4, channels: int = 32) -> None:
        super().__init__()
        if factor not in (2, 4):
            raise ValueError(f"factor={factor} must be 2 or 4; FrameStacking accepts any factor")
        at_least(1, channels=channels)
        self.factor = factor
        self.context = (factor - 1, factor - 1)
        first = nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)
        second = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
        self.convs = nn.ModuleList([first, second][: factor // 2])
        self.proj = nn.Linear(channels * -(-n_features // factor), d_model)

    @override
    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = x[:, None]  # (B, T, F) -> (B, 1, T, F)
        for conv in self.convs:
            # The previous layer's bias is in the padding; the convolution must see zeros there.
            x = conv(without_padding(x, lengths, dim=2)).relu()  # -> (B, C, ⌈T / 2⌉, ⌈F / 2⌉)
            lengths = _divided(lengths, 2)
        x = x.transpose(1, 2).flatten(2)  # (B, C, T', F') -> (B, T', C F')
        return without_padding(self.proj(x), lengths), lengths


class FrontEndStream:
    """Applies a front end to a stream of feature vectors.

    The frames are those of the whole, for any division into pieces. A frame is returned as soon as the last feature
    vector that it depends on was given, `context[1]` after its own. The memory is bounded: the stream keeps at most
    `factor` + `context[0]` + `context[1]` feature vectors, and the frames that depend on their missing predecessors
    are computed again, and dropped.

    Args:
        front_end: The front end.

    Raises:
        ValueError: If it has no `context`.
    """

    def __init__(self, front_end: FrontEnd) -> None:
        if front_end.context is None:
            raise ValueError(f"{type(front_end).__name__} defines no `context`, which a stream needs; see FrontEnd")
        self.front_end = front_end
        before, self._after = front_end.context
        self._kept = -(-before // front_end.factor)  # frames before the next one that are computed again
        self._first = 0  # the frame at which `_x` begins
        self._n_frames = 0  # returned so far
        self._x: Tensor | None = None

    def __call__(self, x: Tensor, *, last: bool = False) -> Tensor | None:
        """Return the next frames (B, n, E), or None if there is none yet.

        Args:
            x: (B, K, F), the next feature vectors; K may be 0.
            last: Whether the stream ends with them.
        """
        factor = self.front_end.factor
        x = x if self._x is None else torch.cat([self._x, x], 1)
        total = self._first * factor + x.size(1)
        n_frames = -(-total // factor) if last else max(self._n_frames, (total - 1 - self._after) // factor + 1)
        if n_frames == self._n_frames:
            self._x = x
            return None
        y, _ = self.front_end(x, x.new_full(x.shape[:1], x.size(1), dtype=torch.long))
        y = y[:, self._n_frames - self._first : n_frames - self._first]
        first = max(0, n_frames - self._kept)
        self._x = x[:, (first - self._first) * factor :].clone()
        self._first, self._n_frames = first, n_frames
        return y

    @property
    def kept(self) -> tuple[Tensor | None, int, int]:
        """The feature vectors that are kept (None: nothing was read) and two counts. Setting it goes on from there."""
        return self._x, self._first, self._n_frames

    @kept.setter
    def kept(self, kept: tuple[Tensor | None, int, int]) -> None:
        self._x, self._first, self._n_frames = kept


FrontEndFactory = Callable[[int, int], FrontEnd]
"""Makes a front end from the widths of a feature vector and of the model's input."""


def _divided(lengths: Tensor, factor: int) -> Tensor:
    return (lengths + factor - 1) // factor
