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


def tone(seconds, rate=RATE):
    return 0.3 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)


def write(path, samples, rate=RATE, **options):
    """Write a recording in the format that its suffix names."""
    kind = {"sph": "NIST", "ogg": "OGG"}.get(path.suffix[1:], path.suffix[1:].upper())
    soundfile.write(path, samples, rate, **{"format": kind, **options})
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


def refused(folder, cases):
    """Check that `read_audio` and `stream_audio` refuse each (name, make, reason, message); yield what was streamed."""
    for number, (name, make, reason, message) in enumerate(cases):
        (folder / str(number)).mkdir()
        path, blocks = make(folder / str(number) / name), []
        with pytest.raises(AudioError, match=f"(?s){name}: .*(?:{message})") as error:
            read_audio(path)
        assert error.value.reason == reason
        with pytest.raises(AudioError, match=f"(?s){message}|but the stream needs"):
            blocks.extend(stream_audio(path, RATE, 1000))
        yield name, blocks


def test_samples_are_those_that_were_written(tmp_path):
    samples = noise(5000)
    for name in ("a.wav", "a.flac", "a.aiff", "a.sph", "upper.WAV"):
        sphere = name in ("a.sph", "upper.WAV")  # on TIMIT's discs, SPHERE files end in .WAV
        path = (write_sphere if sphere else write)(tmp_path / name, samples)
        read = read_audio(path)
        assert read.dtype == torch.float32
        assert (read.numpy() * 2**15 == samples).all()
    if sys.platform not in ("darwin", "win32"):  # which take no such names
        path = (tmp_path / "a.wav").rename(tmp_path / os.fsdecode(b"caf\xe9.wav"))
        assert len(read_audio(path)) == 5000


def test_a_part_is_that_part_and_only_it_is_decoded(tmp_path, monkeypatch):
    samples, decoded, read = noise(100_000), [], soundfile.SoundFile.read
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda f, n, **o: decoded.append(n) or read(f, n, **o))
    for path in (write(tmp_path / "a.wav", samples), write_sphere(tmp_path / "b.wav", samples)):
        assert (read_audio(path, start=1.5, duration=0.25).numpy() * 2**15 == samples[24_000:28_000]).all()
        assert (read_audio(path, start=6.0).numpy() * 2**15 == samples[96_000:]).all()
        assert (read_audio(path, start=6.0, duration=0.3).numpy() * 2**15 == samples[96_000:]).all()  # 0.05 s too far
    assert decoded == [4000] * 6
    for start, duration in (
        *((-0.1, None), (6.25, None), (0.5, 0.0), (0.5, 5.9), (7.0, 0.1), (math.nan, None), (0.5, math.nan)),
        *((1e305, None), (0.0, 1e305), (math.inf, 1.0), (0.0, math.inf), (0.0, 1e-320), (6.24999, None)),
    ):
        with pytest.raises(AudioError, match=r"was requested, but it has 6\.25 s; correct start") as error:
            read_audio(path, start=start, duration=duration)
        assert error.value.reason == "not so long"


def test_a_part_of_a_long_file_is_not_too_long_and_the_whole_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    path = write(tmp_path / "a.flac", noise(3 * RATE))
    assert len(read_audio(path, start=1.0, duration=1.0, max_seconds=1.0)) == RATE
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    with pytest.raises(AudioError, match=r"a\.flac: 3\.0 s are more than max_seconds=1; cut it"):
        read_audio(path, max_seconds=1.0)


def test_resampled_sound_is_the_same_sound(tmp_path):
    for rate in (22_050, 48_000):
        read = read_audio(write(tmp_path / "a.wav", tone(0.7, rate), rate, subtype="FLOAT")).numpy()
        assert len(read) == math.ceil(int(0.7 * rate) * RATE / rate)
        assert np.abs(read - tone(2)[: len(read)])[200:-200].max() < 2e-3
    path = write(tmp_path / "low.wav", noise(8000), 8000)
    assert len(read_audio(path, upsample=True)) == RATE
    assert len(read_audio(path, sample_rate=8000)) == 8000


