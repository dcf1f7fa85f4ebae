"""A packed batch holds the valid positions of a padded one, in one row."""

import pytest
import torch

from lit_effattn.datamodules import IGNORE, LabelledBatch, PairBatch, Response, TokenBatch, pack

X = torch.arange(12).view(3, 4)
LENGTHS = torch.tensor([3, 0, 2])
ROW, STARTS = [0, 1, 2, 8, 9], [1, 0, 0, 1, 0]


def test_tokens_and_targets_lie_end_to_end():
    targets = torch.where(X % 2 == 0, X + 1, IGNORE)
    packed = pack(TokenBatch(X, targets, LENGTHS, fresh=torch.tensor([True, False, True])))
    assert packed.inputs.tolist() == [ROW]
    assert packed.targets.tolist() == [[1, IGNORE, 3, 9, IGNORE]]
    assert packed.starts.tolist() == [[bool(s) for s in STARTS]]
    assert (packed.lengths, packed.fresh) == (None, None)


def test_sequences_keep_their_classes_and_indices():
    labels, indices, lengths = torch.tensor([2, 0, 1]), torch.tensor([5, 6, 7]), torch.tensor([3, 1, 2])
    packed = pack(LabelledBatch(X, labels, lengths, indices))
    assert packed.x.tolist() == [[0, 1, 2, 4, 8, 9]]
    assert packed.starts.int().tolist() == [[1, 0, 0, 1, 1, 0]]
    assert packed.labels is labels
    assert packed.indices is indices
    features = torch.randn(3, 4, 2)
    packed = pack(LabelledBatch(features, lengths=lengths))
    assert torch.equal(packed.x[0], torch.cat([features[0, :3], features[1, :1], features[2, :2]]))


def test_rows_of_several_sequences_are_packed_again():
    starts = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    packed = pack(TokenBatch(X, X, LENGTHS, starts=starts))
    assert packed.starts.int().tolist() == [[1, 0, 1, 1, 1]]
    assert torch.equal(pack(packed).starts, packed.starts)
    assert pack(TokenBatch(X, X)).starts.int().tolist() == [[1, 0, 0, 0] * 3]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (PairBatch(X, LENGTHS, X, X, LENGTHS, [], []), "not a PairBatch.*use batches of similar length"),
        (TokenBatch(X, X, responses=[[Response(0, "", 0)]]), "with responses can't be packed"),
        (TokenBatch(X, X, fresh=torch.tensor([True, False, True])), "continue those of the batch before"),
    ],
)
def test_what_can_not_be_packed_is_refused(batch, message: str):
    with pytest.raises(ValueError, match=message):
        pack(batch)
