"""Logging of a run's time and memory."""

import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

SECONDS, DEVICE_MEMORY, PROCESS_MEMORY = "cost/seconds", "cost/device_bytes", "cost/process_bytes"
"""Columns of the log: time since this fit began, validation included; the peak memory of the GPU's tensors; and the
peak resident memory of the process, which is logged on the CPU."""


class CostLog(Callback):
    """Logs the seconds since this fit began, and the peak memory so far, every `log_every_n_steps` optimiser steps.

    A resumed run begins at 0 again, in a log of its own. The figures are of the first process and its device. Logging
    does not wait for the GPU.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._logged_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self._logged_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log if `log_every_n_steps` divides the step."""
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning sets it
        if not every or step % every or step == self._logged_step:
            return
        self._logged_step = step
        figures = {SECONDS: time.perf_counter() - self._began, **_peak_memory(pl_module.device)}
        for logger in trainer.loggers:
            logger.log_metrics(figures, step - 1)  # as Lightning, which counts from 0


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory in bytes; nothing on Windows without a GPU."""
    if device.type == "cuda":
        return {DEVICE_MEMORY: torch.cuda.max_memory_allocated(device)}
    if sys.platform == "win32":
        return {}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {PROCESS_MEMORY: peak if sys.platform == "darwin" else 1024 * peak}  # Linux counts in KiB
