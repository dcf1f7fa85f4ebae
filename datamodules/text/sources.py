"""Sources of text: documents with fixed splits for training, validation and test."""

import sysconfig
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.datamodules.common import hugging_face
from lit_effattn.datamodules.common.faults import Faults
from lit_effattn.datamodules.common.files import not_empty, shown, text_encoding, unpack_zip, walk_splits
from lit_effattn.datamodules.common.python_library import library_files
from lit_effattn.datamodules.common.records import field, of_rows
from lit_effattn.datamodules.common.splits import HELD_OUT, SPLITS, fixed_order, twentieths
from lit_effattn.datamodules.text.records import SUFFIXES as RECORDS
from lit_effattn.datamodules.text.records import is_records, records

_SUFFIXES = (".txt", *RECORDS)  # of the files in a folder that are read by default
_BLOCK = 1 << 20  # bytes read at a time
_BENCHMARK_BYTES = 100_000_000  # of enwik8 and of text8
_WIKITEXT = {"tokens": "wikitext-103-v1.zip", "raw": "wikitext-103-raw-v1.zip"}  # archives' names


class Document(NamedTuple):
    """A text that is read from its beginning. It may be a part of a file."""

    name: str  # for error messages
    start: int  # offset of its first byte in the file
    blocks: Callable[[], Iterator[bytes]]  # returns an iterator over blocks of its bytes
    title: str = ""  # its title in the file, such as the header of a FASTA record


class TextSource(NamedTuple):
    """Documents by split."""

    name: str  # short, for the names of cached files
    splits: dict[str, Iterable[Document]]  # documents of "train", "val" and "test"
    identity: Any  # plain data that change if the texts change
    n_bytes: dict[str, int] | None  # number of bytes in each split; None: unknown before the documents are read


