"""The HTML page of a report, from the template page.html: without scripts, external files or unescaped text."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from lit_effattn.analysis.report.attention import gradient
from lit_effattn.analysis.tables import Table, shown
from lit_effattn.checkpoints.printable import printable
from lit_effattn.drawing.plots import Line

COLOURS = {"train": 0, "val": 1}
WIDTH, HEIGHT = 480, 260
_LEFT, _BOTTOM, _TOP, _RIGHT = 66, HEIGHT - 34, 8, WIDTH - 28
"""The edges of the axes within a chart."""


class Figure(NamedTuple):
    """A figure of the page: each part that is given, in this order.

    Attributes:
        audio: A WAV file.
        table: A table.
        image: A PNG file.
        description: Alternative text of the image.
        text: A text with its line ends.
        caption: A line below.
    """

    audio: bytes | None = None
    table: Table | None = None
    image: bytes | None = None
    description: str = ""
    text: str | None = None
    caption: str = ""


class Curve(NamedTuple):
    """A curve of a chart: its name, the number of its colour, and the SVG coordinates of its points."""

    name: str
    colour: int
    points: list[tuple[str, str]]


class Chart(NamedTuple):
    """A chart: its label, SVG coordinates and texts of the ticks, and its curves."""

    label: str
    x_ticks: list[tuple[str, str]]
    y_ticks: list[tuple[str, str]]
    lines: list[Curve]


def _breakable(name: str) -> Markup:
    """Return a name that a browser may break after its dots and underscores."""
    return escape(name).replace("_", Markup("_<wbr>")).replace(".", Markup(".<wbr>"))


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _printable(value: Any) -> Any:
    return value if isinstance(value, Markup) else printable(str(value))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=_printable,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"shown": shown, "breakable": _breakable, "data_uri": _data_uri}
_ENVIRONMENT.globals |= {"width": WIDTH, "height": HEIGHT, "left": _LEFT, "right": _RIGHT, "bottom": _BOTTOM}
_ENVIRONMENT.globals["gradient"] = Markup(gradient())


def macro(name: str, *args: Any, **options: Any) -> str:
    """Return the HTML of a macro of the template, such as `page` or `figure`."""
    return str(getattr(_ENVIRONMENT.get_template("page.html").module, name)(*args, **options))


def pairs(values: Mapping[str, Any], *header: str) -> Table:
    """Return a table of names and values."""
    return Table("", header, list(values.items()))


def chart(title: str, x_label: str, lines: Mapping[str, Line]) -> Chart | None:
    """Return a chart of curves; None without a point. Values that are not finite are left out.

    Args:
        title: What the curves show.
        x_label: What the x axis shows.
        lines: The curves by their names. A name in `COLOURS` always has the same colour.
    """
    points = {
        name: [(x, y) for x, y in zip(*line, strict=True) if math.isfinite(x) and math.isfinite(y)]
        for name, line in lines.items()
    }
    if not any(points.values()):
        return None
    xs, ys = zip(*(point for line in points.values() for point in line), strict=True)
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    left, right = min(x_ticks[0], *xs), max(x_ticks[-1], *xs)
    low, high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[str, str]:
        """Return the SVG coordinates of a point."""
        across, up = (x - left) / (right - left), (y - low) / (high - low)
        return f"{_LEFT + across * (_RIGHT - _LEFT):.1f}", f"{_BOTTOM - up * (_BOTTOM - _TOP):.1f}"

    return Chart(
        f"{title} by {x_label}",
        [(place(x, low)[0], _tick_label(x)) for x in x_ticks],
        [(place(left, y)[1], _tick_label(y)) for y in y_ticks],
        [
            Curve(name, COLOURS.get(name, i) % 6, [place(x, y) for x, y in line])
            for i, (name, line) in enumerate(points.items())
        ],
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers whose range holds `low` and `high`."""
    if low == high:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    size = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5)
    return [i * step for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _tick_label(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"
