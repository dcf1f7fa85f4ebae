"""The classes that a checkpoint may name, and further ones that the user trusts.

A checkpoint names the classes that its model was built from, and building the model runs their code. Therefore it may
name only the classes listed here. Checking whether a name is listed imports no module that the checkpoint names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_origin

from lit_effattn.checkpoints.import_errors import FOLDERS, import_error, is_installed

OURS = (
    "lit_effattn",
    "lit_effattn.attention",
    "lit_effattn.nn.adaptive",
    "lit_effattn.nn.front_ends",
    "lit_effattn.nn.heads",
    "lit_effattn.attention.positions",
    "lit_effattn.tasks.optimizers",
    "lit_effattn.tasks.schedules",
    "lit_effattn.tasks",
    "lit_effattn.tasks.ctc",
    "lit_effattn.callbacks",
    "lit_effattn.datamodules",
    "lit_effattn.datamodules.speech",
    "lit_effattn.datamodules.synthetic",
    "lit_effattn.datamodules.text",
)
"""Modules whose public classes are listed if their code is part of this distribution."""

SUBCLASSES = {
    "torch.optim": "torch.optim.Optimizer",
    "torch.optim.lr_scheduler": "torch.optim.lr_scheduler.LRScheduler",
}
"""Modules and base classes: the public subclasses in each module are listed."""

OTHERS = (
    "lightning.pytorch.callbacks.EarlyStopping",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.RichProgressBar",
    "lightning.pytorch.callbacks.TQDMProgressBar",
    "lightning.pytorch.cli.ReduceLROnPlateau",
    "torch.nn.Conv1d",
    "torch.nn.Dropout",
    "torch.nn.Embedding",
    "torch.nn.GELU",
    "torch.nn.Identity",
    "torch.nn.LayerNorm",
    "torch.nn.Linear",
    "torch.nn.RMSNorm",
    "torch.nn.ReLU",
    "torch.nn.SiLU",
    "torch.nn.Tanh",
)
"""Classes that are listed by name."""

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""The value of `hyper_parameters["_instantiator"]` in our checkpoints. No other value is accepted."""

SCORING_CALLBACKS = ("MemoryCarry",)
"""Callbacks that change the result of scoring. The other callbacks in a checkpoint are ignored when it is scored."""

