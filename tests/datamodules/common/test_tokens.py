"""Batches of lists of different lengths."""

import torch

from lit_effattn.datamodules import pad_labelled, pad_tokens


def test_an_empty_list_has_tokens_wherever_it_is():
    for items in ([([], []), ([1, 2], [2, 3])], [([1, 2], [2, 3]), ([], [])]):
        batch = pad_tokens(items)
        assert (batch.inputs.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
        assert sorted(batch.inputs.tolist()) == [[0, 0], [1, 2]]
    assert pad_labelled([([], 1), ([4], 0)]).x.dtype == torch.int64
    assert pad_labelled([(torch.zeros(0, 3), 1), (torch.ones(2, 3), 0)]).x.dtype == torch.float32
