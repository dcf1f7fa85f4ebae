"""Grids of generated images during training."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from lit_effattn.checks import at_least
from lit_effattn.distributed.sharding import heads_of
from lit_effattn.drawing.images import grid, save_png, to_pil


class SampleGrid(pl.Callback):
    """Saves a grid of samples every `every_n_epochs` epochs, in the run's `samples` folder, TensorBoard and W&B.

    Works with models that have `sample(n, seed=…)` and `to_images(levels)`. The seed is the same each time, so the
    grids of different epochs can be compared.

    Args:
        every_n_epochs: Number of epochs between two grids.
        n_samples: Number of images in a grid.
        temperature: Divides the log-probabilities.
        seed: Seed of the samples.

    Raises:
        ValueError: If a number is out of its range; in `setup`, if the model can't sample images.
    """

    def __init__(self, every_n_epochs: int = 1, n_samples: int = 16, temperature: float = 1.0, seed: int = 0) -> None:
        at_least(1, every_n_epochs=every_n_epochs, n_samples=n_samples)
        self.every_n_epochs = every_n_epochs
        self.n_samples = n_samples
        self.temperature = temperature
        self.seed = seed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise ValueError before training if the model can't sample images."""
        if not callable(getattr(pl_module, "sample", None)) or not callable(getattr(pl_module, "to_images", None)):
            raise ValueError(f"SampleGrid: {type(pl_module).__name__} has no `sample` and `to_images`; leave it out")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample and save a grid, on the first process only."""
        epoch = trainer.current_epoch + 1
        if getattr(trainer, "fast_dev_run", False) or epoch % self.every_n_epochs:
            return
        model: Any = pl_module
        with getattr(model, "whole", nullcontext)():  # all processes give their parts of divided parameters
            if trainer.is_global_zero or heads_of(trainer) > 1:
                levels = model.sample(self.n_samples, temperature=self.temperature, seed=self.seed)
                if trainer.is_global_zero:
                    self._log(trainer, model.to_images(levels), epoch)

    def _log(self, trainer: pl.Trainer, images: Tensor, epoch: int) -> None:
        picture = grid(images)
        save_png(picture, Path(trainer.default_root_dir) / "samples" / f"epoch_{epoch:04d}.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("samples", picture, global_step=trainer.global_step)
            elif isinstance(logger, WandbLogger):
                logger.log_image("samples", [to_pil(picture)], step=trainer.global_step)
