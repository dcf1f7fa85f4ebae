"""Tables for the terminal, Markdown and CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from lit_effattn.checkpoints.printable import printable, table_cell


class Table(NamedTuple):
    """Rows under a header, the names of the columns. None is an empty cell."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


class Spread(NamedTuple):
    """A mean and a standard deviation, which is None for one value."""

    mean: float
    deviation: float | None


def shown(value: Any) -> str:
    """Return a value as text: numbers with 4 digits, integers and numbers from 10,000 on with all digits."""
    if value is None:
        return ""
    if isinstance(value, Spread):
        return shown(value.mean) + ("" if value.deviation is None else f" ± {value.deviation:.2g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return printable(str(value), one_line=True)
    if isinstance(value, int) or 1e4 <= abs(value) < 1e15:
        return f"{round(value):,}"
    return f"{value:.4g}"


def markdown(table: Table) -> str:
    """Return a table in Markdown."""
    lines = [table.header, ["---"] * len(table.header), *([shown(v) for v in row] for row in table.rows)]
    body = "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)
    return f"### {table.title}\n\n{body}\n"


def _markdown_cell(text: str) -> str:
    """Return text without HTML, links and images."""
    return escape(text, quote=False).replace("](", "]\\(").replace("|", "\\|")


def comma_separated(table: Table) -> str:
    """Return a table as CSV, with all digits. Means and deviations are separate columns."""
    columns: list[list[Any]] = []
    for name, *values in zip(table.header, *table.rows, strict=True):
        if any(isinstance(value, Spread) for value in values):
            pairs = [value if isinstance(value, Spread) else (value, None) for value in values]
            means, deviations = zip(*pairs, strict=True)
            columns += [[name, *means], [f"± {name}", *deviations]]
        else:
            columns.append([name, *values])
    file = io.StringIO()
    rows = ([table_cell(v) if isinstance(v, str) else v for v in row] for row in zip(*columns, strict=True))
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def from_columns(title: str, columns: Mapping[str, Sequence[Any]]) -> Table:
    """Return a table of columns, without empty ones."""
    full = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    return Table(title, list(full), list(zip(*full.values(), strict=True)))


def show(table: Table) -> None:
    """Print a table to the terminal, with rows and columns exchanged if that makes it narrower."""
    from rich import box, get_console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title), box=box.SIMPLE, title_justify="left")
    lines: Sequence[Sequence[Any]] = [table.header, *table.rows]
    if len(table.header) > len(lines):
        lines = list(zip(*lines, strict=True))
    for name in lines[0]:
        drawn.add_column(Text(shown(name)), overflow="fold")
    for row in lines[1:]:
        drawn.add_row(*(Text(shown(value)) for value in row))  # Text, since names are not markup
    get_console().print(drawn)
