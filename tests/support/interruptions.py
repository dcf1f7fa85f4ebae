"""Callbacks with which tests of the command interrupt a run; named in its configuration."""

import os
import resource
import signal
import subprocess
from pathlib import Path

import lightning.pytorch as pl


class SignalAt(pl.Callback):
    """Sends this process a signal when a step begins.

    `every_rank=False`: on the first process only. `once`: a file that is made before; no signal is sent if it is there.
    """

    def __init__(self, step: int, number: int, every_rank: bool = True, once: str | None = None) -> None:
        self.step, self.number, self.every_rank = step, number, every_rank
        self.once = None if once is None else Path(once)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and (self.every_rank or trainer.is_global_zero):
            if self.once is not None:
                if self.once.exists():
                    return
                self.once.touch()
            os.kill(os.getpid(), self.number)


class SignalToGroup(pl.Callback):
    """Has another process send a signal to this process and those that load its data, in a step or a test."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def setup(self, *_: object, **__: object) -> None:
        os.setpgid(0, 0)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            name = signal.Signals(self.number).name
            subprocess.run(["kill", "-s", name, "--", f"-{os.getpid()}"], start_new_session=True, check=True)

    def on_test_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        self.on_train_batch_start(trainer)


class FullDiskAt(pl.Callback):
    """Lets no file grow beyond 10 kB from a step on: writing more fails, as on a full disk."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
