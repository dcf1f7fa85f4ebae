"""Cached folders of tokenized pairs, made once per source: arrays of tokens and texts, and the index of pairs."""

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_effattn.datamodules.common.faults import Faults
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.splits import SPLITS
from lit_effattn.datamodules.common.store import ArrayWriter, StoredArray, cached, read_about, write_about
from lit_effattn.datamodules.pairs.sources import Pair, PairSource
from lit_effattn.datamodules.text.token_store import replaced, token_type
from lit_effattn.datamodules.text.tokenization import progress
from lit_effattn.datamodules.text.tokenizers import KINDS, Tokenizer

FORMAT = 7
"""Version of the file format. Increment it if the same pairs give different files."""

_BLOCK = 4096  # items tokenized at a time
_SIDES = ("source", "target")


class Tokenizers(NamedTuple):
    """The tokenizers of both sides; with a joint vocabulary, the same one twice."""

    source: Tokenizer
    target: Tokenizer


class Vocabularies(NamedTuple):
    """Settings of the vocabularies."""

    source: str  # a key of `tokenizers.KINDS`
    target: str
    size: int | None  # maximum of each vocabulary of words or byte pairs
    joint: bool  # one vocabulary, learnt from the texts of both sides

    def learn(self, pairs: Callable[[], Iterable[Pair]]) -> Tokenizers:
        """Learn from pairs, which are read once for each vocabulary."""
        if self.joint:
            both = KINDS[self.source].learn(chain.from_iterable(pairs()), self.size)
            return Tokenizers(both, both)
        sources, targets = (pair.source for pair in pairs()), (pair.target for pair in pairs())
        return Tokenizers(KINDS[self.source].learn(sources, self.size), KINDS[self.target].learn(targets, self.size))


class SplitPairs:
    """The items of a split: source texts, each with one target or several."""

    def __init__(self, folder: Path, split: str) -> None:
        self._made_from = folder, split
        self.sources, self.targets = (StoredArray(folder, f"{split}-{side}") for side in _SIDES)  # tokens
        self._texts = {side: StoredArray(folder, f"{split}-{side}-text") for side in _SIDES}
        self.digests = [array.header for array in (self.sources, self.targets)]
        # (items + 1,): the targets of item i are those from `first[i]` to `first[i + 1] - 1`, at least one.
        self.first = np.load(regular(folder / f"{split}.first.npy"), mmap_mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return SplitPairs, self._made_from  # for workers that are not forked: numpy would pickle the mapped array

    def text(self, side: str, i: int) -> str:
        """Return text i of the side "source" or "target" as it was given."""
        return self._texts[side][i].tobytes().decode()

    def __len__(self) -> int:
        return len(self.first) - 1

    def lengths(self) -> np.ndarray:
        """(items, 2), number of tokens of each item's source and of its first target."""
        return np.stack([self.sources.lengths(), self.targets.lengths()[self.first[:-1]]], 1)


class PairStore:
    """A folder with the vocabularies of a source and the tokens of its splits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._about = folder, read_about(folder)
        self.tokenizers = Tokenizers(*(Tokenizer.from_spec(spec) for spec in self._about["tokenizers"]))

    def split(self, name: str) -> SplitPairs:
        """Open the tokens of a split."""
        return SplitPairs(self.folder, name)

    def faults(self, split: str) -> Faults:
        """Return the faults of a split."""
        return Faults.from_data(self._about["faults"][split])

    def doubts(self, split: str) -> list[str]:
        """Return messages of what the vocabularies lack of the texts of a split, and of sources that are trained on."""
        sides = zip(_SIDES, self.tokenizers, self._about["n_replaced"][split], strict=True)
        messages = [f"{side}s of {split!r}: {replaced(tokenizer, n)}" for side, tokenizer, n in sides if n]
        if n_shared := self._about["n_shared"][split]:
            messages.append(f"{n_shared:,} sources of {split!r} are in the training pairs, too")
        return messages


def tokenized_pairs(source: PairSource, vocabularies: Vocabularies, *, merged: bool, cache: Path) -> PairStore:
    """Tokenize a source, or open the tokens of an earlier run if neither the source nor the settings have changed.

    The vocabularies are learnt from the training pairs. Memory grows by about 114 bytes with each training pair; pairs
    of validation and test are held in memory while they are merged. If several processes call this, one tokenizes and
    the others wait.

    Raises:
        ValueError: If a split has no pairs.
    """
    identity = [FORMAT, source.name, source.identity, vocabularies, merged]
    return PairStore(cached(cache, f"pairs-{source.name}", identity, partial(_make, source, vocabularies, merged)))


def _make(source: PairSource, vocabularies: Vocabularies, merged: bool, folder: Path) -> None:
    with progress("Reading the vocabularies", None):
        tokenizers = vocabularies.learn(lambda: source.pairs("train", Faults()))
    faults = {split: Faults() for split in SPLITS}
    n_replaced, n_shared, written = {}, {}, {}
    with progress("Tokenizing", None):
        for split in SPLITS:
            pairs = source.pairs(split, faults[split])
            items = _merged(pairs) if merged and split != "train" else ((pair.source, [pair.target]) for pair in pairs)
            n_items, n_replaced[split], written[split] = _write(folder, split, tokenizers, items)
            n_shared[split] = written[split].n_shared(written["train"]) if split != "train" else 0
            if not n_items:
                first = f"; the first of what is left out: {faults[split].first}" if faults[split] else ""
                raise ValueError(f"corpus={source.name!r}: its split {split!r} has no pairs{first}; add some")
    specs = [tokenizer.to_json() for tokenizer in tokenizers]
    left_out = {split: of_split.to_data() for split, of_split in faults.items()}
    write_about(folder, {"tokenizers": specs, "faults": left_out, "n_replaced": n_replaced, "n_shared": n_shared})


def _merged(pairs: Iterable[Pair]) -> Iterable[tuple[str, list[str]]]:
    """Return each source text once, with its different targets in their order."""
    items: dict[str, dict[str, None]] = {}
    for source, target in pairs:
        items.setdefault(source, {})[target] = None
    return ((source, list(targets)) for source, targets in items.items())


def _write(
    folder: Path, split: str, tokenizers: Tokenizers, items: Iterable[tuple[str, list[str]]]
) -> tuple[int, list[int], ArrayWriter]:
    """Write a split.

    Returns:
        Its number of items, the number of units that the vocabulary of each side lacks, and the array of sources.
    """
    arrays = [
        (
            ArrayWriter(folder, f"{split}-{side}", token_type(tokenizer)),
            ArrayWriter(folder, f"{split}-{side}-text", "u1", compared=side == "source"),
        )
        for side, tokenizer in zip(_SIDES, tokenizers, strict=True)
    ]
    first, items, n_replaced = array("q", [0]), iter(items), [0, 0]
    while block := list(islice(items, _BLOCK)):
        sources, targets = [source for source, _ in block], [target for _, several in block for target in several]
        for side, ((tokens, utf8), tokenizer) in enumerate(zip(arrays, tokenizers, strict=True)):
            texts, before = (sources, targets)[side], tokenizer.n_replaced
            for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
                tokens.add([(ids, 0)], keep_empty=True)
                utf8.add([(np.frombuffer(text.encode(), np.uint8), 0)])
            n_replaced[side] += tokenizer.n_replaced - before
        first.extend(accumulate((len(several) for _, several in block), initial=first.pop()))
    for writer in chain(*arrays):
        writer.close()
    np.save(folder / f"{split}.first.npy", np.asarray(first))
    return len(first) - 1, n_replaced, arrays[0][1]
