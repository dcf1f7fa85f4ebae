import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from lit_effattn.ops.continuous import (
    basis_of,
    evaluate_signal,
    even_times,
    expected_basis,
    fit_matrices,
    gaussian,
    jitter,
    left_edges,
    normal_masses,
    pseudorandom,
    quantiles,
    ridge,
    width_divergence,
)

CPU = torch.device("cpu")
DOUBLE = {"dtype": torch.float64, "device": CPU}
WIDTHS = (0.05, 0.1)


def fit(x: torch.Tensor, n_basis: int, old: torch.Tensor | None = None, tau: float = 0.6, penalty: float = 1e-6):
    """Coefficients (1, n_basis, E) of the signal through `old`, on [0, tau], and `x` (N, E)."""
    n_old = 0 if old is None else len(old)
    matrix, _ = fit_matrices(n_old, len(x), tau, n_basis, WIDTHS, penalty, torch.float64, CPU)
    return (matrix @ (x if old is None else torch.cat([old, x])))[None]


def test_refitting_is_sampling_and_fitting():
    b, x = torch.randn(10, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    old = evaluate_signal(b[None], even_times(7, **DOUBLE), basis_of(10, WIDTHS, **DOUBLE))[0]
    matrix, of_old = fit_matrices(7, 5, 0.6, 10, WIDTHS, 0.1, torch.float64, CPU)
    torch.testing.assert_close(of_old @ b + matrix[:, 7:] @ x, fit(x, 10, old, penalty=0.1)[0])


def test_gaussian():
    t, mean, variance = torch.randn(3, 50, dtype=torch.float64).unbind()
    expected = torch.distributions.Normal(mean, variance.abs().sqrt()).log_prob(t).exp()
    torch.testing.assert_close(gaussian(t, mean, variance.abs()), expected)


def test_the_basis():
    centres, variances = basis_of(6, (0.1, 0.3), **DOUBLE)
    torch.testing.assert_close(centres, torch.tensor([0, 0.5, 1], dtype=torch.float64))
    torch.testing.assert_close(variances.sqrt(), torch.tensor([0.1, 0.3], dtype=torch.float64))
    # Each function's integral is 1, and so is its height times its width.
    at_centres = expected_basis(centres, torch.zeros_like(centres), (centres, variances))  # (3, 6)
    heights = torch.stack([at_centres[:, :3].diagonal(), at_centres[:, 3:].diagonal()])
    torch.testing.assert_close(heights * variances.sqrt()[:, None], torch.full((2, 3), 0.3989422804014327).double())


@pytest.mark.parametrize(
    ("mean", "deviation", "widths"),
    [(0.3, 0.02, (0.01, 0.05)), (0.97, 0.05, (0.005, 0.01)), (0.0, 0.8, (0.3,)), (1.0, 0.001, (0.01, 0.05))],
)
def test_expectations_equal_quadrature(mean: float, deviation: float, widths: tuple[float, ...]):
    """E[ψ_j] = ∫ N(t; μ, σ²) ψ_j(t) dt, by Gauss and Legendre on many short intervals around the density."""
    basis = basis_of(8 * len(widths), widths, **DOUBLE)
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(20))
    edges = torch.linspace(mean - 12 * deviation, mean + 12 * deviation, 4001, dtype=torch.float64)
    half = (edges[1:] - edges[:-1])[:, None] / 2
    t = ((edges[1:] + edges[:-1])[:, None] / 2 + half * nodes).flatten()
    density = torch.exp(-(((t - mean) / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi))
    centres, variances = basis[0].repeat(len(widths)), basis[1].repeat_interleave(8)
    psi = torch.exp(-((t[:, None] - centres) ** 2) / (2 * variances)) / torch.sqrt(2 * math.pi * variances)
    expected = ((half * weights).flatten() * density) @ psi
    mean = torch.tensor([mean], dtype=torch.float64)
    found = expected_basis(mean, torch.tensor([deviation**2], dtype=torch.float64), basis)[0]
    assert (found - expected).abs().max() <= 1e-12 * max(1, expected.max())


def test_ridge_equals_scikit_learn():
    for n, penalty in itertools.product([1, 2, 7, 40], [0.5, 1.0]):
        basis = basis_of(16, (0.01, 0.05), **DOUBLE)
        times, targets = torch.rand(n, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64)
        psi = expected_basis(times, torch.zeros_like(times), basis)
        expected = Ridge(alpha=penalty, fit_intercept=False, solver="svd").fit(psi.numpy(), targets.numpy()).coef_.T
        np.testing.assert_allclose((ridge(psi, penalty) @ targets).numpy(), expected, rtol=1e-8, atol=1e-10)


def test_the_fit_equals_scikit_learn_with_zeros_beyond_the_ends():
    for n_old, n_new in [(0, 1), (0, 5), (0, 8), (3, 4), (4, 5)]:
        tau, n = 0.75, n_old + n_new
        x = np.random.default_rng(0).standard_normal((n, 2))
        start = tau if n_old else 0
        inside = [tau * (i + 0.5) / n_old for i in range(n_old)]
        inside += [start + (1 - start) * (i + 0.5) / n_new for i in range(n_new)]
        beyond = [(i + 0.5) / n for i in range(n) if (i + 0.5) / n <= 0.5]
        assert len(beyond) == (n + 1) // 2
        times = np.array(inside + [-t for t in beyond] + [1 + t for t in beyond])
        centres = np.tile(np.linspace(0, 1, 5), 2)
        deviations = np.repeat([0.1, 0.2], 5)
        psi = np.exp(-(((times[:, None] - centres) / deviations) ** 2) / 2) / (deviations * math.sqrt(2 * math.pi))
        targets = np.concatenate([x, np.zeros((2 * len(beyond), 2))])
        expected = Ridge(alpha=1.0, fit_intercept=False, solver="svd").fit(psi, targets).coef_.T
        matrix, _ = fit_matrices(n_old, n_new, tau, 10, (0.1, 0.2), 1.0, torch.float64, CPU)
        np.testing.assert_allclose(matrix.numpy() @ x, expected, rtol=1e-9, atol=1e-11)


def smooth(t: torch.Tensor) -> torch.Tensor:
    """Three functions that leave [0, 1] smoothly: beyond, the signal is fitted to 0."""
    return torch.stack([torch.sin(5 * t), torch.cos(3 * t), t * (1 - t)], 1) * torch.sin(math.pi * t)[:, None] ** 3


def test_a_smooth_signal_is_recovered():
    for n in [100, 101]:
        times = even_times(n, **DOUBLE)
        b = fit(smooth(times), 64)
        between = torch.linspace(0.02, 0.98, 333, dtype=torch.float64)
        assert (evaluate_signal(b, between, basis_of(64, WIDTHS, **DOUBLE))[0] - smooth(between)).abs().max() < 2e-3


def test_old_times_move_towards_the_past():
    """After an update X̄(τ t) is what X̄(t) was, and on [τ, 1] is the new segment."""
    basis, tau = basis_of(128, WIDTHS, **DOUBLE), 0.6
    first = fit(smooth(even_times(200, **DOUBLE)), 128)
    old = evaluate_signal(first, even_times(150, **DOUBLE), basis)[0]
    second = fit(-smooth(even_times(100, **DOUBLE)), 128, old, tau)
    t = torch.linspace(0.03, 0.97, 100, dtype=torch.float64)
    assert (evaluate_signal(second, tau * t, basis) - evaluate_signal(first, t, basis)).abs().max() < 5e-3
    assert (evaluate_signal(second, tau + (1 - tau) * t, basis)[0] + smooth(t)).abs().max() < 5e-3


def test_times_of_each_row():
    basis, b = basis_of(6, (0.2,), **DOUBLE), torch.randn(3, 6, 2, dtype=torch.float64)
    times = torch.rand(3, 4, dtype=torch.float64)
    expected = torch.cat([evaluate_signal(b[i : i + 1], times[i], basis) for i in range(3)])
    torch.testing.assert_close(evaluate_signal(b, times, basis), expected)


def test_the_fit_is_made_once_and_fit_for_training():
    arguments = (3, 4, 0.55, 6, (0.1, 0.2), 1.0, torch.float32, CPU)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        matrix, _ = fit_matrices(*arguments)
    assert matrix is fit_matrices(*arguments)[0]
    x = torch.randn(7, 2, requires_grad=True)
    (matrix @ x).sum().backward()  # a tensor of inference mode cannot be saved for this
    exact, _ = fit_matrices(*arguments[:-2], torch.float64, CPU)
    torch.testing.assert_close(matrix, exact.float(), rtol=0, atol=0)


def test_masses_of_bins():
    mean, variance = torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64) / 10
    found = normal_masses(mean, variance, 7)
    p = torch.distributions.Normal(mean, variance.sqrt())
    for i in range(7):
        torch.testing.assert_close(found[..., i], p.cdf(torch.tensor((i + 1) / 7)) - p.cdf(torch.tensor(i / 7)))


