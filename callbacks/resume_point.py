"""Points from which a run can be resumed exactly, and the counters of Lightning's loops for them.

Lightning 2.6 resumes exactly from the end of a step that no validation follows, and, without `max_steps`, from the end
of an epoch. In all other cases it skips the rest of the epoch or of the validation. `mark` writes the counters of a
checkpoint so that these cases resume exactly, too:

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

from typing import Any

import lightning.pytorch as pl

from lit_effattn.callbacks import lightning_internals as internals

_ZERO = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
_IN_VALIDATION = {"total": {**_ZERO, "ready": 1, "started": 1}, "current": dict(_ZERO), "is_last_batch": False}
"""Lightning treats a validation with these counters as interrupted, and runs it from its first batch."""


def within_step(trainer: pl.Trainer) -> bool:
    """Return whether callbacks are at the end of a training batch, before Lightning logs its metrics."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return total.processed > total.completed


def within_epoch_end(trainer: pl.Trainer) -> bool:
    """Return whether callbacks are at the end of a training epoch, before Lightning logs its metrics."""
    total: Any = trainer.fit_loop.epoch_progress.total
    return trainer.training and total.processed > total.completed


def can_resume(trainer: pl.Trainer) -> bool:
    """Return whether a checkpoint that is saved after the current training batch, or in a validation, resumes exactly.

    False within an accumulation of gradients, since a checkpoint has no gradients. Also False after an epoch's last
    batch if no validation follows: the end of the epoch comes next, and a resumed run does not repeat it.
    """
    if internals.is_accumulating(trainer):
        return False
    return trainer.validating or not internals.epoch_is_whole(trainer) or internals.is_validation_due(trainer)


def mark(loops: dict[str, Any], trainer: pl.Trainer) -> None:
    """Change the loops' state in a checkpoint that `trainer` is about to save, as in the table of this module."""
    state = loops["fit_loop"]
    epochs, batches = state["epoch_progress"], state["epoch_loop.batch_progress"]
    # The total number of validated batches depends on the validations that an interrupted run repeats. It is not used.
    state["epoch_loop.val_loop.batch_progress"]["total"] = dict(_ZERO)
    if trainer.validating or within_step(trainer):
        follows = internals.is_validation_due(trainer)
        _set(batches, completed=0 if follows else -1)
        if follows:
            state["epoch_loop.val_loop.batch_progress"] = _IN_VALIDATION
    elif epochs["total"]["started"] == epochs["total"]["processed"]:
        if internals.epoch_is_whole(trainer):
            _end_epoch(state)
        elif batches["current"]["ready"] > 0:
            _continue_epoch(state, stepped=not internals.is_accumulating(trainer))


def _end_epoch(state: dict[str, Any]) -> None:
    _set(state["epoch_progress"], ready=0, started=0, completed=0)
    batches = state["epoch_loop.batch_progress"]
    batches["current"], batches["is_last_batch"] = dict(_ZERO), False
    state["state_dict"].pop("combined_loader", None)  # the next epoch's begins at its start


def _continue_epoch(state: dict[str, Any], stepped: bool) -> None:
    for counts in state["epoch_progress"]["total"], state["epoch_progress"]["current"]:
        counts["processed"] = counts["completed"] = counts["processed"] - 1
    # As after the step: on resuming, Lightning counts its batch as completed, and adds 1 to the steps.
    _set(state["epoch_loop.batch_progress"], completed=-1)
    state["epoch_loop.state_dict"]["_batches_that_stepped"] -= stepped


def _set(progress: dict[str, Any], **offsets: int) -> None:
    """Set counters to `processed` plus an offset."""
    for counts in progress["total"], progress["current"]:
        counts.update({name: counts["processed"] + offset for name, offset in offsets.items()})


def restore(trainer: pl.Trainer) -> None:
    """Correct the loops when training starts from a checkpoint, after Lightning has read their counters."""
    epoch_loop = trainer.fit_loop.epoch_loop
    # With `max_steps` Lightning treats the next epoch as one to resume, and ends it at once.
    if epoch_loop.restarting and epoch_loop.batch_progress.current.ready == 0:
        epoch_loop.restarting = False
    validation = epoch_loop.val_loop
    internals.forget_validation(trainer)
    if epoch_loop.restarting and validation.restarted_mid_evaluation and not internals.is_validation_due(trainer):
        internals.advance_logged_step(trainer)  # without a validation, Lightning would not count the last step
    validation.batch_progress.total.reset()  # else a later checkpoint has the counters of `_IN_VALIDATION`
