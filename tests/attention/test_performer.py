import itertools
import math

import pytest
import torch

from lit_effattn import sequence
from lit_effattn.attention import PerformerAttention, SoftmaxAttention
from tests.laws import definitions
from tests.support.tensor_sizes import Largest

E, H = 12, 3
MAPS = ["positive", "hyperbolic", "trigonometric", "relu"]
LOG_SPACE = ["positive", "hyperbolic"]


def inputs(n: int, b: int = 2, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(b, n, E, dtype=dtype)


def redraw(attention: PerformerAttention, seed: int = 9) -> None:
    attention.redraw(torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------- estimates of softmax


@pytest.mark.parametrize("features", LOG_SPACE)
def test_it_nears_softmax_with_more_features(features: str):
    for causal, orthogonal in itertools.product([True, False], [True, False]):
        softmax = SoftmaxAttention(E, H, causal).double()
        x = inputs(40, 1)
        errors = []
        for n_features in (16, 16384):
            twin = PerformerAttention(
                E, H, causal, n_features=n_features, features=features, orthogonal=orthogonal
            ).double()
            missing = twin.load_state_dict(softmax.state_dict(), strict=False)
            assert sorted(missing.missing_keys) == ["feature_map.draws", "feature_map.omega"]
            assert missing.unexpected_keys == []
            errors.append((twin(x)[0] - softmax(x)[0]).square().mean().sqrt().item())
        # √1024 times fewer; the expected ratio is 1/32, and chance moves it.
        assert errors[1] < errors[0] / 8
        assert errors[1] < 0.01


def test_the_number_of_features():
    def n_features(d: int) -> int:
        return PerformerAttention(d, 1).initial_state(1).z.size(-1)

    assert [n_features(d) for d in (1, 2, 16, 32, 64)] == [8, 8, 48, 112, 272]
    for d in (16, 32, 64):
        assert 0 <= n_features(d) - d * math.log(d) < 8
    for features in MAPS:
        attention = PerformerAttention(E, H, n_features=10, features=features)
        assert attention(inputs(3, dtype=torch.float32))[1].s.shape == (2, H, 10, E // H)
        assert attention.feature_map.omega.size(1) == (5 if features in ("hyperbolic", "trigonometric") else 10)


# ------------------------------------------------------------------------------------------------------------ the state


def test_features_keep_float32():
    for cast in [torch.nn.Module.half, torch.nn.Module.bfloat16, lambda m: m.to(torch.float16)]:
        attention = PerformerAttention(E, H)
        before = attention.feature_map.omega.clone()
        cast(attention)
        assert attention.q_proj.weight.dtype != torch.float32
        assert torch.equal(attention.feature_map.omega, before)
        assert "omega" in attention.state_dict()
        assert attention.double().feature_map.omega.dtype == torch.float64
        assert attention.half().feature_map.omega.dtype == torch.float32


def test_a_donated_step_allocates_neither_sums_nor_directions():
    for features in MAPS:
        b, h, f, d = 3, 2, 32, 32
        attention = PerformerAttention(h * d, h, features=features, n_features=f)
        state, x = attention.initial_state(b), torch.randn(b, 1, h * d)
        with torch.no_grad(), sequence.donated(), Largest() as largest:
            attention(x, state)
        assert largest.elements < h * f * d / 2  # of hyperbolic features there are half as many directions


# ------------------------------------------------------------------------------------------------------------ redrawing


def test_redrawing_changes_the_features_in_place():
    attention = PerformerAttention(E, H)
    omega, before = attention.feature_map.omega, attention.feature_map.omega.clone()
    redraw(attention)
    assert attention.feature_map.omega is omega
    assert not torch.equal(omega, before)
    other = PerformerAttention(E, H)
    redraw(other)
    assert torch.equal(other.feature_map.omega, omega)
    assert attention.feature_map.draws.item() == 1


@pytest.mark.parametrize("features", MAPS)
def test_redrawing_empties_a_carried_state(features: str):
    for n, given_away in itertools.product([1, 6], [False, True]):
        attention = PerformerAttention(E, H, features=features, chunk_size=4).double()
        x, more = inputs(7), inputs(n)
        with torch.no_grad():
            _, state = attention(x)
            redraw(attention)
            expected, fresh = attention(more)
            with sequence.donated() if given_away else torch.no_grad():
                y, after = attention(more, state)
        torch.testing.assert_close(y, expected)
        assert after.length.tolist() == [7 + n] * 2  # positions go on
        for name in ("s", "z", "m", "drawn"):
            torch.testing.assert_close(getattr(after, name), getattr(fresh, name))


def test_only_rows_from_before_the_redraw_are_emptied():
    attention = PerformerAttention(E, H, chunk_size=4).double()
    x, more = inputs(7), inputs(3)
    with torch.no_grad():
        _, old = attention(x)
        redraw(attention)
        _, new = attention(x)
        mixed = type(old)(*(torch.stack([a[0], b[1]]) for a, b in zip(old, new, strict=True)))
        y, after = attention(more, mixed)
        torch.testing.assert_close(y[0], attention(more)[0][0])
        torch.testing.assert_close(y[1], attention(more, new)[0][1])
        assert after.drawn.tolist() == [1, 1]


def test_compiled_code_sees_a_redraw():
    attention = PerformerAttention(E, H, chunk_size=4).double()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    x = inputs(5)
    with torch.no_grad():
        _, state = attention(x)
        torch.testing.assert_close(compiled(x, state)[0], attention(x, state)[0])
        redraw(attention)
        torch.testing.assert_close(compiled(x, state)[0], attention(x)[0])


# ------------------------------------------------------------------------------------------------ the authors' features


def test_eps_of_the_authors_code():
    """Features of inputs that are large: an eps of 10⁻⁴ is another function, and one of 10⁻²⁰⁰ is none."""
    exact, theirs, tiny = (PerformerAttention(E, H, eps=eps).double() for eps in (0.0, 1e-4, 1e-200))
    for other in (theirs, tiny):
        other.load_state_dict(exact.state_dict())
    x = 6 * inputs(30)
    y = exact(x)[0]
    torch.testing.assert_close(tiny(x)[0], y)
    assert (theirs(x)[0] - y).abs().max() > 0.1
    torch.testing.assert_close(theirs(x)[0], definitions.performer(theirs, x))
    # The last output is that of the authors' code, which takes the maximum of all keys.
    all_keys = PerformerAttention(E, H, causal=False, eps=1e-4).double()
    all_keys.load_state_dict(exact.state_dict())
    torch.testing.assert_close(theirs(x)[0][:, -1], all_keys(x)[0][:, -1])


N_FEATURES = 24


def test_eps_of_relu_features():
    """Theirs: relu(scale · ωᵀx) + 10⁻³."""
    for scale, eps in [
        (1, None),
        (N_FEATURES**-0.5, 1e-3 * N_FEATURES**0.5),
        ((E / H) ** -0.25, 1e-3 * (E / H) ** 0.25),
    ]:
        options = {"causal": False, "features": "relu", "n_features": N_FEATURES}
        attention = PerformerAttention(E, H, **options, eps=eps).double()
        x = inputs(9)
        q, k, v = attention.project(x)
        q, k = ((scale * t @ attention.feature_map.omega.mT).relu() + 1e-3 for t in (q, k))
        weights = q @ k.mT
        y = (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(attention(x)[0], attention.out_proj(y))


def test_default_eps():
    assert {PerformerAttention(E, H, features=features).feature_map.eps for features in MAPS[:3]} == {0}
    assert PerformerAttention(E, H, features="relu").feature_map.eps == 1e-3


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_the_features_have_float32_in_a_module_made_of_fewer_bits():
    """As under `Trainer(precision="bf16-true").init_module()`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        attention = PerformerAttention(E, H)
    finally:
        torch.set_default_dtype(before)
    assert attention.q_proj.weight.dtype == torch.bfloat16
    assert attention.feature_map.omega.dtype == torch.float32
