import math

import numpy as np
import pytest
import soundfile
import torch

from lit_effattn.datamodules import AudioError, WaveAugment

RATE = 16_000
OFF = {"probability": 1.0, "speed": None, "pitch": 0.0, "reverb": None, "noise": None, "telephone": False}


def changed(samples, seed=0, rate=RATE, **options):
    before = samples.clone()
    out = WaveAugment(**(OFF | options))(samples, rate, np.random.default_rng(seed))
    assert torch.equal(samples, before)
    assert out.dtype == torch.float32
    assert out.isfinite().all()
    return out


def tone(hertz, seconds=1.0):
    return 0.1 * torch.sin(2 * math.pi * hertz * torch.arange(int(seconds * RATE)) / RATE)


def frequency(samples):
    """The strongest frequency, in Hz."""
    return float(torch.fft.rfft(samples * torch.hann_window(len(samples))).abs().argmax()) * RATE / len(samples)


def decibels(a, b):
    return float(20 * torch.log10(a.double().norm() / b.double().norm()))


def test_speed_changes_duration_and_frequencies():
    out = changed(tone(400), speed=(1.25, 1.25))
    assert len(out) == RATE / 1.25
    assert frequency(out) == pytest.approx(500, abs=2)
    lengths = [len(changed(tone(400), seed, speed=(0.9, 1.1))) / RATE for seed in range(40)]
    assert 1 / 1.1 - 1e-3 < min(lengths) < 0.94
    assert 1.07 < max(lengths) < 1 / 0.9 + 1e-3


