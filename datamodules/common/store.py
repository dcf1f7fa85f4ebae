"""Stores: folders that one process makes once, which are complete or absent, and arrays of items in them.

Arrays are memory-mapped, so processes share them. The array NAME is three files, or four with titles:

| file | content |
|---|---|
| NAME.bin | the rows of all items, end to end |
| NAME.npy | (2, items + 1) int64: the items' borders in rows, and in bytes of the texts that they were made of |
| NAME.titles | a line with the title of each item, if any has one |
| NAME.json | the type and shape of a row, counts, and the SHA-256 of NAME.bin; written last |
"""

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json

NAME = "lit-effattn"  # name of the default cache folder


# Arrays


class ArrayWriter:
    """Writes an array of items. Each of its files appears when it is complete, the .json last.

    `n_shared` needs `compared`, which takes 8 bytes of memory an item.
    """

    def __init__(
        self, folder: Path, name: str, dtype: Any, row: tuple[int, ...] = (), *, compared: bool = False
    ) -> None:
        self._path = folder / f"{name}.bin"
        self._dtype, self._row = np.dtype(dtype), row
        self._file = self._path.with_suffix(".unfinished").open("wb")
        self._digest = hashlib.sha256()
        self._borders = array("q", [0]), array("q", [0])  # in rows, in bytes
        self._titles: list[str] = []
        self._hashes = array("q") if compared else None  # 64 bits of each item

    def add(self, pieces: Iterable[tuple[np.ndarray, int]], title: str = "", *, keep_empty: bool = False) -> None:
        """Add an item, given as the rows of its pieces and their sizes in bytes, unless it has no rows."""
        n_rows, n_bytes = (borders[-1] for borders in self._borders)
        item = hashlib.blake2b(digest_size=8)
        for rows, size in pieces:
            data = rows.astype(self._dtype, copy=False).tobytes()
            self._file.write(data)
            self._digest.update(data)
            if self._hashes is not None:
                item.update(data)
            n_rows, n_bytes = n_rows + len(rows), n_bytes + size
        if keep_empty or n_rows > self._borders[0][-1]:
            self._borders[0].append(n_rows)
            self._borders[1].append(n_bytes)
            self._titles.append(title)
            if self._hashes is not None:
                self._hashes.append(int.from_bytes(item.digest(), "little", signed=True))

    def close(self, **more: Any) -> int:
        """Complete the array, and return its number of items. Its .json has the entries `more`, too."""
        unfinished = Path(self._file.name)
        _close(self._file)
        unfinished.replace(self._path)
        with unfinished.open("wb") as file:
            np.save(file, np.array(self._borders, np.int64))
            _close(file)
        unfinished.replace(self._path.with_suffix(".npy"))
        if any(self._titles):
            write_text(self._path.with_suffix(".titles"), "".join(f"{title}\n" for title in self._titles))
        n_rows, n_bytes = (borders[-1] for borders in self._borders)
        n_items = len(self._borders[0]) - 1
        header = {"dtype": self._dtype.name, "row": self._row, "n_items": n_items, "n_rows": n_rows, "n_bytes": n_bytes}
        write_text(self._path.with_suffix(".json"), json.dumps({**header, **more, "sha256": self._digest.hexdigest()}))
        return n_items

    def n_shared(self, other: "ArrayWriter", least: int = 1) -> int:
        """Return how many of the items with at least `least` rows are in another array, too."""
        long = np.diff(np.asarray(self._borders[0])) >= least
        return int(np.isin(np.asarray(self._hashes)[long], np.asarray(other._hashes)).sum())


