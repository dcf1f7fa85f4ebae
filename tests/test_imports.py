"""Imports go one way, as CONTRIBUTING.md says: each room lists the rooms that it may import."""

import ast
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY

ROOMS: dict[str, set[str]] = {
    "hparams": set(),
    "sequence": {"hparams"},
    "sequence_parallel": {"sequence"},
    "strategies": {"sequence", "sequence_parallel"},
    "positions": {"sequence", "hparams"},
    "differences": set(),
    "ops": {"sequence", "differences"},
    "attention": {"ops", "positions", "sequence", "hparams"},
    "nn": {"attention", "positions", "sequence", "hparams"},
    "tensor_parallel": {"nn", "attention", "sequence"},
    "sharding": {"nn", "sequence", "tensor_parallel", "checkpoint_folders"},
    "generation": {"nn", "attention", "ops", "sequence"},
    "beam": {"generation", "nn", "sequence"},
    "schedules": set(),
    "runs": set(),
    "pictures": set(),
    "plots": set(),
    "import_errors": set(),
    "printable": set(),
    "plain_yaml": set(),
    "model_size": set(),
    "allowlist": {"import_errors"},
    "spec_check": {"allowlist"},
    "checkpoint_shape": set(),
    "spec_build": {"allowlist", "spec_check"},
    "checkpoint_files": {"checkpoint_shape", "runs"},
    "checkpoint_folders": {"checkpoint_files", "runs"},
    "checkpoints": {"allowlist", "checkpoint_files", "checkpoint_folders", "checkpoint_shape", "runs"},
    "averaging": {"checkpoints", "runs"},
    "loading": {"allowlist", "averaging", "checkpoints", "model_size", "runs", "spec_build", "spec_check"},
    "datamodules": set(),
    "slurm": {"runs"},
    "run_lock": {"runs", "slurm"},
    "callbacks": {"sequence", "ops", "pictures", "checkpoint_files", "checkpoint_folders", "runs", "slurm"},
    "tasks": {
        *("generation", "beam", "nn", "positions", "sequence", "sharding", "hparams", "datamodules"),
        *("allowlist", "checkpoints", "loading", "printable", "runs", "pictures"),
    },
    "pretrained": {
        *("tasks", "nn", "attention", "positions", "hparams", "datamodules", "allowlist"),
        *("checkpoint_files", "checkpoints", "model_size", "__init__"),
        "runs",
    },
    "export": {
        "tasks",
        "nn",
        "attention",
        "positions",
        "sequence",
        "hparams",
        "datamodules",
        "differences",
        "__init__",
    },
    "run_records": {"tasks", "callbacks", "checkpoints", "datamodules", "plain_yaml", "runs", "sequence"},
    "cli": {
        *("pretrained", "tasks", "generation", "beam", "nn", "attention", "positions", "sequence"),
        *("schedules", "sharding", "datamodules", "callbacks", "strategies"),
        *(
            "allowlist",
            "averaging",
            "checkpoint_files",
            "checkpoint_shape",
            "checkpoints",
            "runs",
            "pictures",
            "slurm",
            "run_lock",
        ),
        *(
            "import_errors",
            "spec_build",
            "spec_check",
            "run_records",
            "plots",
            "model_size",
            "printable",
            "export",
            "loading",
        ),
    },
    "__init__": {"nn", "tasks"},  # when they are asked for
}


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
