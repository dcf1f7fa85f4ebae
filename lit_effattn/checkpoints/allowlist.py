"""The classes that a checkpoint may name, and those that the user trusts besides.

A checkpoint names the classes that its model was built from, and building the model runs their code. Therefore it may
name only the classes listed here. Checking whether a name is listed imports nothing that the checkpoint names.
"""

from __future__ import annotations

import importlib
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_origin

from lit_effattn.checkpoints.import_errors import import_error

OURS = (
    "lit_effattn",
    "lit_effattn.attention",
    "lit_effattn.nn.adaptive",
    "lit_effattn.nn.front_ends",
    "lit_effattn.nn.heads",
    "lit_effattn.attention.positions",
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
"""Modules of which the public subclasses of a base class are listed."""

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
"""Plain values of `trainer` that every command takes from a checkpoint; `logger` only as true, false or null."""

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
"""Plain values of `trainer` that `fit` takes from the checkpoint that it resumes; `strategy` only as a plain name."""

MOVED = {
    "callbacks": "lit_effattn.callbacks",
    "datamodules": "lit_effattn.datamodules",
    "lit_effattn.adaptive": "lit_effattn.nn.adaptive",
    **{
        f"lit_effattn.attention.linear.{name}": f"lit_effattn.attention.feature_maps.{name}"
        for name in ("EluFeatureMap", "FeatureMap", "HedgehogFeatureMap", "ReluFeatureMap")
    },
    "lit_effattn.averaging": "lit_effattn.checkpoints.averaging",
    "lit_effattn.beam": "lit_effattn.generation.beam",
    "lit_effattn.ctc": "lit_effattn.tasks.ctc",
    "lit_effattn.datamodules.associative_recall": "lit_effattn.datamodules.synthetic.associative_recall",
    "lit_effattn.datamodules.audio": "lit_effattn.datamodules.speech.audio",
    "lit_effattn.datamodules.augment": "lit_effattn.datamodules.speech.augment",
    "lit_effattn.datamodules.copy_task": "lit_effattn.datamodules.synthetic.copy_task",
    "lit_effattn.datamodules.corpora": "lit_effattn.datamodules.speech.corpora",
    "lit_effattn.datamodules.dialogue_sources": "lit_effattn.datamodules.text.dialogue_sources",
    "lit_effattn.datamodules.dialogue_task": "lit_effattn.datamodules.synthetic.dialogue_task",
    "lit_effattn.datamodules.dialogues": "lit_effattn.datamodules.text.dialogues",
    "lit_effattn.datamodules.documents": "lit_effattn.datamodules.text.documents",
    "lit_effattn.datamodules.espeak": "lit_effattn.datamodules.speech.espeak",
    "lit_effattn.datamodules.faults": "lit_effattn.datamodules.common.faults",
    "lit_effattn.datamodules.feature_store": "lit_effattn.datamodules.speech.feature_store",
    "lit_effattn.datamodules.filterbanks": "lit_effattn.datamodules.speech.filterbanks",
    "lit_effattn.datamodules.labelled": "lit_effattn.datamodules.common.labelled",
    "lit_effattn.datamodules.labelled_images": "lit_effattn.datamodules.images.labelled_images",
    "lit_effattn.datamodules.labelled_texts": "lit_effattn.datamodules.pairs.labelled_texts",
    "lit_effattn.datamodules.length_batches": "lit_effattn.datamodules.common.length_batches",
    "lit_effattn.datamodules.lengths": "lit_effattn.datamodules.synthetic.lengths",
    "lit_effattn.datamodules.pair_sources": "lit_effattn.datamodules.pairs.sources",
    "lit_effattn.datamodules.pair_store": "lit_effattn.datamodules.pairs.store",
    "lit_effattn.datamodules.phonemes": "lit_effattn.datamodules.speech.phonemes",
    "lit_effattn.datamodules.pixels": "lit_effattn.datamodules.images.pixels",
    "lit_effattn.datamodules.prepare": "lit_effattn.datamodules.text.prepare",
    "lit_effattn.datamodules.prepared": "lit_effattn.datamodules.text.prepared",
    "lit_effattn.datamodules.retrieval_task": "lit_effattn.datamodules.synthetic.retrieval_task",
    "lit_effattn.datamodules.sampling": "lit_effattn.datamodules.common.sampling",
    "lit_effattn.datamodules.segments": "lit_effattn.datamodules.synthetic.segments",
    "lit_effattn.datamodules.sequence_pairs": "lit_effattn.datamodules.pairs.sequence_pairs",
    "lit_effattn.datamodules.sorting_task": "lit_effattn.datamodules.synthetic.sorting_task",
    "lit_effattn.datamodules.state_tracking": "lit_effattn.datamodules.synthetic.state_tracking",
    "lit_effattn.datamodules.streams": "lit_effattn.datamodules.text.streams",
    "lit_effattn.datamodules.text_sources": "lit_effattn.datamodules.text.sources",
    "lit_effattn.datamodules.timit": "lit_effattn.datamodules.speech.timit",
    "lit_effattn.datamodules.token_store": "lit_effattn.datamodules.text.token_store",
    "lit_effattn.datamodules.tokenizers": "lit_effattn.datamodules.text.tokenizers",
    "lit_effattn.datamodules.tokens": "lit_effattn.datamodules.common.tokens",
    "lit_effattn.datamodules.utterances": "lit_effattn.datamodules.speech.utterances",
    "lit_effattn.datamodules.wave_augment": "lit_effattn.datamodules.speech.wave_augment",
    "lit_effattn.export": "lit_effattn.interchange.export",
    "lit_effattn.front_ends": "lit_effattn.nn.front_ends",
    "lit_effattn.heads": "lit_effattn.nn.heads",
    "lit_effattn.lstm": "lit_effattn.nn.lstm",
    "lit_effattn.pictures": "lit_effattn.drawing.images",
    "lit_effattn.positions": "lit_effattn.attention.positions",
    "lit_effattn.pretrained": "lit_effattn.interchange",
    "lit_effattn.schedules": "lit_effattn.tasks.schedules",
    "lit_effattn.sequence_parallel": "lit_effattn.distributed.sequence_parallel",
    "lit_effattn.sharding": "lit_effattn.distributed.sharding",
    "lit_effattn.strategies": "lit_effattn.distributed.strategies",
    "lit_effattn.tensor_parallel": "lit_effattn.distributed.tensor_parallel",
    "lit_effattn.transformer": "lit_effattn.nn.transformer",
}
"""Modules and classes that were renamed after checkpoints had been written. Submodules are renamed with them."""
"""Old names of modules. Checkpoints, YAML and imports that use them get the new modules; submodules are renamed too."""

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE, *((_PACKAGE / name).resolve() for name in ("callbacks", "datamodules")))


