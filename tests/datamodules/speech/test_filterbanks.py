import numpy as np
import pytest
import torch

from lit_effattn.datamodules import Filterbanks
from lit_effattn.datamodules.speech.filterbanks import RunningNormalization, StreamingFilterbanks, moments, normalized


def sound(n, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(n) / 16_000
    return (0.3 * np.sin(2 * np.pi * (200 + 300 * t) * t) + 0.1 * rng.standard_normal(n) + 0.05).astype(np.float32)


def by_definition(x, *, rate, n_mels, frame_ms, hop_ms):
    """Kaldi's filterbanks (feature-window.cc, mel-computations.cc), frame by frame, in float64; and their error.

    The weights of the frequencies are differences of mels in float32, each with up to 4 roundings.
    """
    size, hop = int(rate * frame_ms * 0.001), int(rate * hop_ms * 0.001)
    n_fft = 1
    while n_fft < size:
        n_fft *= 2
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / (size - 1))) ** 0.85

    def mel(f):
        return 1127 * np.log(1 + f / 700)

    points = np.linspace(mel(20), mel(rate / 2), n_mels + 2)
    inexact = 4 * np.finfo(np.float32).eps * points[-1] / (points[1] - points[0])  # of a weight
    rows, errors = [], []
    for start in range(0, len(x) - size + 1, hop):
        frame = 2.0**15 * x[start : start + size].astype(np.float64)
        frame = frame - frame.mean()
        frame = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
        power = np.abs(np.fft.fft(frame * window, n_fft)) ** 2
        row, error = [], []
        for m in range(n_mels):
            left, centre, right = points[m : m + 3]
            energy = heard = 0.0
            for k in range(n_fft // 2):
                at = mel(k * rate / n_fft)
                weight = min((at - left) / (centre - left), (right - at) / (right - centre))
                energy += power[k] * max(0.0, weight)
                heard += power[k] * (weight > -inexact)
            row.append(np.log(max(energy, 2.0**-23)))
            error.append(inexact * heard / energy)
        rows.append(row)
        errors.append(error)
    return np.array(rows), np.array(errors)


def test_equals_the_definition():
    x = sound(2000)
    for rate, n_mels, frame_ms, hop_ms in ((16_000, 40, 25, 10), (16_000, 80, 25, 10), (8000, 23, 32, 16)):
        features = Filterbanks(rate, n_mels=n_mels, frame_ms=frame_ms, hop_ms=hop_ms)(torch.from_numpy(x).double())
        expected, error = by_definition(x, rate=rate, n_mels=n_mels, frame_ms=frame_ms, hop_ms=hop_ms)
        assert features.shape == expected.shape
        assert (np.abs(features.numpy() - expected) < error + 1e-9).all()
        assert np.median(error) < 1e-4  # some of 80 filters hang on one frequency at their foot


def test_the_number_of_frames_is_foretold():
    for rate in (11_025, 16_000):
        filterbanks, size, hop = Filterbanks(rate, n_mels=20), int(rate * 0.025), int(rate * 0.01)
        for n in (0, 1, size - 1, size, size + 1, size + hop - 1, size + hop, size + 7 * hop - 1, size + 7 * hop):
            frames = len([start for start in range(0, n, hop) if start + size <= n])
            assert filterbanks.n_frames(n) == frames
            assert filterbanks(torch.zeros(n)).shape == (frames, 20)
        assert filterbanks.frame_seconds == hop / rate


def test_silence_is_finite():
    features = Filterbanks()(torch.zeros(16_000))
    assert torch.equal(features, torch.full((98, 40), float(np.log(2.0**-23))))
    assert torch.equal(normalized(features, moments(features)), torch.zeros(98, 40))


def test_what_makes_no_sense_is_refused():
    for options, message in [
        ({"sample_rate": 900}, "sample_rate=900"),
        ({"n_mels": 3}, "n_mels=3"),
        ({"n_mels": 200}, r"n_mels=200: \d+ of the filters lie between two frequencies"),
        ({"hop_ms": 0}, "hop_ms=0"),
        ({"hop_ms": 30}, "hop_ms=30 .*frame_ms=25"),
        ({"hop_ms": 0.05}, "less than a sample"),
    ]:
        with pytest.raises(ValueError, match=message):
            Filterbanks(**options)


def test_normalized_has_mean_0_and_variance_1_over_all_that_the_statistics_are_of():
    torch.manual_seed(0)
    parts = [torch.randn(n, 5).double() * torch.tensor([1.0, 2, 30, 0.1, 5]) + torch.arange(5) for n in (1, 7, 200)]
    statistics = sum(moments(part) for part in parts)
    everything = torch.cat([normalized(part, statistics) for part in parts])
    assert everything.mean(0).abs().max() < 1e-10
    assert (everything.var(0, correction=0) - 1).abs().max() < 1e-10
    expected = (parts[1] - torch.cat(parts).mean(0)) / torch.cat(parts).std(0, correction=0)
    torch.testing.assert_close(normalized(parts[1], statistics), expected)


def test_sums_are_exact_where_float32_would_not_be():
    x = torch.full((1000, 2), 16.0)
    x[::2, 1] += 0.01
    statistics = moments(x)
    for _ in range(9):
        statistics = statistics + statistics  # as of 512,000 frames
    y = normalized(x, statistics)
    assert torch.equal(y[:, 0], torch.zeros(1000))
    assert (y[:, 1].abs() - 1).abs().max() < 1e-3


def test_a_stream_gives_the_frames_of_the_whole():
    banks = Filterbanks()
    for sizes in ([1] * 3 + [997] * 4, [160] * 30, [399, 1, 0, 3600, 5]):
        samples = torch.from_numpy(sound(sum(sizes))).double()
        stream, features, read = StreamingFilterbanks(banks), [], 0
        for size in sizes:
            features.append(stream(samples[read : read + size]))
            read += size
            assert sum(map(len, features)) == banks.n_frames(read)
            assert stream.samples.untyped_storage().nbytes() < 8 * banks.frame_samples
        torch.testing.assert_close(torch.cat(features), banks(samples))


def test_running_normalisation_is_by_the_frames_so_far():
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)) * 3 + 5
    for sizes in ([1, 0, 2, 7], [10]):
        running = RunningNormalization()
        rows = torch.cat([running(part) for part in x.split(sizes)])
        for t, row in enumerate(rows):
            seen = x[: t + 1].double()
            expected = (x[t] - seen.mean(0)) / seen.std(0, correction=0).clamp(min=1e-3)
            torch.testing.assert_close(row, expected.float())
