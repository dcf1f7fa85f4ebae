"""`lit-effattn compare`: tables and plots of several runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_effattn.analysis.records import RunRecord, differences, read_run
from lit_effattn.analysis.tables import Table, comma_separated, from_columns, markdown, show
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import short
from lit_effattn.checkpoints.shipped import model_path
from lit_effattn.drawing import plots
from lit_effattn.settings.own_classes import add_trust
from lit_effattn.settings.parsers import tool_parser


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `compare`."""
    parser = tool_parser(
        "compare", "Compare runs: settings that differ, metrics, parameters, bytes of state, time, peak memory."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="The folder of a run, or model:NAME.")
    parser.add_argument(
        "--format", choices=["terminal", "markdown", "csv"], default="terminal", help="Default: terminal."
    )
    parser.add_argument("--output", metavar="FILE", help="Write the table here; in Markdown unless --format csv.")
    parser.add_argument("--plots", metavar="FOLDER", help="Write curves.png here: metrics by step and by time.")
    parser.add_argument(
        "--length",
        type=int,
        help="Positions for which the bytes of a growing state are counted. Default: the length in the data's "
        "configuration, the dimensions of an image, or 1,024.",
    )
    add_trust(parser)
    return parser


def compare(args: list[str]) -> None:
    """Compare runs.

    Args:
        args: The arguments of the command.

    Raises:
        ValueError: If a folder is not that of a run, an option is out of range, or matplotlib is missing.
    """
    options = _parser().parse_args(args)
    if options.length is not None and options.length < 1:
        raise ValueError(f"--length {options.length} must be at least 1")
    if options.plots:
        plots.check_available()
    runs = [read_run(model_path(path, "compare"), length=options.length, trust=options.trust) for path in options.runs]
    names = names_of([run.path for run in runs])
    tables = [table for table in (results(names, runs), _settings(names, runs)) if table.rows]
    text = comma_separated(_joined(names, runs)) if options.format == "csv" else "\n".join(map(markdown, tables))
    if options.output:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(text, encoding="utf-8")
        print(f"table: {short(options.output)}")
    elif options.format == "terminal":
        for table in tables:
            show(table)
    else:
        print(printable(text), end="")
    for name, run in zip(names, runs, strict=True):
        if run.remark:
            print(printable(f"{name}: {run.remark}"), file=sys.stderr)
    if options.plots and (panels := _panels(names, runs)):
        print(f"plots: {short(plots.curves(panels, Path(options.plots) / 'curves.png'))}")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return names of runs: the configuration's name, with the time if several runs have it; of a file, its own."""
    resolved = [path.resolve() for path in paths]
    names = [Path(short(path)).name if path.is_file() else path.parent.name for path in resolved]
    return [
        name if names.count(name) == 1 else f"{path.parent.name}/{path.name}"
        for name, path in zip(names, resolved, strict=True)
    ]


def results(names: Sequence[str], runs: Sequence[RunRecord]) -> Table:
    """Return a table with a row for each run, without empty columns."""
    metrics = dict.fromkeys(name for run in runs for name in run.final if name != "train/loss")
    peaks = dict.fromkeys(name for run in runs for name in run.peak_memory)
    columns: dict[str, list[Any]] = {
        "run": list(names),
        "parameters": [run.parameters for run in runs],
        "state bytes": [run.state_bytes for run in runs],
        "at length": [run.state_length for run in runs],
        "s/step": [run.seconds_per_step for run in runs],
        **{peak: [run.peak_memory.get(peak) for run in runs] for peak in peaks},
        **{name: [run.final.get(name) for run in runs] for name in ("train/loss", *metrics)},
    }
    return from_columns("Results", columns)


def _settings(names: Sequence[str], runs: Sequence[RunRecord]) -> Table:
    rows = [[name, *(v if v is None else str(v) for v in values)] for name, values in differences(runs).items()]
    return Table("Settings that differ", ["setting", *names], rows)


def _joined(names: Sequence[str], runs: Sequence[RunRecord]) -> Table:
    """Return one table, with the settings that differ as columns after the results."""
    table, differing = results(names, runs), differences(runs)
    rows = [[*row, *(values[i] for values in differing.values())] for i, row in enumerate(table.rows)]
    return Table(table.title, [*table.header, *differing], rows)


def _panels(names: Sequence[str], runs: Sequence[RunRecord]) -> list[list[plots.Panel]]:
    """Return a row for each metric of training and validation: by step, and by time if it is known."""
    metrics = dict.fromkeys(
        name for run in runs for name, curve in run.curves.items() if name.startswith(("train/", "val/")) and curve
    )
    axes = ["step", "seconds"] if any(run.seconds for run in runs) else ["step"]
    return [[plots.Panel(axis, metric, _lines(names, runs, metric, axis)) for axis in axes] for metric in metrics]


def _lines(names: Sequence[str], runs: Sequence[RunRecord], metric: str, axis: str) -> dict[str, plots.Line]:
    lines: dict[str, plots.Line] = {}
    for name, run in zip(names, runs, strict=True):
        steps = sorted(run.curves.get(metric, {}))
        x = steps if axis == "step" else _times(steps, run.seconds)
        if x:
            lines[name] = x, [run.curves[metric][step] for step in steps]
    return lines


def _times(steps: Sequence[int], seconds: dict[int, float]) -> list[float]:
    """Return the time of each step, interpolated between the logged ones; empty without a log of time."""
    import numpy as np

    if not seconds:
        return []
    known = sorted(seconds)
    times: list[float] = np.interp(steps, [-1, *known], [0.0, *(seconds[step] for step in known)]).tolist()
    return times
