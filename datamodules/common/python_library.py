"""The source files of Python's standard library: a text that every installation has."""

import os
from collections.abc import Iterator
from pathlib import Path

# Tests repeat the tested code, pydoc_data is generated prose, and the others differ between builds of Python.
_NO_SOURCES = {"__pycache__", "dist-packages", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
_OF_THE_BUILD = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


def library_files(root: Path) -> Iterator[Path]:
    """Yield the source files in a folder of Python's library, without tests and files that differ between builds."""
    for folder, subfolders, names in os.walk(root):
        # Prune before descending: site-packages may be very large.
        subfolders[:] = [name for name in subfolders if name not in _NO_SOURCES and not name.startswith(_OF_THE_BUILD)]
        yield from (Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_OF_THE_BUILD))
