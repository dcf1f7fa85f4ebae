"""Cached files of tokenized pairs, made once per source. They are memory-mapped, so processes share them."""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_effattn.datamodules.common.cache import cached_folder
from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.splits import SPLITS
from lit_effattn.datamodules.pairs.sources import Pair, PairSource
from lit_effattn.datamodules.text.token_store import progress
from lit_effattn.datamodules.text.tokenizers import KINDS, Tokenizer

FORMAT = 1
"""Version of the file format. Increment it if the same pairs give different files."""

_BLOCK = 4096  # items tokenized at a time


class Tokenizers(NamedTuple):
    """The tokenizers of both sides; with a joint vocabulary, the same one twice."""

    source: Tokenizer
    target: Tokenizer


class Vocabularies(NamedTuple):
    """How the tokenizers are learnt.

    Attributes:
        source: Kind of the source tokens, a key of `tokenizers.KINDS`.
        target: Kind of the target tokens.
        size: Maximum size of each vocabulary of words or byte pairs.
        joint: One vocabulary, learnt from the texts of both sides.
    """

    source: str
    target: str
    size: int | None
    joint: bool

    def learn(self, pairs: Callable[[], Iterable[Pair]]) -> Tokenizers:
        """Learn from pairs, which are read once for each vocabulary."""
        if self.joint:
            both = KINDS[self.source].learn(chain.from_iterable(pairs()), self.size)
            return Tokenizers(both, both)
        sources, targets = (pair.source for pair in pairs()), (pair.target for pair in pairs())
        return Tokenizers(KINDS[self.source].learn(sources, self.size), KINDS[self.target].learn(targets, self.size))


class Texts:
    """The texts of one side of a split, in files.

    Attributes:
        tokens: (n,), mapped from a file, of the smallest unsigned type that holds them.
        borders: (texts + 1,): text i is `tokens[borders[i] : borders[i + 1]]`.
    """

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.tokens = np.memmap(folder / f"{name}.tokens", dtype, mode="r")
        self.borders = np.load(folder / f"{name}.tokens.npy", mmap_mode="r")
        self._utf8 = np.memmap(folder / f"{name}.utf8", np.uint8, mode="r")
        self._utf8_borders = np.load(folder / f"{name}.utf8.npy", mmap_mode="r")

    def lengths(self) -> np.ndarray:
        """(texts,), number of tokens of each text."""
        return np.diff(self.borders)

    def ids(self, i: int) -> np.ndarray:
        """The tokens of text i."""
        return self.tokens[self.borders[i] : self.borders[i + 1]]

    def text(self, i: int) -> str:
        """Text i as it was given."""
        return self._utf8[self._utf8_borders[i] : self._utf8_borders[i + 1]].tobytes().decode()


class _TextsWriter:
    """Writes the files of `Texts`."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer) -> None:
        self._folder, self._name, self._tokenizer = folder, name, tokenizer
        self._dtype = _dtype(tokenizer)
        self._tokens = (folder / f"{name}.tokens").open("wb")
        self._utf8 = (folder / f"{name}.utf8").open("wb")
        self._borders, self._utf8_borders = array("q", [0]), array("q", [0])

    def write(self, texts: list[str]) -> None:
        for text, ids in zip(texts, self._tokenizer.encode_all(texts), strict=True):
            utf8 = text.encode()
            self._tokens.write(ids.astype(self._dtype, copy=False).data)
            self._utf8.write(utf8)
            self._borders.append(self._borders[-1] + len(ids))
            self._utf8_borders.append(self._utf8_borders[-1] + len(utf8))

    def close(self) -> None:
        for file, borders, kind in (
            (self._tokens, self._borders, "tokens"),
            (self._utf8, self._utf8_borders, "utf8"),
        ):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            np.save(self._folder / f"{self._name}.{kind}.npy", np.asarray(borders))


class SplitPairs:
    """The items of a split: source texts, each with one target or several.

    Args:
        folder: Folder of the store.
        split: Name of the split.
        dtypes: Types of the tokens of the sources and the targets.

    Attributes:
        sources: Texts of the items.
        targets: Texts of all targets.
        first: (items + 1,): the targets of item i are those from `first[i]` to `first[i + 1] - 1`, at least one.
    """

    def __init__(self, folder: Path, split: str, dtypes: list[str]) -> None:
        self._made_from = folder, split, dtypes
        self.sources, self.targets = (
            Texts(folder, f"{split}.{side}", dtype) for side, dtype in zip(_SIDES, dtypes, strict=True)
        )
        self.first = np.load(folder / f"{split}.first.npy", mmap_mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return SplitPairs, self._made_from  # for workers that are not forked: numpy would pickle the mapped arrays

    def __len__(self) -> int:
        return len(self.first) - 1

    def lengths(self) -> np.ndarray:
        """(items, 2), number of tokens of each item's source and of its first target."""
        return np.stack([self.sources.lengths(), self.targets.lengths()[self.first[:-1]]], 1)


