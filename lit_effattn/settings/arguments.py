"""The command line and the YAML files that it names, read once: the settings that the user gives, in any form.

Each of these gives `model.backbone.attention.stride`:

    --model.backbone.attention.stride 4
    --model.backbone.attention.init_args.stride=4
    --model.backbone.attention '{class_path: SparseAttention, init_args: {stride: 4}}'
    --model.backbone transformer.yaml
    --config run.yaml

The path of a setting is its flag without `--`, `init_args` and `class_path`. Values are not checked here: jsonargparse
gets the same flags and files, and reports errors in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import get_loader

from lit_effattn.checkpoints.plain_yaml import MAX_BYTES, OutOfBoundsError, check_bounds
from lit_effattn.checkpoints.trust import Trust, may_name_modules
from lit_effattn.settings.shipped import find_config

_FLAG = re.compile(r"(-[ch]|--[\w.-]+)(\+?)(?:=(.*))?", re.DOTALL)
_NO_VALUE = re.compile(r"--[\w.-]+\+?=.*|-[^\s\d.]\S*", re.DOTALL)
"""An argument after a flag that is not its value. -5 and "- a list" are values."""
_SHORT = {"-c": "--config", "-h": "--help"}
_WRAPPERS = ("init_args", "dict_kwargs", "class_path")
"""Keys between a class and its options, which a path leaves out."""
FILES = (".yaml", ".yml", ".json")
"""How the names of files of settings end."""
_DEPTH = 20
"""The maximal number of names in a path, since a file may name itself."""


_load = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """Parse YAML as jsonargparse does, for which 1e-3 is a number, within the bounds of `check_bounds`.

    Raises:
        OutOfBoundsError: If it is out of bounds.
        RepeatedKeyError: If a mapping has a key twice.
        yaml.YAMLError: If it is not YAML.
    """
    if "*" in text or ":" in text or len(text) > MAX_BYTES:  # else it has neither keys nor aliases
        check_bounds(text)
    may_name_modules(text)
    try:
        return _load(text)
    except RecursionError as error:  # of PyYAML without libyaml
        raise OutOfBoundsError("it is nested too deeply") from error


class _Dumper(yaml.SafeDumper):
    """Writes what `load_yaml` reads as the same value."""


# Words of an enumeration of strings, such as the default of Lightning's `Timer`.
_Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))
# The text 1e3 needs quotes, since jsonargparse reads it as a number.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), [*"-+0123456789"]
)


def dump_yaml(settings: Any) -> str:
    """Return settings as YAML."""
    text: str = yaml.dump(settings, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


class Option(NamedTuple):
    """A flag with its value, or another argument.

    Attributes:
        key: The flag without `--`, with `+` if it appends to a list; empty for another argument.
        text: The value, None without one.
        args: The arguments that it consists of.
    """

    key: str
    text: str | None
    args: Sequence[str]


class Settings:
    """Settings in the order in which they are given.

    Args:
        pairs: Keys such as `model`, `model.backbone.init_args.d_model` or `trainer.callbacks+`, and their values.
        folder: The folder to which names of files in the values are relative.
    """

    def __init__(self, pairs: Iterable[tuple[str, Any]] = (), folder: Path = Path()) -> None:
        self.pairs = [*pairs]
        self.folder = folder

    def given(self, path: str) -> bool:
        """Return whether the setting at `path` is given. An item that is appended to a list does not give the list."""
        return any(not match.appended for match in self._find(path))

    def value(self, path: str) -> Any:
        """Return the last value at `path`, None without one. A number in a flag is its text."""
        return next(reversed([match.value for match in self._find(path) if not match.appended]), None)

    def text(self, path: str) -> str | None:
        """Return the last value at `path` as text, None if there is none or it is null."""
        value = self.value(path)
        return None if value is None else str(value)

    def values(self, path: str) -> list[Any]:
        """Return all values at `path`, including items of lists and appended values."""
        return [match.value for match in self._find(path)]

    def classes(self, path: str) -> list[str]:
        """Return the bare names of the classes that are given at `path`."""
        return [name for match in self._find(path) for name in _class_names(content_of(match.value, match.folder)[0])]

    def named(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the path of each setting that may name a class, or a list of them, and their bare names."""
        return _named(self.pairs, [], self.folder)

    def _find(self, path: str) -> Iterator[_Match]:
        return _find(self.pairs, names_in(path), self.folder, appended=False)


class _Match(NamedTuple):
    """A value, whether it is appended to a list, and the folder to which names of files in it are relative."""

    value: Any
    appended: bool
    folder: Path


