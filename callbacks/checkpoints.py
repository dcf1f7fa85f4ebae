"""The checkpoints of a run: the last, for resuming, some before it, for averaging, and the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_effattn.callbacks import resume_point
from lit_effattn.callbacks.lightning_internals import epoch_is_whole, logged_step, logs_this_step, metrics_to_log
from lit_effattn.checkpoints.files import remove, remove_parts
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, kept_checkpoints, kept_name
from lit_effattn.distributed.sharding import ShardedStrategy

LOGGED_KEY = "logged"

SET_ASIDE = "set_aside.ckpt"
"""The name of a `last.ckpt` after resuming from `previous.ckpt`."""


class LastCheckpoint(Checkpoint):
    """Saves `last.ckpt`, from which training resumes as if it had not been interrupted.

    It is saved at the end of every epoch, after its validation, when a signal stops the run, and, if
    `every_n_train_steps` is given, between epochs: always between two optimiser steps. If something else stops the run
    while gradients are accumulated, say `max_time`, the run goes on to the end of that optimiser step. A crash keeps
    the previous checkpoint, since the current state may be the cause of the crash.

    With `keep` it also saves `step_00001000.ckpt` and so on, and deletes all but the last `keep` of them. These are
    saved at fixed steps, or at the ends of whole epochs, never because a run is stopped. A resumed run thus ends with
    the same ones as an uninterrupted run. Each is written before the `last.ckpt` of its step.

    Args:
        every_n_train_steps: Also save after every so many optimiser steps, which bounds the loss if the run is killed.
        keep: How many checkpoints to keep for averaging (`--average`). Each is as large as `last.ckpt`.
        keep_every_n_train_steps: Steps from one that is kept to the next. Default: one an epoch.
        save_top_k: How many of the best checkpoints to keep by the task's metric. 1 keeps `best.ckpt` alone, more keep
            `top_00001000.ckpt` and so on as well, named by their steps, of which `best.ckpt` is a copy of the best.
        asynchronous: Whether training goes on while a checkpoint is written, from a copy of it in the CPU's memory; two
            copies if `best.ckpt` is saved at the same step. A run that ends or is stopped waits for the file. A run
            that is killed resumes from the last checkpoint that was whole. Needs the plugin `AtomicCheckpointIO`,
            which runs of the command have.

    Raises:
        ValueError: a number is out of its range, or steps are given with `keep=0`; or, when a run starts,
            `asynchronous` is not supported by how the run saves checkpoints.
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        keep: int = 0,
        keep_every_n_train_steps: int | None = None,
        save_top_k: int = 1,
        asynchronous: bool = False,
    ) -> None:
        super().__init__()
        for name, every in (
            ("every_n_train_steps", every_n_train_steps),
            ("keep_every_n_train_steps", keep_every_n_train_steps),
        ):
            if every is not None and every < 1:
                raise ValueError(f"{name}={every} is not positive; leave it out to save every epoch")
        if keep < 0:
            raise ValueError(f"keep={keep} is negative; 0 keeps none, 5 and 20 are usual")
        if keep == 0 and keep_every_n_train_steps is not None:
            raise ValueError(f"keep_every_n_train_steps={keep_every_n_train_steps} needs keep=5, or how many to keep")
        if save_top_k < 1:
            raise ValueError(f"save_top_k={save_top_k} is not positive; 1 keeps the best checkpoint alone")
        self.every_n_train_steps = every_n_train_steps
        self.keep = keep
        self.save_top_k = save_top_k
        self.asynchronous = asynchronous
        self.keep_every_n_train_steps = keep_every_n_train_steps
        self._saved_step = self._kept_step = -1
        self._stop_after_step = False
        self._metrics: dict[str, float] = {}  # from the checkpoint that is resumed
        self._to_log: tuple[dict[str, float], int] | None = None

    def path(self, trainer: pl.Trainer) -> Path:
        """Return the path of `last.ckpt`, in `checkpoints` in the run's folder."""
        return Path(trainer.default_root_dir) / "checkpoints" / LAST

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have checkpoints written while training goes on, if asked for."""
        if not self.asynchronous or stage != "fit":
            return
        if isinstance(trainer.strategy, ShardedStrategy) and trainer.strategy.saves_parts:
            raise ValueError(
                "asynchronous=True with save_distributed_checkpoint is not supported: all processes wait for the parts "
                "of the others; leave one of them out"
            )
        if not hasattr(trainer.strategy.checkpoint_io, "asynchronous"):
            raise ValueError(
                "asynchronous=True needs Trainer(plugins=[lit_effattn.checkpoints.io.AtomicCheckpointIO()])"
            )
        trainer.strategy.checkpoint_io.asynchronous = True

    def finish(self, trainer: pl.Trainer) -> None:
        """Wait until the checkpoints are written."""
        if self.asynchronous:
            trainer.strategy.checkpoint_io.finish()  # type: ignore[attr-defined]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait until the checkpoints are written."""
        self.finish(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what was not logged yet when the checkpoint was saved, even if there is nothing left to train."""
        if self._to_log is not None:
            for logger in trainer.loggers:
                logger.log_metrics(*self._to_log)
                logger.save()
        self._to_log = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare the loops for exact resuming, and remove unfinished files of processes that were killed."""
        self._saved_step = self._kept_step = trainer.global_step
        self._stop_after_step = False
        resume_point.restore(trainer)
        metrics, self._metrics = self._metrics, {}
        known = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        trainer.callback_metrics.update(known)
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            last = self.path(trainer)
            remove_parts(last.parent)
            if trainer.ckpt_path is not None and Path(trainer.ckpt_path) == last.with_name(PREVIOUS) and last.exists():
                remove(last.with_name(SET_ASIDE))
                last.replace(last.with_name(SET_ASIDE))  # damaged: it must not become previous.ckpt

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save if `every_n_train_steps` or `keep_every_n_train_steps` divides the step."""
        self._finish_step(trainer)
        step = trainer.global_step
        due = _is_due(step, self.every_n_train_steps, self._saved_step)
        due |= _is_due(step, self.keep_every_n_train_steps, self._kept_step)
        if due and resume_point.can_resume(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finish the optimiser step if the validation stops the run."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._finish_step(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save at the end of the epoch."""
        by_epoch = self.keep > 0 and self.keep_every_n_train_steps is None
        self.save(trainer, keep=by_epoch and epoch_is_whole(trainer))

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add where the run resumes, the latest metrics, and those of this step or epoch, which are logged later."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        logged: dict[str, Any] = {"metrics": convert_tensors_to_scalars(dict(trainer.callback_metrics))}
        after_step, after_epoch = resume_point.within_step(trainer), resume_point.within_epoch_end(trainer)
        if after_epoch or (after_step and logs_this_step(trainer)):
            logged["of_step"] = convert_tensors_to_scalars(metrics_to_log(trainer))
            logged["step"] = logged_step(trainer) - after_epoch
        checkpoint[LOGGED_KEY] = logged
        resume_point.mark(checkpoint["loops"], trainer)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read the metrics, and correct the loops' counters of checkpoints that an older lit-effattn has saved.

        Raises:
            ValueError: the metrics are no numbers.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if LOGGED_KEY in checkpoint:
            self._metrics, self._to_log = _checked(checkpoint[LOGGED_KEY])
        else:
            resume_point.mark_epoch_end(checkpoint["loops"]["fit_loop"])

    def _finish_step(self, trainer: pl.Trainer) -> None:
        """Put off a stop to the end of the optimiser step: gradients are not in a checkpoint."""
        if resume_point.within_accumulation(trainer):
            self._stop_after_step |= trainer.should_stop
            trainer.should_stop = False
        elif self._stop_after_step:
            trainer.should_stop = True

    def save(self, trainer: pl.Trainer, keep: bool = False) -> None:
        """Save now; only between two steps or in a validation.

        Args:
            trainer: The trainer.
            keep: Save a checkpoint that stays as well. At steps that `keep_every_n_train_steps` divides it always does.
        """
        if not trainer.sanity_checking and not getattr(trainer, "fast_dev_run", False):
            for logger in trainer.loggers:
                logger.save()
            if keep or _is_due(trainer.global_step, self.keep_every_n_train_steps, self._kept_step):
                self._keep(trainer)
            trainer.save_checkpoint(self.path(trainer))
            self._saved_step = trainer.global_step

    def _keep(self, trainer: pl.Trainer) -> None:
        """Save a checkpoint that stays, and delete those before the last `keep`.

        Those of later steps are deleted too: this run was resumed from before them.
        """
        path = self.path(trainer).with_name(kept_name(trainer.global_step))
        trainer.save_checkpoint(path)
        self._kept_step = trainer.global_step
        if trainer.is_global_zero:
            kept = kept_checkpoints(path.parent, path)
            end = kept.index(path) + 1
            for superseded in [*kept[: max(end - self.keep, 0)], *kept[end:]]:
                trainer.strategy.remove_checkpoint(superseded)


def _is_due(step: int, every: int | None, before: int) -> bool:
    return every is not None and step != before and step % every == 0


def _checked(logged: Any) -> tuple[dict[str, float], tuple[dict[str, float], int] | None]:
    """Return the metrics in a checkpoint, and those to log with their step. All of them are numbers."""
    if isinstance(logged, dict) and isinstance(logged.get("step", 0), int):
        tables = [logged.get(name, {}) for name in ("metrics", "of_step")]
        if all(isinstance(t, dict) and all(isinstance(v, (int, float)) for v in t.values()) for t in tables):
            metrics, of_step = tables
            return metrics, (of_step, logged["step"]) if of_step and "step" in logged else None
    raise ValueError(f"the checkpoint's {LOGGED_KEY!r} are not numbers by name: it was not saved by lit-effattn")


class BestCheckpoint(ModelCheckpoint):
    """Saves the checkpoint with the best value of a metric after each validation.

    Lightning's `ModelCheckpoint`, for which a metric that is infinite or NaN is never among the best.

    Args:
        dirpath: The folder.
        filename: The name of the file without ".ckpt"; `{step}` in it is the step.
        monitor: The metric, of which less is better.
        save_top_k: How many of the best to keep.
        key: The name under which checkpoints have the state of this callback. Callbacks of one metric need different
            ones. Default: that of `ModelCheckpoint`.
    """

    def __init__(
        self, dirpath: str | Path, filename: str, monitor: str, save_top_k: int = 1, key: str = ModelCheckpoint.__name__
    ) -> None:
        super().__init__(
            dirpath,
            filename,
            monitor,
            save_top_k=save_top_k,
            save_on_train_epoch_end=False,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )
        self._key = key

    @property
    def state_key(self) -> str:
        """The name of the state in checkpoints."""
        return super().state_key.replace(type(self).__qualname__, self._key, 1)

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        """Return whether `current` is to be saved."""
        # On all processes together: a metric that is not synchronised may be finite on some.
        if current is not None and not trainer.strategy.reduce_boolean_decision(bool(torch.isfinite(current))):
            rank_zero_warn(f"{self.monitor} is {float(current)}: it is not taken as the best")
            return False
        return super().check_monitor_top_k(trainer, current)
