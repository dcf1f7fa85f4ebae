"""What is reported: sums over the whole data set, divided once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _Mean(Metric, ABC):
    """A function of the mean of everything given.

    Sums are float64 and are added over batches and processes before the one division, so the figure does not depend
    on how the data was cut into batches or dealt to processes. To leave values out, do not give them.
    """

    full_state_update = False
    is_differentiable = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> _Mean:
        """Go where the model goes, but stay float64 where it becomes bfloat16 (`precision="bf16-true"`)."""
        return super()._apply(lambda t: t.to(fn(t).device), *args, **kwargs)  # type: ignore[return-value]

    def update(self, values: Tensor) -> None:
        """Add values, of any shape."""
        self.total += values.detach().sum(dtype=torch.float64)
        self.count += values.numel()

    @abstractmethod
    def compute(self) -> Tensor:
        """Return the figure."""


class BitsPerDim(_Mean):
    """Mean negative log-likelihood in bits, Σ nats / (count · ln 2), over everything scored.

    `update` takes negative log-likelihoods in nats, one for each dimension scored.

    Example:
        >>> metric = BitsPerDim()
        >>> metric.update(torch.full((2, 8), math.log(17)))
        >>> round(float(metric.compute()), 4)
        4.0875
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return bits per value scored."""
        return self.total / self.count / math.log(2)


class BitsPerByte(BitsPerDim):
    """`BitsPerDim` of text whose tokens are bytes: one negative log-likelihood in nats for each byte scored."""


class BitsPerCharacter(BitsPerDim):
    """`BitsPerDim` of text whose tokens are characters: one negative log-likelihood in nats for each scored."""


class Perplexity(_Mean):
    """exp(Σ nats / count), over everything scored: as unsure as a choice among that many equally likely tokens.

    `update` takes negative log-likelihoods in nats, one for each token scored.

    Example:
        >>> metric = Perplexity()
        >>> metric.update(torch.tensor([math.log(2), math.log(8)]))
        >>> round(float(metric.compute()), 4)
        4.0
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the perplexity."""
        return (self.total / self.count).exp()


class Accuracy(_Mean):
    """The fraction that is right. `update` takes booleans, one for each decision.

    Example:
        >>> metric = Accuracy()
        >>> metric.update(torch.tensor([3, 1, 4, 1]) == torch.tensor([3, 1, 4, 2]))
        >>> float(metric.compute())
        0.75
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """Return the fraction."""
        return self.total / self.count


class Count(_Mean):
    """How many values there were.

    Example:
        >>> metric = Count()
        >>> metric.update(torch.zeros(2, 8))
        >>> int(metric.compute())
        16
    """

    def compute(self) -> Tensor:
        """Return it, an integer."""
        return self.count.long()
