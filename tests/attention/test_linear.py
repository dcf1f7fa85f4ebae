import math
import re
from functools import partial

import pytest
import torch

from lit_effattn import sequence
from lit_effattn.attention import EluFeatureMap, FeatureMap, HedgehogFeatureMap, LinearAttention, ReluFeatureMap

E, H = 12, 3


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


class Doubled(FeatureMap):
    """relu(x) and relu(−x): more features than a head has dimensions."""

    def __init__(self, head_dim: int):
        super().__init__(head_dim)
        self.n_features = 2 * head_dim

    def forward(self, x):
        return torch.cat([x.relu(), (-x).relu()], -1) + 0.1


@pytest.mark.parametrize("causal", [True, False])
def test_any_feature_map_of_any_width(causal: bool):
    attention = LinearAttention(E, H, causal, feature_map=Doubled, chunk_size=4).double()
    x = torch.randn(2, 11, E, dtype=torch.float64)
    q, k, v = (p(x).view(2, 11, H, 4) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    weights = torch.einsum("bnhf,bmhf->bhnm", attention.feature_map(q), attention.feature_map(k))
    weights = weights.tril() if causal else weights
    y = torch.einsum("bhnm,bmhd->bnhd", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    torch.testing.assert_close(attention(x)[0], attention.out_proj(y.flatten(2)))
    if causal:
        assert attention(x)[1].s.shape == attention.initial_state(2).s.shape == (2, H, 8, 4)


@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_of_another_width(causal: bool):
    """As with fast-transformers' `query_dimensions`, 2 a head: scores of 2 dimensions, values of 4."""
    attention = LinearAttention(E, H, causal, d_qk=2 * H)
    expected = 2 * (E * 2 * H + 2 * H) + 2 * (E * E + E)
    assert sum(p.numel() for p in attention.parameters()) == expected == 468
    assert attention.initial_state(5).s.shape == (5, H, 2, 4)
    x = torch.randn(2, 70, E)  # float32: through a kernel, if there is one
    q, k = ((torch.nn.functional.elu(p(x)) + 1).view(2, 70, H, 2) for p in (attention.q_proj, attention.k_proj))
    v = attention.v_proj(x).view(2, 70, H, 4)
    weights = torch.einsum("bnhf,bmhf->bhnm", q, k)
    weights = weights.tril() if causal else weights
    y = torch.einsum("bhnm,bmhd->bnhd", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    torch.testing.assert_close(attention(x)[0], attention.out_proj(y.flatten(2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"d_qk": 7}, ["d_qk=7", "n_heads=3"]),
        ({"n_heads": 5}, ["n_heads=5", "d_model=12"]),
        ({"chunk_size": 0}, ["chunk_size=0"]),
        ({"feature_map": partial(ReluFeatureMap, floor=-1.0)}, ["floor=-1.0"]),
        ({"feature_map": partial(HedgehogFeatureMap, eps=0.0)}, ["eps=0.0"]),
    ],
)
def test_bad_options_are_named(options: dict, words: list[str]):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        LinearAttention(**{"d_model": E, "n_heads": H, **options})


def test_the_chunk_size_has_no_effect_on_the_result():
    x = torch.randn(2, 23, E, dtype=torch.float64)
    results = []
    for chunk_size in (1, 3, 8, 23, 100):
        torch.manual_seed(0)
        results.append(LinearAttention(E, H, chunk_size=chunk_size).double()(x)[0])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_the_state_is_the_sums():
    attention = LinearAttention(E, H).double()
    x = torch.randn(2, 6, E, dtype=torch.float64)
    _, state = attention(x, None, torch.tensor([6, 4]))
    k = torch.nn.functional.elu(attention.k_proj(x).view(2, 6, H, 4)) + 1
    v = attention.v_proj(x).view(2, 6, H, 4)
    for row, n in enumerate((6, 4)):
        torch.testing.assert_close(state.s[row], torch.einsum("nhf,nhd->hfd", k[row, :n], v[row, :n]))
        torch.testing.assert_close(state.z[row], k[row, :n].sum(0))
    assert state.length.tolist() == [6, 4]


@pytest.mark.parametrize("n", [1, 5])
def test_sums_have_at_least_float32(n: int):
    x = torch.randn(1, n, E)

    def types(attention, state=None):
        y, state = attention(x.to(attention.out_proj.weight.dtype), state)
        return y.dtype, state.s.dtype, state.z.dtype

    wide = (torch.float32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        attention = LinearAttention(E, H)
        assert types(attention) == (torch.bfloat16, *wide)
        assert types(attention, attention.initial_state(1)) == (torch.bfloat16, *wide)
    for dtype in (torch.float16, torch.bfloat16):
        attention = LinearAttention(E, H).to(dtype)
        assert types(attention) == (dtype, *wide)
        assert types(attention, attention.initial_state(1)) == (dtype, *wide)
        assert attention.initial_state(1).s.dtype == torch.float32
    assert LinearAttention(E, H).initial_state(1, dtype=torch.float16).z.dtype == torch.float32
    assert types(LinearAttention(E, H).double()) == (torch.float64,) * 3


def test_a_donated_step_adds_in_place():
    attention = LinearAttention(E, H)
    with torch.no_grad(), sequence.donated():
        state = attention.initial_state(2)
        _, after = attention(torch.randn(2, 1, E), state)
    assert after.s is state.s
    assert after.z is state.z


def test_the_state_does_not_grow():
    attention = LinearAttention(E, H)
    sizes = {sequence.nbytes(attention(torch.zeros(2, n, E))[1]) for n in (1, 10, 1000)}
    assert sizes == {2 * H * (4 * 4 + 4) * 4 + 2 * 8}
    assert attention.bounded_by is None
