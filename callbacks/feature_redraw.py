"""Periodic redrawing of random features, for attention that uses them."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_effattn.callbacks.lightning_internals import averages_buffers
from lit_effattn.checks import at_least


class FeatureRedraw(pl.Callback):
    """Calls `redraw(generator)` on every module that has it, every `every_n_steps` optimiser steps of training.

    This keeps the model from adapting to the errors of one draw (Choromanski et al. 2020). A draw is a pure function of
    the seed, the step and the module's index. It is the same on every process and after resuming. The features are in
    the checkpoint, with the model's weights.

    Args:
        every_n_steps: Number of optimiser steps (not batches) between two draws.
        seed: Seed of the draws.

    Raises:
        ValueError: If an argument is out of its range; in `setup`, if another callback averages the features.
    """

    def __init__(self, every_n_steps: int = 1000, seed: int = 0) -> None:
        at_least(1, every_n_steps=every_n_steps)
        at_least(0, seed=seed)
        self.every_n_steps = every_n_steps
        self.seed = seed
        self._step = 0  # of the last draw

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset the step of the last draw. A checkpoint is loaded after this.

        Raises:
            ValueError: If a callback would average the features of several draws.
        """
        self._step = 0
        averaging = [type(c).__name__ for c in trainer.callbacks if averages_buffers(c)]  # type: ignore[attr-defined]
        if averaging and stage == "fit":
            raise ValueError(
                f"{averaging[0]} would average the random features of several draws, which are then too small; set its "
                "use_buffers=False, or leave out FeatureRedraw"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if the model has no random features."""
        if not _drawing(pl_module):
            rank_zero_warn(
                f"FeatureRedraw has no effect: no module of this {type(pl_module).__name__} has a method `redraw`, as "
                "attention with random features has, such as PerformerAttention"
            )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Redraw if the step is due: before its first batch, so that all its batches use the same features."""
        step = trainer.global_step
        if step == self._step or step % self.every_n_steps:
            return
        self._step = step
        for i, module in enumerate(_drawing(pl_module)):
            sequence = np.random.SeedSequence((self.seed, step, i))
            module.redraw(torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0])))

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the last draw: a checkpoint may be saved after the draw but before the step."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step of the last draw."""
        self._step = state_dict["step"]


def _drawing(model: nn.Module) -> list[Any]:
    """Return the modules with `redraw`, each once. The class is checked, since wrappers forward attributes."""
    return [module for module in model.modules() if callable(getattr(type(module), "redraw", None))]