def content(data):
    return lambda path: (path.write_bytes(data), path)[1]


def values(*samples, **options):
    return lambda path: write(path, np.array(samples), **{"subtype": "DOUBLE", **options})


def cut(make, share=0.5):
    def of(path):
        data = make(path).read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        return path

    return of


def sound(samples, rate=RATE, **options):
    return lambda path: write(path, samples, rate, **options)


def two_oggs(path):
    data = write(path, tone(1)).read_bytes()
    path.write_bytes(data + data.replace(data[14:18], b"2222"))  # another stream's serial number
    return path


def flac_of_a_pipe(path):
    data = bytearray(write(path, noise(RATE)).read_bytes())
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])  # 36 bits: the number of samples, 0 if it is unknown
    path.write_bytes(data)
    return path


def of_200_mhz(path):
    """An Ogg file whose first page, of 58 bytes, states this rate, with the page's checksum by RFC 3533."""
    data = write(path, np.zeros(10**6)).read_bytes()
    page, crc = data[:22] + bytes(4) + data[26:40] + struct.pack("<I", 200_000_000) + data[44:58], 0
    for byte in page:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x04C11DB7 if crc >> 31 else 0)) & 0xFFFFFFFF
    path.write_bytes(page[:22] + struct.pack("<I", crc) + page[26:] + data[58:])
    return path


def test_what_cannot_be_used_is_named(tmp_path):
    def shortened(path):
        return write_sphere(path, noise(9), coding="pcm,embedded-shorten-v2.00")

    cases = [
        ("a.wav", lambda path: path, "missing", "no such file"),
        ("a", lambda path: path.mkdir() or path, "missing", "this is a folder, not a file"),
        ("a.wav", content(b""), "empty", "file is empty"),
        ("a.wav", sound(noise(0)), "empty", "it has no samples"),
        ("a.wav", content(b"hello" * 100), "unreadable", "libsndfile cannot read it.*convert it to WAV or FLAC"),
        ("a.wav", sound(np.zeros((100, 2))), "several channels", "2 channels.*convert it to mono"),
        ("a.wav", sound(noise(8000), 8000), "low sampling rate", "8000 Hz.*sample_rate=16000.*upsample=true"),
        ("a.wav", sound(noise(99), 48_001), "odd sampling rate", "48001 Hz and sample_rate=16000 have no simple ratio"),
        ("a.ogg", of_200_mhz, "odd sampling rate", "200000000 Hz are more than 192000; convert it"),
        ("a" * 300, lambda path: path, "unreadable", "cannot be opened .*too long"),
        ("a.RAW", content(b"hello" * 100), "unreadable", "a .raw file has no header; convert it to WAV"),
        ("a.wv1", shortened, "unreadable", "sph2pipe"),
        ("a.ogg", two_oggs, "cut off", "it has several Ogg streams"),
        ("a.flac", flac_of_a_pipe, "cut off", "its header does not state its length"),
        ("a.wav", values(0.0, np.nan), "unreadable", "not finite"),
        ("a.wav", values(0.0, np.inf), "unreadable", "not finite"),
        ("a.wav", values(0.0, 1e300), "unreadable", "not finite"),  # in float32
        ("a.wav", values(0.0, 1e38, subtype="FLOAT"), "wrong scale", r"its samples reach 1e\+38, but must lie in"),
        ("a.wav", values(0.0, -32768.0), "wrong scale", r"reach 3\.28e\+04.*divide them by their scale"),
    ]
    assert len(list(refused(tmp_path, cases))) == len(cases)


def without_xing(samples):
    """An MP3 of variable bit rate without its first frame, which has the number of frames."""

    def of(path):
        data = write(path, samples, bitrate_mode="VARIABLE", compression_level=0.3).read_bytes()
        path.write_bytes(data[data.index(b"\xff\xf3", 4) :])
        return path

    return of


