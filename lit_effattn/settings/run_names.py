"""Names of runs: the folder, below that of all runs, in which the runs of one configuration lie.

runs/digits_softmax/                    --config digits_softmax, which says so
runs/digits_softmax+LinearAttention/    the same with --model.backbone.attention LinearAttention
runs/wide/                              with --name wide
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_SWAPPED = ("model", "backbone", "encoder", "decoder", "attention", "cross_attention")
"""Options of the model, and the model itself, whose class the name of a run tells."""


def root_of(root: Path, name: str | None, files: Mapping[str, Any], flags: Sequence[str]) -> Path:
    """Return the folder for the runs of a command, and for `last` and `best`.

    Args:
        root: The folder that files or flags name. One that is named after a configuration is for the runs of this
            configuration as it is.
        name: What `--name` says.
        files: The configurations by the names of their files without ".yaml".
        flags: The arguments of the command.

    Raises:
        ValueError: the name cannot be that of a folder.
    """
    if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(f"--name {name}: use letters, digits and _ . + - only; it is the name of a folder")
    if root.name not in files:
        return root if name is None else root / name
    parts = [root.name, *_swapped(files[root.name], flags)]
    return root.with_name("+".join(parts) if name is None else name)


def _swapped(config: Any, flags: Sequence[str]) -> list[str]:
    """Return the classes that flags name in place of those in `config`, in the order of the flags."""
    found: dict[str, list[str]] = {}
    for option, value in _options(flags):
        path = [part for part in option.split(".") if part not in ("init_args", "class_path")]
        if path[0] == "model" and path[-1] in _SWAPPED:
            now, before = _classes(value), _classes(_at(config, path))
            found[".".join(path)] = now if now != before else []
    return [name for names in found.values() for name in names]


def _options(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Return options and their values, read as YAML."""
    for i, flag in enumerate(flags):
        if flag.startswith("--"):
            option, given, value = flag[2:].partition("=")
            value = value if given else "".join(flags[i + 1 : i + 2])
            try:
                yield option, yaml.safe_load(value)
            except yaml.YAMLError:
                continue  # jsonargparse reports it


def _at(config: Any, path: Sequence[str]) -> Any:
    """Return what a configuration has at a path; None: nothing."""
    for part in path:
        config = config.get("init_args", config) if isinstance(config, dict) else None
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _classes(spec: Any) -> list[str]:
    """Return the bare names of the classes in a spec, or in a list of specs."""
    if isinstance(spec, list):
        return [name for part in spec for name in _classes(part)]
    named = spec.get("class_path") if isinstance(spec, dict) else spec
    return [named.rpartition(".")[2]] if isinstance(named, str) else []
