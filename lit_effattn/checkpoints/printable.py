"""Text of files that is printed: without characters that a terminal would obey, or that change the order of others."""

from __future__ import annotations

import logging
import re

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but the tabulator and the line end
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # order of writing
    "\u2028\u2029\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # other line ends, annotations, surrogates, tags
)


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Return text with control characters, and those that change the order of writing, as escapes.

    Args:
        text: The text.
        one_line: Whether tabulators and line ends are escaped, too.

    Example:
        >>> print(printable("a\x1b[2Jb\u202ec"))
        a\x1b[2Jb\u202ec
    """
    text = _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
    return text.replace("\n", "\\n").replace("\t", "\\t") if one_line else text


class PrintableRecords(logging.Filter):
    """Changes the messages of log records to printable ones."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the message; keep the record."""
        record.msg, record.args = printable(record.getMessage()), ()
        return True
