"""Restoring a run from a checkpoint: the sizes of each part are compared with the object that loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import SGD, Optimizer

from lit_effattn.checkpoints.files import DamagedError
from lit_effattn.checkpoints.folders import Divided
from lit_effattn.checkpoints.runs import short
from lit_effattn.checkpoints.shape import check_counts, check_like, wrong

_LOOPS = {
    TrainerFn.FITTING: "fit_loop",
    TrainerFn.VALIDATING: "validate_loop",
    TrainerFn.TESTING: "test_loop",
    TrainerFn.PREDICTING: "predict_loop",
}
_EXPECTED = (ValueError, OSError, FloatingPointError, MisconfigurationException, torch.OutOfMemoryError)
"""Errors with messages of their own: those of our checks and of the machine."""


class CheckpointConnector(_CheckpointConnector):
    """Lightning's connector with checks of each part that it restores.

    Lightning and torch trust the content: an empty list of optimiser states restores nothing, and a scheduler's state
    replaces all attributes that it names. Here a part with other sizes than its object is a `DamagedError`, and so is
    any other error while a part is restored. Lightning's names are private here, since it has no public way to come
    between the file and the parts that it restores: a callback sees the content only before the first one.
    """

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Read the file."""
        with self._restoring("its version", checkpoint_path):
            super().resume_start(checkpoint_path, weights_only)

    def restore_model(self) -> None:
        """Restore the weights."""
        with self._restoring("the model"):
            super().restore_model()

    def restore_datamodule(self) -> None:
        """Restore the state of the data module."""
        name = type(self.trainer.datamodule).__qualname__  # type: ignore[attr-defined]  # Lightning sets it
        state = self._loaded_checkpoint.get(name)
        with self._restoring(f"the state of {name}"):
            if name in self._loaded_checkpoint and not isinstance(state, dict):
                raise wrong(name, state, "a mapping")
            super().restore_datamodule()

    def restore_callbacks(self) -> None:
        """Restore the states of the callbacks."""
        if not self._loaded_checkpoint:
            return
        with self._restoring("the callbacks"):
            states = self._loaded_checkpoint.get("callbacks", {})
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if callback.state_key in states:
                    check_like(states[callback.state_key], callback.state_dict(), type(callback).__name__)
            super().restore_callbacks()

    def restore_precision_plugin_state(self) -> None:
        """Restore the state of mixed precision."""
        with self._restoring("the precision"):
            super().restore_precision_plugin_state()

    def restore_loops(self) -> None:
        """Restore the counters of the loops."""
        if not self._loaded_checkpoint:
            return
        with self._restoring("the loops"):
            fn = self.trainer.state.fn
            assert fn is not None
            name = _LOOPS[fn]
            saved = self._loaded_checkpoint.get("loops")
            if saved is not None:
                if name not in saved:
                    raise ValueError(f"loops has no {name}")
                new = getattr(self.trainer, name).state_dict()
                del new["state_dict"]  # Lightning adds the loaders' states to those of a new loop
                check_like(saved[name], new, name)
                check_counts({key: saved[name][key] for key in new}, name)
            elif fn == TrainerFn.FITTING:
                raise ValueError(_only_a_model("loops"))
            super().restore_loops()
            if fn == TrainerFn.FITTING:
                loop: Any = self.trainer.fit_loop
                loop._load_combined_loader_states = partial(self._restore_loaders, loop._load_combined_loader_states)

    def _restore_loaders(self, restore: Callable[[], None]) -> None:
        """Restore the positions of the training data's loaders, which Lightning creates after `restore_loops`.

        Lightning would restore no position from an empty list, and an interrupted epoch would begin again.
        """
        loop = self.trainer.fit_loop
        assert loop._combined_loader is not None
        with self._restoring("the loaders' state"):
            n_saved = len(loop._combined_loader_states_to_load)
            n = sum(isinstance(loader, _Stateful) for loader in loop._combined_loader.flattened)
            batches = loop.epoch_loop.batch_progress
            interrupted = batches.current.ready > 0 and not batches.is_last_batch
            if loop.restarting and n_saved != n and (n_saved > 0 or interrupted):
                raise DamagedError(
                    f"{short(self._ckpt_path or '')} can't be restored: loops.fit_loop.state_dict.combined_loader has "
                    f"{n_saved} positions in the training data, which have {n} loaders with one; resume from another "
                    "checkpoint of the run, or start a new run from its weights with --init_weights in place of "
                    "--ckpt_path"
                )
            restore()

    def restore_optimizers(self) -> None:
        """Restore the states of the optimisers."""
        with self._restoring("the optimizer"):
            saved, optimizers = self._loaded_checkpoint["optimizer_states"], self.trainer.optimizers
            _check_number(saved, optimizers, "optimizer_states")
            for i, (state, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
                check_optimizer(
                    state, optimizer, f"optimizer_states[{i}]", has_stepped=self._loaded_checkpoint["global_step"] > 0
                )
            super().restore_optimizers()

    def restore_lr_schedulers(self) -> None:
        """Restore the states of the learning rate schedules."""
        with self._restoring("the learning rate schedule"):
            saved, configs = self._loaded_checkpoint["lr_schedulers"], self.trainer.lr_scheduler_configs
            _check_number(saved, configs, "lr_schedulers")
            for i, (state, config) in enumerate(zip(saved, configs, strict=True)):
                check_scheduler(state, config.scheduler, f"lr_schedulers[{i}]")
            super().restore_lr_schedulers()

    def restore_optimizers_and_schedulers(self) -> None:
        """Restore the states of the optimisers and schedules."""
        for name in ("optimizer_states", "lr_schedulers"):
            if self._loaded_checkpoint and name not in self._loaded_checkpoint:
                raise DamagedError(f"{short(self.trainer.ckpt_path or '')} {_only_a_model(name)}")
        super().restore_optimizers_and_schedulers()

    @contextmanager
    def _restoring(self, part: str, path: Any = None) -> Iterator[None]:
        """Turn any error within into a `DamagedError` that names the file, the part and the reason."""
        path = short(path or self._ckpt_path or "the checkpoint")
        try:
            yield
        except DamagedError:
            raise
        except _EXPECTED as error:
            if type(error) is ValueError and "checkpoint" not in str(error):
                raise DamagedError(f"{path} can't be restored: {error}") from error
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise DamagedError(
                f"{path} can't be restored: {part} is not as lit-effattn saves it ({type(error).__name__}: {reason})"
            ) from error


def _only_a_model(name: str) -> str:
    return (
        f"has no {name}: it holds a model, not a run that can be resumed; start a new run from its weights with "
        "--init_weights in place of --ckpt_path"
    )


def _check_number(saved: Any, objects: Any, where: str) -> None:
    if not isinstance(saved, list) or len(saved) != len(objects):
        raise wrong(where, saved, f"a list of {len(objects)}")


def check_scheduler(saved: Any, scheduler: Any, where: str) -> None:
    """Check the state of a schedule: it may replace only the attributes that a new schedule saves.

    Args:
        saved: The state in the checkpoint.
        scheduler: A new schedule, which is to load it.
        where: The name of the state, for messages.

    Raises:
        ValueError: If it has another structure. The message names the part, its value and the expected structure.
    """
    new = scheduler.state_dict()
    # Other versions of torch save other names.
    check_like(saved, {name: new[name] for name in new if name in saved or name == "last_epoch"}, where)
    _check_unset(saved, new, where)
    for name in saved.keys() - new.keys():
        if not isinstance(name, str) or hasattr(scheduler, name):
            raise ValueError(f"{where} has {name!r}, which is not part of the state of a {type(scheduler).__name__}")


def check_optimizer(saved: Any, optimizer: Optimizer, where: str, *, has_stepped: bool) -> None:
    """Compare the options of an optimiser's groups, and the sizes in its state, with those of a new one.

    Which names a state has is known after a step alone. So the parameters of a group that have as many dimensions must
    have the same names, with values of the same kinds.

    Args:
        saved: The state in the checkpoint.
        optimizer: A new optimiser, which is to load it.
        where: The name of the state, for messages.
        has_stepped: Whether the run has made steps, so that the state must not be empty.

    Raises:
        ValueError: If a part differs. The message names the part, its value and the expected one.
    """
    groups = optimizer.param_groups
    sizes, expected = [len(group["params"]) for group in saved["param_groups"]], [len(g["params"]) for g in groups]
    if sizes != expected:
        raise ValueError(
            f"{where}.param_groups have {_listed(sizes)} parameters, and those of this run {_listed(expected)}: "
            "another optimizer or decay_biases_and_gains made them; start a new run from its weights with "
            "--init_weights in place of --ckpt_path"
        )
    if has_stepped and not saved["state"] and _keeps_state(optimizer):
        raise ValueError(f"{where}.state is empty, though the run has made steps")
    parameters: dict[Any, Tensor] = {}
    of_group: dict[Any, int] = {}
    for i, (old, group) in enumerate(zip(saved["param_groups"], groups, strict=True)):
        options = {name: value for name, value in group.items() if name != "params"}
        check_like(old, options, f"{where}.param_groups[{i}]")
        _check_unset(old, options, f"{where}.param_groups[{i}]")
        parameters |= dict(zip(old["params"], group["params"], strict=True))
        of_group |= dict.fromkeys(old["params"], i)
    first: dict[Any, dict[str, Any]] = {}  # the kinds of values, by group and number of dimensions
    for number, state in saved["state"].items():
        shape = parameters[number].shape
        kinds = {name: _kind(value, len(shape)) for name, value in state.items()}
        if kinds != first.setdefault((of_group[number], len(shape)), kinds):
            raise ValueError(f"{where}.state[{number}] has other parts than the states of similar parameters")
        for name, value in state.items():
            if name == "step" and (kinds[name] != "number" or not float(value) >= 0):
                raise wrong(f"{where}.state[{number}].step", value, "a count")
            # The state of a parameter has its shape, or 1 where it is shared along a dimension.
            same_rank = isinstance(value, (Tensor, Divided)) and len(value.shape) == len(shape)
            if same_rank and any(n not in (1, m) for n, m in zip(value.shape, shape, strict=True)):
                at = f"{where}.state[{number}].{name}"
                raise wrong(at, value, f"a tensor for a parameter of shape {tuple(shape)}")


def _check_unset(saved: Any, new: Any, where: str) -> None:
    """Check that an option without a value in a new object, such as a number that a run sets, has at most a number."""
    for name, value in new.items():
        if value is None and not isinstance(saved.get(name), (int, float, type(None))):
            raise wrong(f"{where}.{name}", saved[name], "a number or None")


def _kind(value: Any, n_dims: int) -> Any:
    """Return what the states of similar parameters share: a number, a tensor of their dimensions, or a type."""
    if isinstance(value, (Tensor, Divided)):
        return "parameter" if len(value.shape) == n_dims else "tensor" if len(value.shape) else "number"
    return "number" if isinstance(value, (int, float)) else type(value)


def _keeps_state(optimizer: Optimizer) -> bool:
    """Return whether a step leaves a state: of SGD only with momentum, of a user's class it is not known."""
    if isinstance(optimizer, SGD):
        return any(group["momentum"] for group in optimizer.param_groups)
    return type(optimizer).__module__.startswith(("torch.", "lit_effattn."))


def _listed(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes))
