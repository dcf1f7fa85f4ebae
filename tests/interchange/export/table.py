"""The table of differences in docs/export.md, with which the exhaustive tests compare their results.

`WRITE_EXPORT_TABLE=1 pytest -m exhaustive tests/interchange/export` writes it.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from filelock import FileLock

from lit_effattn.checkpoints.files import whole
from tests.interchange.export.cases import CASES
from tests.support.commands import REPOSITORY

PAGE = REPOSITORY / "docs/export.md"
WRITES = bool(os.environ.get("WRITE_EXPORT_TABLE"))

COLUMNS = {"onnx": 1, "torch": 2, "opset27": 3, "onnxruntime": 4}
HEAD = (
    "| kind and options | `onnx`: largest difference | `torch` | `onnx`, `--operators opset27` | "
    "`onnx`, `--operators onnxruntime` |\n|---|---|---|---|---|\n"
)
_TABLE = re.compile(re.escape(HEAD) + r"((?:\|.*\|\n)*)")
_ROUNDING = 1e-6  # differences below are the same for a reader, and not the same on all machines
_EXPONENT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def rows() -> dict[str, list[str]]:
    """Return the cells of the page's table by its first column."""
    table = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert table is not None, f"{PAGE} has no table with this head:\n{HEAD}"
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()]
    return {row[0]: row for row in cells}


def check(name: str, format: str, difference: float) -> None:
    """Compare a difference with that of the page, or write it there."""
    if WRITES:
        _write(name, format, difference)
    shown = _number(rows()[name][COLUMNS[format]])
    low, high = sorted((max(shown, _ROUNDING), max(difference, _ROUNDING)))
    assert high <= 4 * low, f"{name}, {format}: {difference:.1e}, and in {PAGE.name} {shown:.1e}"


def _write(name: str, format: str, difference: float) -> None:
    """Write a figure, and bring the rows into the order of the cases. Several processes of pytest may do so at once."""
    with FileLock(Path(tempfile.gettempdir(), "export-table.lock")), whole(PAGE) as part:
        table = {case: rows().get(case, [case, *[""] * len(COLUMNS)]) for case in CASES}
        table[name][COLUMNS[format]] = _cell(difference)
        lines = "".join(f"| {' | '.join(row)} |\n" for row in table.values())
        text = PAGE.read_text(encoding="utf-8")
        part.write_text(_TABLE.sub(lambda _: HEAD + lines, text), encoding="utf-8")


def _cell(x: float) -> str:
    if not x:
        return "0"
    digits, exponent = f"{x:.1e}".split("e")
    return f"{digits}·10{str(int(exponent)).translate(_EXPONENT)}"


def _number(cell: str) -> float:
    digits, _, power = cell.partition("·10")
    back = {ord(raised): plain for plain, raised in zip("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True)}
    return float(f"{digits}e{power.translate(back)}" if power else digits)
