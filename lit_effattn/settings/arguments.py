"""The words of flags and files before they are parsed, by which the run and the checkpoint are found.

jsonargparse parses all settings at once, and does not tell which of them the user gave. Before it parses, a command
has to know the run whose configuration comes first; afterwards it has to know which settings came from which words.
Each of these gives `model.backbone.attention.stride`:

    --model.backbone.attention.stride 4
    --model.backbone.attention.init_args.stride=4
    --model.backbone.attention '{class_path: SparseAttention, init_args: {stride: 4}}'
    --model.backbone transformer.yaml
    --config run.yaml

The path of a setting is its flag without `--`, `init_args` and `class_path`. Values are not checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_effattn.checkpoints.plain_yaml import OutOfBoundsError
from lit_effattn.checkpoints.trust import Trust
from lit_effattn.settings.shipped import find_config
from lit_effattn.settings.yaml_text import content_of, dump_yaml, load_yaml, read_yaml

_FLAG = re.compile(r"(-[ch]|--[\w.-]+)(\+?)(?:=(.*))?", re.DOTALL)
_NO_VALUE = re.compile(r"--[\w.-]+\+?=.*|-[^\s\d.]\S*", re.DOTALL)
"""An argument after a flag that is not its value. -5 and "- a list" are values."""
_SHORT = {"-c": "--config", "-h": "--help"}
_WRAPPERS = ("init_args", "dict_kwargs", "class_path")  # keys between a class and its options, which a path leaves out
_WITH_FILES = ("model", "data", "trainer", "checkpoint")
"""Groups of options whose values may be names of files of settings. Others, such as `--prompt x.yaml`, are text."""


class Settings:
    """The statements on one option: a value, a class and its options, or a list of these.

    Args:
        pairs: Keys such as `model`, `model.backbone.init_args.d_model` or `trainer.callbacks+`, and their values.
        folder: The folder to which names of files in the values are relative.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]] = (), folder: Path = Path()) -> None:
        self.raw: Any = None  # the last value as it is stated, which may be the name of a file of settings
        self.value: Any = None  # the last value, the name of a class, or a list; None if only options are stated
        self.options: dict[str, Settings] = {}  # of the class, by their names; another class drops them
        self.items: list[Settings] | None = None  # those of the list; None if there is none
        self.is_given = False  # whether the option itself is stated, not only its options, or an appended item
        self._n_given = 0  # items that were not appended
        self.update(pairs, folder)

    def update(self, pairs: Iterable[tuple[Any, Any]], folder: Path = Path()) -> None:
        """State more, which takes precedence."""
        for key, value in pairs:
            has_files = str(key).rstrip("+").partition(".")[0] in _WITH_FILES and key not in _TEXTS
            self._add(key, value, folder if has_files else None, ())

    def _add(self, key: Any, value: Any, folder: Path | None, within: tuple[Path, ...]) -> None:
        node = self
        for name in str(key).rstrip("+").split("."):
            if name and name not in _WRAPPERS:
                node = (node.items[-1] if node.items else node).options.setdefault(name, Settings())
        if not str(key).endswith("+"):
            node._put(value, folder, within)
            return
        if folder is not None:
            value, folder = content_of(value, folder)
        node.items = node.items or []
        for item in value if isinstance(value, list) else [value]:
            node.items.append(Settings())
            node.items[-1]._put(item, folder, within)

    def _put(self, value: Any, folder: Path | None, within: tuple[Path, ...]) -> None:
        self.raw, self.is_given = value, True
        if folder is not None and isinstance(value, str) and folder / value not in within:  # a file may name itself
            within = (*within, folder / value)
            value, folder = content_of(value, folder)
        if isinstance(value, Mapping):
            for key in sorted(value, key=lambda key: key != "class_path"):
                self._add(key, value[key], folder, within)
            return
        if isinstance(value, list) or _bare(value) != _bare(self.value):
            self.options = {}
        self.value, self.items, self._n_given = value, None, 0
        if isinstance(value, list):
            self.items, self._n_given = [Settings() for _ in value], len(value)
            for node, item in zip(self.items, value, strict=True):
                node._put(item, folder, within)

    def at(self, path: str, *, appended: bool = True) -> list[Settings]:
        """Return what is stated at a path, which leads through all items of a list, or those that were not appended."""
        found = [self]
        for name in path.split("."):
            parts = [part for node in found for part in node.parts(appended=appended)]
            found = [part.options[name] for part in parts if name in part.options]
        return found

    def parts(self, *, appended: bool = True) -> list[Settings]:
        """Return this one and the items of its list, with those that were appended or without."""
        return [self, *(self.items or [])[: None if appended else self._n_given]]

    def given(self, path: str) -> bool:
        """Return whether the setting at `path` is given. An item that is appended to a list does not give the list."""
        return any(node.is_given for node in self.at(path, appended=False))

    def values(self, path: str) -> list[Any]:
        """Return the values at `path`: several, if it leads through a list. A number in a flag is its text."""
        return [node.raw for node in self.at(path) if node.is_given]

    def text(self, path: str) -> str | None:
        """Return the value at `path` as text, None if there is none or it is null."""
        value = next(reversed([node.raw for node in self.at(path, appended=False) if node.is_given]), None)
        return None if value is None else str(value)

    def classes(self, path: str) -> list[str]:
        """Return the bare names of the classes that are given at `path`."""
        return [name for node in self.at(path) for name in node.names()]

    def names(self) -> list[str]:
        """Return the bare names of the class, or of those in the list."""
        if self.items is not None:
            return [name for item in self.items for name in item.names()]
        return [_bare(self.value)] if re.fullmatch(r"[^\W\d][\w.]*", str(self.value)) and self.value is not None else []

    def named(self, path: str = "") -> Iterator[tuple[str, list[str]]]:
        """Yield the path of each setting that may name a class, or a list of them, and their bare names."""
        for name, node in self.options.items():
            inside = f"{path}.{name}".removeprefix(".")
            if names := node.names():
                yield inside, names
            for part in node.parts():
                yield from part.named(inside)


