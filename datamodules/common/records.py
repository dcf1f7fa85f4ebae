"""Records of data sets: rows of .csv, objects of .jsonl, rows of Hugging Face, and lines of columns between TABs."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lit_effattn.datamodules.common.faults import Fault
from lit_effattn.datamodules.common.files import open_utf8
from lit_effattn.datamodules.common.json_data import parse_json

SUFFIXES = (".tsv", ".csv", ".jsonl", ".tsv.gz", ".csv.gz", ".jsonl.gz")
"""Endings of files of records. A file with another name has columns between TABs."""

_SECOND_NAMES = {"target", "tgt", "trg", "output", "label", "class", "category", "sentiment"}
_COLUMN_NAMES = {"source", "src", "input", "text", "sentence", "review"} | _SECOND_NAMES
"""Names in the first row of a file, which is then not an example. Those of a second column are not in the first."""

_AFTER_BLANK = re.compile(r'\s+".*"\s*', re.DOTALL)  # a cell of a .csv that was meant to be quoted


class Record(NamedTuple):
    """An item of a data set."""

    where: str  # file and line, for messages
    fields: Any  # an object, or the cells of a row by the names of their columns

    def texts(self, columns: tuple[str, ...], *, numbers: bool = False) -> list[str] | Fault:
        """Return the texts in some fields, or the fault of one that is empty, not UTF-8 or not a text.

        Args:
            columns: Names of the fields. `translation.en` is the field en of the object translation.
            numbers: The last one may also be an integer, true or false, which becomes a text as JSON writes it.
        """
        texts = []
        for column in columns:
            value = field(self.fields, column)
            if numbers and column == columns[-1]:
                value = _written(value)
            if not isinstance(value, str):
                message = f"{self.where}: {column!r} must be a text, but is {str(value)[:40]!r}"
                return Fault("without two texts" if len(columns) == 2 else "without a text", message)
            try:
                value.encode()
            except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
                return Fault("not UTF-8", f"{self.where}: is not UTF-8 ({error.reason} at {error.start})")
            texts.append(value)
        if empty := [column for column, text in zip(columns, texts, strict=True) if not text.strip()]:
            return Fault("empty", f"{self.where}: has no {' and no '.join(empty)}")
        return texts


def field(fields: Any, column: str) -> Any:
    """Return a field of a record; None if it lacks it. `translation.en` is the field en of the object translation."""
    if not isinstance(fields, dict):
        return None
    first, _, rest = column.partition(".")
    return field(fields.get(first), rest) if rest and column not in fields else fields.get(column)


def _written(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():  # pandas writes 1.0 in a column with gaps
        value = int(value)
    return json.dumps(value) if isinstance(value, int) else value


def read_lines(path: Path) -> Iterator[tuple[str, str | Fault]]:
    """Yield the lines of a text without their ends, or their faults, each with its file and number.

    The file may be compressed, or begin with a byte-order mark: see `open_utf8`.
    """
    with open_utf8(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                yield where, line.rstrip(b"\r\n").decode()
            except UnicodeDecodeError as error:
                yield where, Fault("not UTF-8", f"{where}: is not UTF-8 ({error.reason} at byte {error.start})")


def read_records(path: Path, columns: tuple[str, ...]) -> Iterator[Record | Fault]:
    """Yield the records of a file, whose format follows from its suffix, and a fault for each that is left out.

    Args:
        path: The file.
        columns: Names of the fields that are needed. If the first row of a .csv or of columns between TABs has them,
            the row names the columns, in capitals or not; otherwise there must be as many columns, in this order.

    Raises:
        ValueError: If a .csv is not valid, or a column that is needed is there twice, or in another place than its own
            beside one of another name.
    """
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".jsonl"):
        return read_objects(path)
    if name.endswith(".csv"):
        return _named(columns, _quoted(path), ",")
    rows = ((where, line if isinstance(line, Fault) else line.split("\t")) for where, line in read_lines(path))
    return _named(columns, rows, " TAB ")


def read_objects(path: Path) -> Iterator[Record | Fault]:
    """Yield the values of JSON lines, and a fault for each line that is not JSON."""
    for where, line in read_lines(path):
        try:
            if isinstance(line, Fault):
                yield line
            else:
                yield Record(where, parse_json(line)) if line.strip() else Fault("empty", f"{where}: is empty")
        except ValueError as error:
            yield Fault("not JSON", f"{where}: is not JSON ({error})")


def of_rows(title: str, rows: Any) -> Iterator[Record]:
    """Yield the rows of a data set of Hugging Face, with the names of its classes; None for −1 or None, no class."""
    names = {
        column: {None: None, -1: None, **dict(enumerate(kind.names))}
        for column, kind in rows.features.items()
        if hasattr(kind, "names")
    }
    for i, row in enumerate(rows):
        yield Record(f"{title}[{i}]", row | {column: of_one[row[column]] for column, of_one in names.items()})


def _quoted(path: Path) -> Iterator[tuple[str, list[str] | Fault]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a text may be longer than the default, 131,072 characters
    with open_utf8(path) as file:
        lines = (line.decode(errors="surrogateescape") for line in file)  # reported when the text is read
        reader = csv.reader(lines, strict=True)
        try:
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if any(map(_AFTER_BLANK.fullmatch, row)):
                    message = f"{where}: a quote after a blank is read as text; delete the blanks between , and quotes"
                    yield where, Fault("quoted after a blank", message)
                else:
                    yield where, row
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: is not CSV ({error}); correct it") from error


def _named(
    columns: tuple[str, ...], rows: Iterator[tuple[str, list[str] | Fault]], separator: str
) -> Iterator[Record | Fault]:
    names, wanted, is_first = columns, {column.lower(): column for column in columns}, True
    for where, row in rows:
        if isinstance(row, Fault):
            yield row
            continue
        cells = tuple(cell.strip() for cell in row)
        header = tuple(wanted.get(cell.lower(), cell) for cell in cells)
        has_all = {*columns} <= {*header}
        was_first, is_first = is_first, is_first and not any(cells)
        if was_first and any(cells) and (has_all or _COLUMN_NAMES.issuperset(cell.lower() for cell in cells)):
            yield Fault("header row", f"{where}: {separator.join(row)!r} are names of columns")
            names = header if has_all else columns
            if twice := [column for column in columns if names.count(column) > 1]:
                raise ValueError(f"{where}: names the column {twice[0]!r} twice; rename one of them")
            misplaced = any(name in columns and name != expected for name, expected in zip(header, names, strict=False))
            if misplaced or (not has_all and cells[0].lower() in _SECOND_NAMES):
                raise ValueError(
                    f"{where}: the columns are {separator.join(row)}, not {separator.join(columns)}; give the options "
                    "that name the columns to read"
                )
        elif len(cells) == len(names):
            yield Record(where, dict(zip(names, row, strict=True)))
        elif any(cells):
            expected = f"expected {separator.join(names)}"
            reason = "not two columns" if len(names) == 2 else f"not {len(names)} columns"
            yield Fault(reason, f"{where}: has {len(row)} columns; {expected}")
        else:
            yield Fault("empty", f"{where}: is empty")
