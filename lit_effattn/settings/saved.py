"""Select and check the settings that the command takes from the configuration in a checkpoint.

A configuration also names loggers, callbacks and folders to write to. A checkpoint may come from somebody else, so the
command takes only the model, the data, and plain values of the trainer.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.checkpoints.allowlist import (
    ACCELERATORS,
    LIMITS,
    SCHEDULE,
    SCORING_CALLBACKS,
    NotAllowedError,
    Trust,
)
from lit_effattn.checkpoints.runs import run_of, short
from lit_effattn.checkpoints.spec_build import check_value
from lit_effattn.checkpoints.spec_check import ANYTHING, CheckpointJudge, Place, check, parameters
from lit_effattn.settings.trainer import Trainer
from lit_effattn.tasks import Task

_CALLBACKS = Place(classes=(pl.Callback,), items=(pl.Callback,))
_WRITERS = ("ModelCheckpoint", "BestCheckpoint", "LastCheckpoint")
"""Callbacks that write checkpoints, to folders that only the user may name."""
_DOWNLOADED = ("mnist", "fashion_mnist", "cifar10")
_STRATEGIES = r"(auto|ddp|fsdp)[a-z_]*|ModelParallelStrategy"
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
"""With 1 in these environment variables, Hugging Face's libraries read their cache alone."""


class UserOptions(NamedTuple):
    """The options that the user has given, which take precedence over those in a checkpoint.

    Attributes:
        args: The flags.
        files: What the YAML files hold.
    """

    args: list[str]
    files: list[dict[str, Any]]

    def name(self, group: str, option: str) -> bool:
        """Return whether the user sets `group.option`, replacing the value in the checkpoint."""
        flags = (f"--{group}.{option}", f"--{group}.init_args.{option}")
        sections = [_section(file, group) for file in self.files]
        return any(arg.split("=")[0] in flags for arg in self.args) or any(
            option in section or option in _section(section, "init_args") for section in sections
        )

    def mention(self, word: str) -> bool:
        """Return whether a flag or a file contains `word`."""
        return any(word in arg for arg in self.args) or word in repr(self.files)


def checked_settings(
    saved: dict[str, Any], command: str, checkpoint: Path, trust: Trust, user: UserOptions
) -> dict[str, Any]:
    """Return the settings in `checkpoint` that `command` takes, with every name in them checked.

    Raises:
        NotAllowedError: They name what a checkpoint may not, or what only the user may.
    """
    judge = CheckpointJudge(short(checkpoint), trust)
    taken = {part: saved[part] for part in saved.keys() & {"seed_everything", "checkpoint"}}
    taken = {part: check(value, ANYTHING, part, judge) for part, value in taken.items()}
    trainer = saved.get("trainer")
    if isinstance(trainer, dict):
        taken["trainer"] = _trainer(trainer, command, judge, user)
        if command == "fit":
            run = run_of(checkpoint)
            if run is not None and not user.name("trainer", "default_root_dir"):
                taken["trainer"]["default_root_dir"] = short(run.parent)
    if "model" in saved:
        taken["model"] = check(saved["model"], Place(classes=(Task,)), "model", judge)
        check_value(taken["model"], Task, "model", judge)
    fixed = tuple(f"model.{name}" for name in fixed_by_data())
    paths = {k: v for k, v in judge.texts.items() if not k.startswith(fixed) and re.search(r"[./\\]", v)}
    judge.texts.clear()
    if "data" in saved:
        taken["data"] = check(saved["data"], Place(classes=(pl.LightningDataModule,)), "data", judge)
        check_value(taken["data"], pl.LightningDataModule, "data", judge)
        paths.update(judge.texts)
        _forbid_downloads(taken["data"], user)
    if paths:
        rank_zero_info(
            "The checkpoint names " + ", ".join(f"{where} {text!r}" for where, text in sorted(paths.items()))
        )
    return taken


def _trainer(saved: dict[str, Any], command: str, judge: CheckpointJudge, user: UserOptions) -> dict[str, Any]:
    fits = command == "fit"
    callbacks = [] if user.name("trainer", "callbacks") else saved.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    if fits:
        for name in ("logger", "profiler", "plugins", "strategy"):
            if not _is_plain(name, saved.get(name)) and not user.name("trainer", name):
                raise NotAllowedError(_restore(judge.source, name, _class_of(saved[name])))
        own = [c for c in callbacks if _class_of(c).endswith(_WRITERS)]
        if own and not user.mention("ModelCheckpoint"):
            raise NotAllowedError(_restore(judge.source, "callbacks+", _class_of(own[0])))
        callbacks = [c for c in callbacks if c not in own]
    else:
        callbacks = [c for c in callbacks if _class_of(c).rpartition(".")[2] in SCORING_CALLBACKS]
    names = {*LIMITS, *(SCHEDULE if fits else ())}
    taken = {name: value for name, value in saved.items() if name in names and _is_plain(name, value)}
    taken = {name: check(value, ANYTHING, f"trainer.{name}", judge) for name, value in taken.items()}
    for name, value in taken.items():
        check_value(value, parameters(Trainer)[name][0], f"trainer.{name}", judge)
        if not user.name("trainer", name):
            _check_machine(name, value, judge)
    if callbacks:
        taken["callbacks"] = check(callbacks, _CALLBACKS, "trainer.callbacks", judge)
        check_value(taken["callbacks"], list[pl.Callback], "trainer.callbacks", judge)
    return taken


