"""The checkpoint to go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn


class LastCheckpoint(Checkpoint):
    """Keeps `last.ckpt`, from which training goes on as if it had never stopped.

    Saved at the end of every epoch, after its validation; when asked, every so many steps too; and when the run is
    stopped by a signal. A crash leaves the one before: what crashed might be what would be saved.

    Args:
        every_n_train_steps: Save every so many optimiser steps too, which bounds what a killed run loses.
    """

    def __init__(self, every_n_train_steps: int | None = None) -> None:
        super().__init__()
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps={every_n_train_steps} is not positive; leave it out for every epoch")
        self.every_n_train_steps = every_n_train_steps
        self._saved_step = -1

    def path(self, trainer: pl.Trainer) -> Path:
        """Where `last.ckpt` is: in `checkpoints`, in the run's folder."""
        return Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take down where the run begins: within the first step there is nothing to save."""
        self._saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save, if it is time."""
        step = trainer.global_step
        if self.every_n_train_steps and step != self._saved_step and step % self.every_n_train_steps == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save."""
        self._save(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save if a signal stopped the run, which happens between two steps, or in a validation.

        Resumed, the run goes on after that validation, with the training that it would have done.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        if isinstance(exception, SystemExit) and fitting and not trainer.sanity_checking:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if not trainer.sanity_checking and not getattr(trainer, "fast_dev_run", False):
            trainer.save_checkpoint(self.path(trainer))
            self._saved_step = trainer.global_step
