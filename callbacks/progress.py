"""The progress bar, and the summary of the model."""

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, RichProgressBar
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich import get_console
from rich.progress import BarColumn, ProgressColumn
from rich.table import Table

EVERY = 0.1
"""Minimum time between two refreshes in seconds. A refresh takes as long as a small training step."""
WIDE = 120  # the number of columns that a terminal needs for the bar and the metrics beside it


class ProgressBar(RichProgressBar):
    """Lightning's rich progress bar, refreshed at most ten times a second.

    Lightning's own refreshes after every step, and waits for the GPU to get the loss. The logger's version number is
    not shown, since each run has its own folder. The number of epochs is shown only if it has a maximum. The number of
    batches is that of the epoch, also of accumulated ones, and of those before training resumed.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=round(1 / EVERY), leave=False)
        self._drawn = 0.0
        self._batch_idx = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refresh if `EVERY` seconds have passed, or if the batch is the last of an epoch."""
        self._batch_idx = batch_idx
        if time.monotonic() - self._drawn >= EVERY or trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._drawn = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refresh once more: a run limited by its number of steps may end between two refreshes."""
        super().on_train_batch_end(trainer, pl_module, None, None, self._batch_idx)

    def configure_columns(self, trainer: pl.Trainer) -> list[ProgressColumn]:
        """Return what is shown before the metrics: no bar in a narrow terminal, where it would cut their names."""
        columns: list[ProgressColumn] = super().configure_columns(trainer)
        narrow = get_console().width < WIDE
        return [column for column in columns if not (narrow and isinstance(column, BarColumn))]

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the metrics shown beside the bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    @property
    def total_train_batches(self) -> int | float:
        """The number of the epoch's batches, up to the last step if `max_steps` alone limits training."""
        trainer = self.trainer
        n = trainer.num_training_batches
        if trainer.max_epochs != -1 or trainer.max_steps <= 0:
            return n
        batches, each = trainer.fit_loop.epoch_loop.batch_progress.current, trainer.accumulate_grad_batches
        done = batches.ready if batches.ready > batches.completed else batches.ready % n  # n: an epoch has ended
        return min(n, done // each * each + (trainer.max_steps - trainer.global_step) * each)

    def _get_train_description(self, current_epoch: int) -> str:
        text = super()._get_train_description(current_epoch)
        return text.replace(f"{current_epoch}/-2", f"{current_epoch}") if self.trainer.max_epochs == -1 else text


class ParameterSummary(ModelSummary):
    """A table of the model's parts that have parameters, and how many there are in all.

    Lightning's own also counts modules by mode, and FLOPs, which are 0 without an example of the input.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]], total_parameters: int, trainable_parameters: int, *_: Any, **__: Any
    ) -> None:
        """Print the table."""
        columns = {name.strip(): values for name, values in summary_data}
        table = Table("Name", "Type", "Params")
        for row in zip(columns["Name"], columns["Type"], columns["Params"], strict=True):
            if row[2].strip() != "0":
                table.add_row(*row)
        total, frozen = (
            get_human_readable_count(n).strip() for n in (total_parameters, total_parameters - trainable_parameters)
        )
        more = f", {frozen} of them frozen" if frozen != "0" else ""
        get_console().print(table)
        get_console().print(f"{total} parameters{more}")
