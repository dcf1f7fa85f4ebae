"""Curves of runs, drawn by matplotlib as SVG for an HTML page."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

COLOURS = 6
"""Number of the page's colours of curves, the CSS variables `--s0` to `--s5`."""

_TEXT, _LINE = "#0000f0", "#0000f1"
"""Colours that the page's variables replace in the file."""


class Curve(NamedTuple):
    """A curve of a chart.

    Attributes:
        name: Its name, for the caption.
        x: The x values of its points.
        y: The y values. Those that are not finite leave gaps.
        colour: The number of its colour.
        dashed: Whether it is dashed.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    dashed: bool = False


def chart(curves: Sequence[Curve]) -> str | None:
    """Return curves as an `svg` element in the colours of the page's CSS variables; None without a point.

    It contains no text but numbers, no scripts and no references to other files.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not any(map(math.isfinite, [value for curve in curves for value in curve.y])):
        return None
    colours = [f"#0100{i:02x}" for i in range(COLOURS)]
    style: dict[Any, Any] = dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), _TEXT)
    style |= {"grid.color": _LINE, "svg.fonttype": "none", "axes.formatter.limits": (-4, 6)}
    file = io.StringIO()
    with rc_context(style):
        figure = Figure((4.8, 2.7), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", clip_on=False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        for curve in curves:
            form = ("o" if len(curve.x) < 12 else "") + ("--" if curve.dashed else "-")
            axes.plot(curve.x, curve.y, form, color=colours[curve.colour % COLOURS], markersize=4, clip_on=False)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for i, colour in enumerate(colours):
        text = text.replace(colour, f"var(--s{i})")
    return text.replace(_TEXT, "currentColor").replace(_LINE, "var(--line)")
