import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention
from lit_effattn.datamodules import IGNORE, AssociativeRecall, StateTracking
from lit_effattn.tasks import LanguageModel
from tests.callbacks.tiny import trainer
from tests.datamodules.synthetic.test_base import batches

SMALL = {"batch_size": 4, "n_train": 16, "n_val": 8, "n_test": 6}
TASKS = [
    pytest.param(lambda **o: AssociativeRecall(12, n_pairs=3, n_keys=5, n_values=4, **o), id="recall"),
    pytest.param(lambda **o: StateTracking("S3", length=12, **o), id="tracking"),
]


@pytest.mark.parametrize("make", TASKS)
def test_test_has_equally_many_sequences_of_each_length(make):
    data = make(**SMALL, test_lengths=[24, 12])
    seen = []
    for batch in batches(data, "test"):
        lengths = [batch.inputs.size(1)] * len(batch.inputs) if batch.lengths is None else batch.lengths.tolist()
        for row, n in enumerate(lengths):
            assert (batch.targets[row, n:] == IGNORE).all()
            assert (batch.targets[row, :n] != IGNORE).sum() == (3 if isinstance(data, AssociativeRecall) else n)
        seen += lengths
    assert seen == 6 * [24] + 6 * [12]
    assert make().test_lengths == (12, 24, 48, 96)
    for split in ("train", "val"):
        assert all(b.inputs.shape == (4, 12) and b.lengths is None for b in batches(data, split))


def test_the_accuracy_at_each_length_is_correct_targets_over_targets(tmp_path):
    """A model that always says 1: its accuracy at a length is the share of ones, with padded batches and without."""
    data = StateTracking("parity", length=5, test_lengths=[5, 9, 30], batch_size=4, n_test=7)
    backbone = Transformer(8, 2, 1, attention=LinearAttention)
    model = LanguageModel(backbone, data.vocab_size, accuracy=True, test_lengths=data.test_lengths)
    model.head.requires_grad_(False)
    for name, parameter in model.head.named_parameters():
        parameter.data = torch.tensor([0.0, 1.0]) if name.endswith("bias") else torch.zeros_like(parameter)
    (result,) = trainer(tmp_path, []).test(model, data, verbose=False)
    total = 0
    for block, n in enumerate((5, 9, 30)):
        inputs = torch.cat([data.sequences("test")[[i]].inputs for i in range(7 * block, 7 * block + 7)])
        ones = int((inputs.cumsum(1) % 2).sum())
        assert result[f"test/accuracy_{n}"] == pytest.approx(ones / (7 * n))
        total += ones
    assert result["test/accuracy"] == pytest.approx(total / (7 * 44))
    assert not any("accuracy_" in name for name in model.score("val", data.sequences("val")[[0]]))


def test_wrong_test_lengths_are_named():
    with pytest.raises(ValueError, match=r"test_lengths=11 must be at least 12"):
        AssociativeRecall(12, n_pairs=3, test_lengths=[12, 11])
    with pytest.raises(ValueError, match=r"length=0 must be at least 1"):
        StateTracking(length=0)
    for lengths in ([], [4, 4]):
        with pytest.raises(ValueError, match="test_lengths="):
            StateTracking(length=4, test_lengths=lengths)
