import io
import math
import os
import struct
import sys

import numpy as np
import pytest
import soundfile
import torch

from lit_effattn.datamodules import AudioError, read_audio
from lit_effattn.datamodules.speech.audio import stream_audio, stream_pipe

RATE = 16_000


def noise(n, seed=0):
    return (np.random.default_rng(seed).uniform(-0.5, 0.5, n) * 2**15).astype(np.int16)


def write(path, samples, rate=RATE, **options):
    soundfile.write(path, samples, rate, **options)
    return path


def write_sphere(path, samples, rate=RATE, coding="pcm"):
    """By NIST's definition: a header of 1024 bytes, then the samples, here with the first byte the lowest."""
    header = (
        f"NIST_1A\n   1024\nchannel_count -i 1\nsample_count -i {len(samples)}\nsample_rate -i {rate}\n"
        f"sample_n_bytes -i 2\nsample_byte_format -s2 01\nsample_sig_bits -i 16\n"
        f"sample_coding -s{len(coding)} {coding}\nend_head\n"
    )
    path.write_bytes(header.encode().ljust(1024) + samples.astype("<i2").tobytes())
    return path


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.sph", "upper.WAV"])
def test_samples_are_those_that_were_written(tmp_path, name):
    samples = noise(5000)
    sphere = name in ("a.sph", "upper.WAV")  # on TIMIT's discs, SPHERE files end in .WAV
    path = (write_sphere if sphere else write)(tmp_path / name, samples)
    read = read_audio(path)
    assert read.dtype == torch.float32
    assert (read.numpy() * 2**15 == samples).all()


@pytest.mark.parametrize("write", [write, write_sphere])
def test_a_part_is_that_part_and_only_it_is_decoded(tmp_path, write, monkeypatch):
    samples = noise(100_000)
    path = write(tmp_path / "a.wav", samples)
    decoded = []
    read = soundfile.SoundFile.read
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda f, n, **o: decoded.append(n) or read(f, n, **o))
    assert (read_audio(path, start=1.5, duration=0.25).numpy() * 2**15 == samples[24_000:28_000]).all()
    assert (read_audio(path, start=6.0).numpy() * 2**15 == samples[96_000:]).all()
    assert (read_audio(path, start=6.0, duration=0.3).numpy() * 2**15 == samples[96_000:]).all()  # 0.05 s too far
    assert decoded == [4000, 4000, 4000]


def test_a_part_of_a_long_file_is_not_too_long_and_the_whole_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    path = write(tmp_path / "a.flac", noise(3 * RATE))
    assert len(read_audio(path, start=1.0, duration=1.0, max_seconds=1.0)) == RATE
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    with pytest.raises(AudioError, match=r"a\.flac: 3\.0 s are more than max_seconds=1; cut it"):
        read_audio(path, max_seconds=1.0)


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="macOS and Windows take no such names")
def test_a_name_need_not_be_utf8(tmp_path):
    path = write(tmp_path / "a.wav", noise(100)).rename(tmp_path / os.fsdecode(b"caf\xe9.wav"))
    assert len(read_audio(path)) == 100


@pytest.mark.parametrize("rate", [22_050, 48_000])
def test_resampled_sound_is_the_same_sound(tmp_path, rate):
    def sine(rate, n):
        return 0.5 * np.sin(2 * np.pi * 440 * np.arange(n) / rate)

    read = read_audio(write(tmp_path / "a.wav", sine(rate, 12_345), rate, subtype="FLOAT")).numpy()
    assert len(read) == math.ceil(12_345 * RATE / rate)
    inner = slice(200, -200)
    assert np.abs(read - sine(RATE, len(read)))[inner].max() < 2e-3


def stereo(path):
    return write(path, np.zeros((100, 2)))


def cut_off(path):
    write(path, noise(50_000))
    path.write_bytes(path.read_bytes()[:-20_000])
    return path


def no_numbers(path):
    return write(path, np.array([0.0, np.nan]), subtype="FLOAT")


def damaged_header(path):
    return write(path, noise(100), 48_001)  # with 16,000 Hz, a filter of 10⁹ weights


def bytes_of(content):
    def make(path):
        path.write_bytes(content)
        return path

    return make


def slow(path):
    return write(path, noise(8000), 8000)


def shortened(path):
    return write_sphere(path, noise(9), coding="pcm,embedded-shorten-v2.00")


