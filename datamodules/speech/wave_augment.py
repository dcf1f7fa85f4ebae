"""Augmentation of recordings: speed, noise and a telephone line."""

import math
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from lit_effattn.datamodules.speech.audio import check_audio, read_audio
from lit_effattn.datamodules.speech.recordings import recordings

_SPEEDS = (0.5, 2.0)  # slowest and fastest that `speed` may name
_TELEPHONE_RATE = 8000  # Hz
_MU_LAW_LEVELS = 256


class WaveAugment:
    """Changes recordings before their features are computed, for more variety of voices, rooms and channels.

    Each operation is applied with `probability`, independently of the others and in this order:

    - speed: resampling by a factor, which changes tempo and pitch together (Ko et al. 2015, "Audio augmentation for
      speech recognition").
    - noise: added at a signal-to-noise ratio in dB, from `noises`, or white Gaussian noise.
    - telephone: 8 kHz, so frequencies up to 4 kHz, and 8-bit mu-law quantisation (ITU-T G.711).

    Values are drawn uniformly from their ranges. The result is a function of the recording and of the generator.

    Args:
        probability: Probability of each operation, for each utterance.
        speed: Smallest and largest factor, 0.5 to 2, in steps of 0.01. An utterance has 1 / factor times the frames.
            null: off.
        noise: Smallest and largest signal-to-noise ratio in dB. null: off.
        noises: Folder of recordings of noise, used instead of white noise. A random stretch of a random file is added;
            short files are repeated.
        telephone: Whether to imitate a telephone line.

    Raises:
        ValueError: If an argument is out of its range, or `noises` is given without `noise`.
    """

    def __init__(
        self,
        *,
        probability: float = 0.5,
        speed: tuple[float, float] | None = (0.9, 1.1),
        noise: tuple[float, float] | None = (5.0, 30.0),
        noises: str | None = None,
        telephone: bool = True,
    ) -> None:
        if not 0 <= probability <= 1:
            raise ValueError(f"probability={probability} must be from 0 to 1")
        _check_range("speed", speed, *_SPEEDS)
        _check_range("noise", noise, -100.0, 100.0)
        if noises is not None and noise is None:
            raise ValueError(f"noises={noises!r} is not used, because noise is null; give noise a range")
        self.probability = probability
        self.speed = speed
        self.noise = noise
        self.noises = noises
        self.telephone = telephone

    @property
    def fastest(self) -> float:
        """The largest factor by which an utterance becomes shorter."""
        return 1.0 if self.speed is None else max(1.0, round(100 * self.speed[1]) / 100)

    def check(self, sample_rate: int) -> None:
        """Check the recordings of noise by their headers, for a sampling rate in Hz.

        Raises:
            FileNotFoundError: If there is no such folder.
            ValueError: If it has no recordings.
            AudioError: If a recording cannot be used.
        """
        for path in self.noise_files:
            check_audio(path, sample_rate)

    @cached_property
    def noise_files(self) -> list[Path]:
        """The recordings of noise. There must be some, if a folder is given."""
        return [] if self.noises is None else [u.audio for u in recordings(Path(self.noises))]

    def __call__(self, samples: Tensor, sample_rate: int, rng: np.random.Generator) -> Tensor:
        """Return a changed copy of a recording.

        Its samples (n,), in −1 … 1, become (⌈n / factor⌉,) with the factor of its speed, 1 if the speed is kept.

        Raises:
            AudioError: If a recording of noise cannot be used.
        """
        from torchaudio.functional import mu_law_decoding, mu_law_encoding, resample  # imported late: they are slow
        from torchaudio.transforms import AddNoise

        if self.speed is not None and self._drawn(rng):
            # In hundredths, since the cost of resampling grows with the terms of the ratio.
            samples = resample(samples, round(100 * rng.uniform(*self.speed)), 100)  # (n,) -> (⌈n / factor⌉,)
        if self.noise is not None and self._drawn(rng):
            noise, ratio = self._some_noise(len(samples), sample_rate, rng), torch.tensor(rng.uniform(*self.noise))
            if noise.square().any() and samples.square().any():  # no ratio to silence
                samples = AddNoise()(samples, noise, ratio)
        if self.telephone and self._drawn(rng):
            narrow = resample(samples, sample_rate, _TELEPHONE_RATE).clamp(-1, 1)  # (n,) -> (8000 n / sample_rate,)
            coded = mu_law_decoding(mu_law_encoding(narrow, _MU_LAW_LEVELS), _MU_LAW_LEVELS)
            samples = resample(coded, _TELEPHONE_RATE, sample_rate)[: len(samples)]  # (8000 n / sample_rate,) -> (n,)
        return samples

    def _drawn(self, rng: np.random.Generator) -> bool:
        return bool(rng.random() < self.probability)

    def _some_noise(self, n: int, sample_rate: int, rng: np.random.Generator) -> Tensor:
        """Return `n` samples of a file from a random place, repeated if it is shorter; without files, white noise."""
        if not self.noise_files:
            return torch.from_numpy(rng.standard_normal(n)).float()
        path = self.noise_files[int(rng.integers(len(self.noise_files)))]
        start, duration = rng.random(), n / sample_rate
        try:
            spare = soundfile.info(path).duration - duration
        except soundfile.SoundFileError:
            spare = 0.0  # `read_audio` raises the error that names the fault
        part = {"start": start * spare, "duration": duration} if spare > 0 else {}
        noise = read_audio(path, sample_rate=sample_rate, max_seconds=math.inf, upsample=True, **part)
        return noise.repeat(-(-n // len(noise)))[:n]


def _check_range(name: str, given: tuple[float, float] | None, least: float, most: float) -> None:
    if given is not None and not least <= given[0] <= given[1] <= most:
        raise ValueError(
            f"{name}={given} must be two numbers from {least:g} to {most:g}, the smaller one first; null turns it off"
        )
