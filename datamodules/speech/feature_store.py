"""Features of recordings. Each is read once to find faults and statistics, and may be cached in a file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.datamodules.common.faults import Fault
from lit_effattn.datamodules.common.store import ArrayWriter, StoredArray, cached, read_about, write_about
from lit_effattn.datamodules.speech.audio import AudioError, read_audio
from lit_effattn.datamodules.speech.filterbanks import Filterbanks, moments
from lit_effattn.datamodules.speech.utterances import Utterance

FORMAT = 6
"""Version of the file format. Increment it if the same recordings give different files."""

_QUICK = 500  # fewer utterances show no progress bar


class FeatureReader(NamedTuple):
    """Reads a recording and computes its features. Lower sampling rates are accepted with `upsample`."""

    filterbanks: Filterbanks
    min_seconds: float
    max_seconds: float
    upsample: bool

    def __call__(self, utterance: Utterance, change: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
        """Return the features of an utterance, (T, F), T ≥ 1 unless `change` shortens it.

        `change` gets the samples (n,) and the sampling rate in Hz, and returns other samples.

        Raises:
            AudioError: As in `read_audio`, or if the utterance is shorter than `min_seconds` or a frame, or has phones
                and is silent.
        """
        samples = read_audio(
            utterance.audio,
            start=utterance.start,
            duration=utterance.duration,
            sample_rate=self.filterbanks.sample_rate,
            max_seconds=self.max_seconds,
            upsample=self.upsample,
        )
        seconds = len(samples) / self.filterbanks.sample_rate
        if seconds < self.min_seconds or not self.filterbanks.n_frames(len(samples)):
            minimum = f"min_seconds={self.min_seconds:g} or a frame of {self.filterbanks.frame_ms:g} ms"
            raise AudioError.of(utterance.audio, "too short", f"{seconds:.3f} s are less than {minimum}; leave it out")
        if utterance.phones and not samples.any():
            raise AudioError.of(utterance.audio, "silent", "all its samples are 0, but it has phones; get it again")
        return self.filterbanks(samples if change is None else change(samples, self.filterbanks.sample_rate))


class Readings(NamedTuple):
    """The results of reading each utterance once."""

    n_frames: np.ndarray  # (n,), frames of each utterance; 0 for utterances with faults
    faults: dict[int, Fault]  # faults by the index of the utterance
    statistics: dict[str | None, Tensor]  # `moments` of each speaker's utterances, and, under None, of all utterances


@dataclass(eq=False)
class Features:
    """The features of utterances, (T, F) each, not normalised."""

    utterances: Sequence[Utterance]
    reader: FeatureReader
    readings: Readings
    stored: StoredArray | None = None

    def __getitem__(self, i: int) -> Tensor:
        """Return the features of utterance `i`, which must have no fault."""
        if self.stored is None:
            return self.reader(self.utterances[i])
        return torch.from_numpy(np.array(self.stored[i]))


def read_features(utterances: Sequence[Utterance], reader: FeatureReader, *, num_workers: int = 0) -> Features:
    """Read every utterance once. The features are computed again on each access."""
    return Features(utterances, reader, _read(utterances, reader, num_workers, "Reading the audio", None))


def stored_features(
    utterances: Sequence[Utterance], reader: FeatureReader, *, name: str, folder: Path, keep: bool, num_workers: int = 0
) -> Features:
    """Read every utterance once, or load the results of an earlier run if no file and no setting has changed.

    If several processes call this, one reads and the others wait. The files are written to a temporary folder, which is
    renamed when they are complete, in the cache `folder` of all runs. With `keep` the features of the split `name` are
    cached too, 4·F bytes per frame, in a file that processes map and share. Otherwise they are computed again on each
    access.

    Raises:
        AudioError: If a file can't be opened, for lack of permission, for instance.
    """
    make = partial(_make, utterances, reader, keep, num_workers, name)
    store = cached(folder, f"speech-{name}", _identity(utterances, reader, keep), make)
    return Features(utterances, reader, _load(store), StoredArray(store, "features") if keep else None)


def _identity(utterances: Sequence[Utterance], reader: FeatureReader, keep: bool) -> Any:
    settings = [FORMAT, keep, repr(reader.filterbanks), reader.min_seconds, reader.max_seconds, reader.upsample]
    versions = {path: _version(path) for path in {u.audio for u in utterances}}
    items = [  # silence is a fault if there are phones
        (u.id, str(u.audio.absolute()), versions[u.audio], u.speaker, u.start, u.duration, bool(u.phones))
        for u in utterances
    ]
    return [settings, items]


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: an invalid file name
        return None
    return status.st_size, status.st_mtime_ns


def _make(
    utterances: Sequence[Utterance], reader: FeatureReader, keep: bool, num_workers: int, name: str, folder: Path
) -> None:
    title = f"{'Keeping the features' if keep else 'Reading the audio'} of {name}"
    stored = ArrayWriter(folder, "features", np.float32, (reader.filterbanks.n_mels,)) if keep else None
    readings = _read(utterances, reader, num_workers, title, stored)
    if stored is not None:
        stored.close()
    statistics = [(speaker, of_one.tolist()) for speaker, of_one in readings.statistics.items()]
    write_about(folder, {"n_frames": readings.n_frames.tolist(), "statistics": statistics, "faults": readings.faults})


def _load(folder: Path) -> Readings:
    about = read_about(folder)
    return Readings(
        np.array(about["n_frames"], np.int64),
        {int(i): Fault(*fault) for i, fault in about["faults"].items()},
        {speaker: torch.tensor(of_one, dtype=torch.float64) for speaker, of_one in about["statistics"]},
    )


def _read(
    utterances: Sequence[Utterance], reader: FeatureReader, num_workers: int, title: str, stored: ArrayWriter | None
) -> Readings:
    n_frames = np.zeros(len(utterances), np.int64)
    faults: dict[int, Fault] = {}
    statistics: dict[str | None, Tensor] = {None: torch.zeros(3, reader.filterbanks.n_mels, dtype=torch.float64)}
    for i, features in enumerate(_progress(_Each(utterances, reader), num_workers, title)):
        if stored is not None:
            stored.add([] if isinstance(features, Fault) else [(features.numpy(), 0)], keep_empty=True)
        if isinstance(features, Fault):
            faults[i] = features
            continue
        n_frames[i] = len(features)
        of_utterance = moments(features)
        for speaker in {None, utterances[i].speaker}:
            statistics[speaker] = statistics[speaker] + of_utterance if speaker in statistics else of_utterance
    return Readings(n_frames, faults, statistics)


def _progress(each: "_Each", num_workers: int, title: str) -> Iterator[Tensor | Fault]:
    # The order does not depend on the workers. A loader draws a number at its start, hence the separate generator.
    loader = DataLoader(each, batch_size=None, num_workers=num_workers, generator=torch.Generator())
    with progress_bar(disable=len(each) < _QUICK) as bar:
        yield from bar.track(loader, total=len(each), description=title)


@dataclass(eq=False)
class _Each(Dataset[Any]):
    """The features or the fault of each utterance."""

    utterances: Sequence[Utterance]
    reader: FeatureReader

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, i: int) -> Tensor | Fault:
        try:
            return self.reader(self.utterances[i])
        except AudioError as error:
            if isinstance(error.__cause__, OSError):  # not a fault of the recording: it may be mended, or pass
                raise
            return Fault(error.reason, str(error))
