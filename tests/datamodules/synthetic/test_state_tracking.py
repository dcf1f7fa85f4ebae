from itertools import permutations

import pytest

from lit_effattn.datamodules import StateTracking


@pytest.mark.parametrize(("group", "degree"), [("parity", 2), ("S3", 3), ("S5", 5)])
def test_targets_are_the_products_so_far(group: str, degree: int):
    """Each permutation in turn rearranges what the ones before it have made."""
    data = StateTracking(group, length=20, batch_size=8, n_val=8)
    elements = list(permutations(range(degree)))
    assert data.vocab_size == len(elements)
    (batch,) = data.val_dataloader()
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        places = list(range(degree))  # where each thing is
        for element, target in zip(inputs, targets, strict=True):
            places = [elements[element][place] for place in places]
            assert elements[target] == tuple(places)


def test_permutations_are_drawn_uniformly():
    data = StateTracking("S3", length=100, batch_size=60, n_val=60)
    (batch,) = data.val_dataloader()
    share = batch.inputs.flatten().bincount(minlength=6) / 6000
    assert share.tolist() == pytest.approx([1 / 6] * 6, abs=0.02)


def test_an_unknown_group_is_named():
    StateTracking("parity", length=1, test_lengths=[1])  # the shortest
    with pytest.raises(ValueError, match="group='S4' is not one of parity, S3, S5"):
        StateTracking("S4")
