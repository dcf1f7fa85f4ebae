"""Normalisation of the loss over all batches and processes of an optimiser step."""

from typing import Any

import lightning.pytorch as pl
import torch

from lit_effattn.callbacks.lightning_internals import is_accumulating


class GlobalLossNormalization(pl.Callback):
    """Divides the loss of an optimiser step by the scored items of all its batches and processes.

        L = Σ_b n_b l_b / Σ_b n_b           over the accumulated batches b of all processes; Lightning: mean_b l_b

    l_b is the loss of a batch, a mean over its n_b scored items: tokens, phones, sequences or images. The two are equal
    if all n_b are. Where rows are ragged, only this L does not depend on how an optimiser step is divided into batches
    and processes (fairseq and torchtitan train with it). Auxiliary losses are weighted in the same way. The logged
    `train/loss` remains l_b.

    Raises:
        ValueError: In `on_fit_start`, if the model can't count its scored items.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the model weight the loss of each batch by its scored items."""
        if not hasattr(pl_module, "scored_items"):
            raise ValueError(
                f"GlobalLossNormalization: {type(pl_module).__name__} is not a Task of lit_effattn, which counts its "
                "scored items; leave the callback out"
            )
        pl_module.scored_items = []  # type: ignore[assignment]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the model return unweighted losses again."""
        pl_module.scored_items = None  # type: ignore[assignment]

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Make the model return unweighted losses again."""
        self.on_fit_end(trainer, pl_module)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Divide the gradients by the scored items, after the last batch of an optimiser step and before clipping."""
        if is_accumulating(trainer):
            return
        n = torch.stack(pl_module.scored_items).sum().float()
        pl_module.scored_items.clear()
        # Lightning divided each loss by `accumulate_grad_batches`; the strategy averages gradients over the processes.
        mean = float(trainer.strategy.reduce(n, reduce_op="mean"))  # over processes
        scale = trainer.accumulate_grad_batches / mean if mean else 0.0
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
