"""The HTML of a report: one page without scripts that loads nothing. All text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lit_effattn.analysis.report.attention import data_uri, gradient
from lit_effattn.analysis.tables import Table, shown
from lit_effattn.checkpoints.printable import printable
from lit_effattn.drawing.plots import Line

_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --quiet: #60666c; --page: #fff; --card: #f4f5f7; --line: #d9dce0;
  --s0: #1f6feb; --s1: #d1570a; --s2: #1a7f37; --s3: #8250df; --s4: #b3224d; --s5: #0a7f8c; --heat: 209, 87, 10; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6e9; --quiet: #9aa2aa; --page: #14171a; --card: #1e2226;
  --line: #363c42; --s0: #6cb0ff; --s1: #ff9d5c; --s2: #5fcf80; --s3: #c49bff; --s4: #ff7fa3; --s5: #55d0dd;
  --heat: 255, 140, 60; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.35rem; margin: 2.5rem 0 .5rem;
  border-bottom: 1px solid var(--line); } h3 { font-size: 1.1rem; margin: 1.75rem 0 .5rem; }
h4 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p, figcaption, caption { margin: .25rem 0; } .quiet, figcaption { color: var(--quiet); font-size: .85rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; } td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.long { overflow-wrap: anywhere; min-width: 9rem; }
.cards { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--least)), 1fr)); }
figure { margin: 0; padding: .6rem; background: var(--card); border-radius: .4rem; min-width: 0; }
figure img { display: block; max-width: 100%; height: auto; } .exact { image-rendering: pixelated; }
.chart { max-width: 46rem; } dl { display: grid; gap: .5rem 1.5rem; margin: .75rem 0;
  grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); } dt { color: var(--quiet); font-size: .85rem; }
dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.tight { grid-template-columns: repeat(auto-fit, minmax(min(100%, 9rem), 1fr)); } .tight figure { max-width: 18rem; }
.fill img { width: 100%; } figure svg { display: block; width: 100%; height: auto; }
audio { display: block; width: 100%; } summary { cursor: pointer; padding: .4rem 0; }
pre, .tokens { font: .85rem/1.6 ui-monospace, monospace; white-space: pre-wrap; margin: 0; }
.tokens span { background: rgba(var(--heat), calc(.75 * var(--bits))); border-radius: .15rem; }
.scale { display: inline-block; width: 6rem; height: .7rem; border-radius: .2rem; background: GRADIENT; }
"""

COLOURS = {"train": 0, "val": 1}
WIDTH, HEIGHT = 480, 260
_LEFT, _BOTTOM, _TOP, _RIGHT = 66, 34, 8, 28


def escape(text: str) -> str:
    """Return text for HTML, without characters that change the order of others."""
    return html.escape(printable(text))


def page(title: str, parts: Iterable[str]) -> str:
    """Return the page. `title` is text, `parts` are HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Were there ever a way around escaping: no script runs, and nothing is loaded.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:; media-src data:">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE.replace('GRADIENT', gradient())}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def heading(level: int, text: str) -> str:
    """Return a heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    """Return a short remark."""
    return f'<p class="quiet">{escape(text)}</p>'


