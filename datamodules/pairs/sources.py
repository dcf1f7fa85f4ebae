"""Sources of pairs of texts, a source and its target, with fixed splits for training, validation and test."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from lit_effattn.datamodules.common import hugging_face
from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.common.records import SUFFIXES, Record, of_rows, read_lines, read_records
from lit_effattn.datamodules.common.splits import HELD_OUT, SPLITS, twentieths

_NAMES = {"train": ("train",), "val": ("val", "valid", "dev"), "test": ("test",)}  # names of the files of each split

_SOURCES = {
    "libreoffice": "python -m scripts.libreoffice_pairs --help, in a copy of the repository, explains how to make it "
    "from two Debian packages",
    "iwslt14": "get it from https://wit3.fbk.eu/2014-01, one sentence a line",
    "wmt14": "get it from https://www.statmt.org/wmt14/translation-task.html, one sentence a line",
}
"""Origin of the data of the shipped configurations, by the names of their folders."""


class Pair(NamedTuple):
    """A text and its counterpart, such as a sentence and its translation. Neither is empty."""

    source: str
    target: str


_Pairs = Callable[[], Iterable[Pair | Fault]]


class PairSource(NamedTuple):
    """Pairs by split."""

    name: str  # short, for the names of cached files
    splits: dict[str, _Pairs]  # of train, val and test: yields the pairs, and a fault for each that is left out
    identity: Any  # plain data that change if the pairs change

    def pairs(self, split: str, faults: Faults) -> Iterator[Pair]:
        """Yield the pairs of a split, and add its faults to `faults`."""
        for item in self.splits[split]():
            if isinstance(item, Fault):
                faults.add(item)
            else:
                yield item


def files(
    root: Path, columns: tuple[str, str], suffixes: tuple[str, str] | None = None, *, numbers: bool = False
) -> PairSource:
    """Return the pairs of files: train, val (or valid, dev) and test in a folder, or of a single file.

    Without val and test, the pairs are divided by `bucket`.

    Args:
        root: The folder, or the file. With `suffixes`, the common prefix of a single pair of files: `data/europarl`
            for `data/europarl.en` and `data/europarl.de`.
        columns: Names of the fields of a record: see `read_records`.
        suffixes: Of two files, such as en and de, of which line i is the i-th pair. None: files of records.
        numbers: The target may also be an integer, true or false.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If only one of val and test exists, or a split has several files. While reading: if two files have
            unequal numbers of lines, or a .csv is not valid.
    """
    paths = _paths(root, suffixes)
    read: Callable[..., Iterator[Record | Fault]] = _aligned if suffixes else read_records
    reads: dict[str, _Pairs] = {
        split: partial(_paired, partial(read, *of_split, columns), columns, numbers)
        for split, of_split in paths.items()
    }
    stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for part in paths.values() for p in part]
    return PairSource("files", with_held_out(reads), [stats, sorted(paths), suffixes or columns, numbers])


def first_rows(root: Path, columns: tuple[str, str]) -> list[Pair]:
    """Return the first pair of each of `files` that has rows and none with names of columns."""
    firsts = []
    for (path,) in _paths(root, None).values():
        if not path.name.lower().endswith((".jsonl", ".jsonl.gz")):
            pairs = _paired(partial(read_records, path, columns), columns, numbers=True)
            first = next((pair for pair in pairs if isinstance(pair, Pair) or pair.reason != "empty"), None)
            firsts += [first] if isinstance(first, Pair) else []
    return firsts


def _paths(root: Path, suffixes: tuple[str, str] | None) -> dict[str, list[Path]]:
    """Return the file of each split, or its two aligned ones; of "train" alone if there is a single file or pair."""
    endings = [(ending,) for ending in SUFFIXES] if suffixes is None else [tuple(f".{suffix}" for suffix in suffixes)]
    paths: dict[str, list[Path]] = {}
    for split, name in ((of_name, name) for of_name, names in _NAMES.items() for name in names):
        for of_format in ([root / f"{name}{end}" for end in ending] for ending in endings):
            if any(path.is_file() for path in of_format):
                if split in paths:
                    raise ValueError(f"{of_format[0]}: {paths[split][0].name} is of {split!r}, too; remove one")
                paths[split] = of_format
    if not root.is_dir():
        single = [root] if suffixes is None else [root.with_name(root.name + end) for end in endings[0]]
        paths = {"train": single} if all(path.is_file() for path in single) else {}
    if not paths:
        wanted = " or ".join(f"train{end}" for end in SUFFIXES[:3])
        lacking = f"there is no such file, and no {wanted} in a folder of that name"
        if suffixes is not None:
            wanted, prefixed = (" and ".join(name + end for end in endings[0]) for name in ("train", root.name))
            lacking = f"there are no files {wanted} in that folder, and no {prefixed}"
        how = f"; {_SOURCES[root.name]}" if root.name in _SOURCES else ""
        raise FileNotFoundError(f"root={str(root)!r}: {lacking} ({root.resolve()}){how}")
    if missing := next((path for of_split in paths.values() for path in of_split if not path.is_file()), None):
        raise FileNotFoundError(f"{missing} is missing, the counterpart of the other file of that name; add it")
    lacking_splits = [split for split in SPLITS if split not in paths]
    if "train" in lacking_splits or len(lacking_splits) == 1:
        raise ValueError(
            f"{root.resolve()}: has files of {' and '.join(paths)}, but not of {' and '.join(lacking_splits)}; add "
            "what is missing, or leave only train to have it divided 90/5/5"
        )
    return paths


def huggingface(path: str, subset: str | None, columns: tuple[str, str], *, numbers: bool = False) -> PairSource:
    """Return a data set of Hugging Face, each row a pair.

    The splits are train, validation and test. If validation or test is missing or has no classes, as in a competition,
    it is taken from train by `bucket`. Classes have their names. With `numbers` the target may also be an integer, true
    or false.

    Raises:
        ValueError: If `datasets` is not installed, or there is no split train with these columns.
    """
    remedy = "text_column and label_column" if numbers else "source_column and target_column"
    rows, identity = hugging_face.load_splits(f"path={path!r}", path, subset, columns, remedy)
    reads: dict[str, _Pairs] = {
        split: partial(_paired, partial(of_rows, f"{path} {split}", of_split), columns, numbers)
        for split, of_split in rows.items()
    }
    return PairSource("huggingface", with_held_out(reads), [identity, numbers])


def source_lines(path: Path) -> list[str]:
    """Return the lines of a file of source texts, one a line.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line is empty or not UTF-8, or there is none, or the file has records.
    """
    if not path.is_file():
        raise FileNotFoundError(f"source_file={str(path)!r}: there is no such file ({path.resolve()})")
    if path.name.lower().endswith(SUFFIXES):
        raise ValueError(
            f"source_file={str(path)!r} has records, where a line must be a text; write the texts alone to a .txt file"
        )
    texts = []
    for where, line in read_lines(path):
        if isinstance(line, Fault) or not line.strip():
            message = line.message if isinstance(line, Fault) else f"{where}: has no text"
            raise ValueError(f"{message}; correct or delete the line")
        texts.append(line)
    if not texts:
        raise ValueError(f"source_file={str(path)!r} is empty; give it one source text a line")
    return texts


def bucket(text: str, n: int) -> int:
    """Return a pseudo-random number below `n` that is the same on every machine: a hash of the text, SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8], "big") % n