def test_quantiles_equal_interpolation():
    histogram = torch.tensor([[0.0, 3, 1, 0, 6], [2, 2, 2, 2, 2], [0, 0, 0, 0, 0]], dtype=torch.float64)
    levels = even_times(40, **DOUBLE).repeat(3, 1)
    found = quantiles(histogram, levels)
    for row, masses in enumerate(histogram.numpy()):
        share = masses / masses.sum() if masses.sum() else np.full(5, 0.2)
        ends = np.concatenate([[0], np.cumsum(0.999 * share + 0.001 / 5)])
        np.testing.assert_allclose(found[row].numpy(), np.interp(levels[0], ends, np.linspace(0, 1, 6)), atol=1e-12)
    torch.testing.assert_close(found[1], levels[1])
    assert (found.diff() > 0).all()
    assert ((found[0] > 0.8).sum() - 24).abs() <= 1  # six tenths of 40 in the last fifth


def test_left_edges_skip_bins_without_mass():
    histogram = torch.tensor([[0.0, 2, 2, 0, 4, 0], [0, 0, 0, 0, 0, 0]])
    levels = torch.tensor([[0, 0.24, 0.25, 0.49, 0.5, 1 - 2**-24, 1]]).repeat(2, 1)  # 1: by rounding
    found = left_edges(histogram, levels) * 6
    torch.testing.assert_close(found, torch.tensor([[1.0, 1, 2, 2, 4, 4, 4], [0, 1, 1, 2, 3, 5, 5]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pseudorandom_numbers_look_independent(dtype: torch.dtype):
    u = pseudorandom(torch.arange(200) + 2**40, 500, dtype)
    assert u.dtype == dtype
    assert ((u > 0) & (u < 1)).all()
    assert abs(u.mean() - 0.5) < 0.003  # three standard deviations
    counts = torch.stack([torch.histc(row.float(), 10, 0, 1) for row in u])  # (200, 10), of 50 each
    chi = ((counts - 50) ** 2 / 50).sum(1)  # 9 degrees of freedom; jitter's are near 0
    assert 8 < chi.mean() < 10
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 0.01
    assert torch.equal(pseudorandom(torch.tensor([5, 9]), 7, dtype)[1], pseudorandom(torch.tensor([9]), 7, dtype)[0])


def test_the_ends_of_a_histogram():
    for dtype in [torch.float32, torch.float64]:
        levels = torch.tensor([[0.0, 2**-23, 1 - 2**-24, 1.0]], dtype=dtype)
        for histogram in (
            torch.rand(1, 128, dtype=dtype),
            torch.zeros(1, 128, dtype=dtype),
            torch.eye(128, dtype=dtype)[:1],
        ):
            found = quantiles(histogram, levels)
            assert ((found >= 0) & (found <= 1)).all()


def test_jitter_is_even_within_a_row_and_over_time():
    for dtype in (torch.float32, torch.float64):
        u = jitter(torch.arange(1000) + 2**40, 64, dtype)
        assert u.dtype == dtype
        assert ((u > 0) & (u < 1)).all()
        assert (((u.sum(1) / 64) - 0.5).abs() < 0.05).all()
        assert ((u.mean(0) - 0.5).abs() < 0.01).all()
        for values in (*u[:5], *u[:, :5].T):
            assert (torch.histc(values.float(), 8, 0, 1) > len(values) / 16).all()
    assert torch.equal(
        jitter(torch.tensor([5, 9]), 7, torch.float32)[1], jitter(torch.tensor([9]), 7, torch.float32)[0]
    )
    assert not torch.equal(*jitter(torch.tensor([5, 6]), 7, torch.float32))


def test_divergence_equals_that_of_torch():
    deviation = torch.rand(20, dtype=torch.float64) + 0.01
    mean = torch.rand(20, dtype=torch.float64)
    p, q = (torch.distributions.Normal(mean, s) for s in (deviation, torch.full_like(mean, 0.05)))
    torch.testing.assert_close(width_divergence(deviation**2, 0.05), torch.distributions.kl_divergence(p, q))
    assert width_divergence(torch.tensor(0.05**2, dtype=torch.float64), 0.05).abs() < 1e-15


def test_gradients():
    basis = basis_of(6, (0.1, 0.2), **DOUBLE)
    mean, variance = torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64) + 0.01
    b, times = torch.randn(2, 6, 4, dtype=torch.float64), torch.rand(2, 5, dtype=torch.float64)
    histogram, levels = torch.rand(2, 4, dtype=torch.float64), even_times(5, **DOUBLE).expand(2, -1).clone()
    for function, given in (
        (lambda m, v: expected_basis(m, v, basis), (mean, variance)),
        (lambda b, t: evaluate_signal(b, t, basis), (b, times)),
        (lambda m, v: normal_masses(m, v, 4), (mean, variance)),
        (quantiles, (histogram, levels)),
        (lambda v: width_divergence(v, 0.05), (variance,)),
    ):
        assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in given])
    x = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: fit(x[4:], 6, x[:4]), (x,))
