"""Reading of recordings, whole or in part, at one sampling rate, with errors that name the file."""

import codecs
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

from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.speech.containers import ENDLESS, mpeg_frame, wrong_length

MAX_SECONDS = 40.0
"""Longer recordings are rejected by default. LibriSpeech's longest utterance has 35 s."""

_MAX_RATE = 192_000  # Hz: memory grows with the samples, of which max_seconds bounds the seconds alone
_MAX_PEAK = 100.0  # 40 dB above full scale; integers stored as floats reach 2¹⁵
_MAX_WEIGHTS = 2 * 10**7  # of a resampling filter: 44,100 to 16,000 Hz needs 80,000, a damaged header's rate 10⁹
_BLOCK = 2**20  # samples that are decoded at once
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
        samples = torch.cat([*_decoded(path, file, n, _BLOCK)])  # (n,)
        rate = file.samplerate
    from torchaudio.functional import resample  # imported here to keep `--help` fast

    return samples if rate == sample_rate else resample(samples, rate, sample_rate)


def check_audio(path: Path, sample_rate: int) -> None:
    """Raise AudioError if `read_audio` can't read all of a recording, of any length and rate, by its header."""
    with _opened(path) as file:
        _, n = _part(path, file, 0.0, None)
        if fault := _header_fault(file, n, sample_rate, math.inf, upsample=True):
            raise AudioError.of(path, *fault)


@contextmanager
def _opened(path: Path) -> Iterator[soundfile.SoundFile]:
    """Open a recording. Errors of the file, here and within the context, become `AudioError`."""
    try:
        _check_file(path)
        # soundfile encodes a str as UTF-8, but a file name need not be UTF-8; bytes are passed on as they are.
        with soundfile.SoundFile(os.fsencode(path) if os.name == "posix" else path) as file:
            if fault := wrong_length(path, file):
                raise AudioError.of(path, "cut off", fault)
            yield file
    except soundfile.SoundFileError as error:
        raise AudioError.of(path, "unreadable", _unreadable(path, error)) from error
    except OSError as error:
        message = f"it cannot be opened ({error.strerror}); correct that, or leave it out"
        raise AudioError.of(path, "unreadable", message) from error


def _decoded(path: Path, file: soundfile.SoundFile, n: int, block: int) -> Iterator[Tensor]:
    """Yield the next `n` samples in blocks, as many as can be decoded, then raise AudioError if there are fewer."""
    left = n
    while left:
        try:
            samples = torch.from_numpy(file.read(min(block, left), dtype="float32"))
        except soundfile.SoundFileError:  # within a damaged frame
            samples = torch.empty(0)
        if not len(samples):
            message = f"its {n} samples can't all be decoded; it was cut off or damaged: get it again"
            raise AudioError.of(path, "unreadable", message)
        if not samples.isfinite().all():
            raise AudioError.of(path, "unreadable", "some of its samples are not finite numbers; get it again")
        if (peak := float(samples.abs().max())) > _MAX_PEAK:
            message = f"its samples reach {peak:.3g}, but must lie in −1 … 1; divide them by their scale, such as 32768"
            raise AudioError.of(path, "wrong scale", message)
        yield samples
        left -= len(samples)


def _check_file(path: Path) -> None:
    if not path.exists():
        raise AudioError.of(path, "missing", "there is no such file; correct the path, or leave it out")
    try:
        regular(path)
    except ValueError as error:
        raise AudioError(str(error), "missing") from error
    with path.open("rb") as file:  # raises OSError without read permission
        if not file.read(1):
            raise AudioError.of(path, "empty", "the file is empty; get it again, or leave it out")
    if path.suffix.lower() == ".raw":  # soundfile goes by the name
        raise AudioError.of(path, "unreadable", "a .raw file has no header; convert it to WAV")


def _part(path: Path, file: soundfile.SoundFile, start: float, duration: float | None) -> tuple[int, int]:
    """Return the first sample and the number of samples."""
    if file.frames == 0:
        raise AudioError.of(path, "empty", "it has no samples; get it again, or leave it out")
    rate, seconds = file.samplerate, file.frames / file.samplerate
    end = seconds if duration is None else start + duration
    if 0 <= start < seconds and start < end <= seconds + _TOLERANCE:  # False for NaN
        first, last = round(start * rate), min(round(end * rate), file.frames)
        if first < last:
            return first, last - first
    part = f"{start:g} s to its end" if duration is None else f"{start:g} s to {end:g} s"
    message = f"{part} was requested, but it has {seconds:.2f} s; correct start and duration, or get the whole file"
    raise AudioError.of(path, "not so long", message)


