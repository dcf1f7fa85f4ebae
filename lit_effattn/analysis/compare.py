"""`lit-effattn compare`: a table of several runs, or an HTML page with their curves."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_effattn.analysis import page as html
from lit_effattn.analysis.charts import charts
from lit_effattn.analysis.records import RunRecord, differences, read_run
from lit_effattn.analysis.tables import Table, comma_separated, from_columns, markdown, show
from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import is_checkpoint, short
from lit_effattn.checkpoints.shipped import model_path
from lit_effattn.settings.tools import add_trust, tool_parser


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "compare", "Compare runs: settings that differ, metrics, parameters, bytes of state, time, peak memory."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="The folder of a run, or model:NAME.")
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--format", choices=["terminal", "markdown", "csv"], default="terminal", help="Default: terminal."
    )
    output.add_argument(
        "--html", metavar="FILE", help="Write a page instead, a new file: the tables, and curves by step and by time."
    )
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

    Raises:
        ValueError: If a folder is not that of a run, or an option is out of range.
        FileExistsError: If the page exists.
    """
    options = _parser().parse_args(args)
    if options.length is not None and options.length < 1:
        raise ValueError(f"--length {options.length} must be at least 1")
    if options.html is not None and Path(options.html).exists():
        raise FileExistsError(f"--html {options.html} exists; name another file, or delete it")
    runs = [read_run(model_path(path, "compare"), length=options.length, trust=options.trust) for path in options.runs]
    names = names_of([run.path for run in runs])
    tables = [table for table in (_results(names, runs), _settings(names, runs)) if table.rows]
    if options.html is not None:
        parts = [part for table in tables for part in (html.heading(table.title), html.table(table))]
        with whole(Path(options.html)) as file:
            text = html.page(f"{len(runs)} runs", [*parts, *charts(names, runs)])
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        print(f"page: {short(options.html)}")
    elif options.format == "terminal":
        for table in tables:
            show(table)
    else:
        joined = comma_separated(_joined(names, runs)) if options.format == "csv" else "\n".join(map(markdown, tables))
        print(printable(joined), end="")
    for name, run in zip(names, runs, strict=True):
        if run.remark:
            print(printable(f"{name}: {run.remark}"), file=sys.stderr)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return names of runs: the configuration's name, with the time if several runs have it; of a checkpoint, its own.

    Of several checkpoints of one name, their paths.
    """
    resolved = [path.resolve() for path in paths]
    names = [Path(short(path)).name if is_checkpoint(path) else path.parent.name for path in resolved]
    return [
        name if names.count(name) == 1 else short(path) if is_checkpoint(path) else f"{path.parent.name}/{path.name}"
        for name, path in zip(names, resolved, strict=True)
    ]


def _results(names: Sequence[str], runs: Sequence[RunRecord]) -> Table:
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
    table, differing = _results(names, runs), differences(runs)
    rows = [[*row, *(values[i] for values in differing.values())] for i, row in enumerate(table.rows)]
    return Table(table.title, [*table.header, *differing], rows)
