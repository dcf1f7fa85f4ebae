"""Names of runs: the folder, inside that of all runs, for the runs of one configuration.

runs/digits_linear/                     --config digits_linear, whose default_root_dir it is
runs/digits_linear+SoftmaxAttention/    the same with --model.backbone.attention SoftmaxAttention
runs/wide/                              with --name wide
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from lit_effattn.settings.arguments import Arguments, Settings

ROOT = "runs"
"""The default of `trainer.default_root_dir`: the folder that holds all runs."""

_SWAPPED = ("model", "backbone", "encoder", "decoder", "attention", "cross_attention")
"""Options whose classes are part of the name of a run."""


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trainer.default_root_dir`, the folder in which `last` and `best` look for runs."""
    parser.add_argument(
        "--trainer.default_root_dir", dest="root", default=ROOT, metavar="FOLDER", help=f"Of the runs; {ROOT}."
    )


def stated_root(arguments: Arguments) -> Path:
    """Return the folder that flags or files name for the runs of this configuration, or that of all runs."""
    return Path(arguments.stated.text("trainer.default_root_dir") or ROOT)


def root_of(arguments: Arguments) -> Path:
    """Return the folder for the runs of a command, and for `last` and `best`.

    A folder that a file names after itself is for the runs of this configuration. If flags swap classes, the folder is
    one beside it, with the names of these classes.

    Raises:
        ValueError: If the name is not valid for a folder.
    """
    root, name = stated_root(arguments), arguments.stated.text("name")
    if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(f"--name {name}: use letters, digits and _ . + - only; it is the name of a folder")
    by_flag = arguments.flags.given("trainer.default_root_dir")
    files = [] if by_flag else [file for file in arguments.files if Path(file.path).stem == root.name]
    if not files:
        return root if name is None else root / name
    return root.with_name("+".join([root.name, *_swapped(files[-1], arguments.flags)]) if name is None else name)


def _swapped(file: Settings, flags: Settings) -> list[str]:
    """Return the classes that flags name in place of those in a file, in the order of the flags."""
    swapped: dict[str, list[str]] = {}
    for path, names in flags.named():
        if path.startswith("model") and path.rpartition(".")[2] in _SWAPPED:
            swapped[path] = names if names != file.classes(path) else []
    return [name for names in swapped.values() for name in names]
