"""Selecting and checking the settings that the command takes from the configuration in a checkpoint.

A configuration also names loggers, callbacks and folders to write to. A checkpoint may come from an untrusted source,
so the command takes only the model, the data, and plain values of the trainer.
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

from lit_effattn.checkpoints.allowlist import ACCELERATORS, LIMITS, SCHEDULE, SCORING_CALLBACKS, NotAllowedError
from lit_effattn.checkpoints.runs import run_of, short
from lit_effattn.checkpoints.spec_build import check_value
from lit_effattn.checkpoints.spec_check import ANYTHING, CheckpointJudge, Place, check, parameters
from lit_effattn.settings.arguments import Arguments, Settings
from lit_effattn.settings.downloads import forbid_downloads, forbid_folders
from lit_effattn.settings.own_classes import subclasses
from lit_effattn.settings.trainer import Trainer
from lit_effattn.tasks import Task

_CALLBACKS = Place(classes=(pl.Callback,), items=(pl.Callback,))
_WRITERS = ("ModelCheckpoint", "BestCheckpoint", "LastCheckpoint")
"""Callbacks that write checkpoints. Only the user may name their folders."""
_STRATEGIES = r"(auto|ddp|fsdp)[a-z_]*|ModelParallelStrategy"


class Checked(NamedTuple):
    """The settings that a command takes from a checkpoint, and whether their data must come from the cache."""

    settings: dict[str, Any]
    offline: bool


def checked_settings(
    config: dict[str, Any], checkpoint: Path, user: Arguments, *, uses_data: bool = True, data_fixes: bool = True
) -> Checked:
    """Return the settings in `checkpoint` that a command takes, with every name in them checked.

    Args:
        config: The configuration in the checkpoint.
        checkpoint: The file.
        user: The command, with the settings that take precedence over those in the checkpoint.
        uses_data: Whether the command takes data.
        data_fixes: Whether the arguments in `Task.fixed_by_data` come from the data; if not, from the checkpoint.

    Raises:
        NotAllowedError: If they name a class, function or value that is not allowed, or that only the user may name.
        ValueError: If they are of an attention transfer and the command is not, or the reverse.
    """
    command, judge = user.command, CheckpointJudge(short(checkpoint), user.trust)
    if command == "fit":
        _check_transfer(config, checkpoint, user)
    saved, offline = _of_command(config, command, uses_data, data_fixes), False
    taken = {part: saved[part] for part in saved.keys() & {"seed_everything", "checkpoint"}}
    taken = {part: check(value, ANYTHING, part, judge) for part, value in taken.items()}
    trainer = saved.get("trainer")
    if isinstance(trainer, dict):
        taken["trainer"] = _trainer(trainer, command, judge, user)
        if command == "fit":
            run = run_of(checkpoint)
            if run is not None and not user.given("trainer.default_root_dir"):
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
        offline = forbid_downloads(taken["data"], user)
        forbid_folders(taken["data"], user, judge.source)
    if paths:
        rank_zero_info(
            "The checkpoint names " + ", ".join(f"{where} {text!r}" for where, text in sorted(paths.items()))
        )
    return Checked(taken, offline)


def _of_command(config: dict[str, Any], command: str, uses_data: bool, data_fixes: bool) -> dict[str, Any]:
    """Return the settings that are options of `command`. They are not checked yet."""
    parts = ["seed_everything", "trainer", "model", *(["data"] if uses_data else [])]
    parts += ["checkpoint"] if command == "fit" else []
    saved = {part: config[part] for part in parts if config.get(part) is not None}
    if data_fixes and "data" in saved:
        init_args = section(section(saved, "model"), "init_args")
        for name in fixed_by_data() & init_args.keys():
            del init_args[name]
    return saved


def _trainer(saved: dict[str, Any], command: str, judge: CheckpointJudge, user: Settings) -> dict[str, Any]:
    fits = command == "fit"
    callbacks = [] if user.given("trainer.callbacks") else saved.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    if fits:
        for name in ("logger", "profiler", "plugins", "strategy"):
            if not _is_plain(name, saved.get(name)) and not user.given(f"trainer.{name}"):
                raise NotAllowedError(_restore(judge.source, name, _class_of(saved[name])))
        own = [c for c in callbacks if _class_of(c).endswith(_WRITERS)]
        if own and not any(name.endswith(_WRITERS) for name in user.classes("trainer.callbacks")):
            raise NotAllowedError(_restore(judge.source, "callbacks+", _class_of(own[0])))
        callbacks = [c for c in callbacks if c not in own]
    else:
        callbacks = [c for c in callbacks if _class_of(c).rpartition(".")[2] in SCORING_CALLBACKS]
    names = {*LIMITS, *(SCHEDULE if fits else ())}
    taken = {name: value for name, value in saved.items() if name in names and _is_plain(name, value)}
    taken = {name: check(value, ANYTHING, f"trainer.{name}", judge) for name, value in taken.items()}
    for name, value in taken.items():
        check_value(value, parameters(Trainer)[name][0], f"trainer.{name}", judge)
        if not user.given(f"trainer.{name}"):
            _check_machine(name, value, judge)
    if callbacks:
        taken["callbacks"] = check(callbacks, _CALLBACKS, "trainer.callbacks", judge)
        check_value(taken["callbacks"], list[pl.Callback], "trainer.callbacks", judge)
    return taken


def _check_machine(name: str, value: Any, judge: CheckpointJudge) -> None:
    """Check the accelerator, and that this machine has enough devices or cores and as many machines take part.

    Raises:
        NotAllowedError: If it does not. The message names the flag.
    """
    if name == "accelerator" and value not in ACCELERATORS:
        raise NotAllowedError(f"{judge.source} has trainer.accelerator {value!r}, which must be one of {ACCELERATORS}")
    here = max(os.cpu_count() or 1, torch.cuda.device_count())
    if name == "devices" and _number_of(value) > here:
        raise NotAllowedError(
            f"{judge.source} was trained on {_number_of(value):,} devices; this machine has {here}: give "
            "--trainer.devices"
        )
    if name == "num_nodes" and value not in (1, int(os.environ.get("SLURM_NNODES", 1))) and not _is_launched():
        raise NotAllowedError(f"{judge.source} was trained on {value} machines: give --trainer.num_nodes")


def _number_of(devices: Any) -> int:
    """Return the number of devices in the trainer's option; 0 if it states none."""
    if isinstance(devices, str):
        items = [item for item in devices.split(",") if item.strip()]
        return len(items) if "," in devices else int(devices) if devices.strip().isdecimal() else 0
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
    """Return the arguments of all tasks that are taken from the data: see `Task.fixed_by_data`."""
    tasks: Any = subclasses(Task)
    return {name for task in tasks for name in task.fixed_by_data}


