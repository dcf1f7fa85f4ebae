"""Stopping training, or skipping steps, if the loss or a gradient is infinite or NaN."""

from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_effattn.callbacks.checkpoints import LastCheckpoint
from lit_effattn.callbacks.lightning_internals import is_accumulating, logs_this_step
from lit_effattn.checkpoints.runs import is_checkpoint
from lit_effattn.checks import at_least

PATIENCE_WITH_SCALER = 20
"""Steps in a row that float16's loss scaler may skip. Each halves the scale, which starts at 2^16."""

_NEVER = 2**62


class NotFiniteError(FloatingPointError):
    """The loss, a gradient or a weight is infinite or NaN."""


class CheckFinite(pl.Callback):
    """Stops training if the loss or a gradient is infinite or NaN, before a checkpoint is overwritten.

    Every step is checked on its device. All processes read the result together, at the steps that `log_every_n_steps`
    divides and before every checkpoint, so that the other steps don't wait for the device. A checkpoint with a
    parameter or an optimiser's state that is not finite is never written: `last.ckpt` is then of an earlier step, and
    can be resumed. Buffers may be infinite. The square of a finite gradient above 1.8e19, which optimisers keep, is
    infinite in float32.

    With float16 the loss scaler skips such steps itself; training stops after 20 in a row.

    Args:
        skip: Maximum number of such steps in a row that are skipped instead. A skipped step does not change weights and
            optimiser, and empties a carried memory; the learning rate's schedule continues. Every step then waits for
            its device.

    Raises:
        ValueError: If `skip` is negative.
        NotFiniteError: In training. It names the step, the batch and the learning rate.
    """

    def __init__(self, skip: int = 0) -> None:
        at_least(0, skip=skip)
        self.skip = skip
        self.skipped = 0
        self._in_a_row = torch.zeros((), dtype=torch.int64)
        self._where = "before the first step"
        self._steps: deque[tuple[int, str]] = deque(maxlen=10_000)  # since the last check, with their descriptions

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the counts of an earlier run. A checkpoint is loaded after this."""
        if stage == "fit":
            self.skipped, self._in_a_row = 0, torch.zeros((), dtype=torch.int64)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting."""
        self._scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._patience = max(self.skip, PATIENCE_WITH_SCALER if self._scaled else 0)
        self._steps.clear()
        self._finite = torch.ones((), dtype=torch.bool, device=pl_module.device)  # in the current optimiser step
        self._in_a_row = self._in_a_row.to(pl_module.device)
        self._failed = torch.full_like(self._in_a_row, _NEVER)  # the first step beyond the patience

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Check the loss."""
        self._finite &= loss.detach().isfinite().all()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Check the gradients. Skip the step if they are not finite and `skip` allows it."""
        rates = ", ".join(f"{group['lr']:.3g}" for group in optimizer.param_groups)
        batch = trainer.fit_loop.epoch_loop.batch_idx
        self._where = f"step {trainer.global_step + 1} (epoch {trainer.current_epoch}, batch {batch}, lr {rates})"
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._finite &= _all_finite([p.grad for p in parameters], self._finite.device)
        if not self.skip or self._scaled:
            return
        if trainer.world_size > 1:
            on_all = self._finite.int()
            dist.all_reduce(on_all, dist.ReduceOp.MIN)
            self._finite = on_all.bool()
        if self._finite:
            return
        self.skipped += 1
        rank_zero_warn(f"the loss or a gradient is infinite or NaN: {self._where} is skipped")
        for parameter in parameters:
            parameter.grad = None  # optimisers do not change a parameter without a gradient
        if hasattr(pl_module, "memory"):
            pl_module.memory = None  # type: ignore[assignment]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Count the steps that were not finite; at the logging interval, stop."""
        if is_accumulating(trainer):
            return
        step = trainer.global_step
        self._in_a_row = torch.where(self._finite, 0, self._in_a_row + 1)
        self._failed = torch.where(self._in_a_row > self._patience, self._failed.clamp(max=step), self._failed)
        self._finite = torch.ones_like(self._finite)
        self._steps.append((step, self._where))
        if logs_this_step(trainer):
            self._stop(self._failed, trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop here too, since the run may end."""
        self._stop(self._failed, trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log how many steps were skipped."""
        if self.skipped:
            rank_zero_info(f"{self.skipped} steps were skipped, since the loss or a gradient was infinite or NaN")

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps were skipped, and how many in a row were not finite."""
        return {"skipped": self.skipped, "in_a_row": int(self._in_a_row)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts.

        Raises:
            ValueError: If a count is not an integer.
        """
        skipped, in_a_row = counts = state_dict.get("skipped"), state_dict.get("in_a_row", 0)
        if not isinstance(skipped, int) or not isinstance(in_a_row, int):
            raise ValueError(f"CheckFinite: the checkpoint's counts are {counts}, not integers")
        self.skipped, self._in_a_row = skipped, torch.tensor(in_a_row)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Stop before weights that are not finite are saved."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            states = (of_one for optimizer in trainer.optimizers for of_one in optimizer.state.values())
            kept = [v for state in states for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
            device = self._failed.device
            finite = _all_finite([p for p in pl_module.parameters() if p.is_floating_point()], device)
            finite &= _all_finite(kept, device, torch.float64)  # sums of squares may be too large for float32
            self._stop(torch.where(finite, self._failed, self._failed.clamp(max=trainer.global_step)), trainer)

    def _stop(self, failed: Tensor, trainer: pl.Trainer) -> None:
        """Stop if a step failed on any process."""
        if trainer.world_size > 1:
            failed = failed.clone()
            dist.all_reduce(failed, dist.ReduceOp.MIN)
        step = int(failed)  # waits for the device
        if step == _NEVER:
            self._steps.clear()
            return
        paths = [c.path(trainer) for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint)]
        saved = "last.ckpt is of an earlier step and finite" if any(map(is_checkpoint, paths)) else "nothing was saved"
        raise NotFiniteError(
            "the loss, a gradient, a weight or the optimiser's state is infinite or NaN at "
            f"{dict(self._steps).get(step, self._where)}; {saved}. Lower the learning rate (--model.optimizer.lr) or "
            "clip gradients (--trainer.gradient_clip_val 1), with --init_weights to start from a checkpoint; or skip "
            f"more than {self.skip} such steps in a row with --trainer.callbacks+=CheckFinite --trainer.callbacks.skip"
        )


def _all_finite(tensors: list[Any], device: torch.device, least: torch.dtype = torch.float32) -> Tensor:
    """Return whether all values are finite, (), on `device`, without waiting for it; of DTensors, the local values."""
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.ones((), dtype=torch.bool, device=device)
    values: Any
    if tensors[0].is_cuda:
        values = torch._foreach_norm(tensors, float("inf"))  # a few kernels for all
    else:  # sums are ten times as fast on a CPU; sums of squares would overflow earlier
        values = [t.detach().sum(dtype=torch.promote_types(t.dtype, least)) for t in tensors]
    widest = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    return torch.stack([value.detach().to(device, widest) for value in values]).isfinite().all()
