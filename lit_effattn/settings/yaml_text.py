"""YAML as the command reads and writes it."""

import re
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from lit_effattn.checkpoints.plain_yaml import MAX_BYTES, OutOfBoundsError, check_bounds
from lit_effattn.checkpoints.trust import may_name_modules

FILES = (".yaml", ".yml", ".json")  # how the names of files of settings end

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
    may_name_modules(text, in_file=True)
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


def read_yaml(path: Path, name: str) -> Any:
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


def content_of(value: Any, folder: Path) -> tuple[Any, Path]:
    """Return the content and the folder of the file that `value` names; `value` and `folder` if it names none.

    Raises:
        ValueError: If the file can't be read. A JSON file that can't is data.
    """
    if not isinstance(value, str) or not value.endswith(FILES):
        return value, folder
    path = folder / value
    try:
        content = read_yaml(path, str(path))
    except FileNotFoundError:
        return value, folder
    except ValueError:
        if path.suffix == ".json":
            return value, folder
        raise
    return (content, path.parent) if isinstance(content, (dict, list)) else (value, folder)
