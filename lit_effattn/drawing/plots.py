"""Plots of runs by matplotlib (the extra `plots`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

Line = tuple[Sequence[float], Sequence[float]]
"""The x and y values of a curve."""

_MARKERS = "osv^D"
_LONG = 40
"""Length from which a name does not fit into half the width of a plot."""


class Panel(NamedTuple):
    """One plot of a figure: the labels of its axes, and its curves by name."""

    x_label: str
    y_label: str
    lines: Mapping[str, Line]


class Point(NamedTuple):
    """A point with an error bar.

    Attributes:
        name: The label.
        x: Its position, positive.
        y: Its position.
        spread: Half the length of the vertical error bar.
    """

    name: str
    x: float
    y: float
    spread: float


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


def scatter(points: Sequence[Point], x_label: str, y_label: str, path: Path) -> Path:
    """Write a PNG of labelled points with error bars; the x axis is logarithmic."""
    from matplotlib.figure import Figure

    columns = 2 if max(len(point.name) for point in points) < _LONG else 1
    figure = Figure((8, 4.5 + 0.22 * math.ceil(len(points) / columns)), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=x_label, ylabel=y_label, xscale="log")
    axis.grid(alpha=0.3)
    for i, point in enumerate(points):
        marker, color = _MARKERS[i // 10 % len(_MARKERS)], f"C{i % 10}"  # matplotlib has ten colours
        axis.errorbar([point.x], [point.y], [point.spread], fmt=marker, color=color, capsize=3, label=point.name)
    figure.legend(loc="outside lower center", ncols=columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
