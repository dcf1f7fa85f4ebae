"""Opening of untrusted files: only regular files, and images only in known formats."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's decoders that are used, for any file name. Other decoders start programs (EPS runs Ghostscript)."""


def regular(path: Path) -> Path:
    """Return `path` if it is a regular file, or a link to one. Opening a FIFO or a device could wait forever.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is a folder, a FIFO, a socket or a device.
    """
    if not path.is_file():
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file")
        kind = next((kind for kind, is_kind in _KINDS if is_kind(path)), "a special file")
        raise ValueError(f"{path}: this is {kind}, not a file; name a file, or remove it from a folder of data")
    return path


_KINDS = (
    ("a folder", Path.is_dir),
    ("a FIFO", Path.is_fifo),
    ("a socket", Path.is_socket),
    ("a device", lambda path: path.is_char_device() or path.is_block_device()),
)


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
