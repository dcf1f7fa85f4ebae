"""Restoring a run from a checkpoint: an error in any part is one line that names the file and the part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from traceback import extract_tb
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import SGD, Optimizer

from lit_effattn.checkpoints.files import DamagedError
from lit_effattn.checkpoints.folders import Divided
from lit_effattn.checkpoints.runs import short
from lit_effattn.checkpoints.shape import wrong

_OF_MACHINE = (OSError, FloatingPointError, MisconfigurationException, torch.OutOfMemoryError)
"""Errors that are not the file's, with messages of their own."""


class CheckpointConnector(_CheckpointConnector):
    """Lightning's connector, with a `DamagedError` for any error while it restores a part.

    Lightning and torch do not compare sizes: an empty list of optimiser states restores nothing. Here the names, the
    numbers and the shapes of states are compared with those of new ones first. Lightning's names are private here,
    since it has no public way to come between the file and the parts that it restores: a callback sees the content
    only before the first one.
    """

    def _restore_modules_and_callbacks(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Read the file; restore the model, the data and the callbacks."""
        with self._restoring(checkpoint_path):
            super()._restore_modules_and_callbacks(checkpoint_path, weights_only)

    def restore_training_state(self) -> None:
        """Restore the precision, the loops, the optimisers and the schedules."""
        with self._restoring():
            super().restore_training_state()

    def restore_loops(self) -> None:
        """Restore the counters of the loops."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            super().restore_loops()
            if self.trainer.state.fn == TrainerFn.VALIDATING:  # logged at the step at which `fit` logged its validation
                n_steps = self._loaded_checkpoint.get("global_step", 0)
                self.trainer.fit_loop.epoch_loop._batches_that_stepped = max(n_steps - 1, 0)
            return
        if self._loaded_checkpoint.get("loops") is None:
            raise ValueError(_only_a_model("loops"))
        loop: Any = self.trainer.fit_loop
        counters = {"epoch": 0, "global_step": 0, "loops": {"fit_loop": loop.state_dict()}}
        check_counters(self._loaded_checkpoint, counters)
        super().restore_loops()
        loop._load_combined_loader_states = partial(self._restore_loaders, loop._load_combined_loader_states)

    def _restore_loaders(self, restore: Callable[[], None]) -> None:
        """Restore the positions of the training data's loaders, which Lightning creates after `restore_loops`.

        Lightning would restore no position from an empty list, and an interrupted epoch would begin again.
        """
        loop = self.trainer.fit_loop
        assert loop._combined_loader is not None
        with self._restoring():
            n_saved = len(loop._combined_loader_states_to_load)
            n = sum(isinstance(loader, _Stateful) for loader in loop._combined_loader.flattened)
            batches = loop.epoch_loop.batch_progress
            interrupted = batches.current.ready > 0 and not batches.is_last_batch
            if loop.restarting and n_saved != n and (n_saved > 0 or interrupted):
                raise ValueError(
                    f"loops.fit_loop.state_dict.combined_loader has {n_saved} positions in the training data, which "
                    f"have {n} loaders with one; resume from another checkpoint of the run, or start a new run from "
                    "its weights with --init_weights in place of --ckpt_path"
                )
            restore()

    def restore_optimizers(self) -> None:
        """Restore the states of the optimisers."""
        saved, optimizers = self._loaded_checkpoint["optimizer_states"], self.trainer.optimizers
        _check_number(saved, optimizers, "optimizer_states")
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)  # of float16, which skips steps at first
        n_steps = self.trainer.global_step if scaler is None else 0
        for i, (state, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
            check_optimizer(state, optimizer, f"optimizer_states[{i}]", n_steps=n_steps)
        super().restore_optimizers()

    def restore_lr_schedulers(self) -> None:
        """Restore the states of the learning rate schedules."""
        saved, configs = self._loaded_checkpoint["lr_schedulers"], self.trainer.lr_scheduler_configs
        callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]
        if not configs and any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
            return  # which restores its own schedule
        _check_number(saved, configs, "lr_schedulers")
        for i, (state, config) in enumerate(zip(saved, configs, strict=True)):
            check_schedule(state, config.scheduler, f"lr_schedulers[{i}]")
        super().restore_lr_schedulers()

    def restore_optimizers_and_schedulers(self) -> None:
        """Restore the states of the optimisers and schedules."""
        for name in ("optimizer_states", "lr_schedulers"):
            if name not in self._loaded_checkpoint:
                raise ValueError(_only_a_model(name))
        super().restore_optimizers_and_schedulers()

    @contextmanager
    def _restoring(self, path: Any = None) -> Iterator[None]:
        """Turn any error within into a `DamagedError` that names the file, and the part or what is wrong with it."""
        path = short(path or self._ckpt_path or "the checkpoint")
        try:
            yield
        except (DamagedError, *_OF_MACHINE):
            raise
        except ValueError as error:
            raise DamagedError(f"{path} can't be restored: {error}") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            names = [frame.name for frame in extract_tb(error.__traceback__) if frame.name.startswith("restore_")]
            part = names[-1].removeprefix("restore_").replace("_", " ") if names else "version"
            raise DamagedError(
                f"{path} can't be restored: its part {part} is not as lit-effattn saves it ({reason})"
            ) from error


