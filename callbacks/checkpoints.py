"""The checkpoints of a run: the last for resuming, some earlier ones for averaging, and the best."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_effattn.callbacks import lightning_internals as internals
from lit_effattn.callbacks import resume_point
from lit_effattn.checkpoints.files import remove, remove_parts
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, is_checkpoint, kept_checkpoints, kept_name, short
from lit_effattn.checks import at_least
from lit_effattn.distributed.sharding import ShardedStrategy

LOGGED_KEY = "logged"

SET_ASIDE = "set_aside.ckpt"  # the name of a `last.ckpt` after resuming from `previous.ckpt`


class LastCheckpoint(Checkpoint):
    """Saves `last.ckpt`, from which training resumes as if it had not been interrupted.

    A model that is not a `Task` also needs the callback `RandomStates`.

    It is saved at the end of every epoch, after its validation, when a signal stops the run, and, if
    `every_n_train_steps` is given, within epochs: always between two optimiser steps. If something else, such as
    `max_time`, stops the run while gradients are accumulated, the run continues to the end of that optimiser step. A
    crash keeps the previous checkpoint, since the current state may be the cause of the crash.

    If the task has a `monitor` and there is a validation, it also adds callbacks that save the best checkpoints.

    With `keep` it also saves `step_00001000.ckpt` and so on, and deletes all but the last `keep` of them. These are
    saved at fixed steps, or at the ends of whole epochs, never because a run is stopped: a resumed run ends with the
    same ones as an uninterrupted run. Each is written before the `last.ckpt` of its step.

    Args:
        every_n_train_steps: Also save every so many optimiser steps, which limits what is lost if the run is killed.
        keep: Number of checkpoints to keep for averaging (`--average`). Each is as large as `last.ckpt`.
        keep_every_n_train_steps: Steps between two that are kept. Default: one an epoch.
        save_top_k: Number of the best checkpoints to keep, by the task's metric. 1: `best.ckpt` alone. More:
            `top_00001000.ckpt` and so on as well, named by their steps; `best.ckpt` is a copy of the best one.
        asynchronous: Whether training continues while a checkpoint is written, from a copy of it in the CPU's memory;
            two copies if `best.ckpt` is saved at the same step. A run that ends or is stopped waits for the file. A run
            that is killed resumes from the last complete checkpoint. Needs the plugin `AtomicCheckpointIO`, which runs
            of the command have.

    Raises:
        ValueError: If a number is out of its range, or `keep_every_n_train_steps` is given with `keep=0`; when a run
            starts, if the way it saves checkpoints does not support `asynchronous`.
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
        at_least(1, every_n_train_steps=every_n_train_steps, keep_every_n_train_steps=keep_every_n_train_steps)
        at_least(0, keep=keep)
        at_least(1, save_top_k=save_top_k)
        if keep == 0 and keep_every_n_train_steps is not None:
            raise ValueError(f"keep_every_n_train_steps={keep_every_n_train_steps} needs keep, such as keep=5")
        self.every_n_train_steps = every_n_train_steps
        self.keep = keep
        self.save_top_k = save_top_k
        self.asynchronous = asynchronous
        self.keep_every_n_train_steps = keep_every_n_train_steps
        self._saved_step = self._kept_step = -1
        self._stop_after_step = False
        self._metrics: dict[str, float] = {}  # from the checkpoint that is resumed
        self._to_log: tuple[dict[str, float], int] | None = None
        self._best: BestCheckpoint | None = None

    @property
    def best_model_path(self) -> str:
        """The path of `best.ckpt`, which Lightning's `ckpt_path="best"` reads; empty if there is none."""
        return "" if self._best is None else self._best.best_model_path

    def path(self, trainer: pl.Trainer) -> Path:
        """Return the path of `last.ckpt`, in `checkpoints` in the run's folder."""
        return Path(trainer.default_root_dir) / "checkpoints" / LAST

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Add the callbacks that save the best checkpoints, and set up asynchronous writing.

        Metrics of an earlier run are forgotten. A checkpoint is loaded after this.

        Raises:
            ValueError: If the way the run saves checkpoints does not support it, or `save_top_k` is more than 1 and
                there is no validation.
        """
        self._metrics, self._to_log = {}, None
        if stage != "fit":
            return
        self._keep_best(trainer, getattr(pl_module, "monitor", None))
        if not self.asynchronous:
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

    def _keep_best(self, trainer: pl.Trainer, monitor: str | None) -> None:
        if monitor is None or trainer.limit_val_batches == 0:
            if self.save_top_k > 1:
                raise ValueError(
                    f"save_top_k={self.save_top_k} needs a validation, and a task with a monitor; leave out "
                    "limit_val_batches=0, or keep the last ones with keep"
                )
            return
        if getattr(trainer, "fast_dev_run", False):
            return
        folder, known = self.path(trainer).parent, {c.state_key for c in trainer.checkpoint_callbacks}
        best = BestCheckpoint(folder, "best", monitor)
        if best.state_key in known:  # the user's own, of the same metric
            best = BestCheckpoint(folder, "best", monitor, key="BestCheckpoint")
        added = [best]
        if self.save_top_k > 1:
            added.append(BestCheckpoint(folder, "top_{step:08d}", monitor, self.save_top_k, key="TopCheckpoints"))
        if not any(isinstance(c, BestCheckpoint) and c.dirpath == best.dirpath for c in trainer.checkpoint_callbacks):
            self._best = best
            trainer.callbacks += added  # type: ignore[attr-defined]  # which this hook then reaches, too

    def finish(self, trainer: pl.Trainer) -> None:
        """Wait until the checkpoints are written."""
        if self.asynchronous:
            trainer.strategy.checkpoint_io.finish()  # type: ignore[attr-defined]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait until the checkpoints are written."""
        self.finish(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the metrics that were not logged yet when the checkpoint was saved, even if no step is left to train."""
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
        trainer.callback_metrics.update({n: torch.tensor(value, dtype=torch.float64) for n, value in metrics.items()})
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            last = self.path(trainer)
            remove_parts(last.parent)
            if trainer.global_step == 0 and is_checkpoint(last):
                rank_zero_warn(
                    f"{short(last)} of an earlier run will be replaced; to go on from it, call trainer.fit with "
                    f"ckpt_path={short(last)!r}, or give this run another default_root_dir"
                )
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
        self.save(trainer, keep=by_epoch and internals.epoch_is_whole(trainer))

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the resume point, the latest metrics, and those of this step or epoch, which are logged later."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        logged: dict[str, Any] = {"metrics": convert_tensors_to_scalars(dict(trainer.callback_metrics))}
        after_step, after_epoch = resume_point.within_step(trainer), resume_point.within_epoch_end(trainer)
        if after_epoch or (after_step and internals.logs_this_step(trainer)):
            logged["of_step"] = convert_tensors_to_scalars(internals.metrics_to_log(trainer))
            logged["step"] = internals.logged_step(trainer) - after_epoch
        checkpoint[LOGGED_KEY] = logged
        resume_point.mark(checkpoint["loops"], trainer)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read the metrics.

        Raises:
            ValueError: If a metric is not a number.
        """
        if trainer.state.fn == TrainerFn.FITTING and LOGGED_KEY in checkpoint:
            self._metrics, self._to_log = _checked(checkpoint[LOGGED_KEY])

    def _finish_step(self, trainer: pl.Trainer) -> None:
        """Postpone a stop to the end of the optimiser step, since a checkpoint has no gradients."""
        if internals.is_accumulating(trainer):
            self._stop_after_step |= trainer.should_stop
            trainer.should_stop = False
        elif self._stop_after_step:
            trainer.should_stop = True

    def save(self, trainer: pl.Trainer, keep: bool = False) -> None:
        """Save now; only between two steps or in a validation.

        With `keep`, also save one that is kept for averaging, as at every step that `keep_every_n_train_steps` divides.
        """
        if not trainer.sanity_checking and not getattr(trainer, "fast_dev_run", False):
            for logger in trainer.loggers:
                logger.save()
            if keep or _is_due(trainer.global_step, self.keep_every_n_train_steps, self._kept_step):
                self._keep(trainer)
            trainer.save_checkpoint(self.path(trainer))
            self._saved_step = trainer.global_step

    def _keep(self, trainer: pl.Trainer) -> None:
        """Save a checkpoint for averaging, and delete those before the last `keep`.

        Those of later steps are deleted too, since this run was resumed from an earlier step.
        """
        path = self.path(trainer).with_name(kept_name(trainer.global_step))
        trainer.save_checkpoint(path)
        self._kept_step = trainer.global_step
        if trainer.is_global_zero:
            kept = kept_checkpoints(path.parent, path)
            end = kept.index(path) + 1
            for superseded in [*kept[: max(end - self.keep, 0)], *kept[end:]]:
                trainer.strategy.remove_checkpoint(superseded)


def _is_due(step: int, every: int | None, saved_step: int) -> bool:
    return every is not None and step != saved_step and step % every == 0


def _checked(logged: Any) -> tuple[dict[str, float], tuple[dict[str, float], int] | None]:
    """Return the metrics in a checkpoint, and those to log with their step. Check that all of them are numbers."""
    if isinstance(logged, dict) and isinstance(logged.get("step", 0), int):
        metrics, of_step = tables = [logged.get(name, {}) for name in ("metrics", "of_step")]
        if all(isinstance(t, dict) and all(isinstance(v, (int, float)) for v in t.values()) for t in tables):
            return metrics, (of_step, logged["step"]) if of_step and "step" in logged else None
    raise ValueError(f"the checkpoint's {LOGGED_KEY!r} are not numbers by name: it was not saved by lit-effattn")


class BestCheckpoint(ModelCheckpoint):
    """Saves the checkpoint with the best value of a metric after each validation.

    Lightning's `ModelCheckpoint`, except that an infinite or NaN metric is never among the best.

    Args:
        dirpath: The folder.
        filename: The name of the file without ".ckpt"; `{step}` in it is the step.
        monitor: The metric; lower is better.
        save_top_k: Number of the best checkpoints to keep.
        key: Name of the state of this callback in checkpoints. Callbacks of one metric need different names. Default:
            that of `ModelCheckpoint`.
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
            rank_zero_warn(f"{self.monitor} is {float(current)}: this checkpoint is not among the best")
            return False
        return super().check_monitor_top_k(trainer, current)
