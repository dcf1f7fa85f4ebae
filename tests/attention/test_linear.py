from functools import partial

import pytest
import torch

from lit_effattn.attention import HedgehogFeatureMap, LinearAttention

E, H = 12, 3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 70])
def test_the_first_position_of_hedgehog_is_its_value(causal: bool, n: int):
    """With large queries and keys, whose features have products below 10⁻⁶; through a kernel if there is one."""
    torch.manual_seed(0)
    attention = LinearAttention(E, H, causal, feature_map=HedgehogFeatureMap)
    with torch.no_grad():
        attention.q_proj.weight.mul_(7)
        attention.k_proj.weight.mul_(7)
        x = torch.randn(400, n, E)
        q, k, v = attention.project(x[:, :1])
        products = (attention.feature_map(q) * attention.feature_map.keys(k)).sum(-1)
        assert 1e-8 < products.min() < 1e-6
        lengths = torch.ones(400, dtype=torch.long)
        expected = attention.out_proj(v.transpose(1, 2).flatten(2))
        for y in (attention(x, lengths=lengths)[0], *([attention(x)[0]] if causal else [])):
            torch.testing.assert_close(y[:, :1], expected, rtol=1e-3, atol=1e-4)
        former = LinearAttention(E, H, causal, feature_map=partial(HedgehogFeatureMap, eps=1e-6))
        former.load_state_dict(attention.state_dict())
        share = products / (products + 1e-6)
        y = attention.out_proj((share[..., None] * v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(former(x, lengths=lengths)[0][:, :1], y, rtol=1e-3, atol=1e-4)
