"""SpecAugment: masking of parts of the features as regularisation."""

import numpy as np
from torch import Tensor

from lit_effattn.checks import at_least


class SpecAugment:
    """Frequency and time masking: masked features are 0, the mean of normalised features (Park et al. 2019).

    A frequency mask covers f ~ U{0, …, `freq_mask`} filters from f₀ ~ U{0, …, F − f}. A time mask covers
    t ~ U{0, …, min(`time_mask`, ⌊p T⌋)} frames from t₀ ~ U{0, …, T − t}, p = `max_share`. The defaults are the paper's
    "Switchboard mild" (table 1). The paper's third operation, time warping, is left out: it is the most expensive and
    improves the least (section 5).

    Args:
        n_freq_masks: Number of frequency masks.
        freq_mask: Largest number of filters in a mask, at most `n_mels`.
        n_time_masks: Number of time masks.
        time_mask: Largest number of frames in a mask.
        max_share: Largest share of an utterance's frames in a time mask, 0 … 1.

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
        at_least(0, n_freq_masks=n_freq_masks, freq_mask=freq_mask, n_time_masks=n_time_masks, time_mask=time_mask)
        if not 0 <= max_share <= 1:
            raise ValueError(f"max_share={max_share} must be from 0 to 1, a fraction of the utterance")
        self.n_freq_masks = n_freq_masks
        self.freq_mask = freq_mask
        self.n_time_masks = n_time_masks
        self.time_mask = time_mask
        self.max_share = max_share

    def __call__(self, features: Tensor, rng: np.random.Generator) -> Tensor:
        """Return a copy of the features (T, F) with the masks that `rng` draws."""
        features = features.clone()
        n_frames, n_mels = features.shape
        for _ in range(self.n_freq_masks):
            first, end = _mask(rng, self.freq_mask, n_mels)
            features[:, first:end] = 0
        for _ in range(self.n_time_masks):
            first, end = _mask(rng, min(self.time_mask, int(self.max_share * n_frames)), n_frames)
            features[first:end] = 0
        return features


def _mask(rng: np.random.Generator, max_len: int, size: int) -> tuple[int, int]:
    """Draw the first index and the end of a mask on an axis of `size`."""
    length = int(rng.integers(min(max_len, size) + 1))
    first = int(rng.integers(size - length + 1))
    return first, first + length
