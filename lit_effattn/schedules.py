"""Learning-rate schedules that can be written in YAML (torch's `LambdaLR` and `SequentialLR` can't)."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupCosine(LambdaLR):
    """Rises linearly over `warmup_steps`, then falls along half a cosine to `final` times the peak at `total_steps`.

    Stays at the end value after `total_steps`. Counts optimiser steps.

    Args:
        optimizer: Its learning rate is the peak.
        total_steps: Steps of the whole run.
        warmup_steps: Steps of the rise.
        final: Final rate, as a fraction of the peak.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(f"warmup_steps={warmup_steps} is not from 0 to below total_steps={total_steps}")
        if not 0 <= final <= 1:
            raise ValueError(f"final={final} is not a fraction of the peak, from 0 to 1")
        self.total_steps, self.warmup_steps, self.final = total_steps, warmup_steps, final
        super().__init__(optimizer, self._factor)

    def _factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


class InverseSquareRoot(LambdaLR):
    """Rises linearly over `warmup_steps`, then falls with the inverse square root of the steps taken.

        rate(step) = peak · min(step / warmup_steps, √(warmup_steps / step)),  step = 1, 2, …

    Vaswani et al. 2017, equation 3, scaled by its peak, which is reached at step `warmup_steps`. The paper's rate is
    d_model^−½ · min(step^−½, step · warmup_steps^−1.5), so its peak is (d_model · warmup_steps)^−½: 7·10⁻⁴ for the base
    model's 512 and 4000. Counts optimiser steps.

    Args:
        optimizer: Its learning rate is the peak.
        warmup_steps: Steps of the rise.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 4000) -> None:
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps={warmup_steps} is not positive; 1 starts at the peak")
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, self._factor)

    def _factor(self, steps_taken: int) -> float:
        step = steps_taken + 1
        return min(step / self.warmup_steps, math.sqrt(self.warmup_steps / step))
