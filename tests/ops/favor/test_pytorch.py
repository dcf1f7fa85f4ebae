import itertools
import math

import pytest
import torch

from lit_effattn.ops.favor.pytorch import (
    causal_favor,
    draw_omega,
    favor_step,
    favor_sums,
    log_hyperbolic_features,
    log_offset,
    log_positive_features,
    positive_favor,
    read_favor_sums,
    relu_features,
    trigonometric_features,
)
from tests.support.rounding import rounding
from tests.support.tensor_sizes import Largest, largest_in_training

B, H, F, D = 2, 3, 5, 4


def favor(log_q: torch.Tensor, log_k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every query sees every key."""
    return read_favor_sums(log_q, *favor_sums(log_k, v))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------- the random directions


def test_blocks_are_orthogonal_and_lengths_are_those_of_gaussians():
    for n, dim in ((4, 4), (11, 4), (3, 5), (2, 1)):
        omega = draw_omega(3000, n, dim, generator=generator())
        assert omega.shape == (3000, n, dim)
        for block in omega.split(dim, 1):
            products = block @ block.mT
            off = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
            assert off.abs().max() < 1e-12
        squares = omega.square().sum(-1).flatten(0, 1)  # χ² of `dim` degrees: mean dim, variance 2 dim
        assert squares.mean().item() == pytest.approx(dim, rel=0.05)
        assert squares.var().item() == pytest.approx(2 * dim, rel=0.15)


def test_blocks_and_heads_are_independent():
    omega = draw_omega(20000, 4, 2, generator=generator())  # two blocks of two
    for a, b in ((omega[:, 0], omega[:, 2]), (omega[:-1, 0], omega[1:, 0])):
        assert abs((a * b).sum(-1).mean().item()) < 4 * math.sqrt(2 / 20000)  # variance of ωᵀω' is D


def test_independent_directions_are_gaussian():
    omega = draw_omega(1, 20000, 3, orthogonal=False, generator=generator())[0]
    torch.testing.assert_close(omega.T @ omega / 20000, torch.eye(3, dtype=torch.float64), rtol=0, atol=0.05)


def test_regular_norms_and_a_generator():
    for orthogonal in (True, False):
        omega = draw_omega(2, 7, 3, orthogonal=orthogonal, norms="sqrt_d", generator=generator())
        torch.testing.assert_close(omega.norm(dim=-1), torch.full((2, 7), math.sqrt(3), dtype=torch.float64))
    a, b, c = (draw_omega(2, 5, 3, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


# ---------------------------------------------------------------------------------------------------- the feature maps


def exponentials(log_map):
    return lambda x, omega: log_map(x, omega).exp()


UNBIASED = {
    "positive": (exponentials(log_positive_features), 1),
    "hyperbolic": (exponentials(log_hyperbolic_features), 2),
    "trigonometric": (trigonometric_features, 2),
}


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize(("orthogonal", "n", "angle"), [(True, 9, 0.4), (False, 4, 2.0)])
def test_estimates_of_the_exponential_are_unbiased(name: str, orthogonal: bool, n: int, angle: float):
    phi, per_omega = UNBIASED[name]
    draws, dim = 20000, 4
    omega = draw_omega(draws, n, dim, orthogonal=orthogonal, generator=generator())
    x = torch.tensor([0.8, 0.4, -0.2, 0.4], dtype=torch.float64)
    across = torch.tensor([-0.4, 0.8, 0.4, 0.2], dtype=torch.float64)  # as long, at a right angle
    y = math.cos(angle) * x + math.sin(angle) * across
    a, b = (phi(t.expand(1, draws, 1, dim), omega) for t in (x, y))
    assert a.shape == (1, draws, 1, per_omega * n)
    estimates = (a * b).sum(-1).flatten()
    score = (estimates.mean() - math.exp(x @ y)) / (estimates.std() / math.sqrt(draws))
    assert abs(score.item()) < 4


def test_logs_of_positive_features_are_a_product_and_an_offset():
    x, omega = torch.randn(B, H, 3, D, dtype=torch.float64), draw_omega(H, F, D, generator=generator())
    logs = torch.einsum("bhnd,hfd->bhnf", x, omega)
    for features, product in ((log_positive_features, logs), (log_hyperbolic_features, torch.cat([logs, -logs], -1))):
        expected = product - x.square().sum(-1, keepdim=True) / 2 - math.log(product.size(-1)) / 2
        torch.testing.assert_close(features(x, omega), expected)
        torch.testing.assert_close(product + log_offset(x, product.size(-1))[..., None], expected)


def test_relu_features_by_hand():
    omega = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0], [0.0, 0.0]]])
    x = torch.tensor([[[[3.0, -1.0]]]])
    expected = torch.tensor([[[[3.0, 0.0, 0.0, 0.0]]]]) + 1e-3
    torch.testing.assert_close(relu_features(x, omega), expected / 2)


# ------------------------------------------------------------------------------------------------------- the attention


def logs(n: int, spread: float = 1.0, f: int = F, b: int = B, h: int = H) -> torch.Tensor:
    return spread * torch.randn(b, h, n, f, dtype=torch.float64)


def values(n: int, b: int = B, h: int = H) -> torch.Tensor:
    return torch.randn(b, h, n, D, dtype=torch.float64)


def empty(f: int = F, b: int = B, h: int = H, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return (
        torch.zeros(b, h, f, D, dtype=dtype),
        torch.zeros(b, h, f, dtype=dtype),
        torch.full((b, h, f), -torch.inf, dtype=dtype),
    )


def by_hand(log_q, log_k, v, causal: bool) -> torch.Tensor:
    """Softmax over keys of log Σ_f φ_f(q) φ_f(k), which no norm takes out of range."""
    log_weights = (log_q[:, :, :, None] + log_k[:, :, None]).logsumexp(-1)  # (B, H, N, M)
    if causal:
        future = torch.ones(log_weights.shape[-2:], dtype=torch.bool).triu(1)
        log_weights = log_weights.masked_fill(future, -torch.inf)
    return log_weights.softmax(-1) @ v


@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0])
def test_causal_equals_the_definition(spread: float):
    for n, chunk_size in itertools.product((1, 7, 8, 9, 23), (1, 8, 64)):
        q, k, v = logs(n, spread), logs(n, spread), values(n)
        y, s, z, m = causal_favor(q, k, v, *empty(), chunk_size=chunk_size)
        torch.testing.assert_close(y, by_hand(q, k, v, causal=True))
        torch.testing.assert_close(m, k.amax(2))
        scaled = (k - k.amax(2, keepdim=True)).exp()
        torch.testing.assert_close(z, scaled.sum(2))
        torch.testing.assert_close(s, torch.einsum("bhnf,bhnd->bhfd", scaled, v))
    q, k, v = logs(6, spread), logs(9, spread), values(9)
    torch.testing.assert_close(favor(q, k, v), by_hand(q, k, v, causal=False))


@pytest.mark.parametrize("in_place", [False, True])
def test_going_on_from_the_sums(in_place: bool):
    q, k, v = logs(17, 300.0), logs(17, 300.0), values(17)
    _, *sums = causal_favor(q[:, :, :7], k[:, :, :7], v[:, :, :7], *empty(), chunk_size=4)
    parts = []
    for i in range(7, 11):
        before = [t.clone() for t in sums]
        y, *after = favor_step(*(t[:, :, i : i + 1] for t in (q, k, v)), *sums, in_place=in_place)
        assert all((a is b) == in_place for a, b in zip(after, sums, strict=True))
        assert in_place or all(torch.equal(a, b) for a, b in zip(sums, before, strict=True))
        parts.append(y)
        sums = after
    parts.append(causal_favor(q[:, :, 11:], k[:, :, 11:], v[:, :, 11:], *sums, chunk_size=4)[0])
    torch.testing.assert_close(torch.cat(parts, 2), by_hand(q, k, v, causal=True)[:, :, 7:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_large_norms_in_float32(causal: bool, order: str):
    """Inputs × 30; rising keys are those that a maximum at a chunk's border underflows for."""
    n, f = 200, 16
    omega = draw_omega(1, f, D, generator=generator())
    q, k = (30 * torch.randn(2, 1, n, D, generator=generator(i), dtype=torch.float64) for i in (1, 2))
    k = k.gather(2, k.norm(dim=-1, keepdim=True).argsort(2, order == "rising").expand_as(k))
    log_q, log_k = (log_positive_features(t * D**-0.25, omega).float() for t in (q, k))
    log_q.requires_grad_(), log_k.requires_grad_()
    v = values(n, 2, 1)
    sums = empty(f, 2, 1, torch.float32)
    y = causal_favor(log_q, log_k, v.float(), *sums)[0] if causal else favor(log_q, log_k, v.float())
    expected = by_hand(log_q.double(), log_k.double(), v, causal)
    largest = log_q.abs().max().item() + log_k.abs().max().item()  # of an exponent: its rounding is one of the weight
    tolerance = rounding(torch.float32, 1, largest)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.square().sum(), (log_q, log_k)))


