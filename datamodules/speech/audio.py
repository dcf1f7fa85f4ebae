"""Reading of recordings, whole or in part, at one sampling rate, with errors that name the file."""

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import soundfile
import torch
from torch import Tensor

MAX_SECONDS = 40.0
"""Longer recordings are rejected by default. LibriSpeech's longest utterance has 35 s."""

_MAX_WEIGHTS = 2 * 10**7  # of a resampling filter: 44,100 to 16,000 Hz needs 80,000, a damaged header's rate 10⁹
_LARGEST_CHUNK = 2**20  # bytes of a chunk before the samples of a WAV stream
_TOLERANCE = 0.1  # seconds that a part may extend beyond the end of its file, since manifests round


class AudioError(ValueError):
    """A recording that cannot be used.

    Attributes:
        reason: The kind of fault in a word or two, the same for all recordings with this fault.
    """

    # `reason` has a default: a loader rebuilds a worker's exception from its message alone.
    def __init__(self, message: str, reason: str = "unreadable") -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def of(cls, path: Path, reason: str, message: str) -> "AudioError":
        """Return an error whose message starts with `path`."""
        return cls(f"{path}: {message}", reason)


def read_audio(
    path: Path,
    *,
    start: float = 0.0,
    duration: float | None = None,
    sample_rate: int = 16_000,
    max_seconds: float = MAX_SECONDS,
    upsample: bool = False,
) -> Tensor:
    """Read a recording, or a part of one. Only that part is decoded.

    Supports all formats of libsndfile: WAV, FLAC, Ogg, MP3, AIFF, NIST SPHERE as on TIMIT's discs, …

    Args:
        path: The file.
        start: Start of the part, in seconds.
        duration: Length of the part, in seconds. It may extend 0.1 s beyond the file's end, since manifests round.
            Default: to the end.
        sample_rate: Sampling rate of the result, in Hz.
        max_seconds: Longest part that is read. It is compared with the header, before anything is decoded.
        upsample: Accept recordings of a lower rate. They have no frequencies above half their own rate, which a model
            trained on other recordings expects, so they are rejected by default.

    Returns:
        (n,) float32 in −1 … 1, with n = ⌈samples · sample_rate / the file's rate⌉.

    Raises:
        AudioError: If the file is missing, empty or unreadable, has several channels, is too long, has a rate that is
            too low or has no simple ratio to `sample_rate`, or ends before the part does. The message names the file,
            the fault and the remedy.
    """
    with _opened(path) as file:
        first, n = _part(path, file, start, duration)
        if fault := _header_fault(file, n, sample_rate, max_seconds, upsample):
            raise AudioError.of(path, *fault)
        file.seek(first)
        samples = torch.from_numpy(file.read(n, dtype="float32"))  # (n,)
        rate = file.samplerate
    if len(samples) < n:
        message = f"it ends after {len(samples)} of {n} samples; it was cut off: get it again"
        raise AudioError.of(path, "unreadable", message)
    if not samples.isfinite().all():
        raise AudioError.of(path, "unreadable", "some of its samples are not finite numbers; get it again")
    from torchaudio.functional import resample  # imported here to keep `--help` fast

    return samples if rate == sample_rate else resample(samples, rate, sample_rate)


@contextmanager
def _opened(path: Path) -> Iterator[soundfile.SoundFile]:
    """Open a recording. Errors of the file, here and within the context, become `AudioError`."""
    try:
        _check_file(path)
        # soundfile encodes a str as UTF-8, but a file name need not be UTF-8; bytes are passed on as they are.
        with soundfile.SoundFile(os.fsencode(path) if os.name == "posix" else path) as file:
            yield file
    except soundfile.SoundFileError as error:
        raise AudioError.of(path, "unreadable", _unreadable(path, error)) from error
    except OSError as error:
        message = f"it cannot be opened ({error.strerror}); correct that, or leave it out"
        raise AudioError.of(path, "unreadable", message) from error


def _check_file(path: Path) -> None:
    if not path.exists():
        raise AudioError.of(path, "missing", "there is no such file; correct the path, or leave it out")
    if not path.is_file():
        raise AudioError.of(path, "missing", "this is not a file; name the files in it")
    with path.open("rb") as file:  # raises OSError without read permission
        if not file.read(1):
            raise AudioError.of(path, "empty", "the file is empty; get it again, or leave it out")


