"""The checkpoint that a command starts from, and what it takes from the checkpoint's run or from the file alone."""

import inspect
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.checkpoints import slurm
from lit_effattn.checkpoints.io import read_intact
from lit_effattn.checkpoints.own_runs import config_file, own_config
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, find_checkpoint, last_kept, run_of, short
from lit_effattn.checkpoints.shipped import is_model
from lit_effattn.checkpoints.trust import find, imported, may_name_modules
from lit_effattn.hparams import defaults, flat, subclasses
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.run_folder import is_child, root_of, stated_root
from lit_effattn.settings.trainer import as_list
from lit_effattn.settings.yaml_text import dump_yaml
from lit_effattn.tasks import Task

CHECKPOINT = "LIT_EFFATTN_CKPT_PATH"
"""Environment variable with the path of the checkpoint, set for the processes that DDP starts."""

OF_FIT = ("checkpoint", "init_weights", "transfer_from")  # sections of a YAML file that only `fit` uses

SECTIONS = {*OF_FIT, "model", "data", "trainer", "seed_everything"}
"""Sections of a YAML file that a command ignores if it does not use them: a file serves all commands."""

_OF_A_RUN = {
    True: ("seed_everything", "trainer", "model", "data", "checkpoint", "transfer_from"),
    False: ("seed_everything", "trainer", "model", "data"),
}
"""Sections that a command takes from the configuration of a run, by whether it trains."""