class _Part(NamedTuple):
    """A part of a file, with the file's name relative to its source."""

    path: Path
    name: str
    start: int
    stop: int

    def read(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            left = self.stop - self.start
            while left and (block := file.read(min(_BLOCK, left))):
                left -= len(block)
                yield block


def stdlib(max_bytes: int | None = None) -> TextSource:
    """Return the sources of the running Python's standard library, without tests. Each file is a document."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return _source("stdlib", root, _split_by_name(_non_empty(library_files(root), root), max_bytes))


def one_file(name: str, path: Path, *, whole_characters: bool, max_bytes: int | None = None) -> TextSource:
    """Divide a file into documents: the first 90 % for training, the next 5 % for validation, the last 5 % for test.

    With `whole_characters` it is divided between UTF-8 characters, up to three bytes later if necessary. Only the first
    `max_bytes` are used.

    Raises:
        ValueError: If the file is too short to be divided.
    """
    start = _start(path)
    size = path.stat().st_size - start
    size = size if max_bytes is None else min(size, max_bytes)
    borders = [start + size * twentieths // HELD_OUT for twentieths in (0, HELD_OUT - 2, HELD_OUT - 1, HELD_OUT)]
    if whole_characters:
        borders = [_next_character(path, border) for border in borders]
    if size < HELD_OUT:
        raise ValueError(f"{path.resolve()}: {size} bytes of text are too few to divide 90/5/5; name a longer file")
    parts = [_Part(path, f"{path.name}[{start}:{stop}]", start, stop) for start, stop in pairwise(borders)]
    return _source(name, path, {split: [part] for split, part in zip(SPLITS, parts, strict=True)})


def _next_character(path: Path, position: int) -> int:
    with path.open("rb") as file:
        file.seek(position)
        following = file.read(3)
    return position + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def benchmark(name: str, root: Path, *, whole_characters: bool, max_bytes: int | None = None) -> TextSource:
    """Return enwik8 or text8: the file of that name in `root`, divided 90/5/5 as in the literature.

    If only its zip archive exists, it is unpacked.

    Raises:
        FileNotFoundError: If the file is missing. The message says where to get it.
        ValueError: If the archive is damaged.
    """
    archive = root / f"{name}.zip"
    if not (root / name).is_file() and archive.is_file():
        unpack_zip(archive, [name], root)
    if not (root / name).is_file():
        raise FileNotFoundError(
            f"{name} is not in {root.resolve()}: get http://mattmahoney.net/dc/{name}.zip and put it there (or name "
            "its folder with root). source='stdlib' needs no download."
        )
    if (size := (root / name).stat().st_size) != _BENCHMARK_BYTES:
        rank_zero_warn(f"{root / name} has {size:,} bytes, not {_BENCHMARK_BYTES:,}: scores do not compare with papers")
    return one_file(name, root / name, whole_characters=whole_characters, max_bytes=max_bytes)


def wikitext103(root: Path) -> TextSource:
    """Return WikiText-103: wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (or .raw), each one document.

    If a file is missing, their zip archive in `root` or beside it is unpacked into `root`.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the archive is damaged.
    """
    for end, archive in _WIKITEXT.items():
        paths = {name: root / f"wiki.{'valid' if name == 'val' else name}.{end}" for name in SPLITS}
        zipped = [folder / archive for folder in (root, root.parent) if (folder / archive).is_file()]
        if zipped and not all(path.is_file() for path in paths.values()):
            unpack_zip(zipped[0], [path.name for path in paths.values()], root)
        if all(path.is_file() for path in paths.values()):
            return _source("wikitext103", root, {name: [_whole(path, root)] for name, path in paths.items()})
    raise FileNotFoundError(
        f"WikiText-103 is not in {root.resolve()}: put wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens there "
        "(or all three ending in .raw, or wikitext-103-v1.zip), or name their folder with root. "
        "source='stdlib' needs no download."
    )


def files(root: Path, glob: str | None, column: str, *, whole_characters: bool) -> TextSource:
    """Return a single file, divided 90/5/5, or a folder with each of its files as a document.

    A folder's subfolders train, val and test are the splits. Otherwise its files are divided by name, 90/5/5 %, with at
    least one file for validation and one for test. If files hold several documents (`records`), the splits without
    subfolders are of documents: every 20th for test, and the one after it for validation. `unread` returns what is left
    out.

    Raises:
        FileNotFoundError: If there is no such file or folder, or no file matches.
        ValueError: If there is too little to divide, a subfolder is missing, files have the names of splits, or there
            is a pattern for a single file.
    """
    if root.is_file() and glob is not None:
        raise ValueError(f"glob={glob!r} selects files of a folder, but root={str(root)!r} is a file; leave it out")
    if root.is_file() and not is_records(root.name):
        return one_file("files", root, whole_characters=whole_characters)
    if not root.exists():
        raise FileNotFoundError(f"root={str(root)!r}: there is no such folder or file ({root.resolve()})")
    paths, faults = ({"": [root]}, Faults()) if root.is_file() else _matching(root, glob)
    for name, of_split in paths.items():
        if not of_split:
            which = f"ends in {', '.join(_SUFFIXES)}" if glob is None else f"matches glob={glob!r}"
            raise FileNotFoundError(
                f"{(root / name).resolve()}: no file with text in it {which}; '**/*.txt' finds all that "
                f"end in .txt{faults.counts}"
            )
    if any(is_records(path.name) for of_split in paths.values() for path in of_split):
        return _of_records(root, paths, column)
    splits = {name: _non_empty(of_split, root) for name, of_split in paths.items()}
    return _source("files", root, _split_by_name(splits[""]) if "" in splits else splits)


def _of_records(root: Path, paths: dict[str, list[Path]], column: str) -> TextSource:
    about = {n: [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in of_n] for n, of_n in paths.items()}
    paths = {"train": paths[""]} if "" in paths else paths
    splits: dict[str, Iterable[Document]] = {
        name: _Numbered(partial(_documents, paths[source], root, column), numbers)
        for name, (source, numbers) in twentieths(paths).items()
    }
    return TextSource(name="files", splits=splits, identity=[str(root.resolve()), column, about], n_bytes=None)


@dataclass
class _Numbered:
    """The documents that `read` yields whose numbers modulo `HELD_OUT` are in `remainders`. None is counted, too."""

    read: Callable[[], Iterator[Document | None]]
    remainders: set[int]

    def __iter__(self) -> Iterator[Document]:
        documents = enumerate(self.read())
        return (d for i, d in documents if d is not None and i % HELD_OUT in self.remainders)


def _documents(paths: list[Path], root: Path, column: str) -> Iterator[Document]:
    """Yield the documents of files, of which some hold several."""
    for path in paths:
        if is_records(path.name):
            texts = records(path, column)
            yield from (Document(f"{path}[{i}]", 0, partial(iter, (text,)), title) for i, title, text in texts if text)
        else:
            part = _whole(path, root)
            yield Document(str(path), part.start, part.read)


def unread(root: Path, glob: str | None) -> Faults:
    """Return the files in a folder that `files` leaves out: also those that are empty or do not match."""
    return Faults() if root.is_file() else _matching(root, glob)[1]


def _matching(root: Path, glob: str | None) -> tuple[dict[str, list[Path]], Faults]:
    """Return the files with text by split, and what is left out."""
    splits, faults = walk_splits(root, _SUFFIXES if glob is None else None, glob)
    return not_empty(splits, faults), faults


def _non_empty(paths: Iterable[Path], root: Path) -> list[_Part]:
    return sorted(part for path in paths if (part := _whole(path, root)).stop > part.start)


def _whole(path: Path, root: Path) -> _Part:
    return _Part(path, path.relative_to(root).as_posix(), _start(path), path.stat().st_size)


def _start(path: Path) -> int:
    """Return the offset of a file's text, after a byte-order mark of UTF-8."""
    compressed, marked = text_encoding(path)
    if compressed:
        raise ValueError(
            f"{shown(path)}: it is compressed with gzip, which is not read in place; unpack it, or let `lit-effattn "
            "data prepare` read it, then use source='prepared'"
        )
    return len(BOM_UTF8) if marked else 0


def _split_by_name(files: list[_Part], max_bytes: int | None = None) -> dict[str, list[_Part]]:
    order = [files[i] for i in fixed_order(file.name for file in files)]
    if max_bytes is not None:
        order = [file for file, end in zip(order, accumulate(f.stop for f in order), strict=True) if end <= max_bytes]
    if len(order) < len(SPLITS):
        limit = "" if max_bytes is None else f" within max_bytes={max_bytes}"
        raise ValueError(
            f"{len(order)} files{limit} cannot be divided into training, validation and test; "
            + ("name one file to have it divided 90/5/5, or add some" if max_bytes is None else "allow more")
        )
    held_out = max(len(order) // HELD_OUT, 1)
    splits = {"test": order[:held_out], "val": order[held_out : 2 * held_out], "train": order[2 * held_out :]}
    return {name: sorted(part) for name, part in splits.items()}


def _source(name: str, root: Path, splits: dict[str, list[_Part]]) -> TextSource:
    changed = {part.path: part.path.stat().st_mtime_ns for split in splits.values() for part in split}
    identity = {name: [(p.name, p.start, p.stop, changed[p.path]) for p in split] for name, split in splits.items()}
    return TextSource(
        name=name,
        splits={name: [Document(str(p.path), p.start, p.read) for p in split] for name, split in splits.items()},
        identity=[str(root.resolve()), identity],
        n_bytes={name: sum(p.stop - p.start for p in split) for name, split in splits.items()},
    )


def huggingface(path: str, subset: str | None, column: str) -> TextSource:
    """Return a data set of Hugging Face, each row a document.

    The splits are train, validation and test. If validation or test is missing, it is every 20th row of train.

    Raises:
        ValueError: If `datasets` is not installed, or there is no split train with this column. While reading: if it
            holds something else than texts.
    """
    rows, identity = hugging_face.load_splits("source='huggingface'", path, subset, [column], "column")
    splits: dict[str, Iterable[Document]] = {
        name: _Numbered(partial(_of_rows, f"{path} {source}", rows[source], column), numbers)
        for name, (source, numbers) in twentieths(rows).items()
    }
    return TextSource(name="huggingface", splits=splits, identity=identity, n_bytes=None)


def _of_rows(title: str, rows: Iterable[Any], column: str) -> Iterator[Document | None]:
    for where, row in of_rows(title, rows):
        text = field(row, column)
        if not isinstance(text, str | None):
            raise ValueError(f"{where}: {column!r} must be a text, but is {str(text)[:40]!r}; choose another column")
        yield Document(where, 0, partial(iter, (text.encode(),))) if text else None
