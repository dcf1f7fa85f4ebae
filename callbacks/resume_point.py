"""Where a run can be resumed exactly, and the counters of Lightning's loops that make it do so.

Lightning 2.6 resumes exactly from the end of a step that no validation follows, and, without `max_steps`, from the end
of an epoch. In all other cases it skips what was left to do. `mark` writes the counters of a checkpoint so that it
resumes like those:

==================================  ==============================================================================
the checkpoint is saved             the resumed run
==================================  ==============================================================================
after a step, validation is due     validates, then trains on
in a validation                     runs the whole validation again, then trains on
after a step otherwise              trains on
at an epoch's end                   begins the next epoch
where `max_steps`, `max_time` or    trains on in the epoch
early stopping ended an epoch
==================================  ==============================================================================
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

_ZERO = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
_IN_VALIDATION = {"total": {**_ZERO, "ready": 1, "started": 1}, "current": dict(_ZERO), "is_last_batch": False}
"""Lightning takes a validation with these counters as interrupted, and runs it from its first batch."""


def within_accumulation(trainer: pl.Trainer) -> bool:
    """Return whether gradients are accumulated that no optimiser step has used yet. A checkpoint has no gradients."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def within_step(trainer: pl.Trainer) -> bool:
    """Return whether callbacks are at the end of a training batch, before Lightning logs its metrics."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return total.processed > total.completed


def can_resume(trainer: pl.Trainer) -> bool:
    """Return whether a checkpoint that is saved after the current training batch, or in a validation, resumes exactly.

    False within an accumulation of gradients, and after an epoch's last batch if no validation follows: the end of the
    epoch then follows at once, and is not repeated by a resumed run.
    """
    if within_accumulation(trainer):
        return False
    ended = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
    return trainer.validating or not ended or _validation_follows(trainer)


def mark(loops: dict[str, Any], trainer: pl.Trainer) -> None:
    """Change the loops' state in a checkpoint that `trainer` is about to save, as the module's docstring says."""
    state = loops["fit_loop"]
    epochs, batches = state["epoch_progress"], state["epoch_loop.batch_progress"]
    if trainer.validating or within_step(trainer):
        follows = _validation_follows(trainer)
        _set(batches, completed=0 if follows else -1)
        if follows:
            state["epoch_loop.val_loop.batch_progress"] = _IN_VALIDATION
    elif epochs["total"]["started"] == epochs["total"]["processed"]:
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            _set(epochs, ready=0, started=0, completed=0)
            batches["current"], batches["is_last_batch"] = dict(_ZERO), False
            state["state_dict"].pop("combined_loader", None)  # the next epoch's begins at its start
        elif epochs["total"]["processed"] > epochs["total"]["completed"]:
            for counts in epochs["total"], epochs["current"]:
                counts["processed"] -= 1
            # As after the step: on resuming, Lightning counts its batch as completed, and adds 1 to the steps.
            _set(batches, completed=-1)
            state["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _set(progress: dict[str, Any], **offsets: int) -> None:
    """Set counters to `processed` plus an offset."""
    for counts in progress["total"], progress["current"]:
        counts.update({name: counts["processed"] + offset for name, offset in offsets.items()})


def restore(trainer: pl.Trainer) -> None:
    """Correct the loops when training starts from a checkpoint, after Lightning has read their counters."""
    epoch_loop = trainer.fit_loop.epoch_loop
    # With `max_steps` Lightning takes the next epoch as one to resume, and leaves it at once.
    if epoch_loop.restarting and epoch_loop.batch_progress.current.ready == 0:
        epoch_loop.restarting = False
    epoch_loop.val_loop.batch_progress.total.reset()  # else a later checkpoint has the counters of `_IN_VALIDATION`


def _validation_follows(trainer: pl.Trainer) -> bool:
    """Return whether a validation is due after the current batch; one that ends a stopped run is not due."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    stop, trainer.should_stop = trainer.should_stop, False
    try:
        return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
    finally:
        trainer.should_stop = stop
