"""Reading of untrusted files: which files of a folder are data, text in known encodings, images in known formats."""

import codecs
import gzip
import os
import re
import tempfile
import zipfile
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.common.splits import SPLITS

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's decoders that are used, for any file name. Other decoders start programs (EPS runs Ghostscript)."""

MAX_BYTES = 2**31
"""Largest size of a file that is unpacked. The largest file of the known data sets has 0.54 GB."""

_HEAD = 4096  # bytes by which a format is recognised
_GZIP = b"\x1f\x8b"
_OTHER = (
    *((mark, "UTF-16 or UTF-32") for mark in (codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
    (b"PK\x03\x04", "a zip archive or an Office document"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    *((b"BZh%d1AY&SY" % level, "a bzip2 archive") for level in range(1, 10)),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"%PDF-", "a PDF"),
    (b"\x89PNG\r\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\xd0\xcf\x11\xe0", "an Office document"),
)


# Folders


class Walked(NamedTuple):
    """The files of a folder."""

    files: list[Path]  # the data, in the order of their names
    left_out: dict[str, list[Path]]  # by reason

    @property
    def faults(self) -> Faults:
        """The files that are left out, counted by reason, with the first names."""
        return Faults(Fault(reason, shown(path)) for reason, paths in self.left_out.items() for path in paths)


def walk(root: Path, suffixes: tuple[str, ...] | None = None) -> Walked:
    """List the files in a folder and its subfolders.

    Linked folders are followed. A folder that several names lead to is read once, under its own name if that is below
    `root`. Left out are hidden files and folders (`.name`), links to nothing, special files, names that are not UTF-8,
    and files with other suffixes. Each is listed by its reason.

    Args:
        root: The folder, which may itself be hidden or a link.
        suffixes: Endings of the names to list, in lower case, such as `.jsonl.gz`; None: all.

    Raises:
        OSError: If a folder can't be read.
    """
    files: list[Path] = []
    left_out: dict[str, list[Path]] = {}
    visited, folders, links = set(), [root], deque[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.popleft()  # links last: a folder keeps its own name
        status = folder.stat()
        if (status.st_dev, status.st_ino) in visited:
            left_out.setdefault("linked to a folder that is read under another name", []).append(folder)
            continue
        visited.add((status.st_dev, status.st_ino))
        for path in sorted(folder.iterdir()):
            if reason := _not_listed(path, suffixes):
                left_out.setdefault(reason, []).append(path)
            elif path.is_dir():
                (links if path.is_symlink() else folders).append(path)
            else:
                files.append(path)
    return Walked(sorted(files), {reason: sorted(paths) for reason, paths in sorted(left_out.items())})


_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_INCIDENTAL = 10  # fewer than 1/10 of the files may have names of splits


def walk_splits(
    root: Path, suffixes: tuple[str, ...] | None = None, glob: str | None = None
) -> tuple[dict[str, list[Path]], Faults]:
    """List the files of a folder as `walk` does, by its subfolders train, val and test, and what is left out.

    Without these subfolders all files are under the key "". `glob` is a pattern of the names to list, relative to the
    folder of their split.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If one or two of the three subfolders are missing, or files have the names of splits, such as Train,
            or ptb.train.txt and ptb.test.txt.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{shown(root)}: there is no such folder ({shown(root.resolve())})")
    walked = walk(root, suffixes)
    missing = [name for name in SPLITS if not (root / name).is_dir()]
    if missing and len(missing) < len(SPLITS):
        raise ValueError(
            f"{shown(root.resolve())}: has subfolders train, val or test, but not {' and '.join(missing)}; add what is "
            "missing, or rename the existing ones to have all files divided"
        )
    splits: dict[str, list[Path]] = {name: [] for name in ([""] if missing else SPLITS)}
    faults = walked.faults
    for path in walked.files:
        name = "" if missing else path.relative_to(root).parts[0]
        if name not in splits:
            faults.add(Fault("beside the folders train, val and test", shown(path)))
        elif glob is not None and not _matches(path.relative_to(root / name).parts, Path(glob).parts):
            faults.add(Fault(f"not like glob={glob!r}", shown(path)))
        else:
            splits[name].append(path)
    if missing:
        _check_undivided(root, splits[""])
    return splits, faults


def not_empty(splits: dict[str, list[Path]], faults: Faults) -> dict[str, list[Path]]:
    """Return the files of each split that are not empty, and add the others to `faults`."""
    for path in (path for paths in splits.values() for path in paths if not path.stat().st_size):
        faults.add(Fault("empty", shown(path)))
    return {split: [path for path in paths if path.stat().st_size] for split, paths in splits.items()}


def _matches(names: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    """Return whether a path matches a pattern of `pathlib`, in which `**` matches any number of folders."""
    if not (names and patterns):
        return not names and patterns in ((), ("**",))
    if patterns[0] == "**":
        return _matches(names, patterns[1:]) or _matches(names[1:], patterns)
    return fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


def _check_undivided(root: Path, files: list[Path]) -> None:
    """Raise ValueError if names of files or folders, in one folder, differ in the name of a split."""
    named: dict[Any, dict[str, list[Path]]] = {}  # by folder and other words, and by split
    for path in files:
        parts = path.relative_to(root).parts
        for depth, part in enumerate(parts):
            words = re.findall(r"[^\W\d_]+", part.lower())
            for word in (word for word in words if word in _SPLIT_NAMES):
                others = parts[:depth], *(other for other in words if other != word)
                named.setdefault(others, {}).setdefault(_SPLIT_NAMES[word], []).append(path)
    for by_split in named.values():
        if len(by_split) > 1 and _INCIDENTAL * sum(map(len, by_split.values())) >= len(files):
            names = " and ".join(shown(by_split[split][0].relative_to(root)) for split in SPLITS if split in by_split)
            raise ValueError(
                f"{shown(root.resolve())}: {names} have names of splits; put them into folders train, val and test, or "
                "rename them to have all files divided"
            )


def _not_listed(path: Path, suffixes: tuple[str, ...] | None) -> str | None:
    if path.name.startswith("."):
        return "hidden"
    if shown(path.name) != path.name:
        return "with a name that is not UTF-8 (rename it)"
    if path.is_dir():
        return None
    if not path.is_file():
        return "neither file nor folder"
    if suffixes is not None and not path.name.lower().endswith(suffixes):
        return f"ending in {path.suffix.lower()}" if path.suffix else "without a suffix"
    return None


def shown(path: Path | str) -> str:
    r"""Return a path for messages, in which bytes that are not UTF-8 are escaped: `caf\xe9.txt`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


# Files


def regular(path: Path) -> Path:
    """Return `path` if it is a regular file, or a link to one. Opening a FIFO or a device could wait forever.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is a folder, a FIFO, a socket or a device.
    """
    if not path.is_file():
        if not path.exists():
            raise FileNotFoundError(f"{shown(path)}: there is no such file")
        kind = next((kind for kind, is_kind in _KINDS if is_kind(path)), "a special file")
        raise ValueError(f"{shown(path)}: this is {kind}, not a file; name a file, or remove it from a folder of data")
    return path


_KINDS = (
    ("a folder", Path.is_dir),
    ("a FIFO", Path.is_fifo),
    ("a socket", Path.is_socket),
    ("a device", lambda path: path.is_char_device() or path.is_block_device()),
)


class Encoding(NamedTuple):
    """The form in which a file holds a text in UTF-8: compressed with gzip or not, with a byte-order mark or not."""

    compressed: bool
    marked: bool


def text_encoding(path: Path) -> Encoding:
    """Recognise a text by its first bytes, whatever its name. That it is UTF-8 is not checked.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a regular file, is damaged, has a known other format, or has NUL bytes.
    """
    with regular(path).open("rb") as file:
        head = file.read(_HEAD)
    if compressed := head.startswith(_GZIP):
        with _naming(path), gzip.open(path) as unpacked:
            head = unpacked.read(_HEAD)
    kind = next((kind for magic, kind in _OTHER if head.startswith(magic)), None)
    if kind is None and b"\0" in head:
        kind = "binary, or UTF-16 without a byte-order mark"
    if kind is not None:
        raise ValueError(f"{shown(path)}: its content is {kind}, not text in UTF-8; save it as UTF-8, or remove it")
    return Encoding(compressed, head.startswith(codecs.BOM_UTF8))


@contextmanager
def open_utf8(path: Path) -> Iterator[BinaryIO]:
    """Open a text in UTF-8, which may be compressed with gzip, as bytes, after a byte-order mark.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If its first bytes are not of such a text; also while reading, if its compression is damaged, or by
            decoding within the context.
    """
    compressed, marked = text_encoding(path)
    with _naming(path), gzip.open(path) if compressed else path.open("rb") as file:
        file.seek(len(codecs.BOM_UTF8) if marked else 0)
        yield file  # type: ignore[misc]  # gzip's file is one


def read_text(path: Path) -> str:
    """Return a text that `open_utf8` opens. Only line feeds end lines."""
    with open_utf8(path) as file:
        return file.read().decode()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Replace the errors of decoding and decompression by a ValueError that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{shown(path)}: it is not {error.encoding} ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{shown(path)}: its compression is damaged ({error}); get it again") from error


@contextmanager
def open_image(path: Path) -> "Iterator[Image]":
    """Open an image in one of `IMAGE_FORMATS`, without decoding it.

    Raises:
        ValueError: If `path` is not a regular file.
        OSError: If it is not an image in one of these formats.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        file = Image.open(regular(path), formats=IMAGE_FORMATS)
    except UnidentifiedImageError as error:
        raise OSError(f"it is in none of the formats {', '.join(IMAGE_FORMATS)}") from error
    with file:
        yield file


def unpack_zip(archive: Path, names: Collection[str], folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack the files of these names, from any folder of a zip file, into `folder`. Each is whole or absent.

    Raises:
        ValueError: If the archive is damaged or encrypted, lacks a file or has it twice, or one has more than
            `max_bytes`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as zipped, tempfile.TemporaryDirectory(dir=folder, prefix=".unpacked") as made:
            every = [(PurePosixPath(info.filename).name, info) for info in zipped.infolist()]
            members = dict(every)
            for name in names:
                if (n := [other for other, _ in every].count(name)) != 1:
                    raise ValueError(f"it has {n} files of the name {name}" if n else f"it lacks {name}")
                if members[name].file_size > max_bytes:
                    raise ValueError(f"{name} is larger than {max_bytes:,} bytes")
            for name in names:
                members[name].filename = name  # the archive never chooses a path
                unpacked = Path(zipped.extract(members[name], made))
                with unpacked.open("rb+") as file:
                    os.fsync(file.fileno())
                unpacked.replace(folder / name)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise ValueError(f"{shown(archive)}: can't be unpacked ({error}); get it again, without a password") from error
