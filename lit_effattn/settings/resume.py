"""The checkpoint that a command starts from, and the settings in it, which flags and files override."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.checkpoints import slurm
from lit_effattn.checkpoints.allowlist import listed
from lit_effattn.checkpoints.io import saved_config
from lit_effattn.checkpoints.recovery import read_intact
from lit_effattn.checkpoints.runs import find_checkpoint, last_kept, short
from lit_effattn.checkpoints.shipped import is_model
from lit_effattn.hparams import defaults, flat
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.run_names import root_of, stated_root
from lit_effattn.settings.saved import checked_settings, section

CHECKPOINT = "LIT_EFFATTN_CKPT_PATH"
"""Environment variable with the path of the checkpoint, set for the processes that DDP starts."""

OF_FIT = ("checkpoint", "init_weights", "transfer_from")
"""Sections of a YAML file that only `fit` uses. A file serves all commands."""


class Resolved(NamedTuple):
    """The start of a command.

    Attributes:
        args: The arguments for jsonargparse, starting with the command.
        checkpoint: The file, or None.
        saved: The settings taken from the checkpoint, which `args` override, or None.
        uses_data: Whether the command takes data.
        data_fixes: Whether the arguments in `Task.fixed_by_data` come from the data; if not, from the checkpoint.
        requeued: Whether this is a restarted SLURM job, which resumes its run whatever its arguments say.
        averaged: The checkpoints whose mean is used (`--average`), of which `checkpoint` is the last; or empty.
        offline: Whether Hugging Face's libraries must use their cache alone.
    """

    args: list[str]
    checkpoint: Path | None = None
    saved: dict[str, Any] | None = None
    uses_data: bool = True
    data_fixes: bool = True
    requeued: bool = False
    averaged: Sequence[Path] = ()
    offline: bool = False


def resolve(arguments: Arguments) -> Resolved:
    """Find the checkpoint that a command starts from, and the settings in it that flags and files override.

    Raises:
        ValueError: If a command that needs a checkpoint has none, or more are to be averaged than were kept.
        FileNotFoundError: If the checkpoint does not exist.
        NotAllowedError: If the checkpoint names a class or function that is not allowed.
    """
    if arguments.flags.given("help"):
        return Resolved(arguments.typed)
    fits = arguments.command == "fit"
    root = root_of(arguments)
    # Samples without `--complete` need no data on disk.
    uses_data = arguments.command != "generate" or arguments.given("complete")
    unknown = {*(() if fits else OF_FIT), *(() if uses_data else ("data",))}
    folder = None if root == stated_root(arguments) else root
    args = arguments.for_parser(without=unknown, root=folder)
    name = arguments.text("ckpt_path")
    requeued = slurm.interrupted_checkpoint(root, arguments.typed) if fits else None
    parent = os.environ.get(CHECKPOINT) if is_child() else None  # None also if torchrun started all processes
    if requeued is not None and name is None:  # the same arguments began the run: its settings are known
        checkpoint, _ = read_intact(Path(parent or requeued), root, training=True, verify=parent is None)
        return Resolved([*args, "--ckpt_path", str(checkpoint)], checkpoint, requeued=True)
    if requeued is None and name is None:
        if not fits:
            raise ValueError(
                f"{arguments.command} needs a trained model: give --ckpt_path best, last, a path, or a shipped model "
                "such as model:digits"
            )
        return Resolved(args)
    if fits and name is not None and is_model(name):
        raise ValueError(
            f"--ckpt_path {name}: a shipped model has no optimiser state, so training can't resume from it; fine-tune "
            f"it with --init_weights {name}"
        )
    named = Path(parent) if parent else find_checkpoint(str(requeued or name), root)
    average = None if fits else arguments.text("average")
    averaged = [] if average is None else last_kept(named, _number(average))
    chosen = averaged[-1] if averaged else named
    checkpoint, content = read_intact(chosen, root, training=fits, verify=parent is None)
    config = saved_config(content, short(checkpoint))
    before = f", averaged with {', '.join(path.name for path in averaged[:-1])}" if averaged[:-1] else ""
    rank_zero_info(f"{arguments.command} from {short(checkpoint)}{before}")
    args += _inputs(arguments, config)
    # The user's own recordings or texts need no corpus: the checkpoint has the arguments that the data fixed.
    own = arguments.inputs or any(arguments.given(f"data.{name}") for name in ("audio", "sources", "source_file"))
    data_fixes = uses_data and not own
    saved = checked_settings(config, checkpoint, arguments, uses_data=uses_data, data_fixes=data_fixes)
    return Resolved(
        [*args, "--ckpt_path", str(checkpoint)],
        checkpoint,
        saved.settings,
        uses_data,
        data_fixes,
        requeued is not None,
        averaged,
        saved.offline,
    )


def _inputs(arguments: Arguments, config: dict[str, Any]) -> list[str]:
    """Return the option of the data that takes the inputs of `predict`, and these.

    Raises:
        ValueError: If the data take none.
    """
    if not arguments.inputs:
        return []
    kind = listed(str(arguments.text("data") or section(config, "data").get("class_path")))
    option = getattr(kind, "takes_inputs", None)
    if option is None:
        name = "the checkpoint's data" if kind is None else kind.__name__
        raise ValueError(
            f"predict {' '.join(arguments.inputs)}: {name} can't read inputs from the command line; leave them out to "
            "predict the test data"
        )
    return [f"--data.{option}", json.dumps(arguments.inputs, ensure_ascii=False)]


def _number(average: str) -> int:
    try:
        return int(average)
    except ValueError:
        raise ValueError(f"--average {average} must be a number of checkpoints; 5 and 20 are usual") from None


def check_kept_settings(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Reject settings that resuming would ignore: Lightning restores the saved optimiser, schedule and patience.

    Raises:
        ValueError: If a setting differs from that of the checkpoint. The message names it.
    """
    for name in ("optimizer", "lr_scheduler"):
        before, after = (section(section(s, "model"), "init_args").get(name) for s in (saved, now))
        if "model" in saved and _canonical(before) != _canonical(after):
            option, new, old = _first_difference(after, before, f"model.{name}")
            raise ValueError(
                f"--{option} is {new} here and {old} in the checkpoint, and resuming keeps the checkpoint's {name}: "
                "leave it unchanged, or start a new run from these weights with --init_weights instead of --ckpt_path"
            )
    before, after = (_early_stopping(s) for s in (saved, now))
    if before and after and before != after:
        raise ValueError(
            f"EarlyStopping is {after} here and {before} in the checkpoint; resuming keeps the checkpoint's patience: "
            "leave it unchanged, or start a new run from these weights with --init_weights instead of --ckpt_path"
        )