def _check_machine(name: str, value: Any, judge: CheckpointJudge) -> None:
    """Refuse an accelerator that is none, and more processes than this machine has devices or cores for.

    Raises:
        NotAllowedError: tells the flag that allows it.
    """
    if name == "accelerator" and value not in ACCELERATORS:
        raise NotAllowedError(f"{judge.source} has trainer.accelerator {value!r}, which is none of {ACCELERATORS}")
    here = max(os.cpu_count() or 1, torch.cuda.device_count())
    if name == "devices" and _number_of(value) > here:
        raise NotAllowedError(
            f"{judge.source} was trained on {_number_of(value):,} devices; this machine has {here}: give "
            "--trainer.devices"
        )
    if name == "num_nodes" and value not in (1, int(os.environ.get("SLURM_NNODES", 1))) and not _is_launched():
        raise NotAllowedError(f"{judge.source} was trained on {value} machines: give --trainer.num_nodes")


def _number_of(devices: Any) -> int:
    """Return how many devices the trainer's option means, as far as it states a number."""
    if isinstance(devices, str):
        parts = [part for part in devices.split(",") if part.strip()]
        return len(parts) if "," in devices else int(devices) if devices.strip().isdecimal() else 0
    return len(devices) if isinstance(devices, list) else int(devices or 0)


def _is_launched() -> bool:
    """Return whether another program, such as torchrun, started the processes of all machines."""
    return "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def _is_plain(name: str, value: Any) -> bool:
    if name == "logger":
        return value is None or isinstance(value, bool)
    if name == "strategy":
        return value is None or (isinstance(value, str) and re.fullmatch(_STRATEGIES, value) is not None)
    return not value if name in ("profiler", "plugins") else True


def _restore(source: str, option: str, kind: str) -> str:
    plain = {"logger": ", or --trainer.logger true for the default", "strategy": ", or --trainer.strategy auto"}
    return (
        f"{source} was trained with trainer.{option.rstrip('+')} {kind}, which a checkpoint does not restore: give "
        f"--trainer.{option} {kind} and its options again{plain.get(option, '')}"
    )


def _class_of(value: Any) -> str:
    value = value[0] if isinstance(value, list) and value else value
    return str(value.get("class_path") if isinstance(value, dict) else value)


def fixed_by_data() -> set[str]:
    """Return the arguments of any task that are taken from the data: see `Task.fixed_by_data`."""
    tasks: list[type[Task]] = [Task]
    found: set[str] = set()
    while tasks:
        task = tasks.pop()
        found.update(task.fixed_by_data)
        tasks += task.__subclasses__()
    return found


def check_from_data(task: type[Task], arguments: Mapping[str, Any]) -> None:
    """Check that the data have what a task takes from them.

    Args:
        task: The class.
        arguments: Its arguments; None stands for an attribute that the data don't have.

    Raises:
        ValueError: names the required argument that is None.
    """
    required = inspect.signature(task.__init__).parameters
    for name in task.fixed_by_data:
        if name in arguments and arguments[name] is None and required[name].default is inspect.Parameter.empty:
            raise ValueError(
                f"{task.__name__} takes {name} from the data, which have none: these data are for another task"
            )


def _forbid_downloads(data: Any, user: UserOptions) -> None:
    """Disable downloads of data that only the checkpoint names."""
    init_args = data.setdefault("init_args", {}) if isinstance(data, dict) else {}
    if init_args.get("dataset") in _DOWNLOADED and not (user.name("data", "download") or user.name("data", "dataset")):
        init_args["download"] = False
    if "huggingface" in (init_args.get("source"), init_args.get("corpus")) and not user.name("data", "path"):
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
        rank_zero_info("Only Hugging Face's cache is read; to allow a download, give --data.path yourself")


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def homes(settings: Any) -> list[str]:
    """Return the paths in `settings` that begin with the user's home, and so with a name."""
    if isinstance(settings, (dict, list)):
        values = settings.values() if isinstance(settings, dict) else settings
        return [path for value in values for path in homes(value)]
    home = str(Path.home())
    return [settings] if isinstance(settings, str) and len(home) > 1 and settings.startswith(f"{home}/") else []
