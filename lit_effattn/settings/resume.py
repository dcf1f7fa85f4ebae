"""What a command starts from: the checkpoint that it names, and the settings in it that flags and files override."""

from __future__ import annotations

import inspect
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
from lit_effattn.hparams import defaults, flat
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.run_names import root_of, stated_root
from lit_effattn.settings.saved import checked_settings

CHECKPOINT = "LIT_EFFATTN_CKPT_PATH"
"""Environment variable with the path of the checkpoint, set for the processes that DDP starts."""

OF_FIT = ("checkpoint", "init_weights", "transfer_from")
"""What only `fit` knows of a YAML file, which serves all commands."""


class Resolved(NamedTuple):
    """What a command starts from.

    Attributes:
        args: The arguments for jsonargparse, starting with the command.
        checkpoint: The file, or None.
        saved: The settings taken from the checkpoint, which `args` override, or None.
        uses_data: Whether the command takes data.
        data_fixes: Whether the model takes what `Task.fixed_by_data` names from the data; else from the checkpoint.
        requeued: Whether this is a restarted SLURM job, which goes on with its run whatever its arguments say.
        averaged: The checkpoints whose mean is used (`--average`), of which `checkpoint` is the last; empty: none.
        offline: Whether Hugging Face's libraries may read their cache alone.
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
        ValueError: a command that needs a checkpoint was given none, or an average of fewer than were kept.
        FileNotFoundError: the checkpoint does not exist.
        NotAllowedError: the checkpoint names what it may not.
    """
    if arguments.flags.given("help"):
        return Resolved(arguments.typed)
    fits = arguments.command == "fit"
    root = root_of(arguments)
    # What is drawn from nothing, or from a prompt, needs no data on disk.
    uses_data = arguments.command != "generate" or arguments.given("complete")
    unknown = {*(() if fits else OF_FIT), *(() if uses_data else ("data",))}
    folder = None if root == stated_root(arguments) else root
    args = arguments.for_parser(without=unknown, root=folder)
    name = arguments.text("ckpt_path")
    requeued = slurm.interrupted_checkpoint(root, arguments.typed) if fits else None
    if requeued is not None and name is None:  # the same arguments began the run: it takes no settings from its file
        checkpoint, _ = read_intact(requeued, root, training=True, verify=not is_child())
        return Resolved([*args, "--ckpt_path", str(checkpoint)], checkpoint, requeued=True)
    if requeued is None and name is None:
        if not fits:
            raise ValueError(f"{arguments.command} needs a trained model: give --ckpt_path best, last, or a path")
        return Resolved(args)
    parent = os.environ.get(CHECKPOINT) if is_child() else None
    found = Path(parent) if parent else find_checkpoint(str(requeued or name), root)
    average = None if fits else arguments.text("average")
    averaged = [] if average is None else last_kept(found, _number(average))
    checkpoint, content = read_intact(averaged[-1] if averaged else found, root, training=fits, verify=not is_child())
    config = saved_config(content, short(checkpoint))
    before = f", averaged with {', '.join(path.name for path in averaged[:-1])}" if averaged[:-1] else ""
    rank_zero_info(f"{arguments.command} from {short(checkpoint)}{before}")
    # Nor do recordings or texts of the user's own need the corpus: the checkpoint says what data fixed.
    data_fixes = uses_data and not (arguments.given("data.audio") or arguments.given("data.source_file"))
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


def _number(average: str) -> int:
    try:
        return int(average)
    except ValueError:
        raise ValueError(f"--average {average} is no number of checkpoints; 5 and 20 are usual") from None


def refuse_dropped(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Reject settings that resuming would ignore: Lightning restores the state of the optimiser and others silently."""
    for name in ("optimizer", "lr_scheduler"):
        before, after = (_section(_section(s, "model"), "init_args").get(name) for s in (saved, now))
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
    """Return the first option in which two specs differ, and its values, a class by its name."""
    new, old = (flat(_canonical(spec), name) for spec in (after, before))
    option = next(option for option in new | old if new.get(option) != old.get(option))
    now, then = (value.__name__ if inspect.isclass(value) else value for value in (new.get(option), old.get(option)))
    return option, now, then


def _canonical(spec: Any) -> Any:
    """Return a spec with the class itself in place of its import path, and with the options that it leaves out.

    A class may have several paths, and options that it did not have when a checkpoint was saved.
    """
    kind = listed(str(spec.get("class_path"))) if isinstance(spec, dict) else None
    if kind is None:
        return spec
    return {**spec, "class_path": kind, "init_args": {**defaults(kind), **_section(spec, "init_args")}}


def _early_stopping(settings: dict[str, Any]) -> list[dict[str, Any]]:
    given = _section(settings, "trainer").get("callbacks") or []
    given = given if isinstance(given, list) else [given]
    return [_section(c, "init_args") for c in given if str(c.get("class_path")).endswith("EarlyStopping")]


def is_child() -> bool:
    """Return whether this process was started by another process of the same run (DDP)."""
    return int(os.environ.get("LOCAL_RANK", 0)) > 0


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
