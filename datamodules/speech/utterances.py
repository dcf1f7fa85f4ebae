"""Utterances, the interface of speech corpora, and the batch of speech."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

BLANK = 0
"""CTC's blank; phone i of an inventory is label i + 1."""


class Utterance(NamedTuple):
    """A recording, or a part of one, with its phones.

    Attributes:
        id: Identifier, unique within the corpus.
        audio: The file.
        speaker: The speaker; None: unknown, the utterance then counts as its own speaker.
        phones: The spoken phones; None: unknown.
        start: Start within the file, in seconds.
        duration: Length in seconds; None: to the file's end.
    """

    id: str
    audio: Path
    speaker: str | None = None
    phones: tuple[str, ...] | None = None
    start: float = 0.0
    duration: float | None = None


class SpeechCorpus(ABC):
    """Utterances in splits, with an inventory of phones.

    Attributes:
        root: The folder of the corpus; None: it is not in one.
    """

    root: Path | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Make missing files, or raise an error that says where to get them. One process calls it before all others."""

    @abstractmethod
    def utterances(self, split: str) -> list[Utterance]:
        """Return the utterances of "train", "val" or "test"."""

    @property
    @abstractmethod
    def phones(self) -> tuple[str, ...]:
        """The inventory of phones. Utterances with other phones are left out and counted."""

    @property
    def places(self) -> list[Path]:
        """Files and folders that the corpus is read from, `root` by default. They may be missing."""
        return [] if self.root is None else [self.root]

    @property
    def folded(self) -> tuple[str, ...]:
        """The phone that each phone of the inventory is scored as; "": not scored."""
        return self.phones


class SpeechBatch(NamedTuple):
    """A batch of utterances with their labels.

    Attributes:
        features: (B, T, F) log-mel filterbanks, normalised; 0 in the padding.
        lengths: (B,), number of frames of each utterance.
        phones: (B, U) labels, i + 1 for phone i of the inventory; `BLANK` in the padding.
        phone_lengths: (B,), number of labels of each utterance.
        ids: Ids of the B utterances.
    """

    features: Tensor
    lengths: Tensor
    phones: Tensor
    phone_lengths: Tensor
    ids: list[str]
