"""Plots of runs by matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

Line = tuple[Sequence[float], Sequence[float]]
"""The x and y values of a curve."""


class Panel(NamedTuple):
    """One plot of a figure: the labels of its axes, and its curves by name."""

    x_label: str
    y_label: str
    lines: Mapping[str, Line]


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_available() -> None:
    """Check that matplotlib is installed.

    Raises:
        ValueError: If it is not.
    """
    if not is_available():
        raise ValueError("plots need matplotlib: pip install 'lit-effattn[plots]', or leave out the plots")


def curves(panels: Sequence[Sequence[Panel]], path: Path) -> Path:
    """Write a PNG of rows of panels. A curve has the same colour in all of them."""
    from matplotlib.figure import Figure

    figure = Figure((6 * max(map(len, panels)), 3 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), max(map(len, panels)), squeeze=False)
    names = list(dict.fromkeys(name for row in panels for panel in row for name in panel.lines))
    handles = {}
    for row, of_row in zip(panels, axes, strict=True):
        for panel, axis in zip(row, of_row, strict=False):
            axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
            axis.grid(alpha=0.3)
            for name, (x, y) in panel.lines.items():
                marker = "o" if len(x) == 1 else None
                (handles[name],) = axis.plot(x, y, color=f"C{names.index(name)}", marker=marker)
        for axis in of_row[len(row) :]:
            axis.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
