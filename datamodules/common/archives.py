"""Unpacking of named files from untrusted archives, whose content never chooses the path of a written file."""

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
    """Unpack the files of these names, from any folder of a zip file, into `folder`.

    Raises:
        ValueError: If the archive is damaged, does not hold each of the names once, or holds more than `max_bytes`.
    """
    with _naming(archive), zipfile.ZipFile(archive) as zipped:
        members = [
            info for info in zipped.infolist() if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)
        ]
        base_names = [PurePosixPath(info.filename).name for info in members]
        _check_names(names, base_names)
        for info, name in zip(members, base_names, strict=True):
            if name in names:
                with zipped.open(info) as file:
                    _write(file, folder / name, max_bytes)


def unpack_tar(archive: Path, names: Collection[str], folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack the files of these names, from any folder of a tar file, into `folder`. Links are left out.

    Raises:
        ValueError: If the archive is damaged, does not hold each of the names once, or holds more than `max_bytes`.
    """
    with _naming(archive), tarfile.open(archive) as tar:
        members = [member for member in tar if member.isreg()]
        base_names = [PurePosixPath(member.name).name for member in members]
        _check_names(names, base_names)
        for member, name in zip(members, base_names, strict=True):
            file = tar.extractfile(member) if name in names else None
            if file is not None:
                with file:
                    _write(file, folder / name, max_bytes)


@contextmanager
def _naming(archive: Path) -> Iterator[None]:
    """Replace the decompressors' errors by a ValueError that names the archive."""
    try:
        yield
    except RuntimeError as error:  # from zipfile: encrypted, or (NotImplementedError) an unknown method
        raise ValueError(
            f"{archive}: the archive can't be unpacked ({error}); get it again, without a password"
        ) from error
    except (
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError, gzip.BadGzipFile, EOFError, ValueError),
    ) as error:
        raise ValueError(f"{archive}: the archive is damaged ({error}); delete it and get it again") from error


def _check_names(names: Collection[str], members: list[str]) -> None:
    for name in names:
        if (times := members.count(name)) != 1:
            raise ValueError(f"it holds {name} {times} times instead of once")


def _write(file: _Readable, target: Path, max_bytes: int) -> None:
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
