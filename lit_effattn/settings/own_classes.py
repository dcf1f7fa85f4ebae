"""Classes of the user's own: the folder of their modules, the option `--trust`, and subclasses."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, ClassVar

TRUST = (
    "A module of your own, or the full name of a class or function, that a checkpoint (classes) or YAML and flags "
    "(functions) may name although it is not on lit-effattn's list. May be given several times."
)


class _CurrentFolder:
    """The last finder of modules: it adds the current folder to the import path for a module that the user names.

    Otherwise a file of that folder would run in place of any module that a library tries to import and lacks.
    """

    words: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module that no other finder has found."""
        if name not in cls.words or (folder := str(Path.cwd())) in sys.path:
            return None
        if (spec := PathFinder.find_spec(name, [folder])) is not None:
            sys.path.append(folder)
        return spec


def may_name_modules(text: str) -> None:
    """Let the words of the user's own arguments or files name modules in the current folder: my_module.MyAttention."""
    _CurrentFolder.words.update(re.findall(r"[^\W\d]\w*", text))
    if _CurrentFolder not in sys.meta_path:
        sys.meta_path.append(_CurrentFolder)


def subclasses(base: type) -> Iterator[type]:
    """Yield a class and all classes that are derived from it."""
    yield base
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield from subclasses(kind)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trust`, whose value is a list of names."""
    parser.add_argument("--trust", action=_Append, default=[], metavar="NAME", help=TRUST)


class _Append(argparse.Action):
    """Adds a name to a list, if the name exists."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        from lit_effattn.checkpoints.allowlist import Trust

        Trust([value])
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), value])
