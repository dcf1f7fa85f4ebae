"""Resolve the command-line arguments: find the checkpoint and merge its configuration with files and flags."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import zipfile
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import get_loader
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_effattn.checkpoints import slurm
from lit_effattn.checkpoints.allowlist import Trust, listed
from lit_effattn.checkpoints.files import DamagedError, damage
from lit_effattn.checkpoints.io import read_outline, saved_config
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, find_checkpoint, is_checkpoint, last_kept, short
from lit_effattn.hparams import flat
from lit_effattn.settings.run_names import root_of
from lit_effattn.settings.saved import UserOptions, checked_settings, fixed_by_data
from lit_effattn.settings.shipped import find_config

ROOT = "runs"
"""The default of `trainer.default_root_dir`: the folder that holds all runs."""

CHECKPOINT = "LIT_EFFATTN_CKPT_PATH"
"""Environment variable with the path of the checkpoint, set for the processes that DDP starts."""


class ResolvedArgs(NamedTuple):
    """The command, its checkpoint with the settings in it, and all arguments.

    Attributes:
        command: As in `lit-effattn COMMAND`.
        args: All arguments, starting with `command`.
        checkpoint: The file, or None.
        saved: The settings taken from the checkpoint, which `args` override, or None.
        trust: What the user trusts by name (`--trust`).
        uses_data: Whether the command takes data.
        requeued: Whether this is a restarted SLURM job, which goes on with its run whatever its arguments say.
        data_fixes: Whether the model takes what `Task.fixed_by_data` names from the data; else from the checkpoint.
        averaged: The checkpoints whose mean is used (`--average`), of which `checkpoint` is the last; empty: none.
        files: The contents of the YAML files.
        root: The folder of the configuration's runs, whatever `--name` and swapped classes say; None: not said.
    """

    command: str
    args: list[str]
    checkpoint: Path | None
    saved: dict[str, Any] | None
    trust: Trust
    uses_data: bool = True
    data_fixes: bool = True
    requeued: bool = False
    averaged: Sequence[Path] = ()
    files: Sequence[dict[str, Any]] = ()
    root: Path | None = None

    @classmethod
    def parse(cls, args: list[str]) -> ResolvedArgs:
        """Find the checkpoint and the configuration files in `args`.

        Raises:
            ValueError: a command that needs a checkpoint was given none, an average of fewer than were kept, or an
                option without its value.
            FileNotFoundError: the checkpoint does not exist.
            NotAllowedError: the checkpoint names what it may not.
        """
        command = args[0]
        if {"-h", "--help"} & set(args[1:]):
            return cls(command, args, None, None, Trust())
        given = _Given.parse(command, args[1:])
        requeued = slurm.interrupted_checkpoint(given.root, args) if command == "fit" else None
        if requeued and given.ckpt_path is None:
            return cls._begun_by(given, requeued)
        if requeued or given.ckpt_path is not None:
            return cls._from_checkpoint(given, str(requeued or given.ckpt_path), requeued=requeued is not None)
        if command != "fit":
            raise ValueError(f"{command} needs a trained model: give --ckpt_path best, last, or a path")
        return cls(command, [command, *given.args], None, None, given.trust, files=given.files, root=given.stated_root)

    @classmethod
    def _begun_by(cls, given: _Given, requeued: Path) -> ResolvedArgs:
        """Go on with the run that the same arguments began: no settings are taken from its checkpoint."""
        checkpoint, _ = _read(requeued, given.command, given.root)
        args = [given.command, *given.args, "--ckpt_path", str(checkpoint)]
        return cls(given.command, args, checkpoint, None, given.trust, requeued=True, files=given.files)

    @classmethod
    def _from_checkpoint(cls, given: _Given, name: str, *, requeued: bool) -> ResolvedArgs:
        """Put the settings in the checkpoint that `name` names before files and flags, which override them."""
        command, uses_data = given.command, given.uses_data
        found = Path(os.environ[CHECKPOINT]) if CHECKPOINT in os.environ and is_child() else None
        found = found or find_checkpoint(name, given.root)
        averaged = [] if given.average is None else last_kept(found, _number(given.average))
        checkpoint, content = _read(averaged[-1] if averaged else found, command, given.root)
        os.environ[CHECKPOINT] = str(checkpoint)
        # Nor do recordings or texts of the user's own need the corpus: the checkpoint says what data fixed.
        data_fixes = uses_data and not _has(given.flags, *_OF_THE_USERS_OWN)
        saved = _saved_settings(content, checkpoint, command, uses_data, data_fixes)
        if command == "fit":
            _check_transfer(content, checkpoint, given)
        before = f", averaged with {', '.join(path.name for path in averaged[:-1])}" if averaged[:-1] else ""
        rank_zero_info(f"{command} from {short(checkpoint)}{before}")
        saved = checked_settings(saved, command, checkpoint, given.trust, UserOptions(given.flags, given.files))
        args = [command, *given.args, "--ckpt_path", str(checkpoint)]
        return cls(
            command, args, checkpoint, saved, given.trust, uses_data, data_fixes, requeued, averaged, given.files
        )


class _Given(NamedTuple):
    """What flags and YAML files say, before a checkpoint is read.

    Attributes:
        command: As in `lit-effattn COMMAND`.
        args: The arguments for jsonargparse: the files, the folder of the runs, and `flags`.
        flags: The arguments that were not read here.
        files: The contents of the YAML files.
        trust: What the user trusts by name.
        uses_data: Whether the command takes data.
        ckpt_path: A path, `last`, `best`, or None.
        average: How many checkpoints are averaged, not checked yet; None: none.
        stated_root: The folder of the configuration's runs, whatever `--name` and swapped classes say.
        root: The folder of this run and those like it.
    """

    command: str
    args: list[str]
    flags: list[str]
    files: list[dict[str, Any]]
    trust: Trust
    uses_data: bool
    ckpt_path: str | None
    average: Any
    stated_root: Path
    root: Path

    @classmethod
    def parse(cls, command: str, args: list[str]) -> _Given:
        """Read the files that `args` name, and the options that are needed before jsonargparse sees them.

        Raises:
            ValueError: an option has no value, or a file has no settings.
        """
        said, flags = _quick_options(command, args)
        paths = [find_config(name) for name in said.config]
        files = [read_yaml(path) for path in paths]
        # What is drawn from nothing, or from a prompt, needs no data on disk.
        uses_data = command != "generate" or _has(flags, "--complete")
        unknown = {*(() if command == "fit" else OF_FIT), *(() if uses_data else ("data",))}
        named = {} if said.root else {Path(path).stem: file for path, file in zip(paths, files, strict=True)}
        stated = Path(said.root or _last(_section(f, "trainer").get("default_root_dir") for f in files) or ROOT)
        root = root_of(stated, said.name or _last(f.get("name") for f in files), named, flags)
        configs = [
            arg for path, f in zip(paths, files, strict=True) for arg in ("--config", _without(unknown, path, f))
        ]
        root_args = ["--trainer.default_root_dir", str(root)] if said.root or root != stated else []
        return cls(
            command,
            args=[*configs, *root_args, *flags],
            flags=flags,
            files=files,
            trust=Trust([*said.trust, *(name for f in files for name in f.get("trust") or ())]),
            uses_data=uses_data,
            ckpt_path=said.ckpt_path or _last(f.get("ckpt_path") for f in files),
            average=None if command == "fit" else said.average or _last(f.get("average") for f in files),
            stated_root=stated,
            root=root,
        )


def _quick_options(command: str, args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options that say which configuration, checkpoint and run are meant, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    parser.add_argument("--ckpt_path")
    if command != "fit":
        parser.add_argument("--average")
    parser.add_argument("--trainer.default_root_dir", dest="root")
    parser.add_argument("--trust", action="append", default=[])
    parser.add_argument("--name")
    for arg in args:
        if arg.startswith("-c") and len(arg) > 2:
            raise ValueError(f"{arg}: options begin with --, and -c is followed by a space")
    try:
        return parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ValueError(f"{str(error.argument_name).rpartition('/')[2]} has no value: {error.message}") from None


_OF_THE_USERS_OWN = tuple(f"--data.{part}{name}" for part in ("", "init_args.") for name in ("audio", "source_file"))
"""Flags that name what to predict instead of the corpus."""


OF_FIT = ("checkpoint", "init_weights", "transfer_from")
"""What only `fit` knows of a YAML file, which serves all commands."""


def _without(names: Set[str], path: str, content: dict[str, Any]) -> str:
    """Return `--config`'s value for a file without what `names` names at its top: the file, or else the rest of it."""
    if not names & content.keys():
        return path
    return json.dumps({name: value for name, value in content.items() if name not in names}, ensure_ascii=False)


