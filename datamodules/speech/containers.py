"""Comparison of the length that the header of a recording states with what the file contains."""

import mmap
import re
from functools import lru_cache
from pathlib import Path

import soundfile

ENDLESS = 0x7F000000
"""A stated number of bytes from which on the length is unknown: programs that write into a pipe state 2³¹ or so."""

_TOLERANCE = 0.15  # seconds that may differ: some programs count the header
_MP3_TOLERANCE = 5 * 576  # samples that may differ: encoders add up to 4 frames at rates below 16 kHz
_LARGEST_PAGE = 65_307  # bytes, of Ogg
_KBIT_1 = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)  # per second, layer III of MPEG-1
_KBIT_2 = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)  # of MPEG-2 and 2.5
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}  # Hz, by version

# libsndfile shortens a file that was cut off, and says so in its log alone.
_SHORTENED = re.compile(r"^ *(?:data|SSND|Data Size|riff) *: (\d+) \(should be (\d+)\)", re.M)  # WAV, AIFF, AU, W64
_SHORTENED_RF64 = re.compile(r"frame count (\d+) does not match value from 'ds64' chunk of (\d+)")
_SPHERE = re.compile(rb"^sample_count -i (\d+)", re.M)


def wrong_length(path: Path, file: soundfile.SoundFile) -> str | None:
    """Return what is wrong if an opened file does not contain what its header states; None: it does.

    libsndfile shortens a WAV, AIFF, AU or SPHERE file that was cut off without an error. It takes the length of an MP3
    from its Xing header, or else from the bit rate of the first frame, and reads only the first of several Ogg streams.
    """
    if file.frames > 2**60:
        return "its header does not state its length, since it was written to a pipe; convert it to WAV or FLAC"
    remedy = "it was cut off; get it again"
    stated, actual, tolerance = file.frames, file.frames, _TOLERANCE * file.samplerate
    if file.format == "OGG":
        return _wrong_end(path)
    if file.format == "MP3":
        status = path.stat()
        actual = _mpeg_samples(path, status.st_size, status.st_mtime_ns) or stated
        tolerance = max(tolerance, _MP3_TOLERANCE)
        remedy = "it was cut off, or has a variable bit rate without a Xing header; convert it to WAV or FLAC"
    elif file.format == "NIST":
        with path.open("rb") as header:
            stated = int((_SPHERE.search(header.read(1024)) or [0, actual])[1])
    elif (sizes := _SHORTENED.search(log := file.extra_info)) and int(sizes[1]) < ENDLESS:
        stated = actual * int(sizes[1]) // max(1, int(sizes[2]))
    elif counts := _SHORTENED_RF64.search(log):
        stated = int(counts[2])
    if abs(stated - actual) > tolerance:
        seconds = f"its header states {stated / file.samplerate:.2f} s, but it has {actual / file.samplerate:.2f} s"
        return f"{seconds}; {remedy}"
    return None


def _wrong_end(path: Path) -> str | None:
    with path.open("rb") as file:
        serial = file.read(18)[14:]
        file.seek(max(0, path.stat().st_size - _LARGEST_PAGE))
        end = file.read()
    page = end.rfind(b"OggS")
    if page >= 0 and end[page + 14 : page + 18] != serial:
        return "it has several Ogg streams, one after the other; convert it to WAV or FLAC"
    lengths = end[page + 27 : page + 27 + end[page + 26]] if 0 <= page < len(end) - 26 else b""
    if not lengths or len(end) < page + 27 + len(lengths) + sum(lengths) or not end[page + 5] & 4:  # 4: a last page
        return "its last Ogg page is missing; it was cut off: get it again, or convert it to WAV or FLAC"
    return None


@lru_cache(16)  # a manifest may name many parts of one file
def _mpeg_samples(path: Path, size: int, changed: int) -> int:
    """Return the number of samples in the frames of an MP3 file, by their headers."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        n = at = 0
        if data[:3] == b"ID3":
            at = 10 + sum(byte << 7 * (3 - i) for i, byte in enumerate(data[6:10]))
        while 0 <= at <= size - 4:
            length, samples = mpeg_frame(data[at : at + 4])
            at = at + length if length else data.find(b"\xff", at + 1)
            n += samples if at <= size else 0
        return n


def mpeg_frame(header: bytes) -> tuple[int, int]:
    """Return the bytes and the samples of a frame of layer III. 0, 0: it is not one."""
    if len(header) < 4:
        return 0, 0
    version, kbit, rate = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    if header[0] != 0xFF or header[1] & 0xE6 != 0xE2 or version == 1 or kbit in (0, 15) or rate == 3:
        return 0, 0
    samples = 1152 if version == 3 else 576
    bits = (_KBIT_1 if version == 3 else _KBIT_2)[kbit - 1] * 1000
    return samples // 8 * bits // _RATES[version][rate] + (header[2] >> 1 & 1), samples
