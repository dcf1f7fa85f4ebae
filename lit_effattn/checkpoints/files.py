"""Files and folders of checkpoints: written and deleted atomically, and read as data."""

import errno
import io
import os
import pickletools
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lit_effattn.checkpoints.runs import LAST, PREVIOUS
from lit_effattn.checkpoints.shape import check_plain

_PART, _BEFORE = ".part", ".before"

_CHECKSUM = b"lit-effattn CRC-32 %08x"
_CHECKSUM_SIZE = len(_CHECKSUM % 0)
_END, _END_SIZE = b"PK\5\6", 22  # a zip's end record without its comment, whose length is in the last two bytes

_GLOBALS = re.compile(
    r"collections OrderedDict|torch (\w+Storage|[a-z]\w*|Size)"
    r"|torch\._utils _rebuild_(tensor_v2|parameter|meta_tensor_no_storage)"
)
"""What a checkpoint's pickle may name. torch also allows `bytearray` and others, which allocate any size."""

# ------------------------------------------------------------------------------------------------------------- writing


def unfinished(path: Path) -> Path:
    """Return the name, beside `path`, under which this process writes it."""
    return path.with_name(f".{path.name}.{os.getpid()}{_PART}")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or folder to, which is renamed to `path` unless the block raises an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = unfinished(path)
    try:
        yield part
        part.replace(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)


class _SummedWriter(io.BufferedWriter):
    """A file that is written from its beginning to its end, with the CRC-32 of what was written."""

    crc = 0

    def write(self, data: Any) -> int:
        """Write `data`."""
        self.crc = zlib.crc32(data, self.crc)
        return super().write(data)


def write(content: dict[str, Any], path: Path) -> None:
    """Write a file and flush it to the disk, so that a power cut can't leave an empty file.

    The file is a zip, as `torch.save` writes it, whose comment holds the CRC-32 of the file without that comment.
    """
    with _SummedWriter(io.FileIO(path, "wb")) as file:
        torch.save(content, file)
        comment = _CHECKSUM % file.crc
        file.seek(-2, os.SEEK_END)
        file.write(len(comment).to_bytes(2, "little") + comment)
        file.flush()
        os.fsync(file.fileno())


def put(part: Path, path: Path) -> None:
    """Rename the finished checkpoint `part` to `path`, which replaces the checkpoint of that name.

    A replaced `last.ckpt` becomes `previous.ckpt`. A folder can't be replaced in one step: between two renames the old
    one has a temporary name, from which `remove_parts` restores it.
    """
    if path.name == LAST and path.exists():
        _keep(path, path.with_name(PREVIOUS))
    if not path.is_dir() and not (part.is_dir() and path.exists()):
        part.replace(path)
        return
    before = part.with_suffix(_BEFORE)
    shutil.rmtree(before, ignore_errors=True)  # left by a killed process with the same id
    path.replace(before)
    try:
        part.replace(path)
    except BaseException:
        before.replace(path)
        raise
    remove(before)


def _keep(path: Path, other: Path) -> None:
    """Link a file to the name `other`. A folder, or a file without support for links, is renamed."""
    remove(other)
    try:
        if path.is_dir():
            path.replace(other)
        else:
            os.link(path, other)
    except OSError:
        path.replace(other)


def remove(path: Path) -> None:
    """Delete a checkpoint. A folder is renamed first, so its name never refers to a partial checkpoint."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    renamed = unfinished(path)
    shutil.rmtree(renamed, ignore_errors=True)
    path.replace(renamed)
    shutil.rmtree(renamed)


def remove_parts(folder: Path) -> None:
    """Delete the unfinished checkpoints of ended processes in `folder`, and restore names: see `put`.

    This process is writing none. Those with its number are of an ended one, such as of a container that is restarted.
    """
    for path in (*folder.glob(f".*{_PART}"), *folder.glob(f".*{_BEFORE}")):
        process = path.suffixes[-2][1:] if len(path.suffixes) > 1 else ""
        if not process.isdecimal() or (int(process) != os.getpid() and _is_running(int(process))):
            continue
        name = path.with_name(path.name[1:].removesuffix(f".{process}{_BEFORE}"))
        with suppress(OSError):
            if path.suffix == _BEFORE and not name.exists():
                path.replace(name)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_running(process: int) -> bool:
    if os.name == "nt":
        return True  # on Windows the signal 0 is Ctrl-C
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # a process of another user
    return True


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error in writing `path` into an OSError with the path, the reason and the checkpoint that remains."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = _os_error(error)
        if reason is None and isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        kept = f"; {path} is the one saved before, still intact" if path.exists() else ""
        raise OSError(
            f"the checkpoint {path} could not be written: {reason.strerror if reason else error}{kept}. "
            "Make room, then resume with --ckpt_path last"
        ) from error


def _os_error(error: BaseException | None) -> OSError | None:
    """Return the error of the operating system that caused torch's error; None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


