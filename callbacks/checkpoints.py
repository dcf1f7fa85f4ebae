"""The checkpoint for resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn


class LastCheckpoint(Checkpoint):
    """Saves `last.ckpt`, from which training resumes as if it had not been interrupted.

    It is saved at the end of every epoch, after its validation, when a signal stops the run, and, if
    `every_n_train_steps` is given, between epochs. A crash keeps the previous checkpoint, since the current state may
    be the cause of the crash.

    Args:
        every_n_train_steps: Also save after every so many optimiser steps, which bounds the loss if the run is killed.
    """

    def __init__(self, every_n_train_steps: int | None = None) -> None:
        super().__init__()
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(
                f"every_n_train_steps={every_n_train_steps} is not positive; leave it out to save every epoch"
            )
        self.every_n_train_steps = every_n_train_steps
        self._saved_step = -1

    def path(self, trainer: pl.Trainer) -> Path:
        """Return the path of `last.ckpt`, in `checkpoints` in the run's folder."""
        return Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the first step, so that nothing is saved before it ends."""
        self._saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save if `every_n_train_steps` divides the step."""
        step = trainer.global_step
        if self.every_n_train_steps and step != self._saved_step and step % self.every_n_train_steps == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save at the end of the epoch."""
        self._save(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save if a signal stopped the run, which happens between two steps or in a validation.

        After a stop in a validation, the resumed run continues with the training that follows it.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        if isinstance(exception, SystemExit) and fitting and not trainer.sanity_checking:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if not trainer.sanity_checking and not getattr(trainer, "fast_dev_run", False):
            trainer.save_checkpoint(self.path(trainer))
            self._saved_step = trainer.global_step
