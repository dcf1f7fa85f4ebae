"""Clipping of each parameter's gradient by its own norm."""

from typing import Any

import lightning.pytorch as pl
from torch import nn

from lit_effattn.checks import positive


class ClipEachParameter(pl.Callback):
    """Scales the gradient g of each parameter, a matrix or a vector, so that its norm is at most c.

        g ← g · min(1, c / ‖g‖₂)            the code of Katharopoulos et al. 2020 (`max_grad_norm` of its optimiser)

    The trainer's `gradient_clip_val` has other meanings: one norm of the gradients of all parameters together, or, with
    `gradient_clip_algorithm: value`, limits of each element.

    Args:
        max_norm: c.

    Raises:
        ValueError: If `max_norm` is not positive.
    """

    def __init__(self, max_norm: float = 1.0) -> None:
        positive(max_norm=max_norm)
        self.max_norm = max_norm

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Clip. With float16 the gradients have their true scale here."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                nn.utils.clip_grad_norm_(parameter, self.max_norm)
