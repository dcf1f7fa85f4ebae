"""Voices in the layout of festvox: recordings of one speaker with the phones and their times."""

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.splits import fixed_order
from lit_effattn.datamodules.speech.corpora import read_manifest
from lit_effattn.datamodules.speech.utterances import SpeechCorpus, Utterance

PAUSE = "pau"
"""The label of a pause, festival's usual name."""
_PAUSES = {PAUSE, "h#", "#", "sil", "ssil", "brth"}
_HELD_OUT = 10  # a tenth of the sentences for validation, a tenth for test
_SENTENCE = re.compile(r'\s*\(\s*(\S+)\s+"(.*)"\s*\)\s*')
_GET = (
    "mkdir -p {root} && apt-get download festvox-ru && dpkg-deb --extract festvox-ru_*.deb {root}; without these "
    "programs, download festvox-ru_0.5+dfsg-6_all.deb from https://deb.debian.org/debian/pool/main/f/festvox-ru/, "
    "unpack it by `ar x` (or tar on Windows), and the data.tar.xz in it by tar"
)


class Segment(NamedTuple):
    """A phone of a recording.

    Attributes:
        phone: Its name.
        start: Time at which it begins, in seconds: the end of the phone before it.
        end: Time at which it ends, in seconds.
    """

    phone: str
    start: float
    end: float


