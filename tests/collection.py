"""Check that two processes collect the same tests in the same order: `python -m tests.collection`.

pytest-xdist stops when its processes collect different tests. Here tests are collected twice, at once: as usual, and
with another clock, hash seed and working directory, and with the entries of every folder in reverse order.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LATER = datetime.timedelta(days=400, hours=1, minutes=1, seconds=1)


def main(folder: Path = REPOSITORY / "tests") -> int:
    """Collect the tests of a folder twice, print the first that differ, and return the exit status."""
    try:
        tests, different = collect(folder)
    except ChildProcessError as error:
        print(error)
        return 1
    if different:
        print("An id, or the order of tests, depends on the clock, hashes, the working directory or addresses:")
        print(*(f"  {a}\nis in another process\n  {b}" for a, b in different[:3]), sep="\n")
        return 1
    print(f"{len(tests):,} tests have the same ids in two processes")
    return 0 if tests else 1


def collect(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Collect the tests of a folder twice, and return their ids and the pairs of ids that differ.

    Raises:
        ChildProcessError: If the tests can't be collected. The message is the output of pytest.
    """
    with tempfile.TemporaryDirectory() as elsewhere:
        usual = _collecting(folder, REPOSITORY, "1")
        changed = _collecting(folder, Path(elsewhere), "2", "-p", "tests.collection")
        outputs = [process.communicate()[0] for process in (usual, changed)]
    if usual.returncode or changed.returncode:
        raise ChildProcessError(outputs[0 if usual.returncode else 1])
    ids, changed_ids = ([line for line in output.splitlines() if "::" in line] for output in outputs)
    return ids, [pair for pair in zip_longest(ids, changed_ids, fillvalue="no test") if pair[0] != pair[1]]


def _collecting(folder: Path, cwd: Path, hash_seed: str, *plugin: str) -> subprocess.Popen[str]:
    root = REPOSITORY if folder.is_relative_to(REPOSITORY) else folder
    options = ["--collect-only", "-q", "--rootdir", str(root), "-c", str(REPOSITORY / "pyproject.toml")]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *plugin, *options, str(folder)],
        cwd=cwd,
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pytest_configure() -> None:
    """Change the clock and the order of folders. As a plugin, this module has it called before tests are imported."""
    now, now_ns, listdir, scandir = time.time, time.time_ns, os.listdir, os.scandir
    time.time = lambda: now() + LATER.total_seconds()
    time.time_ns = lambda: now_ns() + int(LATER.total_seconds()) * 10**9
    datetime.datetime = _Later  # type: ignore[misc]
    os.listdir = lambda *folder: listdir(*folder)[::-1]
    os.scandir = lambda *folder: _Entries(scandir(*folder))


class _Later(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return super().now(tz) + LATER


class _Entries:
    """The entries of a folder in reverse order, as `os.scandir` gives them."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self._entries = iter(list(entries)[::-1])

    def __iter__(self) -> Any:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the folder was closed when it was read."""


if __name__ == "__main__":
    sys.exit(main())
