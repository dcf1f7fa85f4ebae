"""Training steps as one compiled program."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


class Compile(pl.Callback):
    """Has `torch.compile` make one program of what a training step computes: embedding, backbone, loss, and the state.

    For models with `compile_objective` (every `Task`). Evaluation and generation run as without it, and checkpoints
    are the same, so that a run may be resumed, tested or drawn from with it or without. The first step compiles, which
    takes a minute or so; the first batch of another size compiles once more, for all sizes; memory that is carried
    (`MemoryCarry`) compiles nothing. CTC and `AdaptiveHead`'s loss can't be compiled and stand between two programs.
    Rounding differs from that of the plain run, and so do dropout's random numbers.

    An LSTM's recurrence is unrolled, which takes it a tenth of a second a position and layer: leave it plain.

    Args:
        backend: That of `torch.compile`.

    Raises:
        ValueError: there is no such backend; on setting up, the model can't be compiled, or inductor lacks something.

    Example:
        >>> Compile("inducktor")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: backend='inducktor' is none of ...inductor...
    """

    def __init__(self, backend: str = "inductor") -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"backend={backend!r} is none of {', '.join(known)}; inductor is the usual one")
        self.backend = backend

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compile, which begins with the first step: before DDP wraps the model, and in each of its processes."""
        if stage != "fit":
            return
        model: Any = pl_module
        if not hasattr(model, "compile_objective"):
            raise ValueError(f"Compile: {type(model).__name__} has no `compile_objective`; leave the callback out")
        if self.backend == "inductor" and trainer.strategy.root_device.type == "cpu":
            _refuse_without_compiler()
        model.compile_objective(self.backend)


def _refuse_without_compiler() -> None:
    """Refuse now what would fail in the first step, in many words."""
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise ValueError(
            f"Compile: backend='inductor' needs Python's headers on the CPU, and there is no Python.h in {headers}; "
            "install them, say with apt-get install python3-dev, or leave Compile out"
        )
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    wanted = os.environ.get("CXX", usual)
    if shutil.which(wanted) is None:
        raise ValueError(
            f"Compile: backend='inductor' needs a C++ compiler on the CPU, and there is no {wanted!r}; install one, "
            "say with apt-get install g++, or let the environment variable CXX name it, or leave Compile out"
        )