def with_held_out(reads: dict[str, _Pairs]) -> dict[str, _Pairs]:
    """Complete the splits: if validation or test is missing, it is every 20th pair of train by its source's `bucket`.

    All pairs of a source text are thus in the same split. What is left out of train is divided by its number.
    """
    return {split: partial(_in_buckets, reads[name], buckets) for split, (name, buckets) in twentieths(reads).items()}


def _in_buckets(read: _Pairs, buckets: set[int]) -> Iterator[Pair | Fault]:
    n_faults = 0
    for item in read():
        n_faults += isinstance(item, Fault)
        if bucket(item.source if isinstance(item, Pair) else str(n_faults), HELD_OUT) in buckets:
            yield item


def _aligned(source: Path, target: Path, columns: tuple[str, str]) -> Iterator[Record | Fault]:
    """Yield line i of both files as the two columns of record i."""
    counts = [0, 0]
    for lines in zip_longest(read_lines(source), read_lines(target)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if None not in lines:
            (where, *_), texts = lines[0], [text for _, text in lines]
            fault = next((text for text in texts if isinstance(text, Fault)), None)
            yield fault or Record(where, dict(zip(columns, texts, strict=True)))
    if counts[0] != counts[1]:
        raise ValueError(
            f"{source} has {counts[0]:,} lines, but {target} has {counts[1]:,}: line i of one must belong to line i of "
            "the other; align them"
        )


def _paired(
    read: Callable[[], Iterable[Record | Fault]], columns: tuple[str, ...], numbers: bool
) -> Iterator[Pair | Fault]:
    for record in read():
        texts = record if isinstance(record, Fault) else record.texts(columns, numbers=numbers)
        yield texts if isinstance(texts, Fault) else Pair(*texts)
