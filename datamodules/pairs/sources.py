"""Sources of pairs of texts, a source and its target, with fixed splits for training, validation and test."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from lit_effattn.datamodules.common import hugging_face
from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.common.files import open_utf8
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.splits import HELD_OUT, SPLITS

_NAMES = {"train": ("train",), "val": ("val", "valid", "dev"), "test": ("test",)}
"""Names of the files of each split. The first one that exists is read."""


_COLUMN_NAMES = {
    *(b"source", b"target", b"src", b"tgt", b"trg", b"input", b"output"),
    *(b"text", b"sentence", b"review", b"label", b"class", b"category", b"sentiment"),
}
"""Names in the first line of a file of TAB-separated columns, which is then not an example."""


class Pair(NamedTuple):
    """A text and its counterpart, such as a sentence and its translation. Neither is empty."""

    source: str
    target: str


_Pairs = Callable[[], Iterable[Pair | Fault]]


class PairSource(NamedTuple):
    """Pairs by split.

    Attributes:
        name: Short name, used in the names of cached files.
        splits: A function for each of "train", "val" and "test" that yields its pairs, and a fault for each that is
            left out.
        identity: Plain data that change if the pairs change.
    """

    name: str
    splits: dict[str, _Pairs]
    identity: Any

    def pairs(self, split: str, faults: Faults) -> Iterator[Pair]:
        """Yield the pairs of a split, and add its faults to `faults`."""
        for item in self.splits[split]():
            if isinstance(item, Fault):
                faults.add(item)
            else:
                yield item


def aligned_files(root: Path, source_suffix: str, target_suffix: str) -> PairSource:
    """Return two files per split, `train.en` and `train.de`, of which line i is the i-th pair.

    `root` is a folder with the files train, val (or valid, dev) and test, or the common prefix of a single pair of
    files: `data/europarl` for `data/europarl.en` and `data/europarl.de`. Without val and test, the pairs are divided by
    `bucket`.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If only one of val and test exists. While reading: if two files have unequal numbers of lines.
    """
    suffixes = (f".{source_suffix}", f".{target_suffix}")
    files = {split: _paths(stem, suffixes) for split, stem in _stems(root, suffixes).items()}
    if not files:
        raise FileNotFoundError(
            f"root={str(root)!r}: there are no files {' and '.join(f'train{s}' for s in suffixes)} in that folder, and "
            f"no {' and '.join(root.name + s for s in suffixes)} ({root.resolve()}){_how_to_get(root)}"
        )
    reads: dict[str, _Pairs] = {split: partial(_aligned, *paths) for split, paths in files.items()}
    return _divided("files", root, reads, [path for paths in files.values() for path in paths])


def tsv(root: Path) -> PairSource:
    """Return lines of a source, a TAB and a target: train.tsv, val.tsv (or valid, dev) and test.tsv, or a single file.

    A single file, or a folder with train.tsv alone, is divided by `bucket`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If only one of val and test exists.
    """
    return _one_file_each("tsv", root, ".tsv", _tabbed)


def jsonl(root: Path, source_column: str, target_column: str, *, numbers: bool = False) -> PairSource:
    """Return JSON lines, one object a pair: train.jsonl, val.jsonl (or valid, dev) and test.jsonl, or a single file.

    Args:
        root: The folder or file. A single file, or train.jsonl alone, is divided by `bucket`.
        source_column: Key of the source text. `translation.en` is the key en of the object under translation.
        target_column: Key of the target text.
        numbers: The target may also be an integer, true or false, which becomes a text as JSON writes it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If only one of val and test exists.
    """
    source = _one_file_each("jsonl", root, ".jsonl", partial(_objects, source_column, target_column, numbers))
    return source._replace(identity=[source.identity, source_column, target_column])


def huggingface(path: str, subset: str | None, source_column: str, target_column: str) -> PairSource:
    """Return a data set of Hugging Face, each row a pair.

    The splits are train, validation and test. If validation or test is missing, it is taken from train by `bucket`.

    Args:
        path: Name or folder of the data set.
        subset: Its configuration, if it has several.
        source_column: Column of the source text. `translation.en` is the key en of the column translation.
        target_column: Column of the target text.

    Raises:
        ValueError: If `datasets` is not installed, or there is no split train with these columns.
    """
    loaded = hugging_face.load("corpus='huggingface'", path, subset)
    has = loaded["train"].column_names if "train" in loaded else []
    columns = [column if column in has else column.split(".")[0] for column in (source_column, target_column)]
    if not set(columns) <= set(has):
        columns_of = {name: rows.column_names for name, rows in loaded.items()}
        raise ValueError(
            f"path={path!r} has no columns {source_column!r} and {target_column!r} in a split 'train'; it has "
            f"{columns_of}; name them with source_column and target_column"
        )
    named = {split: "validation" if split == "val" else split for split in SPLITS}
    reads: dict[str, _Pairs] = {
        split: partial(
            _rows, f"{path} {name}", loaded[name].select_columns(sorted({*columns})), source_column, target_column
        )
        for split, name in named.items()
        if name in loaded
    }
    identity = [path, subset, source_column, target_column, {name: rows._fingerprint for name, rows in loaded.items()}]
    return PairSource("huggingface", with_held_out(reads), identity)


def source_lines(path: Path) -> list[str]:
    """Return the lines of a file of source texts, one a line.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line is empty or not UTF-8, or there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"source_file={str(path)!r}: there is no such file ({path.resolve()})")
    texts = []
    for number, line in enumerate(_lines(path), 1):
        checked = _checked(f"{path}:{number}", line, line)
        if isinstance(checked, Fault):
            raise ValueError(f"{checked.message}; correct or delete the line")
        texts.append(checked.source)
    if not texts:
        raise ValueError(f"source_file={str(path)!r} is empty; give it one source text a line")
    return texts