@pytest.mark.parametrize(
    ("name", "make", "reason", "message"),
    [
        ("a.wav", lambda path: path, "missing", "no such file"),
        ("a", lambda path: path.mkdir() or path, "missing", "not a file"),
        ("a.wav", bytes_of(b""), "empty", "file is empty"),
        ("a.wav", lambda path: write(path, noise(0)), "empty", "it has no samples"),
        ("a.wav", bytes_of(b"hello" * 100), "unreadable", "libsndfile cannot read it.*convert it to WAV or FLAC"),
        ("a.flac", cut_off, "unreadable", "cut off|cannot read"),
        ("a.wav", no_numbers, "unreadable", "not finite"),
        ("a.wav", stereo, "several channels", "2 channels.*convert it to mono"),
        ("a.wav", slow, "low sampling rate", "8000 Hz.*sample_rate=16000.*upsample=true"),
        ("a.wav", damaged_header, "odd sampling rate", "48001 Hz and sample_rate=16000 have no simple ratio; convert"),
        ("a" * 300, lambda path: path, "unreadable", "cannot be opened .*too long"),
        ("a.wv1", shortened, "unreadable", "sph2pipe"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, name, make, reason, message):
    with pytest.raises(AudioError, match=f"(?s){name}: .*(?:{message})") as error:
        read_audio(make(tmp_path / name))
    assert error.value.reason == reason


@pytest.mark.parametrize(("start", "duration"), [(-0.1, None), (1.0, None), (0.5, 0.0), (0.5, 0.7), (2.0, 0.1)])
def test_a_part_outside_the_file_is_refused(tmp_path, start, duration):
    path = write(tmp_path / "a.wav", noise(RATE))
    with pytest.raises(AudioError, match=r"was requested, but it has 1\.00 s; correct start") as error:
        read_audio(path, start=start, duration=duration)
    assert error.value.reason == "not so long"


def test_a_low_rate_is_taken_where_asked_for(tmp_path):
    path = write(tmp_path / "a.wav", noise(8000), 8000)
    assert len(read_audio(path, upsample=True)) == RATE
    assert len(read_audio(path, sample_rate=8000)) == 8000


def test_a_stream_of_a_file_is_the_file(tmp_path):
    samples = noise(1000)
    path = write(tmp_path / "a.flac", samples)
    blocks = list(stream_audio(path, RATE, 300))
    assert [len(block) for block in blocks] == [300, 300, 300, 100]
    assert (torch.cat(blocks).numpy() * 2**15 == samples).all()
    with pytest.raises(AudioError, match=r"a\.flac: it has 16000 Hz and 1 channels, but the stream needs 8000 Hz"):
        list(stream_audio(path, 8000, 300))
    with pytest.raises(AudioError, match="there is no such file"):
        list(stream_audio(tmp_path / "b.wav", RATE, 300))


class Pipe(io.BytesIO):
    """It can't seek."""

    def seek(self, *args):
        raise io.UnsupportedOperation


def wav(samples, rate=RATE, before=b""):
    """As arecord writes a stream, with lengths that it does not know, and another chunk before the samples."""
    header = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 2**32 - 1, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return header + before + struct.pack("<4sI", b"data", 2**32 - 1) + samples.astype("<i2").tobytes()


@pytest.mark.parametrize("before", [None, b"", b"LIST\x03\x00\x00\x00abc\x00"], ids=["raw", "wav", "chunk"])
def test_a_pipe_is_its_samples(before):
    samples = noise(1000)
    data = samples.astype("<i2").tobytes() if before is None else wav(samples, before=before)
    blocks = list(stream_pipe(Pipe(data + b"\x01"), RATE, 300))  # an odd byte at the end
    assert [len(block) for block in blocks] == [300, 300, 300, 100]
    assert (torch.cat(blocks).numpy() * 2**15 == samples).all()
    assert list(stream_pipe(Pipe(b""), RATE, 300)) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (wav(noise(10), rate=8000), "its WAV header is not of 16000 Hz, 16 bits and one channel"),
        (wav(noise(10))[:40], "its WAV header is damaged"),
        (wav(noise(10), before=b"LIST\xff\xff\xff\xff"), "its WAV header is damaged"),
    ],
)
def test_a_pipe_with_another_header(data, message):
    with pytest.raises(AudioError, match=message):
        list(stream_pipe(Pipe(data), RATE, 300))
