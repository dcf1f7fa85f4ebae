"""Features of recordings: each is read once, so that faults and statistics are known, and may be kept in a file."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_effattn.datamodules.audio import AudioError, read_audio
from lit_effattn.datamodules.cache import cached_folder
from lit_effattn.datamodules.filterbanks import Filterbanks, moments
from lit_effattn.datamodules.json_data import parse_json
from lit_effattn.datamodules.utterances import Utterance

FORMAT = 1
"""Raised when the same recordings would give other files."""

_QUICK = 500  # utterances that need no progress bar


class Fault(NamedTuple):
    """Why an utterance is left out.

    Attributes:
        reason: In a word or two, the same for all that have the same fault.
        message: Names the utterance or its file, the fault and the remedy.
    """

    reason: str
    message: str


class FeatureReader(NamedTuple):
    """How a recording becomes features.

    Attributes:
        filterbanks: What is computed.
        min_seconds: The shortest recording.
        max_seconds: The longest.
        upsample: Whether those of a lower sampling rate are taken.
    """

    filterbanks: Filterbanks
    min_seconds: float
    max_seconds: float
    upsample: bool

    def __call__(self, utterance: Utterance) -> Tensor:
        """The features of an utterance, (T, F), T ≥ 1.

        Raises:
            AudioError: As `read_audio`, or if it is shorter than `min_seconds` or a frame.
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
            least = f"min_seconds={self.min_seconds:g} or a frame of {self.filterbanks.frame_ms:g} ms"
            raise AudioError.of(utterance.audio, "too short", f"{seconds:.3f} s are less than {least}; leave it out")
        return self.filterbanks(samples)


class Readings(NamedTuple):
    """What reading each utterance once has shown.

    Attributes:
        n_frames: (n,), of each; 0 for those that have faults.
        faults: By the number of the utterance.
        statistics: `moments` of all that each speaker says, and, under None, of everything.
    """

    n_frames: np.ndarray
    faults: dict[int, Fault]
    statistics: dict[str | None, Tensor]


class Features:
    """The features of utterances, (T, F) each, not normalised.

    Attributes:
        readings: What is known of all of them.
    """

    def __init__(
        self, utterances: Sequence[Utterance], reader: FeatureReader, readings: Readings, kept: Path | None = None
    ) -> None:
        self.readings = readings
        self._utterances = utterances
        self._reader = reader
        self._kept = kept  # the file of (frames of all, F)

    @cached_property
    def _borders(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.readings.n_frames)])

    def __getitem__(self, i: int) -> Tensor:
        """Those of utterance ``i``, which has no fault."""
        if self._kept is None:
            return self._reader(self._utterances[i])
        # Mapped anew each time, which is quick: spawned workers would be sent a copy of a whole array that is mapped.
        shape = (int(self.readings.n_frames[i]), self._reader.filterbanks.n_mels)
        frames = np.memmap(self._kept, np.float32, mode="r", offset=4 * shape[1] * int(self._borders[i]), shape=shape)
        return torch.from_numpy(np.array(frames))


def read_features(utterances: Sequence[Utterance], reader: FeatureReader, *, num_workers: int = 0) -> Features:
    """Read every utterance once. Features are computed whenever they are asked for."""
    return Features(utterances, reader, _read(utterances, reader, num_workers, "Reading the audio", None))


def stored_features(
    utterances: Sequence[Utterance],
    reader: FeatureReader,
    *,
    name: str,
    folder: Path,
    keep: bool,
    num_workers: int = 0,
) -> Features:
    """Read every utterance once, unless an earlier run did, and neither a file nor a setting has changed since.

    Of several processes that ask, one reads, the others wait. The files come into being under another name, and get
    theirs when they are whole.

    Args:
        utterances: Of one split.
        reader: How they are read.
        name: Of the split.
        folder: Where the files of all runs are.
        keep: Keep the features too, 4·F bytes a frame, in a file that processes map and share. Otherwise they are
            computed whenever they are asked for.
        num_workers: Processes that read; 0: this one.
    """
    store = folder / f"speech-{name}-{_digest(utterances, reader, keep)}"
    cached_folder(store, partial(_make, utterances, reader, keep, num_workers, name), _is_whole)
    return Features(utterances, reader, _load(store), store / "features.bin" if keep else None)


