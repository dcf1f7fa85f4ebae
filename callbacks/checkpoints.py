"""Checkpoints that are whole or not there, and the one to go on from."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there when it is whole.

    A crash or a full disk while saving leaves the checkpoint that was there before as it was.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            OSError: it could not be written, say because the disk is full; names the file and the reason.
        """
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())  # the bytes before the name: a power cut must not leave an empty file
            part.replace(path)
        except BaseException as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if not isinstance(error, (OSError, RuntimeError)):
                raise
            reason = _os_error(error)
            if reason is None and isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise
            kept = f"; {path} is the one saved before, intact" if path.exists() else ""
            raise OSError(
                f"the checkpoint {path} could not be written: {reason.strerror if reason else error}{kept}. "
                "Make room, then resume with --ckpt_path last"
            ) from error

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Read a checkpoint: plain containers of tensors only, unless `weights_only` is False."""
        return read_checkpoint(path, weights_only=weights_only is not False)


def read_checkpoint(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint to the CPU.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is cut off, or not a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:  # what is no pickle fails in every way there is
        reason = str(error).partition("\n")[0].partition(". ")[0]  # what torch adds is advice to trust the file
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) can't be read as a checkpoint: it is cut off, damaged, or of "
            f"another program ({reason or type(error).__name__})"
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"{path} holds no Lightning checkpoint: it has no `state_dict`")
    return checkpoint


def _os_error(error: BaseException | None) -> OSError | None:
    """Find the operating system's reason: torch raises an error of its own on top of it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


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