def check_from_data(task: type[Task], arguments: Mapping[str, Any]) -> None:
    """Check that the data have the arguments that a task takes from them.

    Args:
        task: The class.
        arguments: Its arguments. An argument is None if the data lack it.

    Raises:
        ValueError: If a required argument is None. The message names it.
    """
    required = inspect.signature(task.__init__).parameters
    for name in task.fixed_by_data:
        if name in arguments and arguments[name] is None and required[name].default is inspect.Parameter.empty:
            raise ValueError(
                f"{task.__name__} takes {name} from the data, which have none: these data are for another task"
            )


def _check_transfer(config: dict[str, Any], checkpoint: Path, arguments: Arguments) -> None:
    """Check that an attention transfer is resumed as one: only the user may name its teacher."""
    before, now = config.get("transfer_from"), arguments.value("transfer_from")
    if before and not now:
        raise ValueError(
            f"{short(checkpoint)} is of an attention transfer: give --transfer_from {before} again to resume it, or "
            "--init_weights in place of --ckpt_path to fine-tune its result"
        )
    if now and not before:
        raise ValueError(
            f"{short(checkpoint)} is not of an attention transfer: give --transfer_from without --ckpt_path"
        )


def section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping at a name of a configuration; empty if there is none."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def homes(settings: Any) -> list[str]:
    """Return the paths in `settings` that begin with the user's home folder."""
    if isinstance(settings, (dict, list)):
        values = settings.values() if isinstance(settings, dict) else settings
        return [path for value in values for path in homes(value)]
    home = str(Path.home())
    return [settings] if isinstance(settings, str) and len(home) > 1 and settings.startswith(f"{home}/") else []
