"""Printing text from files without the characters that control a terminal or change the direction of writing."""

import logging
import re

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # other line ends, annotations, surrogates, tags
)


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Return text with escapes in place of characters that control a terminal or the direction of writing.

    With `one_line`, tabs and line feeds are escaped, too.

    Examples:
        >>> print(printable("a\x1b[2Jb\u202ec"))
        a\x1b[2Jb\u202ec
    """
    text = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
    return text.replace("\n", "\\n").replace("\t", "\\t") if one_line else text


def cut(value: object) -> str:
    """Return `repr(value)`, cut to 78 characters, for a message."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}…"


def table_cell(text: str) -> str:
    """Return text for a cell of a CSV file, which a spreadsheet does not take for a formula.

    Examples:
        >>> table_cell("=1+1"), table_cell("-1.5")
        ("'=1+1", '-1.5')
    """
    text = printable(text, one_line=True)
    return f"'{text}" if re.match("[=+@-]", text) and not re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?|-inf", text) else text


class PrintableRecords(logging.Filter):
    """A filter that makes the messages of log records printable."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Make the message printable and keep the record."""
        record.msg, record.args = printable(record.getMessage()), ()
        return True
