"""Classes of the user's own: the folder of their modules, the option `--trust`, and subclasses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRUST = (
    "A module of your own, or the full name of a class or function, that a checkpoint (classes) or YAML and flags "
    "(functions) may name although it is not on lit-effattn's list. May be given several times."
)


def add_current_folder() -> None:
    """Add the current folder to the end of the import path, for classes such as my_module.MyAttention."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)


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