# ------------------------------------------------------------------------------------------------------------- reading


class DamagedError(ValueError):
    """A file is a cut-off or changed checkpoint, or not a checkpoint."""


def read(path: Path, map_location: Any = "cpu", *, mmap: bool = False) -> dict[str, Any]:
    """Read a file with plain containers of tensors, after its checksums (CRC-32). Nothing in it is executed.

    With `mmap`, the values of its tensors are read when they are used.

    Raises:
        DamagedError: If the file is cut off, changed, or from another program.
    """
    if reason := damage(path):
        raise DamagedError(f"{path} is damaged: {reason}")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # non-pickle files raise many exception types
        if _of_machine(error):
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0]  # without torch's advice to trust the file
        raise DamagedError(
            f"{path} ({path.stat().st_size:,} bytes) can't be read as a checkpoint: it is cut off, damaged, or from "
            f"another program ({reason or type(error).__name__})"
        ) from error
    try:
        check_plain(content)
    except ValueError as error:
        raise DamagedError(f"{path} can't be read as a checkpoint: {error}") from error
    return content if isinstance(content, dict) else {}


def damage(path: Path) -> str | None:
    """Describe the damage of a torch file, a zip; None if it is intact.

    A file from `write` has a checksum of all its bytes. In other files, the checksum of each entry is verified, and the
    records about the entries must be as torch writes them.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(4) == b"PK\3\4"
            if not begins and not zipfile.is_zipfile(file):
                return None  # an older torch's format, or not a torch file: torch.load decides
            size = file.seek(0, os.SEEK_END)
            file.seek(-min(size, _END_SIZE + _CHECKSUM_SIZE), os.SEEK_END)
            tail = file.read()
            summed = tail[: len(_END)] == _END and len(tail) == _END_SIZE + _CHECKSUM_SIZE
            if summed and not _is_sum(file, tail[_END_SIZE - 2 :]):
                return "the checksum of the whole file is wrong"
            if not summed and not (tail[-_END_SIZE:][:4] == _END and tail[-2:] == b"\0\0"):
                return f"it is cut off or changed: its {path.stat().st_size:,} bytes do not end as torch's files do"
            with zipfile.ZipFile(file) as archive:
                reason = _damaged_record(archive, size) or _foreign_name(archive)
                if reason or summed:
                    return reason
                entry = archive.testzip()
                return None if entry is None else f"the checksum of {entry} is wrong"
    except Exception as error:  # a changed header can name any unsupported option
        if _of_machine(error):
            raise
        return str(error) or type(error).__name__


def _is_sum(file: io.BufferedReader, comment: bytes) -> bool:
    """Return whether a file's comment, preceded by its length, is the checksum of the file without it."""
    crc, left = 0, file.seek(0, os.SEEK_END) - len(comment)
    file.seek(0)
    while left:
        block = file.read(min(left, 1 << 20))
        crc, left = zlib.crc32(block, crc), left - len(block)
    expected = _CHECKSUM % zlib.crc32(b"\0\0", crc)
    return comment == len(expected).to_bytes(2, "little") + expected


def _damaged_record(archive: zipfile.ZipFile, size: int) -> str | None:
    """Describe the first entry whose record in the directory is not as torch writes it, in a file of `size` bytes."""
    if sum(entry.file_size for entry in archive.infolist()) > size:
        return f"its entries claim more than the {size:,} bytes of the file"
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            return "it is compressed, as torch's files never are"
        if entry.external_attr or entry.is_dir():
            return f"its directory does not describe {entry.filename} as a file"
    return None


def _foreign_name(archive: zipfile.ZipFile) -> str | None:
    """Describe the first name in the pickle that no checkpoint has."""
    for entry in archive.namelist():
        if entry.rpartition("/")[2] == "data.pkl":
            for code, name, _ in pickletools.genops(archive.read(entry)):
                if code.name in ("GLOBAL", "INST") and not _GLOBALS.fullmatch(str(name)):
                    return f"it names {name!r}, which no checkpoint does"
    return None


def _of_machine(error: Exception) -> bool:
    """Return whether the machine made reading fail, not the file. EINVAL is a position beyond the file's end."""
    if isinstance(error, OSError):
        return error.errno not in (None, errno.EINVAL)
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
