"""Kaldi's log-mel filterbanks, and their normalisation by mean and variance."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.checks import at_least

_LOWEST = 20.0  # Hz, lower edge of the first filter
SCALE = 2.0**15  # Kaldi's samples are 16-bit integers

PREEMPHASIS = 0.97
EPSILON = 2.0**-23  # least energy of a filter

_LEAST_STD = 1e-3  # of a channel, in nats: a channel that varies less counts as constant


class Filterbanks:
    """x_t = log max(M |FFT(w · preemphasised(s_t − mean s_t))|², ε): Kaldi's `compute-fbank-feats`, without dither.

    s_t are the `frame_ms` of samples from t · `hop_ms` on, on the scale of 16-bit integers. Only frames that lie within
    the recording count (snip-edges). The preemphasis is .97, w = Hann^.85 (the Povey window), and the FFT has the next
    power of two as its size. M are triangular filters, equally spaced from 20 Hz to half the sampling rate on the scale
    mel(f) = 1127 ln(1 + f / 700). ε = 2⁻²³.

    Args:
        sample_rate: Sampling rate of the recordings, in Hz.
        n_mels: Number of filters, F.
        frame_ms: Length of a frame in milliseconds.
        hop_ms: Hop from one frame to the next in milliseconds.

    Raises:
        ValueError: If an argument is out of its range, or there are so many filters that some lie between two
            frequencies of the FFT.

    Examples:
        >>> Filterbanks()(torch.zeros(16_000)).shape
        torch.Size([98, 40])
    """

    def __init__(
        self, sample_rate: int = 16_000, *, n_mels: int = 40, frame_ms: float = 25.0, hop_ms: float = 10.0
    ) -> None:
        at_least(1000, sample_rate=sample_rate)
        at_least(4, n_mels=n_mels)
        if not 0 < hop_ms <= frame_ms:
            raise ValueError(f"hop_ms={hop_ms} must be above 0 and at most frame_ms={frame_ms}")
        self.sample_rate = sample_rate
        self.n_mels = n_mels
        self.frame_ms = frame_ms
        self.hop_ms = hop_ms
        # The formulas of torchaudio, so that the numbers of frames agree at any rate.
        self.frame_samples = int(sample_rate * frame_ms * 0.001)
        self.hop_samples = int(sample_rate * hop_ms * 0.001)
        if self.hop_samples < 1:
            raise ValueError(f"hop_ms={hop_ms} is less than a sample of sample_rate={sample_rate}")
        weights = self.weights()
        if empty := int((weights.sum(0) == 0).sum()):
            raise ValueError(
                f"n_mels={n_mels}: {empty} of the filters lie between two frequencies of an FFT of "
                f"{2 * (len(weights) - 1)} samples at {sample_rate} Hz; use fewer, such as 40 or 80, or a longer "
                f"frame_ms than {frame_ms:g}"
            )

    def weights(self) -> Tensor:
        """Return each filter's weights of the frequencies of the FFT, from 0 to half the sampling rate: (K, F)."""
        from torchaudio.compliance import kaldi  # imported here to keep `--help` fast

        size = 2 ** (self.frame_samples - 1).bit_length()
        filters, _ = kaldi.get_mel_banks(self.n_mels, size, self.sample_rate, _LOWEST, 0.0, 100.0, -500.0, 1.0)
        return F.pad(filters, (0, 1)).T.contiguous()  # (F, K − 1) -> (K, F)

    @property
    def frame_seconds(self) -> float:
        """Hop from one frame to the next in seconds."""
        return self.hop_samples / self.sample_rate

    def n_frames(self, n_samples: int) -> int:
        """Return ⌊(n_samples − frame) / hop⌋ + 1, the number of frames in a recording; 0 if it is shorter than one."""
        return max(0, (n_samples - self.frame_samples) // self.hop_samples + 1)

    def __call__(self, samples: Tensor) -> Tensor:
        """Return the features (T, F), T = `n_frames(n)`, of samples (n,) in −1 … 1.

        Raises:
            ValueError: If `samples` has another shape, or holds integers.
        """
        if samples.dim() != 1 or not samples.is_floating_point():
            raise ValueError(
                f"samples is {samples.dtype} of shape {tuple(samples.shape)}; expected floats in −1 … 1 of shape (n,): "
                "one channel, without a batch, integers of 16 bits divided by 32768"
            )
        if not self.n_frames(len(samples)):
            return samples.new_empty(0, self.n_mels)
        from torchaudio.compliance import kaldi

        return kaldi.fbank(
            SCALE * samples[None],
            sample_frequency=self.sample_rate,
            num_mel_bins=self.n_mels,
            frame_length=self.frame_ms,
            frame_shift=self.hop_ms,
            low_freq=_LOWEST,
        )

    def __repr__(self) -> str:
        return (
            f"Filterbanks({self.sample_rate}, n_mels={self.n_mels}, frame_ms={self.frame_ms:g}, hop_ms={self.hop_ms:g})"
        )


class StreamingFilterbanks:
    """Computes the filterbanks of a stream of samples: a frame as soon as its last sample was given.

    The frames are those of the whole, for any division into pieces. At most a frame of samples is kept.
    """

    def __init__(self, filterbanks: Filterbanks) -> None:
        self.filterbanks = filterbanks
        self.samples: Tensor | None = None  # the first samples (n,) of the next frame. None: nothing was read

    def __call__(self, samples: Tensor) -> Tensor:
        """Return the next frames (T, F), T ≥ 0, after the next samples (n,), in −1 … 1."""
        if self.samples is not None:
            samples = torch.cat([self.samples, samples])
        features = self.filterbanks(samples)
        self.samples = samples[len(features) * self.filterbanks.hop_samples :].clone()
        return features


class RunningNormalization:
    """Normalises frame t of a stream by the mean and variance of frames 0 … t. See `normalized`.

    A recogniser that was trained with `normalize: utterance` or `speaker`, whose statistics look ahead, gets other
    features from it, above all in the first seconds.
    """

    def __init__(self) -> None:
        self.moments: Tensor | None = None  # (3, F), `moments` of the frames so far. None: there was none

    def __call__(self, features: Tensor) -> Tensor:
        """Return the next frames (T, F), normalised."""
        if not len(features):
            return features
        if self.moments is None:
            self.moments = torch.zeros(3, features.size(-1), dtype=torch.double)
        sums = running(features, self.moments)
        self.moments = sums[:, -1]
        return normalized(features, sums)


def running(features: Tensor, before: Tensor) -> Tensor:
    """Return the moments up to each frame (3, …, T, F), given features (…, T, F) and the moments before (3, …, F)."""
    x = features.double()
    return torch.stack([torch.ones_like(x), x, x.square()]).cumsum(-2) + before.unsqueeze(-2)


def moments(features: Tensor) -> Tensor:
    """Return the count, sum and sum of squares of frames (T, F): (3, F), float64. Moments of several inputs add up."""
    x = features.double()
    return torch.stack([torch.full_like(x[0], len(x)), x.sum(0), x.square().sum(0)])  # (T, F) -> (3, F)


def normalized(features: Tensor, statistics: Tensor) -> Tensor:
    """Return (x − mean) / max(std, 1e-3) for each channel, with mean and standard deviation from `statistics`.

    Args:
        features: (…, T, F).
        statistics: (3, F), as returned by `moments`, or (3, …, T, F), different ones for each frame.

    Returns:
        (…, T, F) of the features' type. A constant channel becomes 0.
    """
    n, total, squares = statistics
    mean = total / n
    std = (squares / n - mean.square()).clamp(min=0).sqrt().clamp(min=_LEAST_STD)
    return ((features - mean) / std).to(features.dtype)
