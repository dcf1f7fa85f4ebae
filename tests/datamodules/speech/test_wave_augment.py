import math

import numpy as np
import pytest
import soundfile
import torch

from lit_effattn.datamodules import AudioError, WaveAugment

RATE = 16_000
OFF = {"probability": 1.0, "speed": None, "noise": None, "telephone": False}


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
    odd = WaveAugment(probability=1.0, speed=(1.106, 1.106), noise=None, telephone=False)  # in hundredths
    assert len(odd(tone(400), RATE, np.random.default_rng(0))) == math.ceil(RATE / odd.fastest)


def test_noise_is_white_at_the_ratio():
    samples = tone(400)
    for seed in range(12):
        noise = changed(samples, seed, noise=(10.0, 10.0)) - samples
        assert decibels(samples, noise) == pytest.approx(10, abs=1e-3)
        spectrum = torch.fft.rfft(noise).abs()
        assert decibels(spectrum[4000:8000], spectrum[500:1000]) == pytest.approx(9, abs=1.2)  # octaves, three apart
    ratios = [decibels(samples, changed(samples, seed, noise=(5.0, 30.0)) - samples) for seed in range(30)]
    assert 5 <= min(ratios) < 10
    assert 25 < max(ratios) <= 30
    assert not changed(torch.zeros(RATE), noise=(0.0, 0.0)).any()


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
    for hertz, least, most in [(1000, -1, 1), (3000, -1, 1), (5000, -90, -30), (7000, -90, -30)]:
        assert least < decibels(changed(tone(hertz), telephone=True), tone(hertz)) < most, hertz
    assert len(changed(torch.rand(7998) - 0.5, rate=8000, telephone=True).unique()) in range(150, 257)


def test_operations_are_drawn_independently():
    x = tone(400)
    every = {"noise": (20.0, 20.0), "telephone": True}
    assert torch.equal(changed(x, probability=0.0, speed=(0.9, 0.9), **every), x)
    draws = [changed(x, seed, probability=0.5, speed=(0.9, 0.9), **every) for seed in range(80)]
    assert 3 <= sum(torch.equal(draw, x) for draw in draws) <= 20  # 1 in 8
    assert 25 <= sum(len(draw) > len(x) for draw in draws) <= 55
    assert torch.equal(*(changed(x, 7, **every) for _ in range(2)))


def test_what_makes_no_sense_is_refused(tmp_path):
    for options, message in [
        ({"probability": 1.5}, "probability=1.5 must be from 0 to 1"),
        ({"speed": (1.1, 0.9)}, r"speed=\(1.1, 0.9\) must be two numbers from 0.5 to 2, the smaller one first"),
        ({"noise": (float("nan"), 5.0)}, r"noise=\(nan, 5.0\)"),
        ({"noise": None, "noises": "x"}, "noises='x' is not used, because noise is null"),
    ]:
        with pytest.raises(ValueError, match=message):
            WaveAugment(**options)
    with pytest.raises(ValueError, match="has no recordings"):
        _ = WaveAugment(noises=str(tmp_path)).noise_files
    for level in (0.0, 1e-25):  # whose square is 0
        soundfile.write(tmp_path / "silence.wav", np.full(RATE, level), RATE, subtype="FLOAT")
        assert torch.equal(changed(tone(400), noise=(0.0, 0.0), noises=str(tmp_path)), tone(400))
    (tmp_path / "silence.wav").write_bytes(b"no sound" * 9)
    with pytest.raises(AudioError, match=r"silence\.wav: libsndfile cannot read it"):
        changed(tone(400), noise=(5.0, 5.0), noises=str(tmp_path))
