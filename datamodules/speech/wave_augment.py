"""Augmentation of recordings: speed, pitch, reverberation, noise and a telephone line."""

import math
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from lit_effattn.datamodules.speech.audio import read_audio
from lit_effattn.datamodules.speech.recordings import recordings

_SPEEDS = (0.5, 2.0)  # slowest and fastest that `speed` may name
_OCTAVE = 12.0  # semitones; the largest `pitch`
_VOCODER_SECONDS = 0.032  # longest window of the phase vocoder
_DIRECT_TO_REVERBERANT = (0.0, 10.0)  # dB, energy of the direct sound to that of the synthetic reverberation
_TELEPHONE_RATE = 8000  # Hz
_TELEPHONE_BAND = (300.0, 3400.0)  # Hz
_MU_LAW_LEVELS = 256


class WaveAugment:
    """Changes recordings before their features are computed, for more variety of voices, rooms and channels.

    Each operation is applied with `probability`, independently of the others and in this order:

    - speed: resampling by a factor, which changes tempo and pitch together (Ko et al. 2015, "Audio augmentation for
      speech recognition").
    - pitch: a phase vocoder, which changes the pitch and keeps the tempo.
    - reverberation: convolution with an impulse response, from `impulse_responses` or synthetic:
      h(0) = 1, h(t) = g · n(t) · 10^(−3 t / `reverb`), with white Gaussian noise n and g such that the direct sound has
      0 to 10 dB more energy than the rest (exponential decay by 60 dB in `reverb` seconds). The energy of the recording
      is kept, and so are the times of its sounds.
    - noise: added at a signal-to-noise ratio in dB, from `noises`, or white or pink (1/f) Gaussian noise, each half of
      the time.
    - telephone: a band of 300 to 3400 Hz at 8 kHz, and 8-bit mu-law quantisation (ITU-T G.711).

    Values are drawn uniformly from their ranges. The result is a function of the recording and of the generator.

    Args:
        probability: Probability of each operation, for each utterance.
        speed: Smallest and largest factor, 0.5 to 2, in steps of 0.01. An utterance has 1 / factor times the frames.
            null: off.
        pitch: Largest shift in semitones, up or down. 0: off.
        reverb: Shortest and longest reverberation time of synthetic rooms, in seconds. null: off.
        impulse_responses: Folder of recordings of impulse responses, used instead of synthetic ones. They begin at
            their largest sample.
        noise: Smallest and largest signal-to-noise ratio in dB. null: off.
        noises: Folder of recordings of noise, used instead of white and pink noise. A random stretch of a random file
            is added; short files are repeated.
        telephone: Whether to imitate a telephone line.

    Raises:
        ValueError: If an argument is out of its range, or a folder is given for an operation that is off.
    """

    def __init__(
        self,
        *,
        probability: float = 0.5,
        speed: tuple[float, float] | None = (0.9, 1.1),
        pitch: float = 2.0,
        reverb: tuple[float, float] | None = (0.1, 0.5),
        impulse_responses: str | None = None,
        noise: tuple[float, float] | None = (5.0, 30.0),
        noises: str | None = None,
        telephone: bool = True,
    ) -> None:
        if not 0 <= probability <= 1:
            raise ValueError(f"probability={probability} must be from 0 to 1")
        if not 0 <= pitch <= _OCTAVE:
            raise ValueError(f"pitch={pitch} must be from 0 to {_OCTAVE:g} semitones; 0 turns it off")
        _check_range("speed", speed, *_SPEEDS)
        _check_range("reverb", reverb, 0.01, 10.0)
        _check_range("noise", noise, -100.0, 100.0)
        for name, folder, option, value in (
            ("impulse_responses", impulse_responses, "reverb", reverb),
            ("noises", noises, "noise", noise),
        ):
            if folder is not None and value is None:
                raise ValueError(f"{name}={folder!r} is not used, because {option} is null; give {option} a range")
        self.probability = probability
        self.speed = speed
        self.pitch = pitch
        self.reverb = reverb
        self.impulse_responses = impulse_responses
        self.noise = noise
        self.noises = noises
        self.telephone = telephone

    @property
    def fastest(self) -> float:
        """The largest factor by which an utterance becomes shorter."""
        return 1.0 if self.speed is None else max(1.0, self.speed[1])

    def check(self) -> None:
        """Check that the folders have recordings.

        Raises:
            FileNotFoundError: If a folder is missing.
            ValueError: If a folder has no recordings.
        """
        _ = self._impulse_files, self._noise_files

    def __call__(self, samples: Tensor, sample_rate: int, rng: np.random.Generator) -> Tensor:
        """Return a changed copy of a recording.

        Args:
            samples: (n,) in −1 … 1.
            sample_rate: Its sampling rate in Hz.
            rng: Draws the operations and their values.

        Returns:
            (⌈n / factor⌉,) with the factor of its speed, 1 if the speed is kept.

        Raises:
            AudioError: If a recording of noise or an impulse response cannot be used.
        """
        if self.speed is not None and self._drawn(rng):
            samples = _faster(samples, _percent(rng.uniform(*self.speed)))
        if self.pitch and self._drawn(rng):
            samples = _shifted(samples, _percent(2 ** (rng.uniform(-self.pitch, self.pitch) / _OCTAVE)), sample_rate)
        if self.reverb is not None and self._drawn(rng):
            samples = _reverberant(samples, self._impulse_response(self.reverb, sample_rate, rng))
        if self.noise is not None and self._drawn(rng):
            samples = _noisy(samples, self._some_noise(len(samples), sample_rate, rng), rng.uniform(*self.noise))
        if self.telephone and self._drawn(rng):
            samples = _by_telephone(samples, sample_rate)
        return samples

    def _drawn(self, rng: np.random.Generator) -> bool:
        return bool(rng.random() < self.probability)

    def _impulse_response(self, reverb: tuple[float, float], sample_rate: int, rng: np.random.Generator) -> Tensor:
        if not self._impulse_files:
            return _synthetic_room(rng.uniform(*reverb), rng.uniform(*_DIRECT_TO_REVERBERANT), sample_rate, rng)
        path = self._impulse_files[int(rng.integers(len(self._impulse_files)))]
        response = read_audio(path, sample_rate=sample_rate, upsample=True)
        return response[int(response.abs().argmax()) :]

    def _some_noise(self, n: int, sample_rate: int, rng: np.random.Generator) -> Tensor:
        if not self._noise_files:
            return _coloured(n, rng, pink=bool(rng.random() < 0.5))
        path = self._noise_files[int(rng.integers(len(self._noise_files)))]
        return _stretch_of(path, n, sample_rate, rng)

    @cached_property
    def _impulse_files(self) -> list[Path]:
        return [] if self.impulse_responses is None else [u.audio for u in recordings(Path(self.impulse_responses))]

    @cached_property
    def _noise_files(self) -> list[Path]:
        return [] if self.noises is None else [u.audio for u in recordings(Path(self.noises))]


