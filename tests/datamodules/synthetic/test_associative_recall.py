import pytest

from lit_effattn.datamodules import IGNORE, AssociativeRecall


@pytest.mark.parametrize("length", [12, 13, 40])
def test_each_key_is_asked_once_and_answered_by_its_value(length: int):
    data = AssociativeRecall(length, n_pairs=3, n_keys=5, n_values=4, batch_size=50, n_val=50)
    assert data.vocab_size == 10
    (batch,) = data.val_dataloader()
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        pairs = dict(zip(inputs[0:6:2], inputs[1:6:2], strict=True))
        assert len(pairs) == 3
        assert all(1 <= key <= 5 and 6 <= value <= 9 for key, value in pairs.items())
        assert targets[:6] == 6 * [IGNORE]
        asked = [(key, target) for key, target in zip(inputs[6:], targets[6:], strict=True) if target != IGNORE]
        assert dict(asked) == pairs
        assert len(asked) == 3
        assert all(key == 0 for key, target in zip(inputs[6:], targets[6:], strict=True) if target == IGNORE)


def test_values_are_different_and_fillers_random():
    """Arora et al. 2024, with 3 values for 3 pairs, so that each occurs once. Queries and targets are as without."""
    options = {"n_pairs": 3, "n_keys": 5, "n_values": 3, "batch_size": 400, "n_val": 400}
    (batch,) = AssociativeRecall(13, **options, distinct_values=True, random_fillers=True).val_dataloader()
    fillers = []
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert sorted(inputs[1:6:2]) == [6, 7, 8]
        pairs = dict(zip(inputs[0:6:2], inputs[1:6:2], strict=True))
        asked = [(key, target) for key, target in zip(inputs, targets, strict=True) if target != IGNORE]
        assert len(pairs) == len(asked) == 3
        assert dict(asked) == pairs
        fillers += [token for token, target in zip(inputs[6:], targets[6:], strict=True) if target == IGNORE]
    share = [fillers.count(token) / len(fillers) for token in range(9)]
    assert share == pytest.approx(9 * [1 / 9], abs=0.04)
    (batch,) = AssociativeRecall(13, **options).val_dataloader()
    assert any(len(set(values)) < 3 for values in batch.inputs[:, 1:6:2].tolist())


def test_gaps_follow_the_power_law():
    """The slot of the first query drawn has p(g) ∝ (g + 1)^(power − 1); with one pair it is the only query."""
    for power, weights in ((0.5, [(g + 1) ** -0.5 for g in range(4)]), (1.0, [1.0] * 4)):
        data = AssociativeRecall(10, n_pairs=1, power=power, batch_size=500, n_val=500)
        (batch,) = data.val_dataloader()
        share = (batch.targets != IGNORE).double().mean(0)
        assert share[3::2].sum() == 0
        assert share[2::2].tolist() == pytest.approx([w / sum(weights) for w in weights], abs=0.06)


def test_different_values_need_as_many():
    AssociativeRecall(n_values=7)
    with pytest.raises(ValueError, match="n_values=7 must be at least 8"):
        AssociativeRecall(n_values=7, distinct_values=True)
