"""Curves of runs for a page, drawn by matplotlib as SVG in the colours of the page's CSS variables."""

import io
from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from lit_effattn.analysis.page import cards, figure, text
from lit_effattn.analysis.records import RunRecord

COLOURS = 6  # number of the page's colours of curves, the CSS variables `--s0` to `--s5`

_TEXT, _LINE = "#0000f0", "#0000f1"
"""Colours that the page's variables replace in the file."""


class _Curve(NamedTuple):
    name: str
    x: Sequence[float]
    y: Sequence[float]  # values that are not finite leave gaps
    colour: int
    dashed: bool


def charts(names: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return a chart of each metric of training and validation by step, and of several runs also by time."""
    quantities: dict[str, dict[tuple[int, str], dict[int, float]]] = {}
    for i, run in enumerate(runs):
        for metric, curve in run.curves.items():
            stage, _, quantity = metric.partition("/")
            if stage in ("train", "val") and (len(set(curve.values())) > 1 or len(curve) == 1):
                quantities.setdefault(quantity, {})[i, stage] = curve
    several = len(runs) > 1
    axes = ["step", "seconds"] if several and all(run.seconds for run in runs) else ["step"]
    figures = []
    for quantity, by_run in quantities.items():
        if not any(isfinite(value) for curve in by_run.values() for value in curve.values()):
            continue
        for axis in axes:
            curves = []
            for (i, stage), values in by_run.items():
                steps, is_val = sorted(values), stage == "val"
                x = steps if axis == "step" else _times(steps, runs[i].seconds)
                name, colour = (f"{names[i]} {stage}", i) if several else (stage, int(is_val))
                curves.append(_Curve(name, x, [values[step] for step in steps], colour % COLOURS, is_val and several))
            legend = ", ".join(
                f'<span style="color: var(--s{c.colour})">{"╍" if c.dashed else "━"}</span> {text(c.name)}'
                for c in curves
            )
            label = text(f"{quantity} by {axis}")
            svg = _svg(curves).replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
            figures.append(figure(svg, f"<figcaption>{label}: {legend}</figcaption>"))
    return cards("Curves", figures)


def _times(steps: Sequence[int], seconds: dict[int, float]) -> list[float]:
    """Return the time of each step, interpolated between the logged ones."""
    known = sorted(seconds)
    times: list[float] = np.interp(steps, [-1, *known], [0.0, *(seconds[step] for step in known)]).tolist()
    return times


def _svg(curves: Sequence[_Curve]) -> str:
    """Return an `svg` element without scripts, references to other files, and text other than numbers."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    colours = [f"#0100{i:02x}" for i in range(COLOURS)]
    style: dict[Any, Any] = dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), _TEXT)
    style |= {"grid.color": _LINE, "svg.fonttype": "none", "axes.formatter.limits": (-4, 6)}
    file = io.StringIO()
    with rc_context(style):
        drawing = Figure((4.8, 2.7), layout="constrained")
        drawing.patch.set_visible(False)
        axes = drawing.subplots()
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", clip_on=False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        for curve in curves:
            form = ("o" if len(curve.x) < 12 else "") + ("--" if curve.dashed else "-")
            axes.plot(curve.x, curve.y, form, color=colours[curve.colour], markersize=4, clip_on=False)
        drawing.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for i, colour in enumerate(colours):
        svg = svg.replace(colour, f"var(--s{i})")
    return svg.replace(_TEXT, "currentColor").replace(_LINE, "var(--line)")
