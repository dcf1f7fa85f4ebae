"""Division into training, validation and test, the same on every machine."""

import hashlib
from collections.abc import Collection, Iterable

SPLITS = ("train", "val", "test")
SPLITS_OF = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}
"""The splits that each stage of a trainer reads."""
PURPOSES = {"train": "to train on", "val": "to validate", "test": "to test"}
"""The purpose of each split, for messages that count its items."""
HELD_OUT = 20  # 1/20 of a text is for validation, another 1/20 for test: 90/5/5 %


def twentieths(splits: Collection[str]) -> dict[str, tuple[str, set[int]]]:
    """Return for each split the one that its items are read from, and the remainders of their numbers modulo 20.

    If validation or test is not among the `splits` of a data set, it is every 20th item of train.
    """
    whole = set(range(HELD_OUT))
    held_out = {split: {i} for i, split in enumerate(("test", "val")) if split not in splits}
    divided = {"train": whole.difference(*held_out.values())} | held_out
    return {s: ("train", divided[s]) if s in divided else (s, whole) for s in SPLITS}


def fixed_order(keys: Iterable[str]) -> list[int]:
    """Return a pseudo-random order that is the same on every machine and with every library version."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    return sorted(range(len(digests)), key=digests.__getitem__)
