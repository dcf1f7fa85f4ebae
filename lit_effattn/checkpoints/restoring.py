"""Restoring a run from a checkpoint. Each part is compared with the object that loads it before it is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

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
    replaces all attributes that it names. Here a part without the structure of its object is a `DamagedError`, and so
    is any other error while a part is restored.
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
                names = saved.keys() & {*_LOOPS.values()} if fn == TrainerFn.FITTING else {name}
                for name in sorted(names):
                    _check_loop(saved[name], getattr(self.trainer, name), name)
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
                    state, optimizer, f"optimizer_states[{i}]", bool(self._loaded_checkpoint["global_step"])
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


def _check_loop(saved: Any, loop: Any, where: str) -> None:
    """Check the counters of a loop and of the loops inside it. Loaders check their own states."""
    if not isinstance(saved, dict):
        raise wrong(where, saved, "a mapping")
    for name, new in loop.state_dict().items():
        if name not in saved:
            raise ValueError(f"{where} has no {name}")
        is_progress = not name.endswith("state_dict")
        if name == "state_dict":  # Lightning adds the loaders' states to those of a new loop
            loaders = saved[name].get("combined_loader", []) if isinstance(saved[name], dict) else None
            if not isinstance(loaders, list) or not all(isinstance(state, dict) for state in loaders):
                raise wrong(f"{where}.{name}", saved[name], "a mapping with the states of the loaders")
            continue
        check_like(saved[name], new, f"{where}.{name}", exact=is_progress)
        if is_progress or name.endswith("epoch_loop.state_dict"):
            check_counts(saved[name], f"{where}.{name}")


def check_scheduler(saved: Any, scheduler: Any, where: str) -> None:
    """Check the state of a schedule: it may replace only the attributes that a new schedule saves.

    Args:
        saved: The state in the checkpoint.
        scheduler: A new schedule, which is to load it.
        where: The name of the state, for messages.

    Raises:
        ValueError: If a part has another structure. The message names the part, its value and the expected structure.
    """
    new = scheduler.state_dict()
    # Earlier versions of torch and of this library saved fewer names.
    known = {name: value for name, value in new.items() if name in saved or name in ("last_epoch", "base_lrs")}
    check_like(saved, known, where)
    for name in saved.keys() - new.keys():
        if not isinstance(name, str) or hasattr(scheduler, name):
            raise ValueError(f"{where} has {name!r}, which is not part of the state of a {type(scheduler).__name__}")


def check_optimizer(saved: Any, optimizer: Optimizer, where: str, has_stepped: bool) -> None:
    """Compare the state of an optimiser with that of a new one, and its tensors with those that a step creates.

    Args:
        saved: The state in the checkpoint.
        optimizer: A new optimiser, which is to load it.
        where: The name of the state, for messages.
        has_stepped: Whether the run has made steps, so that the state must not be empty.

    Raises:
        ValueError: If a part has another structure. The message names the part, its value and the expected structure.
    """
    new = optimizer.state_dict()
    for name in ("state", "param_groups"):
        if name not in saved:
            raise ValueError(f"{where} has no {name}")
    groups = saved["param_groups"]
    sizes, expected = _sizes(groups), [len(group["params"]) for group in new["param_groups"]]
    if sizes is not None and sizes != expected:
        raise ValueError(
            f"{where}.param_groups have {_listed(sizes)} parameters, and those of this run {_listed(expected)}: an "
            "earlier version or another decay_biases_and_gains made them; start a new run from its weights with "
            "--init_weights in place of --ckpt_path"
        )
    _check_number(groups, new["param_groups"], f"{where}.param_groups")
    for i, (group, of_new) in enumerate(zip(groups, new["param_groups"], strict=True)):
        at = f"{where}.param_groups[{i}]"
        added = _added(group, optimizer) if isinstance(group, dict) else set()
        check_like(group, {name: value for name, value in of_new.items() if name not in added}, at)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in groups for i in group["params"]]
    if len(set(numbers)) != len(parameters):
        raise ValueError(f"{where}.param_groups name {len(set(numbers))} parameters, not {len(parameters)}")
    by_number = dict(zip(numbers, parameters, strict=True))
    group_of = {number: i for i, group in enumerate(groups) for number in group["params"]}
    states = saved["state"]
    if not isinstance(states, dict):
        raise wrong(f"{where}.state", states, "a mapping")
    steps = _after_a_step(optimizer)
    if has_stepped and not states and any(state for of_group in steps for state in of_group.values()):
        raise ValueError(f"{where}.state is empty, though the run has made steps")
    for number, state in states.items():
        if number not in by_number:
            raise ValueError(f"{where}.state has {number!r}, which is not one of the parameters")
        parameter = by_number[number]
        _check_state(state, parameter, steps[group_of[number]].get(parameter.ndim), f"{where}.state[{number}]")


def _sizes(groups: Any) -> list[int] | None:
    """Return the number of parameters of each group; None if `groups` is not a list of groups."""
    params: list[Any] = (
        [group.get("params") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    )
    return [*map(len, params)] if params and all(isinstance(numbers, list) for numbers in params) else None


def _listed(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes))


def _added(group: dict[str, Any], optimizer: Optimizer) -> set[str]:
    """Return the options that torch adds to a group when it is loaded: earlier versions of torch lacked them."""
    loaded, made = dict(group), object.__new__(type(optimizer))
    with suppress(Exception):  # the group may have any content
        made.__setstate__({"defaults": dict(optimizer.defaults), "state": {}, "param_groups": [loaded]})
    return loaded.keys() - group.keys()


def _check_state(saved: Any, parameter: Tensor, after_step: dict[str, Any] | None, where: str) -> None:
    if not isinstance(saved, dict):
        raise wrong(where, saved, "a mapping")
    for name, example in (after_step or {}).items():
        if name not in saved:
            raise ValueError(f"{where} has no {name}")
        value, at = saved[name], f"{where}.{name}"
        if not isinstance(example, Tensor) or example.ndim == 0:
            check_like(value, example, at)
            if name == "step" and not 0 <= float(value) < 2**53:
                raise wrong(at, value, "a count")
        elif (
            not isinstance(value, (Tensor, Divided))
            or value.dtype.is_complex
            or not _fits(value.shape, parameter.shape, example.shape)
        ):
            raise wrong(at, value, f"a tensor for a parameter of shape {tuple(parameter.shape)}")


def _fits(value: torch.Size, parameter: torch.Size, example: torch.Size) -> bool:
    """Return whether a state has the shape of its parameter, with a 1 where the example, of a shape of 2s, has one."""
    if len(value) != len(example) or len(example) != len(parameter):
        return len(value) == len(example)
    return all(n == (m if k == 2 else k) for n, m, k in zip(value, parameter, example, strict=True))


def _after_a_step(optimizer: Optimizer) -> list[dict[int, dict[str, Any]]]:
    """Return the states of small parameters after a step, by group and number of dimensions; none if it can't step.

    An optimiser that consists of others has them as `parts`, in the order of its groups.
    """
    groups: list[dict[int, dict[str, Any]]] = []
    for part in getattr(optimizer, "parts", (optimizer,)):
        arguments = inspect.signature(type(part)).parameters.keys() - {"params"}
        for group in part.param_groups:
            options = {name: value for name, value in group.items() if name in arguments}
            states: dict[int, dict[str, Any]] = {}
            for n in {p.ndim for p in group["params"]}:
                p = nn.Parameter(torch.zeros((2,) * n))
                p.grad = torch.zeros_like(p)
                with suppress(Exception):  # an optimiser that needs a closure, sparse gradients or further arguments
                    made = type(part)([p], **options)
                    made.step()
                    states[n] = dict(made.state[p])
            groups.append(states)
    return groups
