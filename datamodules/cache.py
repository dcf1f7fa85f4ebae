"""Folders that are made once, by one of the processes that want them, and are whole or not there."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def default_cache() -> Path:
    """Where they lie unless the arguments say otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit-effattn"


def cached_folder(folder: Path, make: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> None:
    """Let ``make(another name)`` fill a folder that is renamed to ``folder`` when it is whole, unless that is there.

    Of several processes that ask, one makes it, the others wait. What an interrupted run left, or what has been damaged
    since, is made again.
    """
    from filelock import FileLock

    if is_whole(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if is_whole(folder):
            return
        unfinished = folder.with_name(f".{folder.name}.lit-effattn-unfinished")  # a name that nobody else gives
        for left in (unfinished, folder):
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir()
        try:
            make(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
