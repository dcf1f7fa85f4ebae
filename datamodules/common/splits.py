"""Division into training, validation and test, the same on every machine."""

import hashlib
from collections.abc import Iterable

SPLITS = ("train", "val", "test")
SPLITS_OF = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}
"""The splits that each stage of a trainer reads."""
PURPOSES = {"train": "to train on", "val": "to validate", "test": "to test"}
"""The purpose of each split, for messages that count its items."""
HELD_OUT = 20
"""1/20 of a text is for validation, another 1/20 for test: 90/5/5 %."""


def fixed_order(keys: Iterable[str]) -> list[int]:
    """Return a pseudo-random order that is the same on every machine and with every library version."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    return sorted(range(len(digests)), key=digests.__getitem__)
