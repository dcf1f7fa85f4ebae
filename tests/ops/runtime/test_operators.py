"""Operators have no rules for forward-mode derivatives: these come from the plain forms."""

from functools import partial

import pytest
import torch

from lit_effattn.attention import GatedDeltaNetAttention, LinearAttention, LSHAttention, PerformerAttention


@pytest.mark.parametrize(
    "kind", [PerformerAttention, GatedDeltaNetAttention, partial(LSHAttention, n_buckets=2, chunk_size=2)]
)
def test_forward_derivatives_are_those_of_the_backward_pass(kind):
    torch.manual_seed(0)
    module = kind(8, 2).eval()
    x, direction = torch.randn(2, 1, 5, 8)
    forward = torch.func.jvp(lambda x: module(x)[0], (x,), (direction,))[1]
    rows = torch.autograd.functional.jacobian(lambda x: module(x)[0], x)
    expected = (rows * direction).sum((-3, -2, -1))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(forward, expected, rtol=1e-4, atol=1e-5)


def test_a_form_without_forward_derivatives_says_so():
    module, x = LinearAttention(8, 2), torch.randn(1, 5, 8)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: module(x)[0], (x,), (x,))