def _has(args: list[str], *options: str) -> bool:
    return any(arg.split("=")[0].rstrip("+") in options for arg in args)


def _number(average: Any) -> int:
    try:
        return int(str(average))
    except ValueError:
        raise ValueError(f"--average {average} is no number of checkpoints; 5 and 20 are usual") from None


def _read(checkpoint: Path, command: str, root: Path) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint, of which all parts are verified. Training goes on from the one before it if it is damaged.

    Processes that this command starts get its choice; those that another program starts (torchrun) each make it, from
    the same files.

    Raises:
        DamagedError: It is damaged; names what else there is.
    """
    previous = checkpoint.with_name(PREVIOUS)
    try:
        content = read_outline(checkpoint, verify=not is_child())
    except DamagedError as error:
        if command == "fit" and checkpoint.name == LAST and is_checkpoint(previous):
            with suppress(DamagedError):
                content = read_outline(previous, verify=True)
                rank_zero_warn(f"{error}. {_goes_on_from(previous, content)}")
                return previous, content
        others = [*checkpoint.parent.glob("*.ckpt"), *sorted(root.rglob(f"checkpoints/{LAST}"), reverse=True)]
        others = list(dict.fromkeys(path.resolve() for path in others))
        whole = (path for path in others if _is_whole(path))
        there = ", ".join(short(path) for path in islice(whole, 4))
        there = f"; there are {there}" if there else ""
        raise DamagedError(f"{error}{there}") from error
    if checkpoint.name == PREVIOUS and command == "fit" and not checkpoint.with_name(LAST).exists():
        rank_zero_warn(f"there is no {short(checkpoint.with_name(LAST))}. {_goes_on_from(checkpoint, content)}")
    return checkpoint, content


def _is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint can be read."""
    if checkpoint.is_dir():
        with suppress(ValueError, OSError):
            return bool(read_outline(checkpoint, verify=True))
        return False
    return zipfile.is_zipfile(checkpoint) and not damage(checkpoint)