def _first_difference(after: Any, before: Any, name: str) -> tuple[str, Any, Any]:
    """Return the first option in which two specs differ, and its two values. Classes are shown by their names."""
    new, old = (flat(_canonical(spec), name) for spec in (after, before))
    option = next(option for option in new | old if new.get(option) != old.get(option))
    now, then = (value.__name__ if inspect.isclass(value) else value for value in (new.get(option), old.get(option)))
    return option, now, then


def _canonical(spec: Any) -> Any:
    """Return a spec with the class in place of its import path, and with the default values of all options.

    A class may have several paths, and options that it did not have when a checkpoint was saved.
    """
    kind = listed(str(spec.get("class_path"))) if isinstance(spec, dict) else None
    if kind is None:
        return spec
    return {**spec, "class_path": kind, "init_args": {**defaults(kind), **section(spec, "init_args")}}


def _early_stopping(settings: dict[str, Any]) -> list[dict[str, Any]]:
    given = section(settings, "trainer").get("callbacks") or []
    given = given if isinstance(given, list) else [given]
    return [section(c, "init_args") for c in given if str(c.get("class_path")).endswith("EarlyStopping")]


def is_child() -> bool:
    """Return whether this process was started by another process of the same run (DDP)."""
    return int(os.environ.get("LOCAL_RANK", 0)) > 0
