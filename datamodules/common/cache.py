"""Cache folders, which one process creates once and which are either complete or absent."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json

NAME = "lit-effattn"
"""Name of the default cache folder."""


def default_cache() -> Path:
    """Return the default cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Write `about` and the sizes of all files to about.json, as the last file of a folder."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    (folder / "about.json").write_text(json.dumps({**about, "sizes": sizes}), encoding="utf-8")


def is_whole(folder: Path) -> bool:
    """Return whether every file of a folder has the size that `write_about` recorded."""
    try:
        sizes = parse_json(regular(folder / "about.json").read_text(encoding="utf-8"))["sizes"]
    except (FileNotFoundError, ValueError):  # ValueError: invalid JSON, such as after a power failure
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == sizes[name] for name in sizes)


def cached_folder(folder: Path, make: Callable[[Path], None], is_whole: Callable[[Path], bool] = is_whole) -> None:
    """Create `folder` unless it is complete: `make` fills a temporary folder, which is then renamed to `folder`.

    If several processes call this, one creates the folder and the others wait. A folder that an interrupted run left or
    that was damaged later is created again.

    Args:
        folder: The folder.
        make: Writes the files, with `write_about` at the end unless `is_whole` is given.
        is_whole: Returns whether a folder is complete.

    Raises:
        OSError: If the folder above can't be written to.
    """
    from filelock import FileLock

    with suppress(NotADirectoryError):  # a file is in the place of a folder above
        if is_whole(folder):
            return
    # The default folder holds the compiled kernels too, so only this user may write to it.
    mode = 0o700 if folder.parent.name == NAME else 0o777
    try:
        for path in (folder.parent.parent, folder.parent):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
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
        for incomplete in (unfinished, folder):
            shutil.rmtree(incomplete, ignore_errors=True)
        unfinished.mkdir()
        try:
            make(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