def _goes_on_from(previous: Path, content: dict[str, Any]) -> str:
    step = content.get("global_step")
    return f"Training goes on from {short(previous)}, saved at step {step}: what came after it is trained again"


def _saved_settings(
    content: dict[str, Any], checkpoint: Path, command: str, uses_data: bool, data_fixes: bool
) -> dict[str, Any]:
    """Return the settings in the checkpoint that are options of `command`. Nothing in them is checked yet."""
    config = saved_config(content, short(checkpoint))
    parts = ["seed_everything", "trainer", "model", *(["data"] if uses_data else [])]
    parts += ["checkpoint"] if command == "fit" else []
    saved = {part: config[part] for part in parts if config.get(part) is not None}
    if data_fixes and "data" in saved:
        init_args = _section(_section(saved, "model"), "init_args")
        for name in fixed_by_data() & init_args.keys():
            del init_args[name]
    return saved


def _check_transfer(content: dict[str, Any], checkpoint: Path, given: _Given) -> None:
    """Check that an attention transfer is resumed as one: whose attention is learnt, only the user may say."""
    before = saved_config(content, short(checkpoint)).get("transfer_from")
    now = _has(given.flags, "--transfer_from") or any(file.get("transfer_from") for file in given.files)
    if before and not now:
        raise ValueError(
            f"{short(checkpoint)} is of an attention transfer: give --transfer_from {before} again to resume it, or "
            "--init_weights in place of --ckpt_path to fine-tune its result"
        )
    if now and not before:
        raise ValueError(f"{short(checkpoint)} is of no attention transfer: give --transfer_from without --ckpt_path")


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
    options = inspect.signature(kind).parameters.values()
    defaults = {option.name: option.default for option in options if option.default is not option.empty}
    return {**spec, "class_path": kind, "init_args": {**defaults, **_section(spec, "init_args")}}


def _early_stopping(settings: dict[str, Any]) -> list[dict[str, Any]]:
    given = _section(settings, "trainer").get("callbacks") or []
    given = given if isinstance(given, list) else [given]
    return [_section(c, "init_args") for c in given if str(c.get("class_path")).endswith("EarlyStopping")]


def is_child() -> bool:
    """Return whether this process was started by another process of the same run (DDP)."""
    return int(os.environ.get("LOCAL_RANK", 0)) > 0


def read_yaml(name: str) -> dict[str, Any]:
    """Read a YAML file.

    Raises:
        ValueError: it is no YAML, or holds no settings.
    """
    try:
        content = get_loader("yaml")(Path(name).read_text(encoding="utf-8"))  # for which 1e-3 is a number
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {name} is no text: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"--config {name} is no YAML{where}: {error.problem}") from error
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"--config {name} holds {kind}, not settings such as `model:`, `data:` and `trainer:`")
    if not isinstance(content.get("trainer") or {}, dict):
        raise ValueError(f"--config {name}: trainer is {content['trainer']!r}, not settings such as `max_steps: 100`")
    return content


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _last(values: Iterable[Any]) -> Any:
    return next(reversed([value for value in values if value is not None]), None)