def test_padding_is_nothing_and_rows_without_keys_give_0():
    q, k, v = (t.requires_grad_() for t in (logs(9, 300.0), logs(9, 300.0), values(9)))
    there = torch.tensor([0, 5])
    masked = k.masked_fill((torch.arange(9) >= there[:, None])[:, None, :, None], -torch.inf)
    y, s, z, m = causal_favor(q, masked, v, *empty(), chunk_size=4)
    assert (y[0] == 0).all()
    torch.testing.assert_close(y[1:, :, :5], by_hand(q[1:, :, :5], k[1:, :, :5], v[1:, :, :5], causal=True))
    assert all((t[0] == e[0]).all() for t, e in zip((s, z, m), empty(), strict=True))
    both = favor(q, masked, v)
    assert (both[0] == 0).all()
    torch.testing.assert_close(both[1:], by_hand(q[1:], k[1:, :, :5], v[1:, :, :5], causal=False))
    for out in (y, both):
        for g in torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True):
            assert g.isfinite().all()
            assert (g[0] == 0).all()


def steep(n: int, at: int, rise: float = 1000.0, b: int = 1, h: int = 1, f: int = 3) -> tuple[torch.Tensor, ...]:
    """Return logs whose first feature rises from a position on, and falls as much in queries: all features count."""
    log_q, log_k = logs(n, 1, f, b, h), logs(n, 1, f, b, h)
    log_q[..., 0] -= rise
    log_k[:, :, at:, 0] += rise
    return log_q, log_k