def test_a_header_that_states_another_length_is_refused_by_every_reader(tmp_path):
    quiet_first, hiss = np.concatenate([np.zeros(3 * RATE), noise(3 * RATE) / 2**15]), sound(noise(4 * RATE))
    states = r"states 4\.00 s, but it has %s s; it was cut off"
    cases = [
        ("a.mp3", cut(sound(tone(4))), "cut off", states % r"2\.\d\d"),
        ("a.mp3", without_xing(quiet_first), "cut off", r"has 6\.\d\d s; .*without a Xing header; convert it"),
        ("a.mp3", without_xing(quiet_first[::-1]), "cut off", r"has 6\.\d\d s; .*without a Xing header; convert it"),
        ("a.flac", cut(hiss), "unreadable", r"its 64000 samples can't all be decoded"),
        ("a.ogg", cut(sound(tone(4)), 0.7), "cut off", "its last Ogg page is missing"),
        ("a.ogg", cut(sound(tone(4), subtype="OPUS")), "cut off", "its last Ogg page is missing"),
        ("a.wav", cut(sound(noise(4 * RATE), subtype="IMA_ADPCM")), "cut off", r"states \d\.\d+ s, but it has 2"),
        *((f"a.{kind}", cut(hiss), "cut off", states % r"2\.00") for kind in ("wav", "aiff", "au", "w64", "rf64")),
        ("a.sph", cut(hiss), "cut off", states % r"1\.9\d"),
    ]
    for name, blocks in refused(tmp_path, cases):
        assert bool(blocks) == (name == "a.flac")  # elsewhere the header tells


def test_whole_files_are_read_whole(tmp_path):
    """In each format, with other data around the sound, and with a length that the writer did not know."""
    samples = noise(2 * RATE)
    for name, options in {
        **{"a.mp3": {}, "a.ogg": {}, "a.aiff": {}, "a.rf64": {}, "a.w64": {}, "a.au": {}},
        **{"constant.mp3": {"bitrate_mode": "CONSTANT"}, "variable.mp3": {"bitrate_mode": "VARIABLE"}},
        **{"opus.ogg": {"subtype": "OPUS"}, "a.wav": {"format": "WAVEX"}},
    }.items():
        path = write(tmp_path / name, samples, **options)
        assert len(read_audio(path)) == len(torch.cat([*stream_audio(path, RATE, 777)])) == 2 * RATE
    path, mp3 = tmp_path / "tagged.mp3", (tmp_path / "a.mp3").read_bytes()
    tag = b"ID3\x03\0\0\0\0\x07\x74" + b"\xff\xf3\x18\xc4" * 253  # 1,012 bytes, which look like frames
    path.write_bytes(tag + mp3 + b"TAG" + bytes(125))
    assert len(read_audio(path)) == 2 * RATE
    for rate in (8000, 11_025, 12_000):  # a frame of MP3 lasts longer
        for mode in ("CONSTANT", "VARIABLE"):
            write(path, samples, rate, bitrate_mode=mode, compression_level=0.0)
            assert len(read_audio(path, sample_rate=rate)) == 2 * RATE
    path.write_bytes(wav(samples))
    assert (read_audio(path).numpy() * 2**15 == samples).all()


def test_a_stream_of_a_file_is_the_file(tmp_path):
    samples = noise(1000)
    path = write(tmp_path / "a.flac", samples)
    blocks = list(stream_audio(path, RATE, 300))
    assert [len(block) for block in blocks] == [300, 300, 300, 100]
    assert (torch.cat(blocks).numpy() * 2**15 == samples).all()
    with pytest.raises(AudioError, match=r"a\.flac: it has 16000 Hz and 1 channels, but the stream needs 8000 Hz"):
        list(stream_audio(path, 8000, 300))


class Pipe(io.BytesIO):
    """It can't seek."""

    def seek(self, *args):
        raise io.UnsupportedOperation


