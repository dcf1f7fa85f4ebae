"""What a speech corpus and a batch of speech are, whatever they were made from."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

BLANK = 0
"""CTC's blank; phone i of an inventory is label i + 1."""


class Utterance(NamedTuple):
    """One recording, or a part of one, and what was said in it.

    Attributes:
        id: Unique within its corpus.
        audio: The file.
        speaker: Who speaks; None: nobody knows, so the utterance is its own speaker.
        phones: What was said; None: not known.
        start: Where in the file it begins, in seconds.
        duration: How long it is, in seconds; None: to the file's end.
    """

    id: str
    audio: Path
    speaker: str | None = None
    phones: tuple[str, ...] | None = None
    start: float = 0.0
    duration: float | None = None


class SpeechCorpus(ABC):
    """Utterances, divided, and the phones that occur in them."""

    @abstractmethod
    def prepare(self) -> None:
        """Make what is missing, or say what is and where to get it; one process calls it before all others."""

    @abstractmethod
    def utterances(self, split: str) -> list[Utterance]:
        """Return those of "train", "val" or "test"."""

    @property
    @abstractmethod
    def phones(self) -> tuple[str, ...]:
        """The inventory; every phone of every utterance is one of it, or the utterance is left out, and counted."""

    @property
    def folded(self) -> tuple[str, ...]:
        """What each phone of the inventory counts as when errors are counted; "" counts as nothing."""
        return self.phones


class SpeechBatch(NamedTuple):
    """Utterances, and what was said in them.

    Attributes:
        features: (B, T, F) log-mel filterbanks, normalised; 0 in the padding.
        lengths: (B,), frames of each.
        phones: (B, U) labels, i + 1 for phone i of the inventory; `BLANK` in the padding.
        phone_lengths: (B,), labels of each.
        ids: B names.
    """

    features: Tensor
    lengths: Tensor
    phones: Tensor
    phone_lengths: Tensor
    ids: list[str]
