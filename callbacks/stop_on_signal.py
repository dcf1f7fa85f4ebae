"""Stopping on a signal, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.callbacks.resume_point import can_resume


class Stopped(SystemExit):
    """Raised if a signal stops the run. The process exits with 128 + the signal's number, as shells expect."""


class StopOnSignal(pl.Callback):
    """Ends training between two steps on SIGTERM or Ctrl-C, on all processes at the same step, so that it can be saved.

    The process then exits with 143 (SIGTERM) or 130 (Ctrl-C). A second Ctrl-C stops at once. Lightning's own handler
    exits with 0, and runs collective communication inside the signal handler, which can deadlock.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers."""
        self._signal = 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the previous handlers, before Lightning restores the ones from before it installed its own."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the previous handlers."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop if a signal was received, at the end of an optimiser step."""
        if can_resume(trainer):
            self._stop_if_asked(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop if a signal was received since the last step."""
        self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Stop if a signal was received, without waiting for the end of the validation."""
        if self._before and can_resume(trainer):
            self._stop_if_asked(trainer)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal:
            raise KeyboardInterrupt
        self._signal = number
        if number == signal.SIGINT:
            rank_zero_info("\nStopping after this step, to save. Press Ctrl-C again to stop at once.")

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        # A signal may reach only some of the processes, but all must stop at the same step.
        if trainer.world_size > 1 and not trainer.strategy.reduce_boolean_decision(bool(self._signal), all=False):
            return
        if trainer.world_size == 1 and not self._signal:
            return
        number = self._signal or signal.SIGTERM
        rank_zero_info(f"\nStopped by {signal.Signals(number).name} at step {trainer.global_step}.")
        # The launcher kills its own process if one of its children reports a failure.
        raise Stopped(128 + number if trainer.is_global_zero else 0)