def _header_fault(
    file: soundfile.SoundFile, n: int, sample_rate: int, max_seconds: float, upsample: bool
) -> tuple[str, str] | None:
    """Return why a file cannot be used, as reason and message, by its header."""
    rate, seconds = file.samplerate, n / file.samplerate
    if file.channels != 1:
        return "several channels", f"it has {file.channels} channels, but must have one; convert it to mono"
    if rate > _MAX_RATE:  # before the seconds: memory grows with the samples
        return "odd sampling rate", f"{rate} Hz are more than {_MAX_RATE}; convert it, or correct its header"
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
        AudioError: As in `read_audio`, and for another rate than `sample_rate`: a stream is not resampled. A file that
            was cut off in a way that its header does not show raises it after its last sample.
    """
    with _opened(path) as file:
        if file.channels != 1 or file.samplerate != sample_rate:
            message = f"it has {file.samplerate} Hz and {file.channels} channels, but the stream needs {sample_rate} Hz"
            raise AudioError.of(path, "other rate", f"{message} and one channel; convert it")
        yield from _decoded(path, file, _part(path, file, 0.0, None)[1], block)


_PIPE = Path("standard input")
_EXTENSIBLE = 0xFFFE  # a WAV header whose coding is in a GUID
_REMEDY = "name the file, or send it through ffmpeg -i - -ac 1 -ar {} -c:a pcm_s16le -f wav -"
_MAGIC = {
    **{b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"FORM": "AIFF", b"RF64": "RF64", b"BW64": "BW64"},
    **{
        b"RIFX": "big-endian WAV",
        b"RIFF": "RIFF without WAVE",
        b"riff": "Wave64",
        b".snd": "AU",
        b"caff": "CAF",
        b"NIST_1A": "SPHERE",
    },
    **{b"wvpk": "WavPack", b"\x1aE\xdf\xa3": "Matroska or WebM", b"\x1f\x8b\x08": "gzip", b"PK\x03\x04": "ZIP"},
}


def stream_pipe(file: BinaryIO, sample_rate: int, block: int) -> Iterator[Tensor]:
    """Yield the sound of a pipe in blocks of `block` samples, float32 in −1 … 1.

    Args:
        file: WAV with 16 bits and one channel, or the samples alone: 16-bit integers, little-endian, one channel.
        sample_rate: In Hz. Without a header, the samples must have this rate.
        block: Samples in a block; the last one may have fewer.

    Raises:
        AudioError: If it is a file of another kind, the header states another format or is damaged, or there are fewer
            samples than the header states.
    """
    held, stated = file.read(12), math.inf
    if held[:4] == b"RIFF" and held[8:] == b"WAVE":
        held, stated = b"", _after_wav_header(file, sample_rate)
    else:
        mpeg, _ = mpeg_frame(held)
        held += file.read(mpeg or (64 if _is_text(held) else 0))
        if kind := _kind(held, mpeg):
            message = f"this is {kind}; a pipe takes WAV of 16 bits or its samples alone: {_REMEDY.format(sample_rate)}"
            raise AudioError.of(_PIPE, "other format", message)
    n = 0  # bytes of the samples so far
    while n + 1 < stated:
        size = int(min(2 * block, stated - n))
        held += file.read(max(0, size - len(held)))
        data, held = held[: min(size, len(held)) // 2 * 2], held[size:]
        if not data:
            break
        yield torch.frombuffer(bytearray(data), dtype=torch.int16).float() / 2**15
        n += len(data)
    if not n:
        raise AudioError.of(_PIPE, "empty", "it has no samples; start the program that sends them")
    if n + 1 < stated < math.inf:
        message = f"it ended after {n // 2} of {stated // 2} samples; it was cut off: send it again"
        raise AudioError.of(_PIPE, "unreadable", message)


def _kind(head: bytes, mpeg: int) -> str | None:
    """Return what a pipe holds in place of samples, by its first bytes; None: samples.

    `mpeg` is the length of the MPEG frame that they would be, after which another one begins; 0: they are not one.
    """
    if mpeg:
        return "MP3" if mpeg_frame(head[mpeg : mpeg + 4])[0] else None
    if head[4:8] == b"ftyp":
        return "MP4"
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "text" if _is_text(head) else None)


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # may end within a character
    except UnicodeDecodeError:
        return False
    return len(head) >= 12 and all(character.isprintable() or character in "\t\r\n" for character in text)


def _after_wav_header(file: BinaryIO, sample_rate: int) -> float:
    """Read to the first sample, and return the bytes of samples; infinity: the writer did not know it."""
    known = False
    while len(header := file.read(8)) == 8:
        kind, size = header[:4], int.from_bytes(header[4:], "little")
        if kind == b"data" and known:
            return size if 0 < size < ENDLESS else math.inf
        if kind == b"data" or size > _LARGEST_CHUNK:
            break
        chunk = file.read(size + size % 2)
        if kind == b"fmt " and len(chunk) >= 16:
            coding, channels, rate, _, _, bits = struct.unpack("<HHIIHH", chunk[:16])
            if coding == _EXTENSIBLE:
                coding = int.from_bytes(chunk[24:26], "little")  # the first bytes of the GUID
            if (coding, channels, rate, bits) != (1, 1, sample_rate, 16):
                message = f"its WAV header states {rate} Hz, {channels} channels, {bits} bits and coding {coding}, but "
                message += f"must be of {sample_rate} Hz, 1, 16 and 1 (integers): {_REMEDY.format(sample_rate)}"
                raise AudioError.of(_PIPE, "other rate", message)
            known = True
    raise AudioError.of(_PIPE, "unreadable", "its WAV header is damaged; send the samples alone, or correct it")
