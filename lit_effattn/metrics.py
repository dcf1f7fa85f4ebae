"""What is reported: sums over the whole data set, divided once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class BitsPerDim(Metric):
    """Mean negative log-likelihood in bits, Σ nats / (count · ln 2), over everything scored.

    Sums are float64 and are added over batches and processes before the one division, so the figure does not depend
    on how the data was cut into batches or dealt to processes.

    Example:
        >>> metric = BitsPerDim()
        >>> metric.update(torch.full((2, 8), math.log(17)))
        >>> round(float(metric.compute()), 4)
        4.0875
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    nats: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> BitsPerDim:
        """Go where the model goes, but stay float64 where it becomes bfloat16 (`precision="bf16-true"`)."""
        return super()._apply(lambda t: t.to(fn(t).device), *args, **kwargs)  # type: ignore[return-value]

    def update(self, nll: Tensor) -> None:
        """Add negative log-likelihoods in nats, one for each dimension scored."""
        self.nats += nll.detach().sum(dtype=torch.float64)
        self.count += nll.numel()

    def compute(self) -> Tensor:
        """Return bits per dimension."""
        return self.nats / self.count / math.log(2)
