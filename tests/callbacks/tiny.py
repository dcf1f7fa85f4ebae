"""What the tests of the callbacks train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_effattn.checkpoints.io import AtomicCheckpointIO


class Tiny(pl.LightningModule):
    """One number that is drawn to those of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.drawn: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        return (self.weight - batch).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self.log("val/loss", (self.weight - batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Images(Tiny):
    """Draws images, the i-th of level i all over."""

    def __init__(self, shape: tuple[int, int, int] = (6, 6, 1)) -> None:
        super().__init__()
        self.shape = shape
        self.asked: list[dict[str, Any]] = []

    def sample(self, n: int, **options: Any) -> Tensor:
        self.asked.append({"n": n, **options})
        h, w, c = self.shape
        return torch.arange(n)[:, None].expand(n, h * w * c)

    def to_images(self, levels: Tensor) -> Tensor:
        h, w, c = self.shape
        return levels.view(-1, c, h, w).to(torch.uint8) * 10


def loader(n: int = 4) -> DataLoader:
    return DataLoader(torch.linspace(1, 2, n), batch_size=1, generator=torch.Generator())  # else it draws a seed


def trainer(folder: Path, callbacks: Sequence[pl.Callback], **options: Any) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=[*callbacks],
        **{
            "plugins": [AtomicCheckpointIO()],
            "logger": False,
            "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        },
    )
