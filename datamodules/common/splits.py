"""Division into training, validation and test, the same on every machine."""

import hashlib
from collections.abc import Iterable

SPLITS = ("train", "val", "test")
HELD_OUT = 20
"""1/20 of a text is for validation, another 1/20 for test: 90/5/5 %."""


def fixed_order(keys: Iterable[str]) -> list[int]:
    """Return a pseudo-random order that is the same on every machine and with every library version."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    return sorted(range(len(digests)), key=digests.__getitem__)