_OF_SCORING = (
    *("accelerator", "precision", "deterministic", "benchmark", "inference_mode"),
    *("limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("enable_progress_bar", "enable_model_summary"),
)
"""Options of the trainer that commands other than `fit` take from the configuration of a run."""


class Resolved(NamedTuple):
    """The start of a command."""

    args: list[str]  # the arguments for jsonargparse, starting with the command
    checkpoint: Path | None = None  # the file, or None
    content: dict[str, Any] | None = None  # its content; of a folder, what all processes have in common
    run: dict[str, Any] | None = None  # what the command takes of the configuration of the user's run; None without one
    describes: bool = False  # whether the file alone describes the model: nothing of the user's does
    uses_data: bool = True  # whether the command takes data
    data_fixes: bool = True  # whether `Task.fixed_by_data` come from the data; if not, from the checkpoint
    requeued: bool = False  # a restarted SLURM job or torchrun launch resumes its run, whatever the arguments say
    averaged: Sequence[Path] = ()  # whose mean is used (`--average`), of which `checkpoint` is the last; or empty
    takes_inputs: str | None = None  # the option of the data for the inputs of `predict`; None without inputs


def resolve(arguments: Arguments) -> Resolved:
    """Find the checkpoint that a command starts from, and the settings of its run if the run is the user's.

    Raises:
        ValueError: If a command that needs a checkpoint has none, or more are to be averaged than were kept; or if the
            checkpoint is not of a run of the user's, and neither files nor flags have what the command needs.
        FileNotFoundError: If the checkpoint does not exist.
    """
    if arguments.flags.given("help"):
        return Resolved(arguments.typed)
    fits = arguments.command == "fit"
    root = root_of(arguments)
    # Samples without `--complete` need no data on disk.
    uses_data = arguments.command != "generate" or arguments.stated.text("complete") is not None
    folder = None if root == stated_root(arguments) else root
    args = arguments.for_parser(root=folder)
    name = arguments.stated.text("ckpt_path")
    run = None if name is None or arguments.stated.given("trainer.default_root_dir") else run_of(Path(name))
    # A run that began from the file of another run is beside that one.
    requeued = slurm.interrupted_checkpoint(run.parent if run else root, arguments.typed) if fits else None
    parent = os.environ.get(CHECKPOINT) if is_child() else None  # None also if torchrun started all processes
    if requeued is not None:
        checkpoint, content = read_intact(Path(parent or requeued), training=True, verify=parent is None)
        config = own_config(checkpoint)
        if config is not None:  # it has these arguments, and the files as they were when the run began
            args = [arguments.command, "--config", dump_yaml(config)]
        return Resolved([*args, "--ckpt_path", str(checkpoint)], checkpoint, content, config, requeued=True)
    if name is None:
        if not fits:
            raise ValueError(
                f"{arguments.command} needs a trained model: give --ckpt_path best, last, a path, or a shipped model "
                "such as model:digits"
            )
        return Resolved(args)
    if fits and is_model(name):
        raise ValueError(
            f"--ckpt_path {name}: a shipped model has no optimiser state, so training can't resume from it; fine-tune "
            f"it with --init_weights {name}"
        )
    if arguments.command == "generate" and (given := arguments.flags.text("seed_everything")):
        raise ValueError(f"--seed_everything {given}: samples depend on --seed alone; give that")
    if not uses_data and (given := _flag(arguments, "data")):
        raise ValueError(f"--{given}: generate reads data for --complete alone; leave it out")
    named = Path(parent) if parent else find_checkpoint(name, root)
    if name not in ("last", "best") and (not fits or named.name in (LAST, PREVIOUS)):
        _check_same_run(arguments, named, root)
    average = None if fits else arguments.stated.text("average")
    averaged = [] if average is None else last_kept(named, _number(average))
    checkpoint, content = read_intact(averaged[-1] if averaged else named, training=fits, verify=parent is None)
    before = f", averaged with {', '.join(path.name for path in averaged[:-1])}" if averaged[:-1] else ""
    rank_zero_info(f"{arguments.command} from {short(checkpoint)}{before}")
    config = own_config(checkpoint)
    file = None if (run := run_of(checkpoint)) is None else config_file(run)
    if config is None:
        _check_lone(arguments, checkpoint, file, uses_data=uses_data)
    else:
        may_name_modules(dump_yaml(config))
        config = _of_command(config, checkpoint, arguments, uses_data=uses_data)
        args = arguments.for_parser(root=folder, run=config)
    # The user's own recordings or texts need no corpus: the checkpoint has the arguments that the data fixed.
    own = arguments.inputs or any(arguments.stated.text(f"data.{name}") for name in ("audio", "sources", "source_file"))
    return Resolved(
        [*args, "--ckpt_path", str(checkpoint)],
        checkpoint,
        content,
        config,
        config is None and not arguments.stated.classes("model"),
        uses_data,
        uses_data and not own,
        averaged=averaged,
        takes_inputs=_takes_inputs(arguments, config or {}) if arguments.inputs else None,
    )


def _check_same_run(arguments: Arguments, checkpoint: Path, root: Path) -> None:
    """Reject a folder for the results of a command that writes into the run of its checkpoint."""
    folder = run_of(checkpoint)
    if folder is None or folder.is_relative_to(root.resolve()):
        return
    remedy = ", or start a new run with --init_weights in place of --ckpt_path" if arguments.command == "fit" else ""
    for option in ("name", "trainer.default_root_dir"):
        if (given := arguments.flags.text(option)) is not None:
            raise ValueError(
                f"--{option} {given}: {arguments.command} from {short(checkpoint)} writes into the run of that "
                f"checkpoint; leave --{option} out{remedy}"
            )


def _of_command(config: dict[str, Any], checkpoint: Path, arguments: Arguments, *, uses_data: bool) -> dict[str, Any]:
    """Return the settings that a command takes from the configuration of a run."""
    fits = arguments.command == "fit"
    taken = {part: config[part] for part in _OF_A_RUN[fits] if config.get(part) is not None}
    if not uses_data:
        taken.pop("data", None)
    # Without options that are given, so that a class that they replace need not be there.
    trainer = {k: v for k, v in section(taken, "trainer").items() if not arguments.stated.given(f"trainer.{k}")}
    if fits:
        if arguments.stated.text("transfer_from") and not config.get("transfer_from"):
            raise ValueError(
                f"{short(checkpoint)} is not of an attention transfer: give --transfer_from without --ckpt_path"
            )
        if (run := run_of(checkpoint)) is not None and not arguments.stated.given("trainer.default_root_dir"):
            trainer = {**trainer, "default_root_dir": short(run.parent)}
    else:
        callbacks = [callback for callback in as_list(trainer.get("callbacks")) if changes_scores(callback)]
        names = (*_OF_SCORING, *(["logger"] if trainer.get("logger") is False else []))
        trainer = {name: trainer[name] for name in names if name in trainer}
        trainer |= {"callbacks": callbacks} if callbacks else {}
    return {**taken, "trainer": trainer}


def changes_scores(callback: Any) -> bool:
    """Return whether the spec of a callback is of a class that also changes the results of scoring."""
    with suppress(Exception):  # the user's module may raise any exception
        return bool(find(callback["class_path"]).changes_scores)
    return False


def _check_lone(arguments: Arguments, checkpoint: Path, file: Path | None, *, uses_data: bool) -> None:
    """Check that files and flags have what a command needs beside a checkpoint that is not of a run of the user's."""
    if file is None:
        why = f"{short(checkpoint)} is outside of your runs, and of such a file only the model is used"
        remedy = "give --config with {}, or --ckpt_path within a run of yours"
    else:
        why = f"this account did not write {short(file)}, or it was changed: only the model of the checkpoint is used"
        remedy = "read that file, and accept it by --config; or give --config with {}"
    if not arguments.stated.classes("model"):
        if arguments.command == "fit":
            raise ValueError(f"{why}: {remedy.format('the model, the data and the trainer of this training')}")
        if given := _flag(arguments, "model"):
            raise ValueError(f"--{given}: {why}, and as it is: {remedy.format('the whole model')}")
    if uses_data and not arguments.stated.classes("data"):
        raise ValueError(f"{why}: {remedy.format('the data')}")
    accepted = file is not None and any(given.folder.resolve() == file.parent.resolve() for given in arguments.files)
    if file is not None and not accepted:
        rank_zero_info(f"{why}: {remedy.format('other settings')}")


def _flag(arguments: Arguments, group: str) -> str | None:
    """Return the first flag of a group of options; None if none is given."""
    return next((option.key for option in arguments.options if option.key.partition(".")[0] == group), None)


def _takes_inputs(arguments: Arguments, config: dict[str, Any]) -> str:
    """Return the option of the data that takes the inputs of `predict`."""
    named = arguments.stated.classes("data") or [str(section(config, "data").get("class_path")).rpartition(".")[2]]
    kinds = {kind.__name__: kind for kind in subclasses(pl.LightningDataModule)}
    option: str | None = getattr(kinds.get(named[-1]), "takes_inputs", None)
    if option is None:
        raise ValueError(
            f"predict {' '.join(arguments.inputs)[:80]}: {named[-1]} can't read inputs from the command line; leave "
            "them out to predict the test data"
        )
    if arguments.stated.given(f"data.{option}"):
        inputs = " ".join(arguments.inputs)[:80]
        raise ValueError(f"predict {inputs} and --data.{option} were both given; give only one")
    return option


def _number(average: str) -> int:
    try:
        return int(average)
    except ValueError:
        raise ValueError(f"--average {average} must be a number of checkpoints; 5 and 20 are usual") from None


def check_kept_settings(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Reject settings that resuming would ignore: Lightning restores the saved optimiser and schedule.

    Raises:
        ValueError: If a setting differs from that of the checkpoint. The message names it.
    """
    for name in ("optimizer", "lr_scheduler"):
        before, after = (section(section(s, "model"), "init_args").get(name) for s in (saved, now))
        if _canonical(before) != _canonical(after):
            option, new, old = _first_difference(after, before, f"model.{name}")
            raise ValueError(
                f"--{option} is {new} here and {old} in the checkpoint, and resuming keeps the checkpoint's {name}: "
                "leave it unchanged, or start a new run from these weights with --init_weights instead of --ckpt_path"
            )


def check_patience(callbacks: Sequence[Any], content: dict[str, Any]) -> None:
    """Reject an `EarlyStopping` whose patience resuming would replace with the one in the content of a checkpoint.

    Raises:
        ValueError: If the two differ.
    """
    for callback in callbacks:
        if isinstance(callback, pl.callbacks.EarlyStopping):
            saved = section(section(content, "callbacks"), callback.state_key).get("patience", callback.patience)
            if saved != callback.patience:
                raise ValueError(
                    f"{type(callback).__name__} has patience={callback.patience} here and {saved} in the checkpoint, "
                    "and resuming keeps the checkpoint's: leave it unchanged, or start a new run from these weights "
                    "with --init_weights instead of --ckpt_path"
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
    kind = imported(str(spec.get("class_path"))) if isinstance(spec, dict) else None
    if kind is None:
        return spec
    return {**spec, "class_path": kind, "init_args": {**defaults(kind), **section(spec, "init_args")}}


def fixed_by_data() -> set[str]:
    """Return the arguments of all tasks that are taken from the data: see `Task.fixed_by_data`."""
    tasks: Any = subclasses(Task)
    return {name for task in tasks for name in task.fixed_by_data}


def section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping at a name of a configuration; empty if there is none."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}
