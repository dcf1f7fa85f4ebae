"""Features with parts of them hidden, so that a model learns not to rely on any."""

import numpy as np
from torch import Tensor


class SpecAugment:
    """Bands of frequencies and stretches of time are set to 0, the mean of normalised features (Park et al. 2019).

    A band has f ~ U{0, …, `freq_mask`} filters and begins at f₀ ~ U{0, …, F − f}; a stretch has
    t ~ U{0, …, min(`time_mask`, ⌊p T⌋)} frames and begins at t₀ ~ U{0, …, T − t}, p = `max_share`. The defaults are the
    paper's "Switchboard mild" (table 1). Its third operation, time warping, is left out: it costs most and gives least
    (section 5).

    Args:
        n_freq_masks: Number of bands.
        freq_mask: Filters of the widest band, at most `n_mels`.
        n_time_masks: Number of stretches.
        time_mask: Frames of the longest stretch.
        max_share: What a stretch may hide of an utterance at most, 0 … 1.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        *,
        n_freq_masks: int = 2,
        freq_mask: int = 15,
        n_time_masks: int = 2,
        time_mask: int = 70,
        max_share: float = 0.2,
    ) -> None:
        given = {
            "n_freq_masks": n_freq_masks,
            "freq_mask": freq_mask,
            "n_time_masks": n_time_masks,
            "time_mask": time_mask,
        }
        for name, value in given.items():
            if value < 0:
                raise ValueError(f"{name}={value} must be at least 0")
        if not 0 <= max_share <= 1:
            raise ValueError(f"max_share={max_share} must be from 0 to 1, a part of the utterance")
        self.n_freq_masks = n_freq_masks
        self.freq_mask = freq_mask
        self.n_time_masks = n_time_masks
        self.time_mask = time_mask
        self.max_share = max_share

    def __call__(self, features: Tensor, rng: np.random.Generator) -> Tensor:
        """A copy of the features (T, F) with what ``rng`` draws set to 0."""
        features = features.clone()
        n_frames, n_mels = features.shape
        for _ in range(self.n_freq_masks):
            first, last = _stretch(rng, self.freq_mask, n_mels)
            features[:, first:last] = 0
        for _ in range(self.n_time_masks):
            first, last = _stretch(rng, min(self.time_mask, int(self.max_share * n_frames)), n_frames)
            features[first:last] = 0
        return features


def _stretch(rng: np.random.Generator, longest: int, of: int) -> tuple[int, int]:
    length = int(rng.integers(min(longest, of) + 1))
    first = int(rng.integers(of - length + 1))
    return first, first + length
