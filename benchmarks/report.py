"""Tables as Markdown and JSON, each after the settings that are needed to repeat it."""

import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Spread

Value = str | int | float | Spread | None
"""A value in a table. None: it was not measured."""

Row = dict[str, Value]

NOTE = (
    "Figures with brackets: median (min–max) over the rounds, in which all take turns. Ratios are taken round by round."
)


@dataclass(frozen=True)
class Report:
    """One benchmark's results.

    Attributes:
        name: Name of the benchmark and of its files.
        rows: Rows with the same columns.
        notes: Explanations below the table.
        plot: Draws a picture into a figure; None: there is none.
    """

    name: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    plot: Callable[[Any], None] | None = None


def publish(report: Report, settings: Mapping[str, Any], command: str, output: Path | None) -> None:
    """Print `report`, and write its files to the folder `output` if one is given."""
    header = _header(settings, command)
    text = markdown(report, header)
    print(text, flush=True)
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{report.name}.md").write_text(text, encoding="utf-8")
    rows = [{column: _plain(value) for column, value in row.items()} for row in report.rows]
    data = {"name": report.name, **header, "settings": _words(settings), "rows": rows, "notes": report.notes}
    (output / f"{report.name}.json").write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")
    if report.plot is not None:
        _picture(report.plot, output / f"{report.name}.png")


def markdown(report: Report, header: Mapping[str, str]) -> str:
    """Return the header as a list, the table and the notes."""
    columns = list(report.rows[0])
    lines = [f"## {report.name}", "", *(f"- {name}: {value}" for name, value in header.items()), ""]
    lines += [_line(columns), _line(["---"] * len(columns))]
    lines += [_line([cell(row[column]) for column in columns]) for row in report.rows]
    lines += ["", *(f"- {note}" for note in (*report.notes, NOTE)), ""]
    return "\n".join(lines)


def cell(value: Value) -> str:
    """Return a value as text; a spread as its median, with minimum and maximum in brackets."""
    if value is None:
        return "not measured"
    if isinstance(value, Spread):
        return f"{_number(value.median)} ({_number(min(value.samples))}–{_number(max(value.samples))})"
    return value if isinstance(value, str) else _number(value)


def _number(x: float) -> str:
    return f"{x:,.0f}" if isinstance(x, int) or abs(x) >= 100 else f"{x:.3g}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(value: Value) -> Any:
    if not isinstance(value, Spread):
        return value
    low, high = min(value.samples), max(value.samples)
    return {"median": value.median, "min": low, "max": high, "samples": list(value.samples)}


def _header(settings: Mapping[str, Any], command: str) -> dict[str, str]:
    device: torch.device = settings["device"]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "not used"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lit-effattn", "pillow"))
    return {
        "machine": f"{_cpu()}, cores: {os.cpu_count()}, threads: {torch.get_num_threads()}, GPU: {gpu}",
        "versions": f"python {platform.python_version()}, {versions}",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "settings": ", ".join(f"{name} {value}" for name, value in _words(settings).items()),
        "command": f"`{command}`",
    }


def _words(settings: Mapping[str, Any]) -> dict[str, str]:
    return {k: " ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in settings.items()}


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _picture(draw: Callable[[Any], None], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=150)
