"""How far the run is."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar

EVERY = 0.1
"""Seconds from one picture to the next, at least; drawing one takes as long as a small step."""


class ProgressBar(RichProgressBar):
    """Lightning's rich progress bar, drawn ten times a second and no more often.

    Lightning's draws every step, and waits for the GPU to show its loss. The logger's version number is left out: runs
    have a folder each here.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=round(1 / EVERY), leave=False)
        self._drawn = 0.0
        self._batch_idx = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw the step if it is time, or if it is an epoch's last."""
        self._batch_idx = batch_idx
        if time.monotonic() - self._drawn >= EVERY or trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._drawn = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the step at which a run of so many steps ends."""
        super().on_train_batch_end(trainer, pl_module, None, None, self._batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return what is shown beside the bar."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return shown
