"""Compilation of training steps with `torch.compile`."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.torch_version import TorchVersion

from lit_effattn.ops.runtime.check_inductor import check_inductor

_OLDEST = "2.14"  # tested; 2.12 and 2.13 were not


class Compile(pl.Callback):
    """Compiles a training step into one graph with `torch.compile`: embedding, backbone, loss and state.

    Works with models that have `compile_objective` (every `Task`). Evaluation and generation are not compiled, and
    checkpoints are the same, so a run may be resumed, tested or sampled from with or without this callback. The first
    step compiles, which takes about a minute. The first batch of another size compiles once more, for all sizes. A
    carried memory (`MemoryCarry`) causes no recompilation. CTC, `AdaptiveHead`'s loss and flash-linear-attention's
    kernels can't be compiled and break the graph. Rounding and dropout's random numbers differ from the run without
    compilation.

    An LSTM's recurrence is unrolled, which takes a tenth of a second per position and layer: do not compile it.

    Args:
        backend: Backend of `torch.compile`.

    Raises:
        ValueError: If the backend is unknown; in `setup`, if the model can't be compiled, PyTorch is older than 2.14,
            or inductor lacks a requirement.

    Examples:
        >>> Compile("inducktor")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: backend='inducktor' is not one of ...inductor...
    """

    def __init__(self, backend: str = "inductor") -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"backend={backend!r} is not one of {', '.join(known)}; the usual choice is inductor")
        self.backend = backend
        self._compiled: Any = None  # the model, while it trains

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Request compilation, which the first step starts: before DDP wraps the model, and in each process.

        Raises:
            ValueError: If the model, PyTorch or the machine does not support it.
        """
        if stage != "fit":
            return
        model: Any = pl_module
        if not hasattr(model, "compile_objective"):
            raise ValueError(f"Compile: {type(model).__name__} has no `compile_objective`; leave the callback out")
        if TorchVersion(torch.__version__) < _OLDEST:
            raise ValueError(
                f"Compile needs PyTorch {_OLDEST} or newer, and this is {torch.__version__}: with 2.11, compiled steps "
                "fail or have wrong gradients. Update PyTorch or leave the callback out"
            )
        if self.backend == "inductor":
            check_inductor("Compile", trainer.strategy.root_device)
        model.compile_objective(self.backend)
        self._compiled = model

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Undo the request: a later run of the model may be without this callback."""
        if self._compiled is not None:
            self._compiled.compile_objective(None)
            self._compiled = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Undo the request."""
        self.teardown(trainer, pl_module, "fit")
