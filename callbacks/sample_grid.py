"""Pictures of what the model has learned so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lit_effattn.pictures import grid, save_png


class SampleGrid(pl.Callback):
    """Draws a grid of samples every so many epochs, into the run's `samples` folder and TensorBoard.

    For models with `sample(n, seed=…)` and `to_images(levels)`. The same seed every time, so that the pictures show
    one and the same draw as the model learns.

    Args:
        every_n_epochs: How often.
        n_samples: How many images.
        temperature: Divides the log-probabilities.
        seed: Of the draw.
    """

    def __init__(self, every_n_epochs: int = 1, n_samples: int = 16, temperature: float = 1.0, seed: int = 0) -> None:
        if every_n_epochs < 1 or n_samples < 1:
            raise ValueError(f"every_n_epochs={every_n_epochs}, n_samples={n_samples}: both are at least 1")
        self.every_n_epochs = every_n_epochs
        self.n_samples = n_samples
        self.temperature = temperature
        self.seed = seed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a model that draws no images, before training and not after its first epoch."""
        if not callable(getattr(pl_module, "sample", None)) or not callable(getattr(pl_module, "to_images", None)):
            raise ValueError(f"SampleGrid: {type(pl_module).__name__} has no `sample` and `to_images`; leave it out")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw, on the first process."""
        epoch = trainer.current_epoch + 1
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False) or epoch % self.every_n_epochs:
            return
        model: Any = pl_module
        images: Tensor = model.to_images(model.sample(self.n_samples, temperature=self.temperature, seed=self.seed))
        self._log(trainer, images, epoch)

    def _log(self, trainer: pl.Trainer, images: Tensor, epoch: int) -> None:
        picture = grid(images)
        save_png(picture, Path(trainer.default_root_dir) / "samples" / f"epoch_{epoch:04d}.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("samples", picture, global_step=trainer.global_step)
