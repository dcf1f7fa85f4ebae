"""Files that hold several documents: JSON lines and FASTA."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from lit_effattn.datamodules.common.files import open_utf8, text_encoding
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.records import field as value_of

LINES = (".jsonl",)
FASTA = (".fasta", ".fas", ".fa", ".faa", ".fna", ".ffn", ".frn")
SUFFIXES = tuple(suffix + end for suffix in LINES + FASTA for end in ("", ".gz"))  # endings of the names of such files


def is_records(name: str) -> bool:
    """Return whether a file holds several documents, by its name."""
    return name.lower().endswith(SUFFIXES)


def records(
    path: Path, field: str, start: int = 0, stop: float = math.inf, read: Callable[[bytes], object] = len
) -> Iterator[tuple[int, str, bytes]]:
    """Yield the documents of a file: the offset of each, its title, which is the header in FASTA, and its text.

    Args:
        path: The file. It may be compressed with gzip, or begin with a byte-order mark.
        field: Name of the text in JSON lines: see `common.records.field`.
        start: Yield the documents that begin at this offset or later,
        stop: and before this one.
        read: Called with each line.

    Raises:
        ValueError: If a line is not valid. The message says where it is.
    """
    if not path.name.lower().removesuffix(".gz").endswith(FASTA):
        for offset, line in _lines(path, start):
            if offset >= stop:
                return
            read(line)
            if line.strip():
                yield offset, "", _text(line, field, path, offset)
        return
    header, begin, residues = "", -1, list[bytes]()
    for offset, line in _lines(path, start):
        if line.startswith(b">"):
            if b"\r" in line.rstrip():
                raise ValueError(f"{path}: the header at byte {offset} has a carriage return in it; end lines with LF")
            if begin >= 0:
                yield begin, header, b"".join(residues)
            if offset >= stop:
                return
            header, begin, residues = line[1:].decode(errors="replace").strip(), offset, []
        elif begin < 0:
            if line.strip() and not start:
                raise ValueError(f"{path}: the line at byte {offset} precedes the first header (>…) of a FASTA file")
            continue  # of the document before `start`
        elif not line.startswith(b";"):  # which begins a comment
            residues += line.split()
        read(line)
    if begin >= 0:
        yield begin, header, b"".join(residues)


def _lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin at `start` or later, each with its offset in the file."""
    with open_utf8(path) as file:
        if start:  # a line that begins before `start` belongs to what is before it
            file.seek(start - 1)
            file.readline()
        while (offset := file.tell(), line := file.readline())[1]:
            yield offset, line


def divisible(path: Path) -> bool:
    """Return whether parts of a file can be read by their offsets."""
    return is_records(path.name) and not text_encoding(path).compressed


def _text(line: bytes, field: str, path: Path, offset: int) -> bytes:
    try:
        text = value_of(parse_json(line), field)
        if not isinstance(text, str):
            raise ValueError(f"its field {field!r} must be a text")
        return text.encode()
    except ValueError as error:  # also UnicodeError, for half of a surrogate pair
        raise ValueError(f"{path}: the line at byte {offset}: {error}; correct it, and start again") from error
