"""Heads that processes divide."""

from functools import partial

import pytest
import torch

from lit_effattn.attention import (
    HedgehogFeatureMap,
    LinearAttention,
    LinearCrossAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    TransformerXLAttention,
)


def test_a_process_computes_its_heads():
    """The features of the second half of the heads, and a state of these alone."""
    attention = PerformerAttention(8, 4, n_features=6)
    attention.keep_heads(1, 2)
    assert attention.n_heads == attention.n_kv_heads == 2
    torch.testing.assert_close(
        attention.feature_map.directions(torch.float32), attention.feature_map.omega[2:], rtol=0, atol=0
    )
    assert attention.initial_state(3).s.shape == (3, 2, 6, 2)
    attention.redraw(torch.Generator().manual_seed(0))
    whole = PerformerAttention(8, 4, n_features=6)
    whole.redraw(torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention.feature_map.omega, whole.feature_map.omega, rtol=0, atol=0)


def test_what_does_not_divide_is_told():
    for attention, size, said in [
        (SoftmaxAttention(8, 4), 3, "tensor_parallel_size=3 does not divide n_heads=4 of SoftmaxAttention"),
        (SoftmaxAttention(8, 4, n_kv_heads=1), 2, "tensor_parallel_size=2 does not divide n_kv_heads=1 of Softmax"),
        (LinearCrossAttention(8, 4), 3, "tensor_parallel_size=3 does not divide n_heads=4 of LinearCrossAttention"),
        (
            TransformerXLAttention(8, 4, mem_len=3),
            2,
            "TransformerXLAttention does not divide its heads among processes",
        ),
        (ShawAttention(8, 4), 2, "ShawAttention does not divide its heads among processes; leave it out, or choose"),
        (LinearAttention(8, 4, feature_map=HedgehogFeatureMap), 2, "LinearAttention does not divide its heads"),
        (LinearCrossAttention(8, 4, feature_map=partial(HedgehogFeatureMap)), 2, "LinearCrossAttention does not divi"),
    ]:
        with pytest.raises(ValueError, match=said):
            attention.keep_heads(0, size)
        assert attention.n_heads == 4
