"""Bit-for-bit comparison of a resumed run with an uninterrupted one."""

import csv
import math
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OF_THE_RUN = {"default_root_dir", "ckpt_path", "current_score"}
"""What differs in a resumed run, by its name at any depth: its folder, how it began, and the score of the last
validation, which Lightning's ModelCheckpoint saves and does not restore."""

BEST = {"best_model_score", "best_model_path", "best_k_models", "kth_best_model_path", "kth_value"}
"""What ModelCheckpoint saves of the best: after a validation of its own, a run may have another."""

Log = dict[str, dict[int, float]]
"""The last value of each column, by step."""


def first_difference(a: Any, b: Any, name: str = "") -> str | None:
    """Return where `a` and `b` differ first, or None if they are equal bit for bit. NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        if torch.equal(*bits):
            return None
        return f"{name}: tensors differ by up to {(a.double() - b.double()).abs().max().item():.1g}"
    if type(a) is not type(b):
        return f"{name}: {_short(a)} and {_short(b)}"
    if isinstance(a, Mapping):
        if a.keys() != b.keys():
            return f"{name}: only one has {', '.join(map(str, sorted(a.keys() ^ b.keys(), key=str)))}"
        return next((d for key in a if (d := first_difference(a[key], b[key], _join(name, key)))), None)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{name}: {len(a)} and {len(b)} entries"
        result = (first_difference(x, y, _join(name, i)) for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((d for d in result if d), None)
    if a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)):
        return None
    return f"{name}: {_short(a)} and {_short(b)}"


def compare_checkpoints(whole: Path, resumed: Path, but: Set[str] = frozenset()) -> str | None:
    """Return the first difference of two checkpoints, in all that they hold but `OF_THE_RUN` and `but`."""
    a, b = (_without(OF_THE_RUN | but, torch.load(path, weights_only=True)) for path in (whole, resumed))
    return _nothing_learnt(a) or first_difference(a, b)


def _nothing_learnt(whole: Mapping[str, Any]) -> str | None:
    """Return why the uninterrupted run's checkpoint would be equal to that of a broken run, or None."""
    if empty := [key for key in ("global_step", "state_dict", "optimizer_states") if not whole.get(key)]:
        return f"the uninterrupted run's checkpoint has no {', '.join(empty)}"
    broken = [name for name, t in whole["state_dict"].items() if not t.isfinite().all()]
    return f"the uninterrupted run's {broken[0]} is not finite" if broken else None


def _without(names: Set[str], content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _without(names, value) for name, value in content.items() if name not in names}
    return [_without(names, value) for value in content] if isinstance(content, list) else content


def compare_best(whole: Path, resumed: Path) -> str | None:
    """Return the first difference of the weights of two best checkpoints."""
    if not resumed.exists():
        return "best.ckpt is missing"
    a, b = (torch.load(path, weights_only=True) for path in (whole, resumed))
    keys = ("global_step", "state_dict")
    return first_difference(*({key: checkpoint[key] for key in keys} for checkpoint in (a, b)), "best.ckpt")


def read_log(run: Path) -> Log:
    """Read all logged values of training, validation and the learning rate; a resumed run overrides earlier values."""
    log: Log = {}
    for path in sorted((run / "csv").rglob("metrics.csv"), key=_version):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and re.match(r"train/|val/|lr-", name):
                        log.setdefault(name, {})[int(row["step"])] = float(value)
    return log


def compare_logs(whole: Log, resumed: Log, may_add: int | None = None) -> str | None:
    """Return the first difference of two logs.

    Args:
        whole: The uninterrupted run's.
        resumed: The resumed run's.
        may_add: A step at which `resumed` may have values of its own: a time limit stopped it, after a validation.
    """
    if not any(whole.values()):
        return "log: the uninterrupted run has no values"
    for name in sorted(whole.keys() | resumed.keys()):
        a, b = whole.get(name, {}), resumed.get(name, {})
        for step in sorted(a.keys() | b.keys()):
            if step not in b:
                return f"log: {name} of step {step} is missing"
            if step not in a:
                if step != may_add:
                    return f"log: {name} of step {step} is not in the uninterrupted run's"
            elif step == may_add and name.startswith("val/"):
                continue
            elif difference := first_difference(a[step], b[step], f"log: {name} of step {step}"):
                return difference
    return None


def unreadable(run: Path) -> str | None:
    """Return the first checkpoint of `run` that can't be read, or None."""
    for path in sorted(run.rglob("*.ckpt")):
        try:
            torch.load(path, weights_only=True)
        except Exception as error:
            return f"{path.name} can't be read: {type(error).__name__}"
    return None


def remains(run: Path) -> str | None:
    """Return the first file of `run` that an interrupted write has left, or None."""
    result = sorted(path.name for path in run.rglob(".*.part"))
    return f"left over: {re.sub(r'[.][0-9]+[.]', '.PID.', result[0])}" if result else None


def _version(path: Path) -> int:
    result = re.search(r"version_(\d+)", str(path))
    return int(result[1]) if result else -1


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
