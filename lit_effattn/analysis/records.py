"""Read the folder of a run, as data: its configuration, log and checkpoints."""

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from lit_effattn import sequence
from lit_effattn.callbacks.cost_log import DEVICE_MEMORY, PROCESS_MEMORY, SECONDS
from lit_effattn.checkpoints.io import read_outline, saved_model
from lit_effattn.checkpoints.own_runs import config_file, own_config
from lit_effattn.checkpoints.plain_yaml import parse_yaml
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, check_contained, is_checkpoint, small_text
from lit_effattn.datamodules.common.files import regular
from lit_effattn.hparams import flat
from lit_effattn.settings.defaults import split
from lit_effattn.tasks import Task

Curve = dict[int, float]  # values by optimiser step, counted from 0
STATE_LENGTH = 1024  # positions for which the bytes of a growing state are counted if the data have no length

_LENGTHS = ("length", "max_len", "segment_len")
_MEMORY = {DEVICE_MEMORY: "peak device bytes", PROCESS_MEMORY: "peak process bytes"}
_MOST_STEPS = 2**53
_NOT_SETTINGS = ("trainer.default_root_dir", "ckpt_path")
"""Settings that differ between runs without effect on the results."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run. Unknown values are None or empty."""

    path: Path  # the folder, or the file of a checkpoint outside all runs
    settings: dict[str, Any]  # the flat configuration, such as `model.backbone.attention`, with bare class names
    curves: dict[str, Curve] = field(default_factory=dict)  # every column of the log, by step
    seconds: Curve = field(default_factory=dict)  # since the start, by step, without pauses of a stopped run
    seconds_per_step: float | None = None  # the median over the logged intervals
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes, by the kind of memory
    parameters: int | None = None  # number of the model's parameters
    state_bytes: int | None = None  # of the backbone's carried state, for one sequence of `state_length` positions
    state_length: int | None = None  # the number of positions; None if the state has a fixed size
    monitor: str | None = None  # the task's validation metric; lower is better
    remark: str = ""  # why something is missing
    defaults: Collection[str] = ()  # names of the settings that are as by default

    @property
    def final(self) -> dict[str, float]:
        """The last value of each metric of training, validation and test."""
        return {
            name: curve[max(curve)]
            for name, curve in self.curves.items()
            if curve and name.startswith(("train/", "val/", "test/"))
        }


def read_run(path: Path, *, length: int | None = None, trust: Sequence[str] = ()) -> RunRecord:
    """Read a run, or what a checkpoint outside all runs says of its own.

    The bytes of a growing state are counted for `length` positions. Default: the data's `length`, `max_len` or
    `segment_len`, the dimensions of an image, or 1,024.

    Raises:
        ValueError: If `path` is not the folder of a run, or its configuration can't be read.
    """
    config = read_config(path)
    settings = flat(config)
    columns, seconds, seconds_per_step = _read_log(path / "csv")
    peaks = {}
    for column, name in _MEMORY.items():
        if values := [value for value in columns.get(column, {}).values() if isfinite(value)]:
            peaks[name] = int(max(values))
    curves = {name: curve for name, curve in columns.items() if not name.startswith("cost/")}
    known: dict[str, Any] = {"seconds": seconds, "seconds_per_step": seconds_per_step, "peak_memory": peaks}
    known["defaults"] = flat(split(config)[1]).keys()
    files = (path, *(path / "checkpoints" / name for name in (LAST, PREVIOUS, "best.ckpt")))
    checkpoint = next((file for file in files if is_checkpoint(file)), None)
    if checkpoint is None:
        return RunRecord(path, settings, curves, **known, remark="no checkpoint")
    try:
        curves = curves or checkpoint_metrics(checkpoint)
        model = Task.load_from_checkpoint(checkpoint, map_location="cpu", trust=trust)
        known |= _sizes(model, length or getattr(model, "n_dims", None) or _data_length(settings))
    except (ValueError, RuntimeError, TypeError, AttributeError, LookupError, ArithmeticError, OSError) as error:
        # These are the errors of reading a file and of building a model.
        known["remark"] = f"{checkpoint.name}: {str(error).partition(chr(10))[0]}"
    return RunRecord(path, settings, curves, **known)


def read_config(path: Path) -> dict[str, Any]:
    """Return the newest configuration of the run in the folder `path`, or of the model in a checkpoint, as data.

    Raises:
        ValueError: If `path` is not the folder of a run, or its configuration can't be read.
    """
    if is_checkpoint(path):
        return own_config(path) or {"model": saved_model(read_outline(path))}
    if (file := config_file(path)) is None:
        runs = sorted(config.parent for config in path.glob("*/config.yaml"))
        hint = f"; it holds runs, such as {runs[-1]}" if runs else ""
        raise ValueError(f"{path} is not the folder of a run: it has no config.yaml{hint}")
    try:
        content = parse_yaml(small_text(check_contained(path) / file.name))
    except ValueError as error:
        raise ValueError(f"{file} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no settings")
    return content


def differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the settings that differ between runs, by name: the value in each run, None if it is missing.

    A configuration may leave out defaults: a missing setting does not differ from the default.
    """
    settings = _aligned([{name: (value, name in run.defaults) for name, value in run.settings.items()} for run in runs])
    rows: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for of_run in settings for name in of_run if name not in _NOT_SETTINGS):
        stated = [of_run[name] for of_run in settings if name in of_run]
        values = [of_run.get(name, (None, True))[0] for of_run in settings]
        if any(setting != (stated[0][0], True) for setting in stated) and any(value != values[0] for value in values):
            rows[name] = values
    return rows


def _aligned(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return settings with `x` and `x.option` as `x.0` and `x.0.option` where another run has a list.

    Examples:
        >>> _aligned([{"attention": "A", "attention.bias": True}, {"attention.0": "A"}])
        [{'attention.0': 'A', 'attention.0.bias': True}, {'attention.0': 'A'}]
    """
    lists = {name.removesuffix(".0") for of_run in settings for name in of_run if name.endswith(".0")}
    aligned = []
    for of_run in settings:
        single = lists & of_run.keys()
        owner = {name: next((x for x in single if f"{name}.".startswith(f"{x}.")), None) for name in of_run}
        aligned.append({(f"{x}.0{name[len(x) :]}" if (x := owner[name]) else name): v for name, v in of_run.items()})
    return aligned


def _read_log(folder: Path) -> tuple[dict[str, Curve], Curve, float | None]:
    """Return all columns of the logs in `folder`, the time by step, and the median time of a step."""
    curves: dict[str, Curve] = {}
    seconds: Curve = {}
    per_step: list[float] = []
    for path in sorted(folder.glob("version_*/metrics.csv"), key=_version):
        timed: Curve = {}
        for step, name, value in _entries(path):
            (timed if name == SECONDS else curves.setdefault(name, {}))[step] = value
        if not timed:
            continue
        steps = sorted(timed)
        per_step += [(timed[b] - timed[a]) / (b - a) for a, b in pairwise(steps)]
        seconds = {step: value for step, value in seconds.items() if step < steps[0]}  # without repeated steps
        offset = max(seconds.values(), default=0.0)
        seconds |= {step: offset + value for step, value in timed.items()}
    return curves, seconds, median(per_step) if per_step else None


def _entries(path: Path) -> Iterator[tuple[int, str, float]]:
    """Yield step, column and value of every number in a log, without a truncated last line."""
    try:
        with regular(path).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                try:
                    step = int(row.pop("step"))
                    numbers = [(name, float(value)) for name, value in row.items() if value and name != "epoch"]
                except (KeyError, TypeError, ValueError):
                    continue
                if 0 <= step < _MOST_STEPS:
                    yield from ((step, name, value) for name, value in numbers)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read: {error}; delete it to leave its figures out") from error


def _version(path: Path) -> int:
    number = path.parent.name.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def checkpoint_metrics(checkpoint: Path) -> dict[str, Curve]:
    """Return the latest metrics when a checkpoint was saved, by name and step."""
    content = read_outline(checkpoint)
    logged = content.get("logged")
    metrics = logged.get("metrics") if isinstance(logged, dict) else None
    step = content.get("global_step")
    if not isinstance(metrics, dict) or not isinstance(step, int):
        return {}
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    return {name: {step: float(v)} for name, v in numbers.items() if isinstance(name, str) and not abs(v) > _MOST_STEPS}


def _data_length(settings: Mapping[str, Any]) -> int:
    lengths = (settings.get(f"data.{name}") for name in _LENGTHS)
    return next((value for value in lengths if isinstance(value, int) and value > 0), STATE_LENGTH)


def _sizes(model: Task, length: int) -> dict[str, Any]:
    """Return the number of parameters, the monitor, and the bytes of the state if the backbone has one."""
    parameters = sum(p.numel() for p in model.parameters())
    sizes: dict[str, Any] = {"parameters": parameters, "monitor": getattr(model, "monitor", None)}
    backbone: Any = getattr(model, "backbone", None)
    if getattr(backbone, "causal", False) and hasattr(backbone, "initial_state"):
        positions = None if backbone.bounded_by is None else length
        sizes["state_bytes"] = sequence.nbytes(backbone.initial_state(1, max_len=positions))
        sizes["state_length"] = positions
    return sizes