def _find(pairs: Iterable[tuple[Any, Any]], names: list[str], folder: Path, *, appended: bool) -> Iterator[_Match]:
    """Yield the values at the path `names`."""
    for key, value in pairs:
        own = names_in(key)
        if names[: len(own)] != own:
            continue
        rest, appends = names[len(own) :], appended or str(key).endswith("+")
        if not rest:
            yield _Match(value, appends, folder)
            continue
        value, inside = content_of(value, folder) if own else (value, folder)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from _find(item.items(), rest, inside, appended=appends)


def _named(pairs: Iterable[tuple[Any, Any]], before: list[str], folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the paths that begin with `before`, and the classes that they may name."""
    for key, value in pairs:
        own = names_in(key)
        path = [*before, *own]
        value, inside = content_of(value, folder) if own else (value, folder)
        if own and (names := _class_names(value)):
            yield ".".join(path), names
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and len(path) <= _DEPTH:
                yield from _named(item.items(), path, inside)


def content_of(value: Any, folder: Path) -> tuple[Any, Path]:
    """Return the content and the folder of the file that `value` names; `value` and `folder` if it names none.

    Raises:
        ValueError: If the file can't be read. A JSON file that can't is data.
    """
    if not isinstance(value, str) or not value.endswith(FILES):
        return value, folder
    path = folder / value
    try:
        content = _read(path, value)
    except FileNotFoundError:
        return value, folder
    except ValueError:
        if path.suffix == ".json":
            return value, folder
        raise
    return (content, path.parent) if isinstance(content, (dict, list)) else (value, folder)


def _with_absolute_names(value: Any, folder: Path) -> Any:
    """Return a copy of `value` in which the names of files of settings are absolute."""
    if isinstance(value, dict):
        return {key: _with_absolute_names(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_absolute_names(item, folder) for item in value]
    return value if content_of(value, folder)[0] is value else str((folder / value).absolute())


def _read(path: Path, name: str) -> Any:
    """Return what a YAML file holds.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it can't be read; the message begins with `name`.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return load_yaml(file.read(MAX_BYTES + 1))
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{name} is not YAML{where}: {error.problem}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{name} can't be read: {' '.join(str(error).split())}") from error


class File(Settings):
    """The settings in a YAML file.

    Args:
        path: The file.
        content: What it holds.
    """

    def __init__(self, path: str, content: dict[str, Any]) -> None:
        super().__init__(content.items(), Path(path).parent)
        self.path = path
        self.content = content

    @classmethod
    def read(cls, path: str) -> File:
        """Read a file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file can't be read, or does not hold settings.
        """
        content = _read(Path(path), f"--config {path}")
        if not isinstance(content, dict):
            kind = "nothing" if content is None else f"a {type(content).__name__}"
            raise ValueError(f"--config {path} holds {kind}, not settings such as `model:`, `data:` and `trainer:`")
        if not isinstance(content.get("trainer") or {}, dict):
            raise ValueError(
                f"--config {path}: trainer is {content['trainer']!r}, not settings such as `max_steps: 100`"
            )
        return cls(path, content)

    def without(self, names: Set[str]) -> str:
        """Return the value of `--config` for the file without some sections: its path, or the others as JSON.

        JSON has no folder, so names of files of settings in it are absolute.
        """
        kept = {key: value for key, value in self.content.items() if str(key).partition(".")[0] not in names}
        if len(kept) == len(self.content):
            return self.path
        return json.dumps(_with_absolute_names(kept, self.folder), ensure_ascii=False)


class Arguments(Settings):
    """A command with its flags and files. Flags take precedence over files, and a file over those before it.

    Args:
        args: The command, as in `lit-effattn COMMAND`, and its arguments.
        files: Files in place of those that `args` name.

    Attributes:
        command: The command.
        typed: `args`.
        options: The flags and other arguments, in their order.
        flags: The settings that flags give.
        inputs: `predict`: the arguments that are not flags, which are to be predicted.
        remaining: The arguments without these, and without the flags that name files, the run and the checkpoint.

    Raises:
        ValueError: If one of these flags has no value.
    """

    def __init__(self, args: Sequence[str], files: Sequence[File] | None = None) -> None:
        self.command = args[0]
        self.typed = [*args]
        self.options = [*_options(args[1:])]
        self.flags = Settings(
            (option.key, option.text if option.key in _TEXTS else _of_text(option))
            for option in self.options
            if option.key
        )
        own = _OWN.get(self.command, _OWN_OF_RUNS)
        for option in self.options:
            if option.key in own and option.text is None:
                raise ValueError(f"--{option.key.rstrip('+')} has no value: expected one argument")
        given = [option for option in self.options if self.command == "predict" and _is_input(option)]
        self.inputs = [option.args[0] for option in given]
        self.remaining = [
            arg for option in self.options if option.key not in own and option not in given for arg in option.args
        ]
        if files is not None:
            self.files = files

    @cached_property
    def files(self) -> Sequence[File]:
        """The files that `--config` names, read at the first access; none if help is asked for.

        Raises:
            ValueError: If a file is missing, or is not a YAML file of settings.
        """
        named = [] if self.flags.given("help") else [o.text or "" for o in self.options if o.key == "config"]
        return [File.read(find_config(name)) for name in named]

    @cached_property
    def trust(self) -> Trust:
        """The modules, classes and functions that the user trusts.

        Raises:
            ValueError: If a name is not that of one: see `Trust`.
        """
        values = [value for value in self.values("trust") if value is not None]
        return Trust([name for value in values for name in (value if isinstance(value, list) else [value])])

    def for_parser(self, *, without: Set[str], root: Path | None, run: Mapping[str, Any] | None = None) -> list[str]:
        """Return the arguments for jsonargparse: files, flags that were not read here, and the folder of the runs.

        Args:
            run: The settings of a run of the user's, which files and flags override.
            without: The sections of files that the command does not know.
            root: The folder of the runs; None for that of the flags or files.
        """
        folder = self.flags.text("trainer.default_root_dir") if root is None else str(root)
        configs = [arg for file in self.files for arg in ("--config", file.without(without))]
        return [
            self.command,
            *(["--config", dump_yaml(run)] if run else []),
            *configs,
            *self.remaining,
            *(["--trainer.default_root_dir", folder] if folder else []),
        ]

    def named(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the paths and class names of the files, then of the flags: see `Settings.named`."""
        for settings in (*self.files, self.flags):
            yield from settings.named()

    def _find(self, path: str) -> Iterator[_Match]:
        for settings in (*self.files, self.flags):
            yield from settings._find(path)


_OWN_OF_RUNS = ("config", "trust", "trust+", "name", "ckpt_path", "trainer.default_root_dir", "average")
"""Flags that are read here. jsonargparse gets the paths that they mean, where it needs them."""
_TEXTS = ("name", "ckpt_path", "trainer.default_root_dir", "init_weights", "transfer_from")
"""Flags whose values are text, `null` included."""
_OWN = {"fit": _OWN_OF_RUNS[:-1], "data": _OWN_OF_RUNS[:3]}


def _options(args: Sequence[str]) -> Iterator[Option]:
    """Yield the flags of a command line, each with its value, and the arguments between them.

    Raises:
        ValueError: If `-c` and a file are one argument.
    """
    i = 0
    while i < len(args):
        flag, n = _FLAG.fullmatch(args[i]), 1
        if args[i].startswith("-c") and len(args[i]) > 2:
            raise ValueError(f"{args[i]}: options begin with --, and -c is followed by a space")
        if flag is None:
            yield Option("", None, args[i : i + 1])
        else:
            name, plus, text = flag.groups()
            if text is None and i + 1 < len(args) and not _NO_VALUE.fullmatch(args[i + 1]):
                text, n = args[i + 1], 2
            yield Option(_SHORT.get(name, name)[2:] + plus, text, args[i : i + n])
        i += n


def _is_input(option: Option) -> bool:
    """Return whether an argument is neither a flag nor one that is not understood."""
    return not option.key and not option.args[0].startswith("-")


def _of_text(option: Option) -> Any:
    """Return a flag's value: a list or a mapping, None for null, else the text.

    Raises:
        ValueError: If it is out of bounds.
    """
    try:
        content = load_yaml(option.text or "")
    except OutOfBoundsError as error:
        raise ValueError(f"--{option.key} can't be read: {error}") from error
    except (ValueError, yaml.YAMLError):
        return option.text
    return content if isinstance(content, (dict, list)) else None if option.text == "null" else option.text


def names_in(key: Any) -> list[str]:
    """Return the names in the key of a setting, without those in `_WRAPPERS`."""
    return [name for name in str(key).rstrip("+").split(".") if name and name not in _WRAPPERS]


def _class_names(spec: Any) -> list[str]:
    """Return the bare names of the classes in a spec, or in a list of specs."""
    if isinstance(spec, list):
        return [name for item in spec if not isinstance(item, list) for name in _class_names(item)]
    named = spec.get("class_path") if isinstance(spec, dict) else spec
    return [named.rpartition(".")[2]] if isinstance(named, str) and re.fullmatch(r"[^\W\d][\w.]*", named) else []
