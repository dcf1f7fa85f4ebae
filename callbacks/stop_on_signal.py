"""Stopping on a signal, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.callbacks.checkpoints import LastCheckpoint
from lit_effattn.callbacks.lightning_internals import cluster_environment
from lit_effattn.callbacks.resume_point import can_resume
from lit_effattn.checkpoints import slurm

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)  # Windows lacks the last two


class Stopped(SystemExit):
    """Raised if a signal stops the run. The process exits with 128 + the signal's number, as shells expect.

    Args:
        code: The exit code.
        job: The number of the SLURM job to requeue when the run is saved.
    """

    def __init__(self, code: int, job: str | None = None) -> None:
        super().__init__(code)
        self.job = job


class StopOnSignal(pl.Callback):
    """Ends training between two steps on a signal, on all processes at the same step, so that it can be saved.

    The signals are SIGTERM, Ctrl-C (SIGINT), SIGUSR1 and SIGHUP. One that was ignored when the training started, as
    `nohup` ignores SIGHUP, stays ignored. The process then exits with 128 + the signal's number. A second Ctrl-C stops
    at once and saves nothing. In a SLURM job SIGUSR1 (`sbatch --signal=USR1@120`) also requeues the job, which then
    continues the same run.

    Lightning's own handler exits with 0, and runs collective communication inside the signal handler, which can
    deadlock; in a SLURM job it saves outside of the run.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._previous: dict[int, Any] = {}  # handlers

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers."""
        self._signal = 0
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in handled}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the previous handlers, before Lightning restores the ones from before it installed its own."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save if a signal stopped the run, and requeue its job. Then restore the previous handlers."""
        try:
            if isinstance(exception, Stopped) and trainer.state.fn == TrainerFn.FITTING:
                for callback in trainer.checkpoint_callbacks:
                    if isinstance(callback, LastCheckpoint):
                        callback.save(trainer)
                        callback.finish(trainer)  # a job that is requeued may be killed at once
                if exception.job is not None and trainer.is_global_zero:
                    slurm.requeue(exception.job)
        finally:
            self.teardown(trainer, pl_module, "fit")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop if a signal was received, at the end of an optimiser step."""
        if can_resume(trainer):
            self._stop_if_signalled(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop if a signal was received since the last step."""
        self._stop_if_signalled(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Stop if a signal was received, without waiting for the end of the validation."""
        if self._previous and can_resume(trainer):
            self._stop_if_signalled(trainer)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal:
            raise KeyboardInterrupt
        self._signal = number
        if number == signal.SIGINT:
            rank_zero_info("\nStopping after this step, to save. Press Ctrl-C again to stop at once.")

    def _stop_if_signalled(self, trainer: pl.Trainer) -> None:
        number = self._signal
        if trainer.world_size > 1:  # a signal may reach only some of the processes, but all stop at the same step
            largest = torch.tensor(number, device=trainer.strategy.root_device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            number = int(largest)
        if not number:
            return
        rank_zero_info(f"\nStopped by {signal.Signals(number).name} at step {trainer.global_step}.")
        cluster = cluster_environment(trainer)
        requeues = isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue and number == cluster.requeue_signal
        # The launcher kills its own process if one of its children reports a failure.
        raise Stopped(128 + number if trainer.is_global_zero else 0, slurm.job() if requeues else None)
