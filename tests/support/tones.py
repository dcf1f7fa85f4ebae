"""A corpus that takes no time to make: every phone is a tone of its own."""

from pathlib import Path

import numpy as np
import soundfile

from lit_effattn.datamodules.speech.utterances import SpeechCorpus, Utterance

RATE = 16_000
PITCHES = {"a": 300, "i": 700, "u": 1500, "s": 3400}  # Hz
SECONDS = 0.08  # of a phone


class Tones(SpeechCorpus):
    """Utterances of two to five phones.

    Args:
        root: Folder for the recordings.
        n: Utterances of a split.
    """

    def __init__(self, root: str = "data/tones", n: int = 6) -> None:
        self.root, self.n = Path(root), n

    def prepare(self) -> None:
        for split in ("train", "val", "test"):
            for utterance in self.utterances(split):
                utterance.audio.parent.mkdir(parents=True, exist_ok=True)
                write(utterance.audio, utterance.phones or ())

    def utterances(self, split: str) -> list[Utterance]:
        rng = np.random.default_rng(len(split) + ord(split[-1]))
        return [
            Utterance(f"{split}-{i}", self.root / split / f"{i}.wav", f"speaker-{i % 2}", said(rng))
            for i in range(self.n)
        ]

    @property
    def phones(self) -> tuple[str, ...]:
        return tuple(PITCHES)


def said(rng: np.random.Generator) -> tuple[str, ...]:
    return tuple(rng.choice(list(PITCHES), rng.integers(2, 6)).tolist())


def write(path: Path, phones: tuple[str, ...]) -> None:
    t = np.arange(round(SECONDS * RATE)) / RATE
    silence = np.zeros(400)
    parts = [part for phone in phones for part in (silence, 0.3 * np.sin(2 * np.pi * PITCHES[phone] * t))]
    soundfile.write(path, np.concatenate([*parts, silence]), RATE)