class StoredArray:
    """The items of an array. Its .json is read unless its content is given as `header`.

    `rows`, (n, …), are memory-mapped. Item i is `rows[borders[0, i] : borders[0, i + 1]]`, by (2, items + 1) `borders`.

    Raises:
        ValueError: If the array is damaged.
    """

    def __init__(self, folder: Path, name: str, header: dict[str, Any] | None = None) -> None:
        self._made_from = folder, name
        path = folder / f"{name}.bin"
        self.header = read_header(folder, name) if header is None else header
        self.borders = _borders(path.with_suffix(".npy"), self.header["n_rows"])
        dtype, shape = np.dtype(self.header["dtype"]), (self.header["n_rows"], *self.header["row"])
        self.rows = np.memmap(path, dtype, mode="r", shape=shape) if shape[0] else np.empty(shape, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredArray, self._made_from  # for workers that are not forked: numpy would pickle the mapped rows

    def __len__(self) -> int:
        return self.borders.shape[1] - 1

    def __getitem__(self, i: int) -> np.ndarray:
        """Return the rows of item i."""
        return self.rows[self.borders[0, i] : self.borders[0, i + 1]]

    def lengths(self) -> np.ndarray:
        """(items,), number of rows of each item."""
        return np.diff(self.borders[0])


def read_header(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of an array's .json."""
    header: dict[str, Any] = parse_json(regular(folder / f"{name}.json").read_text(encoding="utf-8"))
    return header


def damaged(path: Path) -> ValueError:
    """Return the error of a file of a store."""
    return ValueError(f"{path} is missing or damaged; delete {path.parent} and prepare the data again")


def _borders(path: Path, n_rows: int) -> np.ndarray:
    """Return the borders of an array's items, which rise from 0 to its number of rows."""
    try:
        borders: np.ndarray = np.load(regular(path), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise damaged(path) from error
    if borders.dtype != np.int64 or borders.ndim != 2 or len(borders) != 2 or not borders.shape[1]:
        raise damaged(path)
    if borders[:, 0].any() or borders[0, -1] != n_rows or (np.diff(borders) < 0).any():
        raise damaged(path)
    return borders


def write_text(path: Path, text: str) -> None:
    """Write a file that is either complete or absent."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(text.encode())
        _close(file)
    unfinished.replace(path)


def _close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


# Folders


def default_cache() -> Path:
    """Return the default cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Write `about` and the sizes of all files to about.json, as the last file of a folder."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    (folder / "about.json").write_text(json.dumps({**about, "sizes": sizes}), encoding="utf-8")


def read_about(folder: Path) -> dict[str, Any]:
    """Return what `write_about` wrote."""
    return read_header(folder, "about")


def is_whole(folder: Path) -> bool:
    """Return whether every file of a folder has the size that `write_about` recorded."""
    try:
        sizes = read_about(folder)["sizes"]
    except (FileNotFoundError, ValueError):  # ValueError: invalid JSON, such as after a power failure
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == sizes[name] for name in sizes)


def cached(cache: Path, name: str, identity: Any, make: Callable[[Path], None]) -> Path:
    """Return the folder of a store in a cache: see `cached_folder`. Another `identity` is another folder."""
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    cached_folder(folder := cache / f"{name}-{digest}", make)
    return folder


def cached_folder(folder: Path, make: Callable[[Path], None], is_whole: Callable[[Path], bool] = is_whole) -> None:
    """Create `folder` unless it is complete: `make` fills a temporary folder, which is then renamed to `folder`.

    If several processes call this, one creates the folder and the others wait. A folder that an interrupted run left or
    that was damaged later is created again. Unless `is_whole` is given, `make` calls `write_about` at the end.

    Raises:
        OSError: If the folder above can't be written to.
        ValueError: If it is the working directory and is not complete.
    """
    from filelock import FileLock

    folder = folder.resolve()  # a link stays
    with suppress(NotADirectoryError):  # a file is in the place of a folder above
        if is_whole(folder):
            return
    if folder == Path.cwd():
        raise ValueError(f"{folder} is the working directory, which a folder can't replace; name another")
    # The default folder holds the compiled kernels too, so only this user may write to it.
    mode = 0o700 if folder.parent.name == NAME else 0o777
    try:
        for path in (folder.parent.parent, folder.parent):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent):
            pass
    except OSError as error:
        raise OSError(
            f"the folder {folder.parent} for prepared data can't be written to ({error.strerror}): name another "
            "by an option of the data, or set XDG_CACHE_HOME in the environment to a folder that can"
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