def _check_range(name: str, given: tuple[float, float] | None, least: float, most: float) -> None:
    if given is not None and not least <= given[0] <= given[1] <= most:
        raise ValueError(
            f"{name}={given} must be two numbers from {least:g} to {most:g}, the smaller one first; null turns it off"
        )


def _percent(factor: float) -> int:
    """Round a factor to hundredths: the cost of resampling grows with the terms of the ratio."""
    return round(100 * factor)


def _faster(samples: Tensor, percent: int) -> Tensor:
    from torchaudio.functional import resample  # imported here to keep `--help` fast

    return resample(samples, percent, 100)  # (n,) -> (⌈100 n / percent⌉,)


def _shifted(samples: Tensor, percent: int, sample_rate: int) -> Tensor:
    """Multiply all frequencies by percent / 100: stretch by that factor, then play as much faster."""
    from torchaudio.functional import phase_vocoder

    size = 2 ** int(math.log2(_VOCODER_SECONDS * sample_rate))
    window, hop = torch.hann_window(size), size // 4
    spectrum = torch.stft(samples, size, hop, window=window, return_complex=True)  # (n,) -> (F, T)
    advance = torch.linspace(0, math.pi * hop, size // 2 + 1)[:, None]
    stretched = phase_vocoder(spectrum, 100 / percent, advance)  # (F, T) -> (F, T percent / 100)
    longer = torch.istft(stretched, size, hop, window=window, length=math.ceil(len(samples) * percent / 100))
    return _faster(longer, percent)[: len(samples)]  # (n percent / 100,) -> (n,)


def _synthetic_room(seconds: float, direct_db: float, sample_rate: int, rng: np.random.Generator) -> Tensor:
    n = max(2, round(seconds * sample_rate))
    response = rng.standard_normal(n) * 10 ** (-3 * np.arange(n) / n)
    response[0] = 0
    response *= 10 ** (-direct_db / 20) / np.linalg.norm(response)
    response[0] = 1
    return torch.from_numpy(response).float()


def _reverberant(samples: Tensor, response: Tensor) -> Tensor:
    from torchaudio.functional import fftconvolve

    wet = fftconvolve(samples, response)[: len(samples)]  # (n,), (m,) -> (n + m − 1,) -> (n,)
    energy = torch.linalg.vector_norm(wet)
    return wet * (torch.linalg.vector_norm(samples) / energy) if energy > 0 else samples


def _coloured(n: int, rng: np.random.Generator, *, pink: bool) -> Tensor:
    noise = rng.standard_normal(n)
    if pink:
        spectrum = np.fft.rfft(noise)  # (n,) -> (⌊n / 2⌋ + 1,)
        noise = np.fft.irfft(spectrum / np.sqrt(np.maximum(1, np.arange(len(spectrum)))), n)
    return torch.from_numpy(noise).float()


def _stretch_of(path: Path, n: int, sample_rate: int, rng: np.random.Generator) -> Tensor:
    """Return `n` samples of a file, from a random place; the whole file, repeated, if it is shorter."""
    start, duration = rng.random(), n / sample_rate
    try:
        spare = soundfile.info(path).duration - duration
    except soundfile.SoundFileError:
        spare = 0.0  # `read_audio` raises the error that names the fault
    part = {"start": start * spare, "duration": duration} if spare > 0 else {}
    noise = read_audio(path, sample_rate=sample_rate, max_seconds=math.inf, upsample=True, **part)
    return noise.repeat(-(-n // len(noise)))[:n]


def _noisy(samples: Tensor, noise: Tensor, snr: float) -> Tensor:
    from torchaudio.functional import add_noise

    if not noise.any() or not samples.any():
        return samples  # no ratio to silence
    return add_noise(samples, noise, torch.tensor(snr))


def _by_telephone(samples: Tensor, sample_rate: int) -> Tensor:
    from torchaudio.functional import (
        highpass_biquad,
        lowpass_biquad,
        mu_law_decoding,
        mu_law_encoding,
        resample,
    )

    low, high = _TELEPHONE_BAND
    narrow = resample(samples, sample_rate, _TELEPHONE_RATE)  # (n,) -> (8000 n / sample_rate,)
    narrow = lowpass_biquad(highpass_biquad(narrow, _TELEPHONE_RATE, low), _TELEPHONE_RATE, high)
    coded = mu_law_decoding(mu_law_encoding(narrow.clamp(-1, 1), _MU_LAW_LEVELS), _MU_LAW_LEVELS)
    return resample(coded, _TELEPHONE_RATE, sample_rate)[: len(samples)]  # (8000 n / sample_rate,) -> (n,)
