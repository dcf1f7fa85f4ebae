import math

import pytest
import torch

from lit_effattn.attention import EluFeatureMap, HedgehogFeatureMap, ReluFeatureMap

H = 3


def test_elu_plus_one():
    x = torch.tensor([-30.0, -2.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    expected = torch.tensor([math.exp(-30), math.exp(-2), math.exp(-0.5), 1, 1.5, 4], dtype=torch.float64)
    phi = EluFeatureMap(4)(x)
    torch.testing.assert_close(phi, expected, rtol=1e-6, atol=1e-15)
    (slope,) = torch.autograd.grad(phi.sum(), x)
    torch.testing.assert_close(slope, expected.clamp(max=1), rtol=1e-6, atol=1e-15)
    away = torch.tensor([-2.0, -0.5, 0.5], dtype=torch.float64, requires_grad=True)  # from where the slope has a kink
    assert torch.autograd.gradgradcheck(EluFeatureMap(4), away)


def test_relu_and_its_floor():
    x = torch.tensor([-2.0, 0.0, 3.0])
    torch.testing.assert_close(ReluFeatureMap(4)(x), torch.tensor([0.001, 0.001, 3.001]))
    torch.testing.assert_close(ReluFeatureMap(4, floor=0.5)(x), torch.tensor([0.5, 0.5, 3.5]))


@pytest.mark.parametrize("feature_map", [EluFeatureMap, ReluFeatureMap])
def test_features_are_not_negative_and_as_many_as_said(feature_map):
    phi = feature_map(7)
    y = phi(10 * torch.randn(100, 7))
    assert (y >= 0).all()
    assert y.shape[-1] == phi.n_features == 7


def test_hedgehog_starts_with_the_identity_and_overflows_nowhere():
    phi = HedgehogFeatureMap(4)
    phi.for_heads(H)
    assert [(name, *p.shape) for name, p in phi.named_parameters()] == [
        ("query_weight", H, 4, 4),
        ("key_weight", H, 4, 4),
    ]
    x = torch.tensor([1.0, 0.0, -2.0, 300.0]).expand(2, H, 1, 4)
    negative = torch.tensor([math.exp(-3), math.exp(-2), 1, 0])  # of −x, but for a factor
    expected = torch.cat([torch.tensor([0.0, 0.0, 0.0, 1.0]), negative / negative.sum()])
    for y in (phi(x), phi.keys(x)):
        torch.testing.assert_close(y, expected.expand(2, H, 1, 8))
    assert phi.n_features == 8
