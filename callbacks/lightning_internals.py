"""Every private name of Lightning's loops that callbacks and tasks use. Check this file when Lightning changes."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Return whether gradients are accumulated that no optimiser step has used yet."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def epoch_is_whole(trainer: pl.Trainer) -> bool:
    """Return whether the epoch's last batch was trained on: a limit may end an epoch earlier."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def has_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether the current batch is the last that the training loader has for this epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def is_within_epoch(trainer: pl.Trainer) -> bool:
    """Return whether training resumes within an epoch."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return epoch_loop.restarting and epoch_loop.batch_progress.current.ready > 0


def logs_this_step(trainer: pl.Trainer) -> bool:
    """Return whether metrics are logged after this training step (`log_every_n_steps`)."""
    return trainer._logger_connector.should_update_logs


def metrics_to_log(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the metrics of this step or epoch that loggers get."""
    return dict(trainer._logger_connector.metrics["log"])


def logged_step(trainer: pl.Trainer) -> int:
    """Return the step that loggers get: the number of batches that the optimiser has used."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def advance_logged_step(trainer: pl.Trainer) -> None:
    """Count one more batch that the optimiser has used."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def forget_validation(trainer: pl.Trainer) -> None:
    """Let the next validation count as the first one: an earlier `fit` of this trainer may have validated."""
    trainer.fit_loop.epoch_loop.val_loop._has_run = False


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Return whether a validation follows the current batch, whether or not training should stop."""
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return False  # depends on the clock
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    stop, trainer.should_stop = trainer.should_stop, False
    try:
        return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
    finally:
        trainer.should_stop = stop


def cluster_environment(trainer: pl.Trainer) -> Any:
    """Return the cluster that the processes were started by; None if there is none."""
    return trainer._accelerator_connector.cluster_environment


def leave_signals_alone(trainer: pl.Trainer) -> None:
    """Let `trainer` install no signal handlers, which would exit with 0, and in a SLURM job save outside of the run."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def averages_buffers(callback: pl.Callback) -> bool:
    """Return whether a callback replaces the buffers of the model by averages, as `EMAWeightAveraging` does."""
    return isinstance(callback, WeightAveraging) and callback._use_buffers
