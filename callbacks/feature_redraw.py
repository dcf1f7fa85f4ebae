"""New random features now and then, for models whose attention estimates with them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn


class FeatureRedraw(pl.Callback):
    """Has every module with a method `redraw(generator)` draw new random features, every so many optimiser steps.

    A model then does not settle on one draw's errors (Choromanski et al. 2020). In training only. What is
    drawn follows from the seed, the step and which module it is, and from nothing else: it is the same on every
    process, and after a resume. The features themselves are in the checkpoint, with the model's weights.

    Args:
        every_n_steps: How many optimiser steps (not batches) there are between two draws.
        seed: Of the draws.
    """

    def __init__(self, every_n_steps: int = 1000, seed: int = 0) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} is not positive; leave FeatureRedraw out to keep one draw")
        if seed < 0:
            raise ValueError(f"seed={seed} is negative; 0 and up are seeds")
        self.every_n_steps = every_n_steps
        self.seed = seed
        self._step = 0  # of the last draw

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin; a checkpoint is loaded after this."""
        self._step = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a model without random features."""
        if not _drawing(pl_module):
            raise ValueError(
                f"FeatureRedraw: no module of this {type(pl_module).__name__} has a method `redraw`; leave the "
                "callback out, or give the model an attention with random features, such as PerformerAttention"
            )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Redraw, if it is time: before the first batch of a step, so that its batches all see the same features."""
        step = trainer.global_step
        if step == self._step or step % self.every_n_steps:
            return
        self._step = step
        for i, module in enumerate(_drawing(pl_module)):
            sequence = np.random.SeedSequence((self.seed, step, i))
            module.redraw(torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0])))

    def state_dict(self) -> dict[str, Any]:
        """Remember the step of the last draw: a checkpoint may be saved after it, before the step is taken."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._step = state_dict["step"]


def _drawing(model: nn.Module) -> list[Any]:
    """Return the modules that can redraw, each once; by their class, for wrappers pass attributes on."""
    return [module for module in model.modules() if callable(getattr(type(module), "redraw", None))]