def _bare(name: Any) -> str:
    return str(name).rpartition(".")[2]


class Option(NamedTuple):
    """A flag with its value, or another argument."""

    key: str  # the flag without `--`, with `+` if it appends to a list; empty for another argument
    text: str | None  # the value, None without one
    args: Sequence[str]  # the arguments that it consists of


class File(Settings):
    """The settings in a YAML file."""

    def __init__(self, path: str, content: dict[str, Any]) -> None:
        self.path, self.folder = path, Path(path).parent
        super().__init__(content.items(), self.folder)
        self.content = content

    @classmethod
    def read(cls, path: str) -> File:
        """Read a file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file can't be read, or does not hold settings.
        """
        content = read_yaml(Path(path), f"--config {path}")
        if not isinstance(content, dict):
            kind = "nothing" if content is None else f"a {type(content).__name__}"
            raise ValueError(f"--config {path} holds {kind}, not settings such as `model:`, `data:` and `trainer:`")
        if not isinstance(content.get("trainer") or {}, dict):
            raise ValueError(
                f"--config {path}: trainer is {content['trainer']!r}, not settings such as `max_steps: 100`"
            )
        return cls(path, content)


class Arguments:
    """A command with its flags and files. Flags take precedence over files, and a file over those before it.

    Args:
        args: The command, as in `lit-effattn COMMAND`, and its arguments.
        files: Files in place of those that `args` name.

    Raises:
        ValueError: If one of these flags has no value.
    """

    def __init__(self, args: Sequence[str], files: Sequence[File] | None = None) -> None:
        self.command = args[0]
        self.typed = [*args]
        self.options = [*_options(args[1:])]  # the flags and other arguments, in their order
        own = _OWN.get(self.command, _OWN_OF_RUNS)
        for option in self.options:
            if option.key in own and option.text is None:
                raise ValueError(f"--{option.key.rstrip('+')} has no value: expected one argument")
        self._pairs = [(o.key, _value(o)) for o in self.options if o.key and o.key != "config"]
        self.flags = Settings(self._pairs)  # what flags state
        given = [o for o in self.options if self.command == "predict" and not (o.key or o.args[0].startswith("-"))]
        self.inputs = [option.args[0] for option in given]
        # Without these, and without the flags that name files, the run and the checkpoint.
        self.remaining = [arg for o in self.options if o.key not in own and o not in given for arg in o.args]
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
    def stated(self) -> Settings:
        """The settings in files and flags."""
        return self.over({})

    def over(self, run: Mapping[str, Any]) -> Settings:
        """Return what the configuration of a run states, and files and flags that take precedence over it."""
        stated = Settings(run.items())
        for file in self.files:
            stated.update(file.content.items(), file.folder)
        stated.update(self._pairs)
        return stated

    @cached_property
    def trust(self) -> Trust:
        """The modules, classes and functions that the user trusts.

        Raises:
            ValueError: If a name is not that of one: see `Trust`.
        """
        values = [file.content.get("trust") for file in self.files]
        values += [value for key, value in self._pairs if key.rstrip("+") == "trust"]
        return Trust([name for v in values if v is not None for name in (v if isinstance(v, list) else [v])])

    def for_parser(self, *, root: Path | None, run: Mapping[str, Any] | None = None) -> list[str]:
        """Return the arguments for jsonargparse: files, flags that were not read here, and the folder of the runs.

        Files and flags override the settings of `run`. Without `root` the folder is that of the flags or files.
        """
        folder = self.flags.text("trainer.default_root_dir") if root is None else str(root)
        return [
            self.command,
            *(["--config", dump_yaml(run)] if run else []),
            *(arg for file in self.files for arg in ("--config", file.path)),
            *self.remaining,
            *(["--trainer.default_root_dir", folder] if folder else []),
        ]


_OWN_OF_RUNS = ("config", "trust", "trust+", "name", "ckpt_path", "trainer.default_root_dir", "average")
"""Flags that are read here. jsonargparse gets the paths that they mean, where it needs them."""
_TEXTS = ("name", "ckpt_path", "trainer.default_root_dir", "init_weights", "transfer_from")
"""Flags whose values are text, `null` included."""
_OWN = {"fit": _OWN_OF_RUNS[:-1], "data": _OWN_OF_RUNS[:3]}


def _options(args: Sequence[str]) -> Iterator[Option]:
    """Yield the flags of a command line, each with its value, and the arguments between them."""
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


def _value(option: Option) -> Any:
    """Return a flag's value: a list or a mapping, None for null, else the text."""
    if option.key in _TEXTS:
        return option.text
    try:
        content = load_yaml(option.text or "")
    except OutOfBoundsError as error:
        raise ValueError(f"--{option.key} can't be read: {error}") from error
    except (ValueError, yaml.YAMLError):
        return option.text
    return content if isinstance(content, (dict, list)) else None if option.text == "null" else option.text