def _part(path: Path, file: soundfile.SoundFile, start: float, duration: float | None) -> tuple[int, int]:
    """Return the first sample and the number of samples."""
    if file.frames == 0:
        raise AudioError.of(path, "empty", "it has no samples; get it again, or leave it out")
    first = round(start * file.samplerate)
    last = file.frames if duration is None else round((start + duration) * file.samplerate)
    if not 0 <= first < min(last, file.frames) or last > file.frames + _TOLERANCE * file.samplerate:
        part = f"{start:g} s to its end" if duration is None else f"{start:g} s to {start + duration:g} s"
        seconds = file.frames / file.samplerate
        message = f"{part} was requested, but it has {seconds:.2f} s; correct start and duration, or get the whole file"
        raise AudioError.of(path, "not so long", message)
    return first, min(last, file.frames) - first


def _header_fault(
    file: soundfile.SoundFile, n: int, sample_rate: int, max_seconds: float, upsample: bool
) -> tuple[str, str] | None:
    """Return why a file cannot be used, as reason and message, by its header."""
    rate, seconds = file.samplerate, n / file.samplerate
    if file.channels != 1:
        return "several channels", f"it has {file.channels} channels, but must have one; convert it to mono"
    if seconds > max_seconds:
        message = f"{seconds:.1f} s are more than max_seconds={max_seconds:g}; cut it into utterances, or raise "
        return "too long", message + "max_seconds"
    if rate < sample_rate and not upsample:
        message = f"it has {rate} Hz, less than sample_rate={sample_rate}, so that its upper band would be empty; "
        return "low sampling rate", message + f"set upsample=true to use it anyway, or train with sample_rate={rate}"
    # The time and memory of resampling grow with the product of the ratio's terms.
    common = math.gcd(rate, sample_rate)
    if (rate // common) * (sample_rate // common) > _MAX_WEIGHTS:
        message = f"its {rate} Hz and sample_rate={sample_rate} have no simple ratio; convert it to {sample_rate} Hz, "
        return "odd sampling rate", message + "or correct its header"
    return None


def _unreadable(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        header = file.read(1024)
    if header.startswith(b"NIST_1A") and b"shorten" in header:
        return "this is SPHERE compressed with shorten, which libsndfile does not read; convert it with sph2pipe -f wav"
    why = str(getattr(error, "error_string", error)).rstrip(".")  # `error_string` lacks the file's name
    return f"libsndfile cannot read it ({why}); convert it to WAV or FLAC, or get it again"


def stream_audio(path: Path, sample_rate: int, block: int) -> Iterator[Tensor]:
    """Yield a recording in blocks of `block` samples, float32 in −1 … 1. Only one block is in memory.

    Raises:
        AudioError: If the file is missing, empty or unreadable, has several channels, or another rate than
            `sample_rate`: a stream is not resampled.
    """
    with _opened(path) as file:
        if file.channels != 1 or file.samplerate != sample_rate:
            message = f"it has {file.samplerate} Hz and {file.channels} channels, but the stream needs {sample_rate} Hz"
            raise AudioError.of(path, "other rate", f"{message} and one channel; convert it")
        for samples in file.blocks(block, dtype="float32"):
            yield torch.from_numpy(samples)


def stream_pcm(file: BinaryIO, sample_rate: int, block: int) -> Iterator[Tensor]:
    """Yield the sound of a pipe in blocks of `block` samples, float32 in −1 … 1.

    Args:
        file: WAV with 16 bits and one channel, or the samples alone: 16-bit integers, little-endian, one channel.
        sample_rate: In Hz. Without a header, the samples must have this rate.
        block: Samples in a block; the last one may have fewer.

    Raises:
        AudioError: If the header says another format, or is damaged.
    """
    head = file.read(4)
    if head == b"RIFF":
        head = _after_wav_header(file, sample_rate)
    while True:
        data = head + file.read(2 * block - len(head))
        head = b""
        if len(data) < 2:
            return
        yield torch.frombuffer(bytearray(data[: len(data) // 2 * 2]), dtype=torch.int16).float() / 2**15


def _after_wav_header(file: BinaryIO, sample_rate: int) -> bytes:
    """Read to the first sample. The lengths in a stream's header are unknown to its writer, and are not used."""
    name = Path("standard input")
    # The first 16 bytes of the chunk `fmt `: PCM, 1 channel, the rate, bytes/s, 2 bytes, 16 bits.
    expected = struct.pack("<HHIIHH", 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    file.read(8)  # the length, and WAVE
    while len(header := file.read(8)) == 8:
        kind, size = header[:4], int.from_bytes(header[4:], "little")
        if kind == b"data":
            return b""
        if size > _LARGEST_CHUNK:
            break
        chunk = file.read(size + size % 2)
        if kind == b"fmt " and chunk[:16] != expected:
            message = f"its WAV header is not of {sample_rate} Hz, 16 bits and one channel; convert it"
            raise AudioError.of(name, "other rate", message)
    raise AudioError.of(name, "unreadable", "its WAV header is damaged; send the samples alone, or correct it")