class FestvoxCorpus(SpeechCorpus):
    """One voice in the layout of festvox: wav/NAME.wav, lab/NAME.lab and etc/txt.done.data.

    Intended for Debian's festvox-ru: 620 Russian sentences, 99.5 minutes at 16 kHz, one human voice, 50 phones (Shmyrev
    2005, BSD-like licence, 179 MB). It is not downloaded unasked. This gets it:

        mkdir -p data && apt-get download festvox-ru && dpkg-deb --extract festvox-ru_*.deb data/festvox-ru

    The splits share no sentence: the distinct sentences are sorted by the SHA-256 of "SEED SENTENCE"; the first tenth
    is for test, the second for validation, the rest for training. The same seed gives the same splits everywhere.

    Args:
        root: The folder of the voice, or one that contains it, such as the unpacked package.
        pauses: delete: pauses have no label. unscored: a pause is a phone, `pau`, in training, but not in the error
            rate. scored: it is a phone in both. Consecutive pauses are one.
        seed: Seed of the splits.
        test: A manifest of other recordings (see `read_manifest`), with phones of this voice's inventory: the
            test split, in place of this voice's. None: this voice's.

    Raises:
        ValueError: If `pauses` is unknown, `seed` is negative, or `test` is empty.
    """

    def __init__(
        self,
        root: str = "data/festvox-ru",
        *,
        pauses: Literal["delete", "unscored", "scored"] = "delete",
        seed: int = 0,
        test: str | None = None,
    ) -> None:
        if pauses not in ("delete", "unscored", "scored"):
            raise ValueError(f"pauses={pauses!r} is unknown; choose delete, unscored or scored")
        if test == "":
            raise ValueError("test='' names no manifest; leave it out for this voice's test sentences")
        at_least(0, seed=seed)
        self.root: Path = Path(root)
        self.pauses = pauses
        self.seed = seed
        self.test = None if test is None else Path(test)

    def prepare(self) -> None:
        """Check that the voice exists, and read its sentences and labels.

        Raises:
            FileNotFoundError: If it is missing, or `test` is. The message says how to get the voice.
            ValueError: If `root` has several voices, or a line is invalid.
        """
        _ = self.phones
        self.utterances("test")

    def utterances(self, split: str) -> list[Utterance]:
        """Return the utterances of "train", "val" or "test", sorted by id.

        A recording without a label file has no phones.

        Raises:
            FileNotFoundError: If the voice, or the manifest `test`, is missing.
            ValueError: If a line is invalid.
        """
        if split == "test" and self.test is not None:
            return sorted((line.utterance for line in read_manifest(self.test)), key=lambda u: u.id)
        return self._splits[split]

    @cached_property
    def phones(self) -> tuple[str, ...]:
        """The phones of all recordings, sorted, without pauses if they are deleted."""
        return tuple(sorted({phone for split in self._splits.values() for u in split for phone in u.phones or ()}))

    @property
    def folded(self) -> tuple[str, ...]:
        """The phones themselves; "" for a pause that is not scored."""
        return tuple("" if phone == PAUSE and self.pauses == "unscored" else phone for phone in self.phones)

    def segments(self, name: str) -> list[Segment]:
        """Return the phones of the recording `name` with their times, pauses included, each as `pau`.

        Raises:
            FileNotFoundError: If the recording has no label file.
            ValueError: If a line of it is invalid.
        """
        return read_labels(self._voice / "lab" / f"{name}.lab")

    @cached_property
    def _voice(self) -> Path:
        if (self.root / "lab").is_dir():
            return self.root
        voices = sorted(lab.parent for lab in self.root.rglob("lab") if (lab.parent / "wav").is_dir())
        if len(voices) > 1:
            raise ValueError(f"root={str(self.root)!r} has {len(voices)} voices; name one, such as {voices[0]}")
        if not voices:
            raise FileNotFoundError(
                f"{self.root.resolve()} has no voice of festvox, a folder with wav/, lab/ and etc/txt.done.data. Get "
                f"one: {_GET.format(root=self.root)}"
            )
        return voices[0]

    @cached_property
    def _splits(self) -> dict[str, list[Utterance]]:
        sentences = _read_sentences(self._voice / "etc" / "txt.done.data")
        distinct = sorted(set(sentences.values()))
        order = fixed_order(f"{self.seed} {sentence}" for sentence in distinct)
        held_out = max(1, len(distinct) // _HELD_OUT)
        splits: dict[str, list[Utterance]] = {"train": [], "val": [], "test": []}
        of_sentence = dict.fromkeys(distinct, "train")
        for rank, i in enumerate(order[: 2 * held_out]):
            of_sentence[distinct[i]] = "test" if rank < held_out else "val"
        for name, sentence in sorted(sentences.items()):
            splits[of_sentence[sentence]].append(self._utterance(name))
        return splits

    def _utterance(self, name: str) -> Utterance:
        phones = None
        if (self._voice / "lab" / f"{name}.lab").exists():
            labels = [segment.phone for segment in self.segments(name)]
            # Consecutive pauses are one.
            kept = [p for p, before in zip(labels, ["", *labels], strict=False) if p != PAUSE or before != PAUSE]
            phones = tuple(phone for phone in kept if phone != PAUSE or self.pauses != "delete")
        return Utterance(name, self._voice / "wav" / f"{name}.wav", self._voice.name, phones)


def _read_sentences(path: Path) -> dict[str, str]:
    """Return the sentence of each recording, from lines such as `( ru_0001 "A sentence." )`."""
    sentences: dict[str, str] = {}
    for number, line in enumerate(regular(path).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        match = _SENTENCE.fullmatch(line)
        if match is None or "/" in match[1] or "\\" in match[1]:
            raise ValueError(f"{path}:{number}: {line!r} is not like '( ru_0001 \"A sentence.\" )'; correct it")
        if match[1] in sentences:
            raise ValueError(f"{path}:{number}: {match[1]!r} occurs twice; delete one of the lines")
        sentences[match[1]] = match[2]
    if len(set(sentences.values())) < 3:
        raise ValueError(f"{path}: has fewer than three different sentences, one for each split; add some")
    return sentences


def read_labels(path: Path) -> list[Segment]:
    """Return the segments of a label file of festvox: a header, `#`, then lines such as `0.342 125 pau`.

    The number is the segment's end in seconds; the next field is a colour, which is ignored.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line is invalid, or a segment ends before it begins.
    """
    lines = regular(path).read_text(encoding="utf-8", errors="replace").splitlines()
    header = next((i for i, line in enumerate(lines) if line.strip() == "#"), None)
    if header is None:
        raise ValueError(f"{path}: has no line '#', which ends the header; add it")
    segments: list[Segment] = []
    for number, line in enumerate(lines[header + 1 :], header + 2):
        if not line.strip():
            continue
        start = segments[-1].end if segments else 0.0
        try:
            time, _, label, *_ = line.split()
            end = float(time)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {line!r} is not like '0.342 125 pau'; correct it") from error
        if not (math.isfinite(end) and end >= start):
            raise ValueError(f"{path}:{number}: the segment ends at {time} s, but begins at {start} s; correct it")
        segments.append(Segment(PAUSE if label.lower() in _PAUSES else label, start, end))
    return segments