def wav(samples, rate=RATE, before=b""):
    """As arecord writes a stream, with lengths that it does not know, and another chunk before the samples."""
    header = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 2**32 - 1, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return header + before + struct.pack("<4sI", b"data", 2**32 - 1) + samples.astype("<i2").tobytes()


LIST = b"LIST\x03\x00\x00\x00abc\x00"
_PCM = b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"  # the end of the GUID
EXTENSIBLE = struct.pack("<HHIIHHHHIH14s", 0xFFFE, 1, RATE, 2 * RATE, 2, 16, 22, 16, 4, 1, _PCM)


def test_a_pipe_is_its_samples():
    samples = noise(1000)
    pcm = samples.astype("<i2").tobytes()
    data_chunk = struct.pack("<4sI", b"data", len(pcm)) + pcm
    for data in (
        pcm + b"\x01",  # an odd byte at the end
        wav(samples),
        wav(samples, before=LIST),
        wav(samples)[:36] + data_chunk + LIST,
        wav(samples)[:36] + data_chunk + b"id3 \x04\0\0\0abcd",
        struct.pack("<4sI4s4sI", b"RIFF", 0, b"WAVE", b"fmt ", len(EXTENSIBLE)) + EXTENSIBLE + data_chunk,
    ):
        for block, sizes in ((300, [300, 300, 300, 100]), (16, [16] * 62 + [8])):
            blocks = list(stream_pipe(Pipe(data), RATE, block))
            assert [len(block) for block in blocks] == sizes
            assert (torch.cat(blocks).numpy() * 2**15 == samples).all()
    syncs = np.full(900, 0xF3FF - 2**16, np.int16)  # each sample looks like the beginning of an MPEG frame
    syncs[1] = 0x7FC4
    assert (torch.cat([*stream_pipe(Pipe(syncs.tobytes()), RATE, 300)]).numpy() * 2**15 == syncs).all()


def test_a_pipe_of_something_else_is_refused(tmp_path):
    good = wav(noise(10))
    cases = [
        (wav(noise(10), rate=8000), "states 8000 Hz, 1 channels, 16 bits and coding 1, but must be of 16000 Hz, 1, 16"),
        (good[:20] + struct.pack("<H", 3) + good[22:], "16 bits and coding 3"),
        (good[:22] + struct.pack("<H", 2) + good[24:], "2 channels, 16 bits"),
        (b"", "it has no samples"),
        (good[:44], "it has no samples"),
        (b"a", "it has no samples"),
        (good[:40], "its WAV header is damaged"),
        (good[:12] + good[36:], "its WAV header is damaged"),  # without `fmt `
        (wav(noise(10), before=b"LIST\xff\xff\xff\xff"), "its WAV header is damaged"),
        (good[:40] + struct.pack("<I", 2000) + bytes(900), "ended after 450 of 1000 samples; it was cut off"),
        (b"RIFF\0\0\0\0AVI LIST", "this is RIFF without WAVE"),
        (b'{"audio_filepath": "a.wav"}\n', "this is text"),
        ("Ѐ текст, не звук\n".encode() * 9, "this is text"),
        (b"\0\0\0\x20ftypM4A \0\0\0\0", "this is MP4"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0\0\0", "this is gzip"),
    ]
    for kind, options in {
        **{"FLAC": {}, "Ogg": {}, "MP3": {}, "AIFF": {}, "RF64": {}, "CAF": {}, "AU": {}},
        **{"Wave64": {"format": "W64"}, "SPHERE": {"format": "NIST"}},
        "big-endian WAV": {"format": "WAV", "endian": "BIG"},
    }.items():
        data = write(tmp_path / f"a.{kind}", tone(1), **options).read_bytes()
        cases.append((data, f"this is {kind}; a pipe takes WAV of 16 bits .*ffmpeg -i - -ac 1 -ar 16000"))
    for data, message in cases:
        for block in (300, 1000):
            with pytest.raises(AudioError, match=f"standard input: .*{message}"):
                list(stream_pipe(Pipe(data), RATE, block))
