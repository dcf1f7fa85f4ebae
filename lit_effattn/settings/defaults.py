"""Which settings of a configuration differ from the defaults of the command and of the classes that it names."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_effattn.callbacks import LastCheckpoint
from lit_effattn.checkpoints.allowlist import listed
from lit_effattn.hparams import defaults
from lit_effattn.settings.run_names import ROOT

TRAINER = {"default_root_dir": ROOT, "log_every_n_steps": 10, "check_val_every_n_epoch": None}
"""Defaults of the command that are not those of Lightning's trainer."""

_UNKNOWN = object()


def split(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a run's configuration that differ from their defaults, and the others, by full names.

    The defaults of a class are known if it is on the list of `lit_effattn.checkpoints.allowlist`; the
    configuration is data, so no other class is imported. Classes are shown by their bare names.
    """
    changed: dict[str, Any] = {}
    others: dict[str, Any] = {}
    known: dict[str, Any] = {
        "seed_everything": 0,
        **dict.fromkeys(name for name, value in config.items() if value is None),  # an option that was not given
        "trainer": {**defaults(pl.Trainer), **TRAINER},
        "checkpoint": defaults(LastCheckpoint),
    }
    _sort(config, "", known, changed, others)
    return changed, others


def _sort(value: Any, name: str, default: Any, changed: dict[str, Any], others: dict[str, Any]) -> None:
    if isinstance(value, dict) and "class_path" in value:
        kind = listed(str(value["class_path"]))
        (others if kind is not None and kind is default else changed)[name] = str(value["class_path"]).rpartition(".")[
            2
        ]
        default = {} if kind is None else defaults(kind)
        value = value.get("init_args") or {}
    if isinstance(value, dict) and (value or default != {}):
        of_parts = default if isinstance(default, dict) else {}
        for key, part in value.items():
            _sort(part, f"{name}.{key}".removeprefix("."), of_parts.get(key, _UNKNOWN), changed, others)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            _sort(item, f"{name}.{i}", _UNKNOWN, changed, others)
    elif not isinstance(value, dict):
        same = list(default) if isinstance(default, tuple) else default
        if isinstance(default, type) and isinstance(value, str):  # the path of a class
            same, value = default.__name__, value.rpartition(".")[2]
        (others if default is not _UNKNOWN and value == same else changed)[name] = value
