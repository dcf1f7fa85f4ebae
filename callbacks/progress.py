"""How far the run is."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's rich progress bar, without the logger's version number: runs have a folder each here."""

    def __init__(self) -> None:
        super().__init__(leave=False)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return what is shown beside the bar."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return shown