_SIDES = ("source", "target")


class PairStore:
    """A folder with the vocabularies of a source and the tokens of its splits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about: dict[str, Any] = parse_json(regular(folder / "about.json").read_text(encoding="utf-8"))

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers of the tokens."""
        return Tokenizers(
            *(Tokenizer.from_spec(_spec(self.folder, side).read_text(encoding="utf-8")) for side in _SIDES)
        )

    def split(self, name: str) -> SplitPairs:
        """Open the tokens of a split."""
        return SplitPairs(self.folder, name, self._about["dtypes"])

    def faults(self, split: str) -> Faults:
        """Return what the source leaves out of a split."""
        return Faults.from_data(self._about["faults"][split])

    def is_whole(self) -> bool:
        """Return whether every file has the size it was written with."""
        sizes = self._about["sizes"]
        return all((self.folder / n).is_file() and (self.folder / n).stat().st_size == sizes[n] for n in sizes)


def tokenized_pairs(source: PairSource, vocabularies: Vocabularies, *, merged: bool, cache: Path) -> PairStore:
    """Tokenize a source, or open the tokens of an earlier run if neither the source nor the settings have changed.

    The vocabularies are learnt from the training pairs. Memory grows by 40 bytes with each training pair; pairs of
    validation and test are held in memory while they are merged. If several processes call this, one tokenizes and the
    others wait.

    Args:
        source: The pairs.
        vocabularies: How the tokenizers are learnt.
        merged: Whether the pairs of a source text are one item in validation and test.
        cache: Folder for the files.

    Raises:
        ValueError: If a split has no pairs.
    """
    identity = json.dumps([FORMAT, source.name, source.identity, vocabularies, merged])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = cache / f"pairs-{source.name}-{digest}"
    cached_folder(folder, partial(_make, source, vocabularies, merged), _is_whole)
    return PairStore(folder)


def _is_whole(folder: Path) -> bool:
    try:
        return PairStore(folder).is_whole()
    except (FileNotFoundError, ValueError):  # ValueError: invalid JSON, such as after a power failure
        return False


def _dtype(tokenizer: Tokenizer) -> str:
    return np.min_scalar_type(tokenizer.start - 1).name  # the largest stored token; <start> is not stored


def _spec(folder: Path, side: str) -> Path:
    return folder / f"{side}_tokenizer.json"


def _make(source: PairSource, vocabularies: Vocabularies, merged: bool, folder: Path) -> None:
    with progress("Reading the vocabularies", None):
        tokenizers = vocabularies.learn(lambda: _pairs(source, "train", Faults()))
    for side, tokenizer in zip(_SIDES, tokenizers, strict=True):
        _spec(folder, side).write_text(tokenizer.to_json(), encoding="utf-8")
    faults = {split: Faults() for split in SPLITS}
    with progress("Tokenizing", None):
        for split in SPLITS:
            pairs = _pairs(source, split, faults[split])
            items = _merged(pairs) if merged and split != "train" else ((pair.source, [pair.target]) for pair in pairs)
            if not _write(folder, split, tokenizers, items):
                first = f"; the first of what is left out: {faults[split].first}" if faults[split] else ""
                raise ValueError(f"corpus={source.name!r}: its split {split!r} has no pairs{first}; add some")
    about = {
        "dtypes": [_dtype(tokenizer) for tokenizer in tokenizers],
        "faults": {split: found.to_data() for split, found in faults.items()},
        "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _pairs(source: PairSource, split: str, faults: Faults) -> Iterator[Pair]:
    """Yield the pairs of a split, and add what is left out to `faults`."""
    for item in source.splits[split]():
        if isinstance(item, Fault):
            faults.add(item)
        else:
            yield item


def _merged(pairs: Iterable[Pair]) -> Iterable[tuple[str, list[str]]]:
    """Return each source text once, with its different targets in their order."""
    items: dict[str, dict[str, None]] = {}
    for source, target in pairs:
        items.setdefault(source, {})[target] = None
    return ((source, list(targets)) for source, targets in items.items())


def _write(folder: Path, split: str, tokenizers: Tokenizers, items: Iterable[tuple[str, list[str]]]) -> int:
    """Write a split and return its number of items."""
    sources, targets = (_TextsWriter(folder, f"{split}.{side}", t) for side, t in zip(_SIDES, tokenizers, strict=True))
    first, items = array("q", [0]), iter(items)
    while block := list(islice(items, _BLOCK)):
        sources.write([source for source, _ in block])
        targets.write([target for _, several in block for target in several])
        first.extend(accumulate((len(several) for _, several in block), initial=first.pop()))
    sources.close()
    targets.close()
    np.save(folder / f"{split}.first.npy", np.asarray(first))
    return len(first) - 1