def bucket(text: str, n: int) -> int:
    """Return a pseudo-random number below `n` that is the same on every machine: a hash of the text, SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % n


def with_held_out(reads: dict[str, _Pairs]) -> dict[str, _Pairs]:
    """Take missing splits from "train": a source text is for test if its `bucket` of 20 is 0, for validation if 1.

    All pairs of a source text are thus in the same split. Faults are reported by train only.
    """
    train, missing = reads["train"], {split: i for i, split in enumerate(("test", "val")) if split not in reads}
    if not missing:
        return reads
    held_out: dict[str, _Pairs] = {split: partial(_in_bucket, train, i) for split, i in missing.items()}
    return {**reads, **held_out, "train": partial(_in_no_bucket, train, [*missing.values()])}


def _in_bucket(read: _Pairs, i: int) -> Iterator[Pair]:
    return (pair for pair in read() if isinstance(pair, Pair) and bucket(pair.source, HELD_OUT) == i)


def _in_no_bucket(read: _Pairs, taken: list[int]) -> Iterator[Pair | Fault]:
    return (pair for pair in read() if isinstance(pair, Fault) or bucket(pair.source, HELD_OUT) not in taken)


_SOURCES = {
    "libreoffice": "python -m scripts.libreoffice_pairs --help, in a copy of the repository, explains how to make it "
    "from two Debian packages",
    "iwslt14": "get it from https://wit3.fbk.eu/2014-01, one sentence a line",
    "wmt14": "get it from https://www.statmt.org/wmt14/translation-task.html, one sentence a line",
}
"""Origin of the data of the shipped configurations, by the names of their folders."""


def _how_to_get(root: Path) -> str:
    return f"; {_SOURCES[root.name]}" if root.name in _SOURCES else ""


def _one_file_each(name: str, root: Path, suffix: str, read: Callable[[Path], Iterable[Pair | Fault]]) -> PairSource:
    files = {split: stem.with_name(stem.name + suffix) for split, stem in _stems(root, (suffix,)).items()}
    if root.is_file():
        files = {"train": root}
    if not files:
        raise FileNotFoundError(
            f"root={str(root)!r}: there is no such file, and no train{suffix} in a folder of that name "
            f"({root.resolve()}){_how_to_get(root)}"
        )
    reads: dict[str, _Pairs] = {split: partial(read, path) for split, path in files.items()}
    return _divided(name, root, reads, list(files.values()))


def _stems(root: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of each split without their suffixes; "train" alone if there is a single pair."""
    if not root.is_dir():
        return {"train": root} if all(path.is_file() for path in _paths(root, suffixes)) else {}
    stems = ((split, root / name) for split in SPLITS for name in reversed(_NAMES[split]))
    return {split: stem for split, stem in stems if any(path.is_file() for path in _paths(stem, suffixes))}