def table(rows: Table) -> str:
    """Return a table, which scrolls by itself where it is wider than the page."""
    head = "".join(f'<th scope="col">{escape(shown(name))}</th>' for name in rows.header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="number">{escape(shown(value))}</td>'
    text = escape(shown(value))
    if " " not in text:  # a name: it is broken after its parts
        text = text.replace("_", "_<wbr>").replace(".", ".<wbr>")
    return f'<td class="{"long" if len(text) > 24 else ""}">{text}</td>'


def pairs(values: Mapping[str, Any], title: Sequence[str]) -> str:
    """Return a table of names and values."""
    return table(Table("", title, list(values.items())))


def details(summary: str, content: str) -> str:
    """Return content that is hidden until it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def cards(figures: Iterable[str], *, least: str = "18rem") -> str:
    """Return figures side by side, each at least so wide as long as the page is."""
    return f'<div class="cards" style="--least: {least}">{"".join(figures)}</div>'


def small_cards(figures: Iterable[str]) -> str:
    """Return small figures side by side, two of them on a phone."""
    return f'<div class="cards tight">{"".join(figures)}</div>'


def scores(values: Mapping[str, float]) -> str:
    """Return numbers in large type, each under its name."""
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(shown(value))}</dd></div>" for name, value in values.items()
    )
    return f"<dl>{inside}</dl>"


def figure(parts: Iterable[str], caption: str = "", *, kind: str = "") -> str:
    """Return a figure of HTML parts."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="{kind}">{"".join(parts)}{below}</figure>'


def image(content: bytes, description: str, *, exact: bool = False) -> str:
    """Return a PNG; where it is enlarged, pixel by pixel if `exact`."""
    return f'<img class="{"exact" if exact else ""}" src="{data_uri(content)}" alt="{escape(description)}">'


def audio(wav: bytes) -> str:
    """Return what plays a recording."""
    return f'<audio controls src="{data_uri(wav, "audio/wav")}"></audio>'


def text(content: str) -> str:
    """Return a text with its line ends."""
    return f"<pre>{escape(content)}</pre>"


def tokens(found: Sequence[tuple[str, float]], *, spaced: bool) -> str:
    """Return tokens, the more coloured the more bits they have; with blanks between them if they are `spaced`."""
    most = max(bits for _, bits in found) or 1.0
    spans = (
        f'<span style="--bits: {max(bits, 0) / most:.2f}" title="{bits:.2f} bits">{escape(token)}</span>'
        for token, bits in found
    )
    return f'<div class="tokens">{(" " if spaced else "").join(spans)}</div>'


def scale(low: str, high: str) -> str:
    """Return the colours of the attention pictures, with what the ends mean."""
    return f'<p class="quiet">{escape(low)} <span class="scale"></span> {escape(high)}</p>'


# ------------------------------------------------------------------------------------------------------------- curves


def chart(title: str, x_label: str, lines: Mapping[str, Line]) -> str:
    """Return a figure of curves as SVG, with a legend. Values that are not finite are left out.

    Args:
        title: What the curves show.
        x_label: What the x axis shows.
        lines: The curves by their names. A name in `COLOURS` always has the same colour.
    """
    points = {
        name: [(x, y) for x, y in zip(*line, strict=True) if math.isfinite(x) and math.isfinite(y)]
        for name, line in lines.items()
    }
    every = [point for line in points.values() for point in line]
    if not every:
        return ""
    x_ticks, y_ticks = (_ticks(min(values), max(values)) for values in zip(*every, strict=True))
    left, right = min(x_ticks[0], min(x for x, _ in every)), max(x_ticks[-1], max(x for x, _ in every))
    low, high = y_ticks[0], y_ticks[-1]

    def across(x: float) -> str:
        return f"{_LEFT + (x - left) / (right - left) * (WIDTH - _LEFT - _RIGHT):.1f}"

    def up(y: float) -> str:
        return f"{HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _BOTTOM - _TOP):.1f}"

    drawn = [
        f'<path d="M{_LEFT} {up(y)}H{WIDTH - _RIGHT}" stroke="var(--line)"/>'
        f'<text x="{_LEFT - 6}" y="{up(y)}" text-anchor="end" dominant-baseline="middle">{_short(y)}</text>'
        for y in y_ticks
    ]
    drawn += [
        f'<text x="{across(x)}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_short(x)}</text>' for x in x_ticks
    ]
    legend = []
    for i, (name, line) in enumerate(points.items()):
        colour = f"var(--s{COLOURS.get(name, i) % 6})"
        path = "L".join(f"{across(x)} {up(y)}" for x, y in line)
        dots = line if len(line) < 12 else []
        drawn.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>' if path else "")
        drawn += [f'<circle cx="{across(x)}" cy="{up(y)}" r="3" fill="{colour}"/>' for x, y in dots]
        legend.append(f'<span style="color: {colour}">━</span> {escape(name)}')
    label = escape(f"{title} by {x_label}")
    return (
        f'<figure class="chart"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'fill="currentColor" font-size="12">{"".join(drawn)}</svg>'
        f"<figcaption>{label}: {', '.join(legend)}</figcaption></figure>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers whose range holds `low` and `high`."""
    if low == high:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    size = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5)
    return [i * step for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"
