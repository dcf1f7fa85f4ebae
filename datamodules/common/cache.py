"""Cache folders, which one process creates once and which are either complete or absent."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NAME = "lit-effattn"
"""Name of the default cache folder."""


def default_cache() -> Path:
    """Return the default cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME


def cached_folder(folder: Path, make: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> None:
    """Create `folder` unless it is complete: `make` fills a temporary folder, which is then renamed to `folder`.

    If several processes call this, one creates the folder and the others wait. A folder that an interrupted run left or
    that was damaged later is created again.
    """
    from filelock import FileLock

    with suppress(NotADirectoryError):  # a file is in the place of a folder above
        if is_whole(folder):
            return
    # The default folder holds the compiled kernels too, so only this user may write to it.
    mode = 0o700 if folder.parent.name == NAME else 0o777
    try:
        folder.parent.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent):
            pass
    except OSError as error:
        raise OSError(
            f"the folder {folder.parent} for prepared data can't be written to ({error.strerror}): set XDG_CACHE_HOME "
            "in the environment to a folder that can"
        ) from error
    with FileLock(folder.with_suffix(".lock")):
        if is_whole(folder):
            return
        unfinished = folder.with_name(f".{folder.name}.lit-effattn-unfinished")  # a name that no other program uses
        for left in (unfinished, folder):
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir()
        try:
            make(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
