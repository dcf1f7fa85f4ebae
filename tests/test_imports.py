"""Imports go one way, as CONTRIBUTING.md says: each room lists the rooms that it may import."""

import ast
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY

ROOMS: dict[str, set[str]] = {
    "checks": set(),
    "hparams": set(),
    "stopping": set(),
    "sequence": {"hparams"},
    "ops": {"sequence"},
    "attention": {"ops", "sequence", "hparams"},
    "laws": {"sequence"},
    "nn": {"attention", "ops", "sequence", "hparams"},
    "drawing": set(),
    "datamodules": set(),
    "checkpoints": set(),
    "generation": {"nn", "attention", "ops", "sequence"},
    "distributed": {"nn", "attention", "sequence", "checkpoints"},
    "callbacks": {"distributed", "nn", "ops", "sequence", "checkpoints", "drawing", "stopping"},
    "tasks": {
        "callbacks",
        *("generation", "distributed", "nn", "attention", "sequence", "hparams"),
        *("datamodules", "checkpoints", "drawing"),
    },
    "settings": {"tasks", "callbacks", "generation", "attention", "datamodules", "checkpoints", "hparams"},
    "interchange": {
        *("tasks", "nn", "attention", "ops", "sequence", "hparams"),
        *("datamodules", "checkpoints", "__init__"),
    },
    "analysis": {
        *("settings", "tasks", "callbacks", "generation", "nn", "attention", "sequence", "hparams"),
        *("datamodules", "checkpoints", "drawing", "stopping"),
    },
    "cli": {
        *("interchange", "settings", "tasks", "distributed", "nn", "attention", "ops", "sequence", "hparams"),
        *("callbacks", "datamodules", "checkpoints", "drawing", "laws", "stopping"),
    },
    "__init__": {"nn", "tasks", "checkpoints"},  # when they are asked for
}
ROOMS = {room: below | ({"checks"} if room != "checks" else set()) for room, below in ROOMS.items()}

DATA: dict[str, set[str]] = {
    "common": set(),
    "text": {"common"},
    "pairs": {"common", "text"},
    "images": {"common"},
    "speech": {"common"},
    "synthetic": {"common"},
}
"""The kinds of data, and those that each may import."""


def modules() -> dict[str, Path]:
    """All modules of the package by their names."""
    found = {}
    for folder, prefix in (("lit_effattn", ""), ("callbacks", "callbacks."), ("datamodules", "datamodules.")):
        for path in (REPOSITORY / folder).rglob("*.py"):
            found[prefix + ".".join(path.relative_to(REPOSITORY / folder).with_suffix("").parts)] = path
    return found


MODULES = modules()


def imported(module: str) -> set[str]:
    """What of the package a module imports, at its top or within functions."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lit_effattn":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "lit_effattn"}
    return {known for name in names if (known := module_of(name.removeprefix("lit_effattn."))) and known != module}


def module_of(name: str) -> str | None:
    """The module that `name` is, or is defined in."""
    while name:
        for known in (name, f"{name}.__init__"):
            if known in MODULES:
                return known
        name = name.rpartition(".")[0]
    return None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module: str):
    room = module.split(".")[0]
    assert {name.split(".")[0] for name in imported(module)} - {room} <= ROOMS[room]


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.count(".") > 1 and "datamodules." in name))
def test_kinds_of_data_have_an_order(module: str):
    group = module.split(".")[1]
    used = {name.split(".")[1] for name in imported(module) if name.startswith("datamodules.")}
    assert used - {group} <= DATA[group]


def test_the_rooms_are_those_there_are_and_have_an_order():
    assert {module.split(".")[0] for module in MODULES} == ROOMS.keys()
    left = {room: set(below) for room, below in ROOMS.items()}
    while left:
        lowest = {room for room, below in left.items() if not below & left.keys()}
        assert lowest, f"a circle among {sorted(left)}"
        left = {room: below for room, below in left.items() if room not in lowest}


def test_no_two_modules_import_each_other():
    left = {module: imported(module) - {f"{module.rpartition('.')[0]}.__init__"} for module in MODULES}
    while left:
        lowest = {module for module, below in left.items() if not below & left.keys()}
        assert lowest, f"a circle among {sorted(left)}"
        left = {module: below for module, below in left.items() if module not in lowest}