LIMITS = (
    *("accelerator", "precision", "logger", "deterministic", "benchmark", "inference_mode"),
    *("limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("enable_progress_bar", "enable_model_summary"),
)
"""Plain values of `trainer` that every command takes from a checkpoint; `logger` only if it is true, false or null."""

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
"""Values of `trainer.accelerator` that a checkpoint may have."""

SCHEDULE = (
    *("devices", "num_nodes"),
    *("strategy", "fast_dev_run", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time"),
    *("limit_train_batches", "overfit_batches", "val_check_interval", "check_val_every_n_epoch"),
    *("num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "use_distributed_sampler", "detect_anomaly", "barebones"),
    *("sync_batchnorm", "reload_dataloaders_every_n_epochs"),
)
"""Plain values of `trainer` that `fit` takes from the checkpoint that it resumes; `strategy` only if it is a name."""


class NotAllowedError(ValueError):
    """A checkpoint, file or flag names a class or function that is not allowed there."""


def listed(name: str) -> type | None:
    """Return the listed class of this name, None if there is none.

    Args:
        name: A path by which a module exports or defines the class, or its bare name.
    """
    return _listed().get(name)


def is_listed(kind: type) -> bool:
    """Return whether a class is listed."""
    return listed(f"{kind.__module__}.{kind.__qualname__}") is kind


def listed_names() -> list[str]:
    """Return the full names of the listed classes: where they are exported, and where they are defined."""
    return [name for name in _listed() if "." in name]


@cache
def _listed() -> dict[str, type]:
    by_path: dict[str, type] = {}
    by_name: dict[str, set[type]] = {}
    for path, kind in _classes():
        by_path[path] = by_path[f"{kind.__module__}.{kind.__qualname__}"] = kind
        by_name.setdefault(kind.__name__, set()).add(kind)
    return {**by_path, **{name: kinds.pop() for name, kinds in by_name.items() if len(kinds) == 1}}


def _classes() -> Iterator[tuple[str, type]]:
    for module in OURS:
        yield from ((path, kind) for path, kind in _public(module) if is_ours(kind))
    for module, name in SUBCLASSES.items():
        base = find(name)
        yield from ((path, kind) for path, kind in _public(module) if issubclass(kind, base))
    yield from ((path, find(path)) for path in OTHERS)


def _public(module: str) -> Iterator[tuple[str, type]]:
    imported = importlib.import_module(module)
    for name in dir(imported):
        value = getattr(imported, name)
        # Until Python 3.10, list[int] and the like count as types.
        if isinstance(value, type) and get_origin(value) is None and not name.startswith("_"):
            yield f"{module}.{name}", value


def is_ours(kind: type) -> bool:
    """Return whether the file of `kind` is part of this distribution, whatever the name of its module."""
    file = _file(kind.__module__)
    return file is not None and any(file.is_relative_to(folder) for folder in FOLDERS)


def _file(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(file).resolve()


class _Trusted(NamedTuple):
    name: str
    value: Any
    files: Path | None  # a module's file, or a package's folder


class Trust:
    """The modules, classes and functions that the user trusts (`--trust`, `trust=`), in addition to the list.

    Args:
        names: Modules of the user's own, all of whose classes and functions are trusted; full names of classes or
            functions of any module; or classes themselves. The modules are imported.

    Raises:
        ValueError: If a name does not exist or can't be imported, or is a module that is installed or part of Python.
    """

    def __init__(self, names: Sequence[str | type] = ()) -> None:
        if isinstance(names, str):
            raise ValueError(f"trust={names!r} is one string; give a tuple of names: trust=({names!r},)")
        self._trusted = [
            _trusted(name) if isinstance(name, str) else _Trusted(f"{name.__module__}.{name.__qualname__}", name, None)
            for name in names
        ]

    @property
    def names(self) -> list[str]:
        """The names of the trusted modules, classes and functions."""
        return [trusted.name for trusted in self._trusted]

    def get(self, name: str) -> Any | None:
        """Return the trusted class or function of a name, None if it is not trusted. Imports only trusted modules."""
        for trusted in self._trusted:
            if name == trusted.name and trusted.files is None:
                return trusted.value
            if trusted.files is not None and name.startswith(f"{trusted.name}."):
                try:
                    value = find(name)
                except ImportError:
                    return None
                return value if self.has(value) else None
        return None

    def has(self, value: Any) -> bool:
        """Return whether a class or function is trusted: by its own name, or by the file that defines it."""
        file = _file(getattr(value, "__module__", None) or "")
        return any(
            value is trusted.value
            if trusted.files is None
            else file is not None and (file == trusted.files or trusted.files in file.parents)
            for trusted in self._trusted
        )


def _trusted(name: str) -> _Trusted:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"--trust {name}: name a module, or a class or function in full, as my_module.MyAttention")
    try:
        value = find(name)
    except Exception as error:  # the user's module may raise any exception
        raise ValueError(f"--trust {name}: {import_error(error)}") from error
    if not isinstance(value, ModuleType):
        return _Trusted(name, value, None)
    file = _file(name)
    if file is None or is_installed(file):
        raise ValueError(f"--trust {name} is a module that is not your own: name the class or function in it in full")
    return _Trusted(name, value, file.parent if file.name == "__init__.py" else file)


def find(name: str) -> Any:
    """Import `name`: a module, or an attribute of a module.

    Raises:
        ImportError: If there is no such module or attribute.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # a module that `name` imports
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ModuleNotFoundError(f"there is no module {name!r}", name=name)
    owner = find(module)
    if not hasattr(owner, attribute):
        near = get_close_matches(attribute, dir(owner), n=1)
        meant = f"; did you mean {module}.{near[0]}?" if near else ""
        raise ImportError(f"{module} has no {attribute!r}{meant}", name=name)
    return getattr(owner, attribute)