def _digest(utterances: Sequence[Utterance], reader: FeatureReader, keep: bool) -> str:
    settings = [FORMAT, keep, repr(reader.filterbanks), reader.min_seconds, reader.max_seconds, reader.upsample]
    digest = hashlib.sha256(json.dumps(settings).encode())
    versions: dict[Path, Any] = {}
    for u in utterances:
        if u.audio not in versions:
            versions[u.audio] = _version(u.audio)
        line = [u.id, str(u.audio.absolute()), versions[u.audio], u.speaker, u.start, u.duration]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()[:16]


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return status.st_size, status.st_mtime_ns


def _make(
    utterances: Sequence[Utterance], reader: FeatureReader, keep: bool, num_workers: int, name: str, folder: Path
) -> None:
    title = f"{'Keeping the features' if keep else 'Reading the audio'} of {name}"
    with (folder / "features.bin").open("wb") if keep else nullcontext() as file:
        readings = _read(utterances, reader, num_workers, title, file)
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
    np.save(folder / "n_frames.npy", readings.n_frames)
    np.save(folder / "statistics.npy", torch.stack(list(readings.statistics.values())).numpy())
    about = {
        "speakers": list(readings.statistics),  # None among them
        "faults": readings.faults,
        "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / "about.json").write_text(json.dumps(about))


def _is_whole(folder: Path) -> bool:
    try:
        sizes = parse_json((folder / "about.json").read_text())["sizes"]
    except (FileNotFoundError, ValueError):  # ValueError: no JSON, such as after a loss of power
        return False
    return all((folder / n).is_file() and (folder / n).stat().st_size == sizes[n] for n in sizes)


def _load(folder: Path) -> Readings:
    about = json.loads((folder / "about.json").read_text())
    statistics = torch.from_numpy(np.load(folder / "statistics.npy"))
    return Readings(
        np.load(folder / "n_frames.npy"),
        {int(i): Fault(*fault) for i, fault in about["faults"].items()},
        dict(zip(about["speakers"], statistics, strict=True)),
    )


def _read(
    utterances: Sequence[Utterance], reader: FeatureReader, num_workers: int, title: str, file: BinaryIO | None
) -> Readings:
    n_frames = np.zeros(len(utterances), np.int64)
    faults: dict[int, Fault] = {}
    statistics: dict[str | None, Tensor] = {None: torch.zeros(3, reader.filterbanks.n_mels, dtype=torch.float64)}
    for i, read in enumerate(_progress(_Each(utterances, reader), num_workers, title)):
        if isinstance(read, Fault):
            faults[i] = read
            continue
        n_frames[i] = len(read)
        if file is not None:
            file.write(read.numpy().data)
        of_this = moments(read)
        for speaker in {None, utterances[i].speaker}:
            statistics[speaker] = statistics[speaker] + of_this if speaker in statistics else of_this
    return Readings(n_frames, faults, statistics)


def _progress(each: "_Each", num_workers: int, title: str) -> Iterator[Tensor | Fault]:
    from rich.progress import Progress

    # In order, whatever the number of workers; with a generator of its own, since a loader draws a number at its start.
    loader = DataLoader(each, batch_size=None, num_workers=num_workers, generator=torch.Generator())
    with Progress(transient=True, disable=len(each) < _QUICK) as bar:
        yield from bar.track(loader, total=len(each), description=title)


class _Each(Dataset[Any]):
    """The features of each utterance, or its fault."""

    def __init__(self, utterances: Sequence[Utterance], reader: FeatureReader) -> None:
        self.utterances = utterances
        self.reader = reader

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, i: int) -> Tensor | Fault:
        try:
            return self.reader(self.utterances[i])
        except AudioError as error:
            return Fault(error.reason, str(error))
