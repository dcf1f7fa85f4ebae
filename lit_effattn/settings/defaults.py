"""Separating the settings of a configuration that differ from their defaults from those that do not."""

from typing import Any

import lightning.pytorch as pl

from lit_effattn.callbacks import LastCheckpoint
from lit_effattn.checkpoints.trust import imported
from lit_effattn.hparams import defaults
from lit_effattn.settings.tools import ROOT

TRAINER = {"default_root_dir": ROOT, "log_every_n_steps": 10, "check_val_every_n_epoch": None}
"""Defaults of the command that are not those of Lightning's trainer."""

_UNKNOWN = object()


def split(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a run that differ from their defaults, and the unchanged ones, by full names.

    The defaults of a class are known if its module is imported; others are not imported, since the configuration is
    data. Classes are shown by their bare names.
    """
    changed: dict[str, Any] = {}
    unchanged: dict[str, Any] = {}
    known: dict[str, Any] = {
        "seed_everything": 0,
        **dict.fromkeys(name for name, value in config.items() if value is None),  # an option that was not given
        "trainer": {**defaults(pl.Trainer), **TRAINER},
        "checkpoint": defaults(LastCheckpoint),
    }
    _sort(config, "", known, changed, unchanged)
    return changed, unchanged


def _sort(value: Any, name: str, default: Any, changed: dict[str, Any], unchanged: dict[str, Any]) -> None:
    if isinstance(value, dict) and "class_path" in value:
        path = str(value["class_path"])
        kind = imported(path)
        (unchanged if kind is not None and kind is default else changed)[name] = path.rpartition(".")[2]
        default = {} if kind is None else defaults(kind)
        value = value.get("init_args") or {}
    if isinstance(value, dict) and (value or default != {}):
        defaults_inside = default if isinstance(default, dict) else {}
        for key, item in value.items():
            _sort(item, f"{name}.{key}".removeprefix("."), defaults_inside.get(key, _UNKNOWN), changed, unchanged)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            _sort(item, f"{name}.{i}", _UNKNOWN, changed, unchanged)
    elif not isinstance(value, dict):
        same = list(default) if isinstance(default, tuple) else default
        if isinstance(default, type) and isinstance(value, str):  # the path of a class
            same, value = default.__name__, value.rpartition(".")[2]
        (unchanged if default is not _UNKNOWN and value == same else changed)[name] = value