def _paths(stem: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return [stem.with_name(stem.name + suffix) for suffix in suffixes]


def _divided(name: str, root: Path, reads: dict[str, _Pairs], paths: list[Path]) -> PairSource:
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, the counterpart of the other file of that name; add it")
    missing = [split for split in SPLITS if split not in reads]
    if "train" in missing or len(missing) == 1:
        raise ValueError(
            f"{root.resolve()}: has files of {' and '.join(reads)}, but not of {' and '.join(missing)}; add what is "
            "missing, or leave only train to have it divided 90/5/5"
        )
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return PairSource(name, with_held_out(reads), [stats, sorted(reads)])


def _lines(path: Path) -> Iterator[bytes]:
    with open_utf8(path) as file:
        for line in file:
            yield line.rstrip(b"\r\n")


def _aligned(source: Path, target: Path) -> Iterator[Pair | Fault]:
    counts = [0, 0]
    for number, lines in enumerate(zip_longest(_lines(source), _lines(target)), 1):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if None not in lines:
            yield _checked(f"{source}:{number}", *lines)
    if counts[0] != counts[1]:
        raise ValueError(
            f"{source} has {counts[0]:,} lines, but {target} has {counts[1]:,}: line i of one must belong to line i of "
            "the other; align them"
        )


def _tabbed(path: Path) -> Iterator[Pair | Fault]:
    for number, line in enumerate(_lines(path), 1):
        columns, where = line.split(b"\t"), f"{path}:{number}"
        if number == 1 and _COLUMN_NAMES.issuperset(column.strip().lower() for column in columns):
            yield Fault("header row", f"{where}: {line.decode()!r} are names of columns")
        elif len(columns) == 2:
            yield _checked(where, *columns)
        elif line.strip():
            yield Fault("not two columns", f"{where}: has {len(columns)} columns; expected source TAB target")
        else:
            yield Fault("empty", f"{where}: is empty")


def _objects(source_column: str, target_column: str, numbers: bool, path: Path) -> Iterator[Pair | Fault]:
    for number, line in enumerate(_lines(path), 1):
        where = f"{path}:{number}"
        try:
            yield _of_fields(where, parse_json(line), source_column, target_column, numbers)
        except UnicodeDecodeError:
            yield Fault("not UTF-8", f"{where}: is not UTF-8")
        except ValueError as error:
            yield Fault("not JSON", f"{where}: is not JSON ({error})")


def _rows(title: str, rows: Iterable[Any], source_column: str, target_column: str) -> Iterator[Pair | Fault]:
    return (_of_fields(f"{title}[{i}]", row, source_column, target_column) for i, row in enumerate(rows))


def _of_fields(where: str, row: Any, source_column: str, target_column: str, numbers: bool = False) -> Pair | Fault:
    texts = [_field(row, column) for column in (source_column, target_column)]
    if numbers and isinstance(texts[1], float) and texts[1].is_integer():  # pandas writes 1.0 in a column with gaps
        texts[1] = int(texts[1])
    if numbers and isinstance(texts[1], int):
        texts[1] = json.dumps(texts[1])
    for column, text in zip((source_column, target_column), texts, strict=True):
        if not isinstance(text, str):
            return Fault("without two texts", f"{where}: {column!r} must be a text, but is {str(text)[:40]!r}")
    return _checked(where, *texts)


def _field(row: Any, column: str) -> Any:
    if not isinstance(row, dict):
        return None
    first, _, rest = column.partition(".")
    return _field(row.get(first), rest) if rest and column not in row else row.get(column)


def _checked(where: str, source: str | bytes, target: str | bytes) -> Pair | Fault:
    """Return a pair, or a fault if a text is empty or not UTF-8."""
    texts = []
    for text in (source, target):
        try:
            # JSON can hold half of a surrogate pair, which is not valid UTF-8.
            texts.append(text.decode() if isinstance(text, bytes) else text.encode().decode())
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            return Fault("not UTF-8", f"{where}: is not UTF-8 ({error.reason} at {error.start})")
    if not all(text.strip() for text in texts):
        side = "source" if texts[1].strip() else "target" if texts[0].strip() else "source and no target"
        return Fault("empty", f"{where}: has no {side}")
    return Pair(*texts)
