import numpy as np
import pytest
import torch

from lit_effattn.datamodules import SpecAugment


def hidden(augment, shape, seed=0):
    """Which rows and which columns are hidden wholly, and whether all else is as it was."""
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 10
    before = features.clone()
    out = augment(features, np.random.default_rng(seed))
    assert torch.equal(features, before)
    zero = out == 0
    rows, columns = zero.all(1), zero.all(0)
    assert torch.equal(zero, rows[:, None] | columns[None])
    assert torch.equal(out[~zero], features[~zero])
    return rows, columns


def runs(flags):
    return [int(part.sum()) for part in np.split(flags, np.flatnonzero(np.diff(flags)) + 1) if part.any()]


def test_one_mask_has_every_length_and_place_equally_often():
    augment = SpecAugment(n_freq_masks=1, freq_mask=3, n_time_masks=1, time_mask=4, max_share=1.0)
    widths, heights, first = np.zeros(5), np.zeros(4), np.zeros(20)
    for seed in range(2000):
        rows, columns = hidden(augment, (20, 10), seed)
        assert len(runs(rows.numpy())) <= 1
        widths[int(rows.sum())] += 1
        heights[int(columns.sum())] += 1
        if rows.sum() == 4:
            first[int(rows.int().argmax())] += 1
    assert np.abs(widths / 2000 - 1 / 5).max() < 0.03
    assert np.abs(heights / 2000 - 1 / 4).max() < 0.03
    assert (first[:17] > 8).all()  # 400 / 17 = 24 each
    assert (first[17:] == 0).all()


def test_masks_are_as_many_as_said_and_within_their_bounds():
    augment = SpecAugment(n_freq_masks=2, freq_mask=5, n_time_masks=3, time_mask=30, max_share=0.1)
    found = [hidden(augment, (100, 40), seed) for seed in range(300)]
    assert max(int(rows.sum()) for rows, _ in found) > 20
    assert max(int(rows.sum()) for rows, _ in found) <= 30  # 3 × 10 % of 100, not 3 × 30
    assert 5 < max(int(columns.sum()) for _, columns in found) <= 10
    assert max(len(runs(rows.numpy())) for rows, _ in found) == 3


def test_short_utterances_no_masks_and_wrong_options():
    rows, columns = hidden(SpecAugment(n_freq_masks=0, n_time_masks=0), (50, 40))
    assert not rows.any()
    assert not columns.any()
    assert hidden(SpecAugment(freq_mask=0, max_share=0.2), (4, 40))[0].sum() == 0  # ⌊0.8⌋ = 0 frames
    hidden(SpecAugment(freq_mask=40, max_share=1.0), (1, 40))
    for name in ("n_freq_masks", "freq_mask", "n_time_masks", "time_mask"):
        with pytest.raises(ValueError, match=f"{name}=-1 must be at least 0"):
            SpecAugment(**{name: -1})
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"max_share={share}"):
            SpecAugment(max_share=share)
