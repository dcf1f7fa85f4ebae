"""Truncated back-propagation through time: the state is carried from batch to batch."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn import sequence
from lit_effattn.distributed.memories import memories_of
from lit_effattn.nn.evaluating import evaluating
from lit_effattn.sequence import SequenceModule, State, reads_values

MEMORY_KEY = "memory_carry"


class MemoryCarry(pl.Callback):
    """Carries each stream's detached state from one batch to the next.

    Gradients end at a segment's border, the context does not (Dai et al. 2019, section 3.2). Training, validation and
    test have separate memories; a validation within an epoch does not change that of training. A memory is empty at the
    start of every epoch, and is reset in the rows where the batch's `fresh` marks a new document. The checkpoint has
    the memory of every process, so a resumed run continues with the same memories.

    Works with models that have `memory`, `carries` and `active_backbone` (see `LanguageModel`), on data in contiguous
    streams: row i of a batch continues row i of the previous one. A step reads the model's `memory` and, since this
    callback sets `carries`, replaces it by the state after the batch.

    Args:
        training: Whether to carry memories in training.
        evaluation: Whether to carry memories in validation, test and prediction.

    Raises:
        ValueError: In `setup`, if the model can't carry a memory, or its state would grow without bound.
    """

    changes_scores = True
    """Whether commands that score take this callback, too, from the configuration of a run."""

    def __init__(self, training: bool = True, evaluation: bool = True) -> None:
        if not training and not evaluation:
            raise ValueError("training=False and evaluation=False: MemoryCarry has no effect; leave it out")
        self.training = training
        self.evaluation = evaluation
        self._training: State | None = None  # the training's memory, while the model does not train

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the model can carry a memory. A run begins without one; a checkpoint is loaded after this.

        Raises:
            ValueError: If it can't, if its state grows without bound, or if there is another `MemoryCarry`.
        """
        if not hasattr(pl_module, "active_backbone"):
            raise ValueError(f"MemoryCarry: {type(pl_module).__name__} carries no memory between batches; leave it out")
        if sum(isinstance(callback, MemoryCarry) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("trainer.callbacks has two MemoryCarry with other options; give the whole list, with one")
        if stage == "fit":
            self._training = None
        if stage == "fit" and self.training:
            _check_bounded(pl_module.backbone)  # type: ignore[arg-type]
        if self.evaluation:
            with evaluating(pl_module):
                _check_bounded(pl_module.active_backbone)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------------- training

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Give the model the memory of a checkpoint, which is loaded to the CPU."""
        pl_module.memory = sequence.to(self._training, pl_module.device)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Clear the memory. Not called if a run resumes within an epoch, which keeps its memory."""
        pl_module.memory = self._training = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Reset the memory of rows that start a new document."""
        self._training = None  # the model has it
        pl_module.carries = self.training
        if self.training:
            pl_module.memory = _for_batch(pl_module.active_backbone, pl_module.memory, batch)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Move the memory to this callback, for a checkpoint: later calls of the model have other data."""
        pl_module.carries = False
        if pl_module.memory is not None:
            self._training, pl_module.memory = pl_module.memory, None

    # ----------------------------------------------------------------------------------------------------- evaluation

    on_validation_start = on_test_start = on_predict_start = on_train_end

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Clear the memory at the first batch; reset the memory of rows that start a new document."""
        pl_module.carries = self.evaluation
        if self.evaluation:
            memory = None if batch_idx == 0 else pl_module.memory
            pl_module.memory = _for_batch(pl_module.active_backbone, memory, batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Restore the training's memory, if the training continues."""
        pl_module.carries = False
        within_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        pl_module.memory = self._training if within_training else None

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Remove the memory from the model."""
        if trainer.training:
            self.on_train_end(trainer, pl_module)
        pl_module.memory, pl_module.carries = None, False

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the training's memory of every process."""
        memory = pl_module.memory if trainer.training and pl_module.memory is not None else self._training
        checkpoint[MEMORY_KEY] = memories_of(trainer).gather_memory(memory)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore this process's memory, unless the number of processes differs: the streams are then different."""
        saved = checkpoint.get(MEMORY_KEY)  # one memory for each process
        if saved is None or not self.training or trainer.state.fn != TrainerFn.FITTING:
            return
        memories = memories_of(trainer)
        if len(saved) != memories.streams.number:
            rank_zero_warn(
                f"the checkpoint has the memories of {len(saved)} processes, this run has "
                f"{memories.streams.number}: the streams are divided differently, so the memories start empty"
            )
            return
        try:
            like = pl_module.backbone.initial_state(1)
            self._training = memories.scatter_memory(saved, like)
            if self._training is None:  # saved before the first batch of an epoch
                return
            found, needed = ([*sequence.tensors(state)] for state in (self._training, like))
            if len(found) < len(needed):
                raise ValueError(f"it has {len(found)} tensors, and a state of this model {len(needed)}")
            for t, expected in zip(found, needed, strict=False):
                if t.is_floating_point() != expected.is_floating_point():
                    raise ValueError(f"a tensor of type {expected.dtype} was expected, and one of {t.dtype} was found")
            rows = {t.size(0) for t in sequence.tensors(self._training)}
            if len(rows) > 1:
                raise ValueError(f"its tensors have {sorted(rows)} rows")
        except ValueError as error:
            raise ValueError(f"{MEMORY_KEY} of the checkpoint is not a memory of this model: {error}") from error


def _for_batch(module: SequenceModule, memory: State | None, batch: Any) -> State:
    """Return a memory for every row of `batch`, empty in the rows that start a new document."""
    if not hasattr(batch, "fresh"):
        raise ValueError(
            f"MemoryCarry: the batch is a {type(batch).__name__} without the field `fresh`; make one of your "
            "tensors by lit_effattn.datamodules.TokenBatch"
        )
    starts, rows = batch.fresh, len(batch.inputs)
    if starts is None:
        rank_zero_warn(
            "MemoryCarry has no effect: `fresh` of the batch is None, so every row begins a new sequence; give a "
            "tensor that is False in the rows that continue those of the batch before"
        )
    if memory is None or starts is None:
        return module.initial_state(rows, device=batch.inputs.device)
    memory_rows = len(next(sequence.tensors(memory)))
    if memory_rows != rows:
        raise ValueError(
            f"a batch has {rows} rows, but the previous one had {memory_rows}: row i continues the memory of row i, so "
            "all batches of an epoch need the same number; use data in contiguous streams (TextStream)"
        )
    if reads_values(starts) and not starts.any():  # a reset copies the whole memory, even if no row is reset
        return memory
    return module.reset(memory, starts)


def _check_bounded(module: SequenceModule) -> None:
    """Raise ValueError if the state of `module` grows without bound."""
    option = module.bounded_by
    if option is None:
        return
    unbounded = [m for m in module.modules() if isinstance(m, SequenceModule) and m.bounded_by == option]
    remedy = f"set its `{option}`, or use" if option else "use"
    raise ValueError(
        f"MemoryCarry: the state of {type(unbounded[-1]).__name__} grows with every segment, without bound; {remedy} "
        "a kind whose state is bounded; `lit-effattn kinds` says which are"
    )
