"""Unpacking of named files from untrusted zip archives, whose content never chooses the path of a written file."""

import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO

MAX_BYTES = 2**31
"""Largest size of an unpacked file. The largest file of the known data sets has 0.54 GB."""

_BLOCK = 1 << 20  # bytes read at a time


def unpack_zip(archive: Path, names: Collection[str], folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack the files of these names, from any folder of a zip file, into `folder`.

    Raises:
        ValueError: If the archive is damaged, does not hold each of the names once, or holds more than `max_bytes`.
    """
    try:
        with zipfile.ZipFile(archive) as zipped:
            files = [i for i in zipped.infolist() if not i.is_dir() and not stat.S_ISLNK(i.external_attr >> 16)]
            members = [(PurePosixPath(info.filename).name, info) for info in files]
            for name in names:
                if (times := [member for member, _ in members].count(name)) != 1:
                    raise ValueError(f"it holds {name} {times} times instead of once")
            for name, info in members:
                if name in names:
                    with zipped.open(info) as file:
                        _write(file, folder / name, max_bytes)
    except RuntimeError as error:  # encrypted, or (NotImplementedError) an unknown method
        raise ValueError(
            f"{archive}: the archive can't be unpacked ({error}); get it again, without a password"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise ValueError(f"{archive}: the archive is damaged ({error}); delete it and get it again") from error


def _write(file: IO[bytes], target: Path, max_bytes: int) -> None:
    """Copy a file. Several processes may do this at once: each writes a separate file and then renames it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".unfinished")
    try:
        with os.fdopen(handle, "wb") as unpacked:
            remaining = max_bytes
            while block := file.read(_BLOCK):
                remaining -= len(block)
                if remaining < 0:
                    raise ValueError(f"{target.name} is larger than {max_bytes:,} bytes")
                unpacked.write(block)
            os.fsync(unpacked.fileno())
        Path(name).chmod(0o644)  # mkstemp allows only this user to read
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
