"""Unpacking of named files from archives. Archives are data: nothing in them chooses where a file is written."""

import gzip
import lzma
import os
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol

MAX_BYTES = 2**31
"""Largest size of an unpacked file. The largest file of the known data sets has 0.54 GB."""

_BLOCK = 1 << 20  # bytes read at a time


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def unpack_gzip(archive: Path, target: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack a gzip file to `target`, which appears when it is complete.

    Raises:
        ValueError: If the archive is damaged or holds more than `max_bytes`.
    """
    with _naming(archive), gzip.open(archive) as file:
        _write(file, target, max_bytes)


def unpack_zip(archive: Path, names: Collection[str], folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack the files of these names, from whatever folder of a zip file, into `folder`.

    Raises:
        ValueError: If the archive is damaged, does not hold each of the names once, or holds more than `max_bytes`.
    """
    with _naming(archive), zipfile.ZipFile(archive) as zipped:
        members = [
            info for info in zipped.infolist() if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)
        ]
        found = [PurePosixPath(info.filename).name for info in members]
        _check_names(names, found)
        for info, name in zip(members, found, strict=True):
            if name in names:
                with zipped.open(info) as file:
                    _write(file, folder / name, max_bytes)


def unpack_tar(archive: Path, names: Collection[str], folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack the files of these names, from whatever folder of a tar file, into `folder`. Links are left out.

    Raises:
        ValueError: If the archive is damaged, does not hold each of the names once, or holds more than `max_bytes`.
    """
    with _naming(archive), tarfile.open(archive) as tar:
        members = [member for member in tar if member.isreg()]
        found = [PurePosixPath(member.name).name for member in members]
        _check_names(names, found)
        for member, name in zip(members, found, strict=True):
            file = tar.extractfile(member) if name in names else None
            if file is not None:
                with file:
                    _write(file, folder / name, max_bytes)


@contextmanager
def _naming(archive: Path) -> Iterator[None]:
    """Turn the errors of the decompressors into one that names the archive."""
    try:
        yield
    except RuntimeError as error:  # of zipfile: encrypted, or (a NotImplementedError) packed by an unknown method
        raise ValueError(
            f"{archive}: the archive can't be unpacked ({error}); get it again, without a password"
        ) from error
    except (
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError, gzip.BadGzipFile, EOFError, ValueError),
    ) as error:
        raise ValueError(f"{archive}: the archive is damaged ({error}); delete it and get it again") from error


def _check_names(names: Collection[str], found: list[str]) -> None:
    for name in names:
        if (times := found.count(name)) != 1:
            raise ValueError(f"it holds {name} {times} times instead of once")


def _write(file: _Readable, target: Path, max_bytes: int) -> None:
    """Copy a file. Processes may do so at once: each writes a file of its own, which it renames at last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".unfinished")
    try:
        with os.fdopen(handle, "wb") as written:
            left = max_bytes
            while block := file.read(_BLOCK):
                left -= len(block)
                if left < 0:
                    raise ValueError(f"{target.name} is larger than {max_bytes:,} bytes")
                written.write(block)
            os.fsync(written.fileno())
        Path(name).chmod(0o644)  # mkstemp allows only this user to read
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
