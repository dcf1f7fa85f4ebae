"""Stopping on a signal, with a checkpoint."""

import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_effattn.callbacks.checkpoints import LastCheckpoint
from lit_effattn.callbacks.lightning_internals import cluster_environment
from lit_effattn.callbacks.resume_point import can_resume
from lit_effattn.checkpoints import slurm
from lit_effattn.stopping import Receiver, Stopped, handle


class StopOnSignal(pl.Callback):
    """Ends training between two steps on a signal, on all processes at the same step, and lets `LastCheckpoint` save.

    The signals are SIGTERM, Ctrl-C (SIGINT), SIGUSR1 and SIGHUP. One that was ignored when the training started, as
    `nohup` ignores SIGHUP, stays ignored. The process then exits with 128 + the signal's number. A second Ctrl-C stops
    at once and saves nothing. In a SLURM job SIGUSR1 (`sbatch --signal=USR1@120`) also requeues the job, which then
    continues the same run.

    Outside the training, as in a sanity check or a test, where there is nothing to save, commands stop at once: see
    `lit_effattn.stopping`.

    Lightning's own handler exits with 0, and runs collective communication inside the signal handler, which can
    deadlock; in a SLURM job it saves outside of the run.
    """

    def __init__(self) -> None:
        self._receiver = Receiver(self._announce)
        self._training = False
        self._restore: list[Callable[[], None]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the processes that load data, which are started before the training, ignore signals."""
        self._restore = [handle(None)]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers. Warn if other callbacks save checkpoints, but none at a signal."""
        saving = [] if getattr(trainer, "fast_dev_run", False) else trainer.checkpoint_callbacks
        if saving and not any(isinstance(callback, LastCheckpoint) for callback in saving):
            rank_zero_warn("StopOnSignal saves nothing without the callback LastCheckpoint; add it to the trainer")
        self._receiver = Receiver(self._announce)
        self._training = True
        self._restore.append(handle(self._receiver))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the previous handlers, before Lightning restores the ones from before it installed its own."""
        self.teardown(trainer, pl_module, "fit")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop if a signal was received since the last step: the end of the run has saved it."""
        if self._receiver.number:
            self._stop(trainer, self._receiver.number)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the previous handlers."""
        self._training = False
        while self._restore:
            self._restore.pop()()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """If a signal stopped the training, save it, and requeue its job. Then restore the previous handlers."""
        try:
            if isinstance(exception, Stopped):
                self._save(trainer, exception) if self._training else _stop_processes(trainer)
        finally:
            self.teardown(trainer, pl_module, "fit")

    @staticmethod
    def _save(trainer: pl.Trainer, stopped: Stopped) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, LastCheckpoint):
                callback.save(trainer)
                callback.finish(trainer)  # a job that is requeued may be killed at once
        if stopped.job is not None and trainer.is_global_zero:
            slurm.requeue(stopped.job)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop if a signal was received, at the end of an optimiser step."""
        if can_resume(trainer):
            self._stop_if_signalled(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop if a signal was received since the last step."""
        self._stop_if_signalled(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Stop if a signal was received, without waiting for the end of the validation."""
        if self._training and can_resume(trainer):
            self._stop_if_signalled(trainer)

    @staticmethod
    def _announce(number: int) -> None:
        if number == signal.SIGINT:
            rank_zero_info("\nStopping after this step, to save. Press Ctrl-C again to stop at once.")

    def _stop_if_signalled(self, trainer: pl.Trainer) -> None:
        number = self._receiver.number
        if trainer.world_size > 1:  # a signal may reach only some of the processes, but all stop at the same step
            largest = torch.tensor(number, device=trainer.strategy.root_device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            number = int(largest)
        if number:
            cluster = cluster_environment(trainer)
            requeues = isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue
            self._stop(trainer, number, slurm.job() if requeues and number == cluster.requeue_signal else None)

    @staticmethod
    def _stop(trainer: pl.Trainer, number: int, job: str | None = None) -> None:
        message = f"Stopped by {signal.Signals(number).name} at step {trainer.global_step}."
        rank_zero_info(f"\n{message}")
        raise Stopped(number, message, job)


def _stop_processes(trainer: pl.Trainer) -> None:
    """Stop the other processes of this run, which would wait for this one."""
    if trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signal.SIGTERM)