class NotAllowedError(ValueError):
    """A checkpoint, file or flag names a class or function that is not allowed there."""


def listed(name: str) -> type | None:
    """Return the listed class of this name, None if there is none.

    Args:
        name: The path by which a module exports it or where it is defined, today or before, or its bare name.
    """
    return _listed().get(moved(name))


def listed_names() -> list[str]:
    """Return the full names of the listed classes, today's and those of the modules that define them."""
    return [name for name in _listed() if "." in name]


def moved(name: str) -> str:
    """Return the current name of what was called `name` in any earlier version."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        if (now := MOVED.get(".".join(parts[:n]))) is not None:
            return moved(".".join([now, *parts[n:]]))
    return name


@cache
def _listed() -> dict[str, type]:
    found: dict[str, type] = {}
    bare: dict[str, set[type]] = {}
    for path, kind in _classes():
        found[path] = found[f"{kind.__module__}.{kind.__qualname__}"] = kind
        bare.setdefault(kind.__name__, set()).add(kind)
    return {**found, **{name: kinds.pop() for name, kinds in bare.items() if len(kinds) == 1}}


def _classes() -> Iterator[tuple[str, type]]:
    for module in OURS:
        yield from ((path, kind) for path, kind in _public(module) if is_ours(kind))
    for module, base in SUBCLASSES.items():
        yield from ((path, kind) for path, kind in _public(module) if issubclass(kind, _get(base)))
    yield from ((path, _get(path)) for path in OTHERS)


def _public(module: str) -> Iterator[tuple[str, type]]:
    imported = importlib.import_module(module)
    for name in dir(imported):
        value = getattr(imported, name)
        # Until Python 3.10, list[int] and the like count as types.
        if isinstance(value, type) and get_origin(value) is None and not name.startswith("_"):
            yield f"{module}.{name}", value


def _get(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def is_ours(kind: type) -> bool:
    """Whether the file that `kind` comes from is part of this distribution, whatever its module's name is."""
    file = _file(kind.__module__)
    return file is not None and any(file.is_relative_to(folder) for folder in _FOLDERS)


def _file(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(file).resolve()


class _Trusted(NamedTuple):
    name: str
    value: Any
    files: Path | None  # a module's file, or a package's folder


class Trust:
    """What the user trusts by name (`--trust`, `trust=`), in addition to the list.

    Args:
        names: Each a module of the user's own, all of whose classes and functions are trusted, or the full name of one
            class or function of any module, or that itself. What is named is imported.

    Raises:
        ValueError: A name names nothing, a module that can't be imported, or one that is installed or part of Python.
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
        """What is trusted, by name."""
        return [trusted.name for trusted in self._trusted]

    def get(self, name: str) -> Any | None:
        """Return what is trusted by the name `name`, None if it is not; only what was trusted is ever imported."""
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
        """Whether `value`, a class or a function, is trusted: itself, or by the file that it is defined in."""
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
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"--trust {name}: {import_error(error)}") from error
    if not isinstance(value, ModuleType):
        return _Trusted(name, value, None)
    file = _file(name)
    if file is None or _is_installed(file):
        raise ValueError(f"--trust {name} is a module that is not your own: name the class or function in it in full")
    return _Trusted(name, value, file.parent if file.name == "__init__.py" else file)


def _is_installed(file: Path) -> bool:
    paths = sysconfig.get_paths()
    folders = [*(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()]
    folders.append(site.getusersitepackages())
    return any(file.is_relative_to(folder) for folder in [*(Path(folder).resolve() for folder in folders), *_FOLDERS])


def find(name: str) -> Any:
    """Import `name`: a module, or what a module has by that name.

    Raises:
        ImportError: there is no such thing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # a module that it imports in turn
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ModuleNotFoundError(f"there is no module {name!r}", name=name)
    owner = find(module)
    if not hasattr(owner, attribute):
        near = get_close_matches(attribute, dir(owner), n=1)
        meant = f"; did you mean {module}.{near[0]}?" if near else ""
        raise ImportError(f"{module} has no {attribute!r}{meant}", name=name)
    return getattr(owner, attribute)
