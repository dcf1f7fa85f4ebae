"""Training steps as one compiled program."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lit_effattn.ops.runtime.check_inductor import check_inductor


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
        if self.backend == "inductor":
            check_inductor("Compile", trainer.strategy.root_device)
        model.compile_objective(self.backend)
