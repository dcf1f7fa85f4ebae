"""Lightning's Trainer with checked checkpoints and a method that draws samples; its loggers and its checks."""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.checkpoints.restoring import CheckpointConnector
from lit_effattn.checkpoints.runs import named_or_new
from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.tasks.options import made


class Trainer(pl.Trainer):
    """See `lightning.pytorch.Trainer`."""

    @property  # type: ignore[override]  # an attribute of the base class
    def _checkpoint_connector(self) -> CheckpointConnector:
        return self._connector

    @_checkpoint_connector.setter
    def _checkpoint_connector(self, connector: Any) -> None:
        """Replace the connector that Lightning's constructor sets with one that checks."""
        self._connector = CheckpointConnector(self)

    def generate(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        output: str | None = None,
        **options: Any,
    ) -> str:
        """Draw samples from a trained model, or write a target for a source. Its configuration is in the checkpoint.

        Of images: writes `samples.png`, a grid, and `samples.npy`, the levels as integers (n, height, width,
        channels). With `complete`, `completed.png` has the erased, completed and original images in three rows.

        Of text: shows each sample, a single one while it is drawn, and writes them, prompt included, to `samples.txt`.
        With `beam` it does not draw but searches for the likeliest texts, and shows and writes their scores as well.

        Of a masked language model: shows the `n` likeliest tokens at each `[MASK]` of `fill`, with their probabilities,
        and writes them to `samples.txt`.

        Of a sequence-to-sequence model: shows the `n` best targets of `source` with their scores, and writes them to
        `translations.jsonl`, with a picture of the source tokens that each output looked at.

        Args:
            model: The model.
            datamodule: The images to complete.
            ckpt_path: The checkpoint: its path, or `last` or `best` of the newest run.
            output: Folder to write to, which must not exist or be empty. Default: a new one in the run's `generated`.
            options: Fields of the model's `generation`: see `lit_effattn.tasks.options`. None: not given.

        Returns:
            Messages, one per line.
        """
        task: Any = model
        chosen = made(getattr(task, "generation", None), type(task).__name__, options)
        folder = None if output is None else Path(output)
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"--output {output} exists and is not an empty folder; name another")
        if ckpt_path is not None:
            checkpoint = self.strategy.checkpoint_io.load_checkpoint(ckpt_path, weights_only=True)
            task.on_load_checkpoint(checkpoint)
            task.load_state_dict(checkpoint["state_dict"])
        task.to(self.strategy.root_device).eval()
        new = partial(named_or_new, folder, Path(self.default_root_dir) / "generated", "samples")
        messages: str = task.write_samples(new, chosen, datamodule=datamodule, progress=_track)
        return messages


def _track(steps: Iterable[int]) -> Iterable[int]:
    assert isinstance(steps, Sequence)
    with progress_bar() as bar:  # on stderr: samples go to stdout
        yield from bar.track(steps, description="Drawing")


def check_trainer(config: Any, command: str) -> None:
    """Reject values that Lightning accepts and on which `command` fails later, or does nothing."""
    limit = f"limit_{ {'fit': 'train', 'validate': 'val'}.get(command, command) }_batches"
    if config.get(limit) == 0:
        raise ValueError(f"--trainer.{limit} 0: {command} would do nothing; give at least 1, or leave it out for all")
    for name in ("max_steps", "max_epochs", "val_check_interval"):
        if config[name] == 0:
            raise ValueError(f"--trainer.{name} 0: give at least 1" + (", or -1 for no limit" if "max" in name else ""))
    for callback in as_list(config.callbacks):
        if isinstance(callback, (pl.callbacks.LearningRateFinder, pl.callbacks.BatchSizeFinder)):
            raise ValueError(
                f"{type(callback).__name__} sets an attribute that nothing here reads: try several values of "
                "--model.optimizer.lr (also: lit-effattn sweep --lr) or --data.batch_size"
            )
    if config.accumulate_grad_batches < 1:
        raise ValueError(f"--trainer.accumulate_grad_batches {config.accumulate_grad_batches} must be at least 1")
    if (config.gradient_clip_val or 0) < 0:
        raise ValueError(
            f"--trainer.gradient_clip_val {config.gradient_clip_val:g} must be at least 0, or null for no clipping"
        )
    if isinstance(config.devices, str) and not re.fullmatch(r"auto|-?\d+|\d+(, ?\d+)*,?", config.devices):
        raise ValueError(f"--trainer.devices {config.devices}: give a number of devices, a list of them, or auto")


def announce_unvalidated(config: Any) -> None:
    """Print a line if training ends before its first validation, which is what saves best.ckpt."""
    every, n_batches = config.val_check_interval, config.max_steps * config.accumulate_grad_batches
    if config.limit_val_batches == 0:
        return
    epochs = 1 if isinstance(every, int) else config.check_val_every_n_epoch or 1
    if 0 < (config.max_epochs or 0) < epochs:
        rank_zero_info(
            f"There will be no validation and no best.ckpt: --trainer.check_val_every_n_epoch {epochs} is more than "
            f"--trainer.max_epochs {config.max_epochs}"
        )
    if isinstance(every, int) and 0 <= n_batches < every:
        rank_zero_info(
            f"There will be no validation and no best.ckpt: --trainer.val_check_interval {every} is more than the "
            f"{n_batches} training batches that --trainer.max_steps {config.max_steps} allows"
        )


def loggers(given: Any, folder: Path) -> list[Logger]:
    """Return the loggers of a run: the user's own, default TensorBoard's, and the CSV log that `compare` reads.

    If the option `trainer.logger` is False or an empty list, there is none at all.
    """
    if given is False or given == []:
        return []
    first = own_loggers(given) or [TensorBoardLogger(folder, name="tensorboard", version="")]
    return [*first, CSVLogger(folder, name="csv")]


def own_loggers(given: Any) -> list[Logger]:
    """Return the loggers that the user named in the option `trainer.logger`."""
    return [] if isinstance(given, bool) else as_list(given)


def as_list(value: Any) -> list[Any]:
    """Return the items of an option that takes one or several; None: none."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]