def _only_a_model(name: str) -> str:
    return (
        f"it has no {name}: it holds a model, not a run that can be resumed; start a new run from its weights with "
        "--init_weights in place of --ckpt_path"
    )


def _check_number(saved: Any, objects: Any, where: str) -> None:
    if not isinstance(saved, list) or len(saved) != len(objects):
        raise wrong(where, saved, f"a list of {len(objects)}")


def check_counters(saved: Any, new: Any, where: str = "") -> None:
    """Check that a saved tree has the counters of a new one, integers from 0: Lightning ignores missing ones.

    `new` is a mapping of counters and mappings of them, or a counter. Other values in it are ignored.

    Raises:
        ValueError: If a counter is missing, is negative or is not an integer. The message names it.
    """
    if not isinstance(new, dict):
        if not isinstance(saved, int) or saved < 0:
            raise wrong(where, saved, "a count")
    elif not isinstance(saved, dict):
        raise wrong(where, saved, "a mapping")
    else:
        for name, value in new.items():
            if isinstance(value, (dict, int)):
                check_counters(saved.get(name), value, f"{where}.{name}".removeprefix("."))


def check_schedule(saved: Any, schedule: Any, where: str) -> None:
    """Check that the state of a schedule has the public entries of a new one, and counts from 0.

    Raises:
        ValueError: If an entry is missing, or the number of epochs is below 0.
    """
    new = schedule.state_dict()
    if not isinstance(saved, dict):
        raise wrong(where, saved, "a mapping")
    if missing := [name for name in new if name not in saved and not name.startswith("_")]:
        raise ValueError(f"{where} has no {', '.join(missing)}, which a {type(schedule).__name__} has")
    check_counters(saved, {"last_epoch": 0} if "last_epoch" in new else {}, where)


def check_optimizer(saved: Any, optimizer: Optimizer, where: str, *, n_steps: int = 0) -> None:
    """Compare the sizes in the state of an optimiser with those of a new one, which torch does not do.

    A state that was saved after `n_steps` steps, 1 or more and none of them skipped, has entries.

    Raises:
        ValueError: If a size differs. The message names the part, its value and the expected one.
    """
    groups = optimizer.param_groups
    sizes = " + ".join(str(len(group["params"])) for group in saved["param_groups"])
    expected = " + ".join(str(len(group["params"])) for group in groups)
    if sizes != expected:
        raise ValueError(
            f"{where}.param_groups have {sizes} parameters, and those of this run {expected}: another optimizer or "
            "decay_biases_and_gains made them; start a new run from its weights with --init_weights in place of "
            "--ckpt_path"
        )
    known = type(optimizer).__module__.startswith(("torch.optim", "lit_effattn."))  # a user's own may have no state
    has_state = known and not (isinstance(optimizer, SGD) and not any(group["momentum"] for group in groups))
    if n_steps and has_state and not any(saved["state"].values()):
        raise wrong(f"{where}.state", saved["state"], f"that of {type(optimizer).__name__} after {n_steps} steps")
    for old, group in zip(saved["param_groups"], groups, strict=True):
        for number, parameter in zip(old["params"], group["params"], strict=True):
            for name, value in saved["state"].get(number, {}).items():
                # The state of a parameter has its shape, or 1 where it is shared along a dimension.
                at = f"{where}.state[{number}].{name}"
                same_rank = isinstance(value, (Tensor, Divided)) and len(value.shape) == parameter.ndim
                if same_rank and any(n not in (1, m) for n, m in zip(value.shape, parameter.shape, strict=True)):
                    raise wrong(at, value, f"a tensor for a parameter of shape {tuple(parameter.shape)}")
                if known and name == "step" and not value >= 0:
                    raise ValueError(f"{at} is {float(value):g}, not a count")
