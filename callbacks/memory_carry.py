"""Truncated back-propagation through time: the state is carried from batch to batch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn import sequence
from lit_effattn.sequence import SequenceModule, State, reads_values

MEMORY_KEY = "memory_carry"


class MemoryCarry(pl.Callback):
    """Carries each stream's detached state from one batch to the next.

    Gradients end at a segment's border, the context does not (Dai et al. 2019, section 3.2). Training, validation and
    test have separate memories; a validation within an epoch does not change that of training. A memory is empty at the
    start of every epoch, and is reset in the rows where the batch's `fresh` marks a new document. The checkpoint has
    the memory of every process, so a resumed run continues with the same memories.

    Works with models that have `carries_memory`, `memory` and `active_backbone` (see `LanguageModel`), on data in
    contiguous streams: row i of a batch continues row i of the previous one.

    Args:
        training: Whether to carry memories in training.
        evaluation: Whether to carry memories in validation, test and prediction.

    Raises:
        ValueError: In `setup`, if the model can't carry a memory, or its state would grow without bound.
    """

    def __init__(self, training: bool = True, evaluation: bool = True) -> None:
        if not training and not evaluation:
            raise ValueError("training=False and evaluation=False: MemoryCarry then does nothing; leave it out")
        self.training = training
        self.evaluation = evaluation
        self._aside: State | None = None  # the training's memory while the model is evaluated
        self._evaluating = False
        self._carried = False  # before the evaluation

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the model can carry a memory."""
        if not hasattr(pl_module, "active_backbone"):
            raise ValueError(f"MemoryCarry: {type(pl_module).__name__} carries no memory between batches; leave it out")
        if stage == "fit" and self.training:
            _refuse_unbounded(pl_module.backbone)  # type: ignore[arg-type]
        if self.evaluation:
            training = [module for module in pl_module.modules() if module.training]  # parts may be frozen
            pl_module.eval()
            _refuse_unbounded(pl_module.active_backbone)  # type: ignore[arg-type]
            for module in training:
                module.training = True

    # ------------------------------------------------------------------------------------------------------- training

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start carrying the memory."""
        pl_module.carries_memory = self.training
        if pl_module.memory is not None:  # from a checkpoint, which is loaded to the CPU
            pl_module.memory = sequence.to(pl_module.memory, pl_module.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Stop carrying, since later calls have other data. The memory is kept for a checkpoint."""
        pl_module.carries_memory = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Clear the memory. Not called if a run resumes within an epoch, which keeps its memory."""
        pl_module.memory = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Reset the memory of rows that start a new document."""
        if self.training:
            _start_rows(pl_module, batch)

    # ----------------------------------------------------------------------------------------------------- evaluation

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Set the training's memory aside."""
        self._aside, pl_module.memory = pl_module.memory, None
        self._evaluating, self._carried = True, pl_module.carries_memory
        pl_module.carries_memory = self.evaluation

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Restore the training's memory."""
        pl_module.memory, self._aside = self._aside, None
        self._evaluating, pl_module.carries_memory = False, self._carried

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Clear the memory at the first batch; reset the memory of rows that start a new document."""
        if batch_idx == 0:
            pl_module.memory = None
        if self.evaluation:
            _start_rows(pl_module, batch)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the training's memory of every process."""
        memory = self._aside if self._evaluating else pl_module.memory
        mine = sequence.pack(sequence.to(sequence.detach(memory), "cpu"))
        everyone: list[Any] = [mine]
        if trainer.world_size > 1:
            everyone = [None] * trainer.world_size
            dist.all_gather_object(everyone, mine)
        checkpoint[MEMORY_KEY] = everyone

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore this process's memory, unless the number of processes differs: the streams are then different."""
        everyone = checkpoint.get(MEMORY_KEY)
        if everyone is None or not self.training or trainer.state.fn != TrainerFn.FITTING:
            return
        if len(everyone) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint has the memories of {len(everyone)} processes, this run has {trainer.world_size}: the "
                "streams are divided differently, so the memories start empty"
            )
            return
        packed = everyone[trainer.global_rank]
        pl_module.memory = None if packed is None else sequence.unpack(packed, pl_module.backbone.initial_state(1))


def _start_rows(pl_module: Any, batch: Any) -> None:
    """Make sure that every row has a memory, which is empty in rows that start a new document."""
    module: SequenceModule = pl_module.active_backbone
    fresh = batch.fresh
    rows = len(batch.inputs)
    memory = pl_module.memory
    if memory is None or fresh is None:
        pl_module.memory = module.initial_state(rows, device=batch.inputs.device)
        return
    had = len(next(sequence.tensors(memory)))
    if had != rows:
        raise ValueError(
            f"a batch has {rows} rows and the one before had {had}: row i continues the memory of row i, so "
            "all batches of an epoch need the same number; use data in contiguous streams (TextStream)"
        )
    if not reads_values(fresh) or fresh.any():  # a reset copies the whole memory, even if no row is fresh
        pl_module.memory = module.reset(memory, fresh)


def _refuse_unbounded(module: SequenceModule) -> None:
    if module.bounded_by is None:
        return
    how = f"set its option `{module.bounded_by}`" if module.bounded_by else "use an attention whose state is bounded"
    raise ValueError(f"MemoryCarry: the model's state grows with every segment, without bound; {how}")
