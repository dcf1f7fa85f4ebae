"""HTML pages that load nothing when they are opened: without scripts, external files or unescaped text."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lit_effattn.analysis.tables import Table, shown
from lit_effattn.checkpoints.printable import printable

_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --quiet: #60666c; --page: #fff; --card: #f4f5f7; --line: #d9dce0;
  --s0: #1f6feb; --s1: #d1570a; --s2: #1a7f37; --s3: #8250df; --s4: #b3224d; --s5: #0a7f8c; --heat: 209, 87, 10; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6e9; --quiet: #9aa2aa; --page: #14171a; --card: #1e2226;
  --line: #363c42; --s0: #6cb0ff; --s1: #ff9d5c; --s2: #5fcf80; --s3: #c49bff; --s4: #ff7fa3; --s5: #55d0dd;
  --heat: 255, 140, 60; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p, figcaption { margin: .25rem 0; } .quiet, figcaption { color: var(--quiet); font-size: .85rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; } .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.long { overflow-wrap: anywhere; min-width: 9rem; }
.cards { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); }
.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 9rem), 1fr)); } .small figure { max-width: 18rem; }
.small img { width: 100%; image-rendering: pixelated; }
figure { margin: 0; padding: .6rem; background: var(--card); border-radius: .4rem; min-width: 0; max-width: 46rem; }
figure img { display: block; max-width: 100%; height: auto; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
summary { cursor: pointer; padding: .4rem 0; }
pre, .tokens { font: .85rem/1.6 ui-monospace, monospace; white-space: pre-wrap; margin: 0; }
.tokens span { background: rgba(var(--heat), calc(.75 * var(--bits))); border-radius: .15rem; }
.scale { display: inline-block; width: 6rem; height: .7rem; border-radius: .2rem;
  background: linear-gradient(to right, #000004, #51127c, #b73779, #fc8961, #fcfdbf); }
"""
_LONG = ' class="long"'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, parts: Iterable[str]) -> str:
    """Return a page of parts, which the other functions of this module return."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{text(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def text(value: Any) -> str:
    """Return a value as HTML."""
    return html.escape(printable(str(value)))


def heading(title: str, level: int = 2) -> str:
    """Return a heading."""
    return f"<h{level}>{text(title)}</h{level}>"


def note(remark: str) -> str:
    """Return a line in a quiet colour."""
    return f'<p class="quiet">{text(remark)}</p>'


def table(content: Table) -> str:
    """Return a table. A browser may break names after dots and underscores."""

    def cell(value: Any) -> str:
        if _is_number(value):
            return f'<td class="number">{text(shown(value))}</td>'
        name = shown(value)
        broken = text(name) if " " in name else text(name).replace("_", "_<wbr>").replace(".", ".<wbr>")
        return f"<td{_LONG if len(name) > 24 else ''}>{broken}</td>"

    columns = zip(*content.rows, strict=True) if content.rows else [()] * len(content.header)
    kinds = [' class="number"' if any(map(_is_number, values)) else "" for values in columns]
    names = zip(kinds, content.header, strict=True)
    header = "".join(f'<th scope="col"{kind}>{text(shown(name))}</th>' for kind, name in names)
    rows = "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in content.rows)
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def pairs(values: Mapping[str, Any], *header: str) -> str:
    """Return a table of names and values."""
    return table(Table("", header, list(values.items())))


def image(png: bytes, caption: str, *parts: str) -> str:
    """Return a figure of a PNG file, with `parts` above it."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return figure(*parts, f'<img src="{source}" alt="{text(caption)}">', caption=caption)


def figure(*parts: str, caption: str = "") -> str:
    """Return a figure of parts with a caption."""
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<figure>{''.join(parts)}{below}</figure>"


def cards(title: str, figures: Sequence[str], kind: str = "") -> list[str]:
    """Return a heading and figures side by side; nothing without a figure."""
    return [heading(title, 3), f'<div class="cards {kind}">', *figures, "</div>"] if figures else []


def token_bits(tokens: Sequence[tuple[str, float]], *, spaced: bool) -> str:
    """Return a figure of tokens on a colour whose strength shows the bits of each."""
    largest = max((bits for _, bits in tokens), default=0) or 1
    spans = (
        f'<span style="--bits: {max(bits, 0) / largest:.2f}" title="{bits:.2f} bits">{text(token)}</span>'
        for token, bits in tokens
    )
    mean = sum(bits for _, bits in tokens) / max(1, len(tokens))
    caption = f"−log₂ p of each: the stronger the colour, the less expected; {mean:.2f} bits on average"
    return figure(f'<div class="tokens">{(" " if spaced else "").join(spans)}</div>', caption=caption)
