"""Errors of the kernel exp(x·y) by random features, against the paper's closed forms."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from lit_effattn.ops.favor.pytorch import (
    draw_omega,
    log_hyperbolic_features,
    log_positive_features,
    trigonometric_features,
)


def phi(name: str, x: Tensor, omega: Tensor) -> Tensor:
    if name == "trigonometric":
        return trigonometric_features(x, omega)
    return (log_positive_features if name == "positive" else log_hyperbolic_features)(x, omega).exp()


def squared_errors(features: str, x: Tensor, y: Tensor, n: int, draws: int, orthogonal: bool) -> Tensor:
    """Return (φ(x)·φ(y) − exp(x·y))² of every draw of n random vectors, (draws,)."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for part in torch.arange(draws).split(10_000):  # in memory at once
        omega = draw_omega(len(part), n, x.numel(), orthogonal=orthogonal, generator=generator)
        a, b = (phi(features, t.expand(1, len(part), 1, -1), omega) for t in (x, y))
        found.append(((a * b).sum(-1).flatten() - (x @ y).exp()).square())
    return torch.cat(found)


def closed_form(name: str, x: Tensor, y: Tensor, n: int) -> float:
    """Return the mean squared error with n independent random vectors (Choromanski et al. 2020, lemma 2)."""
    together, apart = ((x + y).square().sum().item(), (x - y).square().sum().item())
    kernel = math.exp(x @ y)
    if name == "trigonometric":
        return math.exp(together) * kernel**-2 * (1 - math.exp(-apart)) ** 2 / (2 * n)
    positive = math.exp(together) * kernel**2 * (1 - math.exp(-together)) / n
    return positive if name == "positive" else positive * (1 - math.exp(-together)) / 2


def orthogonal_bound(x: Tensor, y: Tensor, n: int) -> float:
    """Return what the error of n ≤ D orthogonal vectors' positive features is at most (theorem 2)."""
    gain = (math.exp(x @ y) - math.exp(-(x.square().sum() + y.square().sum()) / 2)) ** 2
    return closed_form("positive", x, y, n) - 2 * (n - 1) / (n * (x.numel() + 2)) * gain


def pair(cosine: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([0.5, 0, 0, 0], dtype=torch.float64)
    y = 0.5 * torch.tensor([cosine, math.sqrt(1 - cosine**2), 0, 0], dtype=torch.float64)
    return x, y


def test_errors_are_those_of_the_closed_forms():
    for name, cosine in itertools.product(["positive", "hyperbolic", "trigonometric"], [0.7, -0.7]):
        x, y = pair(cosine)
        errors = squared_errors(name, x, y, 3, 100_000, orthogonal=False)
        score = (errors.mean() - closed_form(name, x, y, 3)) / (errors.std() / math.sqrt(len(errors)))
        assert abs(score.item()) < 4


def test_orthogonal_vectors_keep_their_bound():
    for cosine in [0.7, 0.0]:
        x, y = pair(cosine)
        errors = squared_errors("positive", x, y, 4, 100_000, orthogonal=True)
        bound = orthogonal_bound(x, y, 4)
        assert bound < closed_form("positive", x, y, 4)
        assert errors.mean() < bound


def test_closed_form_of_positive_features_by_integration():
    """Of one feature: E exp(2 ωᵀz − ‖x‖² − ‖y‖²) − exp(2 x·y), over the component of ω along z."""
    for cosine in [0.7, 0.0]:
        x, y = pair(cosine)
        along = torch.linspace(-12, 12, 20001, dtype=torch.float64)
        density = (-along.square() / 2).exp() / math.sqrt(2 * math.pi)
        z = (x + y).norm()
        second = torch.trapezoid(density * (2 * along * z - x.square().sum() - y.square().sum()).exp(), along)
        assert closed_form("positive", x, y, 1) == pytest.approx(float(second - (2 * x @ y).exp()), rel=1e-6)