def test_pitch_changes_frequencies_and_keeps_times():
    shifts = [frequency(changed(tone(400), seed, pitch=2.0)) / 400 for seed in range(30)]
    assert 2 ** (-2 / 12) - 0.01 < min(shifts) < 0.94
    assert 1.07 < max(shifts) < 2 ** (2 / 12) + 0.01
    burst = torch.cat([torch.zeros(RATE // 2), tone(400, 0.25), torch.zeros(RATE // 2)])
    out = changed(burst, seed=int(np.argmax(shifts)), pitch=2.0)
    assert len(out) == len(burst)
    loud = torch.nonzero(out.abs() > 0.05)
    assert abs(int(loud.min()) - 8000) < 400
    assert abs(int(loud.max()) - 12_000) < 400


def test_synthetic_reverberation_decays_and_keeps_time_and_energy():
    impulse = torch.zeros(RATE)
    impulse[100] = 0.5
    for seed in range(5):
        out = changed(impulse, seed, reverb=(0.4, 0.4))
        assert not out[:100].abs().gt(1e-4).any()
        assert int(out.abs().argmax()) == 100
        assert decibels(out, impulse) == pytest.approx(0, abs=1e-3)
        early, late = out[110:1710], out[3310:4910]  # 0.1 s each, 0.2 s apart: half of the 60 dB
        assert decibels(early, late) == pytest.approx(30, abs=1.5)
        assert 0 <= decibels(out[100:101], out[101:]) <= 10
        assert not out[100 + 6400 :].abs().gt(1e-4).any()


def test_impulse_responses_begin_at_their_peak(tmp_path):
    soundfile.write(tmp_path / "hall.wav", np.array([0.0, 0.0, 0.8, 0.0, -0.4]), RATE, subtype="FLOAT")
    samples = torch.randn(500)
    out = changed(samples, reverb=(0.1, 0.2), impulse_responses=str(tmp_path))
    expected = np.convolve(samples.numpy(), [0.8, 0.0, -0.4])[:500]
    assert np.allclose(out, expected * np.linalg.norm(samples) / np.linalg.norm(expected), atol=1e-5)


def test_noise_is_white_or_pink_at_the_ratio():
    samples = tone(400)
    slopes = []
    for seed in range(12):
        noise = changed(samples, seed, noise=(10.0, 10.0)) - samples
        assert decibels(samples, noise) == pytest.approx(10, abs=1e-3)
        spectrum = torch.fft.rfft(noise).abs()
        slopes.append(decibels(spectrum[4000:8000], spectrum[500:1000]))  # octaves, three apart
    white, pink = np.isclose(slopes, 9, atol=1.2), np.isclose(slopes, 0, atol=1.2)
    assert (white | pink).all()
    assert 2 <= white.sum() <= 10
    ratios = [decibels(samples, changed(samples, seed, noise=(5.0, 30.0)) - samples) for seed in range(30)]
    assert 5 <= min(ratios) < 10
    assert 25 < max(ratios) <= 30


def test_noise_from_a_folder_is_a_random_stretch_of_a_file(tmp_path):
    hum = np.random.default_rng(0).uniform(-0.5, 0.5, 3 * RATE)
    soundfile.write(tmp_path / "hum.wav", hum, RATE, subtype="FLOAT")
    places = set()
    for seed in range(4):
        added = (changed(tone(400), seed, noise=(0.0, 20.0), noises=str(tmp_path)) - tone(400)).double().numpy()
        found = np.correlate(hum, added, "valid") / np.linalg.norm(added)
        place = int(found.argmax())
        stretch = hum[place : place + RATE]
        assert found[place] == pytest.approx(np.linalg.norm(stretch), rel=1e-4)
        places.add(place)
    assert len(places) == 4
    short = changed(torch.ones(4 * RATE), noise=(0.0, 0.0), noises=str(tmp_path)) - 1
    assert torch.allclose(short[:RATE], short[3 * RATE :], atol=1e-5)  # the file is repeated after 3 s


def test_a_telephone_passes_its_band_in_few_levels():
    for hertz, least, most in [(60, -60, -20), (1000, -1, 1), (3000, -4, 1), (3800, -60, -10), (5000, -90, -30)]:
        assert least < decibels(changed(tone(hertz), telephone=True), tone(hertz)) < most, hertz
    assert len(changed(torch.rand(7998) - 0.5, rate=8000, telephone=True).unique()) in range(150, 257)


def test_operations_are_drawn_independently():
    x = tone(400)
    every = {"reverb": (0.1, 0.2), "noise": (20.0, 20.0), "telephone": True}
    assert torch.equal(changed(x, probability=0.0, speed=(0.9, 0.9), pitch=2.0, **every), x)
    none = sum(torch.equal(changed(x, seed, probability=0.5, **every), x) for seed in range(80))
    assert 3 <= none <= 20  # 1 in 8
    draws = [changed(x, 7, **every) for _ in range(2)]
    assert torch.equal(*draws)


def test_silence_stays_silence(tmp_path):
    soundfile.write(tmp_path / "nothing.wav", np.zeros(RATE), RATE)
    assert not changed(torch.zeros(RATE), reverb=(0.1, 0.2), noise=(0.0, 0.0)).any()
    quiet = changed(tone(400), noise=(0.0, 0.0), noises=str(tmp_path))
    assert torch.equal(quiet, tone(400))
    quiet = changed(tone(400), reverb=(0.1, 0.1), impulse_responses=str(tmp_path))
    assert torch.equal(quiet, tone(400))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 1.5}, "probability=1.5 must be from 0 to 1"),
        ({"pitch": -1.0}, "pitch=-1.0 must be from 0 to 12 semitones"),
        ({"speed": (1.1, 0.9)}, r"speed=\(1.1, 0.9\) must be two numbers from 0.5 to 2, the smaller one first"),
        ({"noise": (float("nan"), 5.0)}, r"noise=\(nan, 5.0\)"),
        ({"noise": None, "noises": "x"}, "noises='x' is not used, because noise is null"),
        ({"reverb": None, "impulse_responses": "x"}, "impulse_responses='x' is not used"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        WaveAugment(**options)


def test_folders_without_recordings_are_named(tmp_path):
    with pytest.raises(ValueError, match="has no recordings"):
        WaveAugment(noises=str(tmp_path)).check()
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such file or folder"):
        WaveAugment(impulse_responses=str(tmp_path / "nowhere")).check()
    (tmp_path / "bad.wav").write_bytes(b"no sound" * 9)
    with pytest.raises(AudioError, match=r"bad\.wav: libsndfile cannot read it"):
        changed(tone(400), noise=(5.0, 5.0), noises=str(tmp_path))