@pytest.mark.parametrize(("n", "at"), [(1, 9), (4, 3), (5, 9), (7, 1), (7, 6)])
def test_gradients(n: int, at: int):
    """Chunks of 4, and keys that rise far at one of their positions, or nowhere."""
    q, k = (t.requires_grad_() for t in steep(n, at))
    v = values(n, 1, 1).requires_grad_()
    _, *sums = causal_favor(logs(3, 1, 3, 1, 1), logs(3, 1, 3, 1, 1), values(3, 1, 1), *empty(3, 1, 1))
    s, z = (t.requires_grad_() for t in sums[:2])

    def causal(q, k, v, s, z):
        return causal_favor(q, k, v, s, z, sums[2], chunk_size=4)[0]

    assert torch.autograd.gradcheck(causal, (q, k, v, s, z))
    assert torch.autograd.gradcheck(favor, (q, k, v))
    one = tuple(t[:, :, :1].detach().requires_grad_() for t in (q, k, v))
    assert torch.autograd.gradcheck(lambda q, k, v, s, z: favor_step(q, k, v, s, z, sums[2])[0], (*one, s, z))


def gradients_of(function, inputs, weights, m, **options):
    """Return what `function` returns, and the gradients of its sum with `weights`, m being what it is."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    y, s, z, after = function(*inputs, m, **options)
    assert not after.requires_grad
    return y, s, z, after, *torch.autograd.grad((y, s, z), inputs, weights)


@pytest.mark.parametrize("rise", [0.0, 100.0])
def test_gradients_in_float32_are_near_those_in_float64(rise: float):
    n = 300
    exact = [*steep(n, 70, rise, 1, 1, F), values(n, 1, 1)]
    *sums, m = (t[:1, :1] for t in causal_favor(logs(3), logs(3), values(3), *empty())[1:])
    weights = [values(n, 1, 1), *(torch.randn_like(t) for t in sums)]
    expected = gradients_of(causal_favor, [*exact, *sums], weights, m)
    found = gradients_of(causal_favor, [t.float() for t in (*exact, *sums)], [t.float() for t in weights], m.float())
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        a, b = (t.double().nan_to_num(neginf=-1e3) for t in (a, b))
        assert (a - b).norm() < rounding(
            torch.float32, n, 1 + rise / 10
        ) * b.norm()  # exponents up to `rise` are rounded


@pytest.mark.parametrize("chunk_size", [8, 64])
def test_a_later_key_changes_no_bit_however_far_it_rises(chunk_size: int):
    n, f = 100, 16
    q, k, v = (t.float() for t in (logs(n, 3, f, 1, 2), logs(n, 3, f, 1, 2), values(n, 1, 2)))
    y = causal_favor(q, k, v, *empty(f, 1, 2, torch.float32), chunk_size=chunk_size)[0]
    for t in (0, 5, 63, 64, 99):
        for rise in (1e-3, 45.0, 1e4, -1e4):
            changed = k.clone()
            changed[:, 0, t] += rise
            z = causal_favor(q, changed, v, *empty(f, 1, 2, torch.float32), chunk_size=chunk_size)[0]
            assert torch.equal(z[:, :, :t], y[:, :, :t])
            torch.testing.assert_close(z[:, 1], y[:, 1])  # another head
            assert t == 0 or not torch.equal(z[:, 0, t:], y[:, 0, t:])  # at 0 all of its keys are as far above


def test_directions_with_a_gradient_are_refused():
    q, omega = logs(5), torch.randn(H, F, F, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match=r"omega requires a gradient.*detach"):
        positive_favor(q, q, values(5), omega, *empty())


def test_nothing_of_size_n_squared_nor_n_f_d_is_made():
    n, f, d, chunk_size = 1024, 16, 16, 32
    q, k, v = torch.randn(1, 1, n, f), torch.randn(1, 1, n, f), torch.randn(1, 1, n, d)
    state = torch.zeros(1, 1, f, d), torch.zeros(1, 1, f), torch.full((1, 1, f), -torch.inf)
    causal = largest_in_training(lambda *a: causal_favor(*a, *state, chunk_size=chunk_size)[0], q, k, v)
    assert causal <= n * chunk_size  # far below n² and n f d
    assert largest_in_training(favor, q, k, v) <= n * (max(f, d) + 1)


def test_a_step_in_place_allocates_no_sums():
    q, k, v = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)
    sums = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 64), torch.full((1, 1, 64), -torch.inf)
    with Largest() as largest, torch.no_grad():
        favor_step(q, k, v, *sums, in_place=True)
    assert largest.elements <= 2 * 64
