"""Continuous attention: a signal on [0, 1] instead of a row of vectors (Martins et al. 2020; Martins et al. 2022)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Grid = Literal["midpoints", "ends"]

_FLOOR = 1e-3  # share of the samples that is spread evenly, so that every bin is sampled at times


def gaussian(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the density of the normal distribution N(mean, variance) at t. The arguments are broadcast."""
    return torch.exp(-((t - mean) ** 2) / (2 * variance)) / torch.sqrt(2 * math.pi * variance)


@lru_cache(maxsize=64)
def basis_of(
    n_basis: int, widths: tuple[float, ...], *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the basis ψ_j(t) = N(t; μ_j, σ_j²): its centres μ, (n_basis / W,), and its variances σ², (W,).

    The centres are even on [0, 1], and the same for each of the W widths; all functions of one width come before those
    of the next. All callers get the same tensors: see `fit_matrices`.
    """
    with torch.inference_mode(False):
        centres = torch.linspace(0, 1, n_basis // len(widths), dtype=torch.float64, device=device)
        variances = torch.tensor([width**2 for width in widths], dtype=torch.float64, device=device)
        return centres.to(dtype), variances.to(dtype)


def expected_basis(mean: Tensor, variance: Tensor, basis: tuple[Tensor, Tensor]) -> Tensor:
    """Return the basis functions' expectations under normal densities of t.

        E_{N(t; μ, σ²)}[ψ_j(t)] = N(μ; μ_j, σ² + σ_j²)                 Martins et al. 2022, section 2.2

    The distances do not depend on the width, nor the variances on the centre, so only the exponents and their
    exponentials are computed for every basis function.

    Args:
        mean: μ, any shape.
        variance: σ², of the same shape; 0 evaluates the basis at μ.
        basis: Centres and variances: see `basis_of`.

    Returns:
        (…, n_basis).
    """
    centres, variances = basis
    square = (mean[..., None] - centres).square()  # (…, n_basis / W)
    total = variance[..., None] + variances  # (…, W)
    height = -torch.log(2 * math.pi * total) / 2
    exponent = torch.addcmul(height[..., None], square[..., None, :], (-0.5 / total)[..., None])
    return exponent.exp().flatten(-2)  # (…, W, n_basis / W) -> (…, n_basis)


def evaluate_signal(coefficients: Tensor, times: Tensor, basis: tuple[Tensor, Tensor]) -> Tensor:
    """Return the signal X̄(t) = Bᵀ ψ(t) (Martins et al. 2022, section 3.1).

    Args:
        coefficients: B, (B, n_basis, E).
        times: (T,), or (B, T) for times of each row.
        basis: Centres and variances: see `basis_of`.

    Returns:
        (B, T, E).
    """
    return expected_basis(times, torch.zeros_like(times), basis) @ coefficients


def even_times(n: int, grid: Grid = "midpoints", *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the midpoints, or with "ends" the right ends, of n equal parts of [0, 1]: (n,)."""
    return (torch.arange(n, dtype=dtype, device=device) + (1 if grid == "ends" else 0.5)) / n


def ridge(psi: Tensor, penalty: float) -> Tensor:
    """Return the matrix that multivariate ridge regression multiplies its targets by.

        B = G X = argmin_B ‖Ψ B − X‖² + λ ‖B‖²,  G = (ΨᵀΨ + λ I)⁻¹ Ψᵀ           Martins et al. 2022, section 3.1

    Args:
        psi: Ψ, (T, n_basis), the basis at the targets' times. In float64: ΨᵀΨ is ill-conditioned.
        penalty: λ, above 0.

    Returns:
        (n_basis, T).
    """
    gram = psi.T @ psi + penalty * torch.eye(psi.size(1), dtype=psi.dtype, device=psi.device)
    return torch.cholesky_solve(psi.T, torch.linalg.cholesky(gram))


@lru_cache(maxsize=64)
def fit_matrices(
    n_old: int,
    n_new: int,
    tau: float,
    n_basis: int,
    widths: tuple[float, ...],
    penalty: float,
    dtype: torch.dtype,
    device: torch.device,
    grid: Grid = "midpoints",
) -> tuple[Tensor, Tensor]:
    """Return the matrices that fit a signal to n_old vectors, evenly on [0, τ], and n_new, evenly on [τ, 1].

        B' = G [X_old; X_new];  if X_old is the old signal at even times, B' = G_old Ψᵀ B + G_new X_new

        "midpoints":  old vector i at τ (i − ½) / n_old,  new vector i at τ + (1 − τ) (i − ½) / n_new,  i = 1, 2, …
        "ends":       old vector i at τ i / n_old,        new vector i at τ + (1 − τ) i / n_new

    As in the authors' code the signal is also fitted to zeros on [−½, 0] and [1, 1½], as dense as the n = n_old + n_new
    targets on [0, 1]; their columns are left out, since they are multiplied by 0. With "midpoints" the zeros are at
    −(i − ½) / n and 1 + (i − ½) / n, with "ends" they are those of 2n even points from −½ + 1/(n + n_new) to
    1½ − 1/(n + n_new) that are outside [0, 1], as in the authors' code. Their first fit, n_old = 0, is "midpoints".
    Solved in float64, once for each choice of arguments. All callers share the results, so they must not be changed in
    place. Do not call this function in compiled code.

    Args:
        n_old: Vectors on [0, τ]; 0: the new vectors are on all of [0, 1].
        n_new: Vectors on [τ, 1].
        tau: τ.
        n_basis: Number of basis functions: see `basis_of`.
        widths: Widths of the basis functions.
        penalty: λ of `ridge`.
        dtype: Type of the results.
        device: Device of the results.
        grid: Where the vectors are placed if n_old is not 0.

    Returns:
        G, (n_basis, n_old + n_new), and G_old Ψᵀ, (n_basis, n_basis).
    """
    cpu = torch.device("cpu")
    # Not inference tensors: they are cached, and training may use those that validation made.
    with torch.inference_mode(False), torch.no_grad():
        start = tau if n_old else 0.0
        n, grid = n_old + n_new, grid if n_old else "midpoints"
        old, new = (even_times(count, grid, dtype=torch.float64, device=cpu) for count in (n_old, n_new))
        if grid == "ends":
            shift = 1 / (n + n_new)
            around = torch.linspace(shift - 0.5, 1.5 - shift, 2 * n, dtype=torch.float64, device=cpu)
            zeros = around[(around < 0) | (around > 1)]
        else:
            outside = even_times(n, dtype=torch.float64, device=cpu)[: (n + 1) // 2]
            zeros = torch.cat([-outside, 1 + outside])
        basis = basis_of(n_basis, widths, dtype=torch.float64, device=cpu)

        def at(times: Tensor) -> Tensor:
            return expected_basis(times, torch.zeros_like(times), basis)

        fit = ridge(at(torch.cat([start * old, start + (1 - start) * new, zeros])), penalty)[:, :n].contiguous()
        return fit.to(device, dtype), (fit[:, :n_old] @ at(old)).to(device, dtype)


def normal_masses(mean: Tensor, variance: Tensor, n_bins: int) -> Tensor:
    """Return the mass of normal densities in each of n_bins equal parts of [0, 1].

    `mean` and `variance` (…,) -> (…, n_bins), ∫ N(t; mean, variance) dt over each part.
    """
    edges = torch.linspace(0, 1, n_bins + 1, dtype=mean.dtype, device=mean.device)
    return torch.erf((edges - mean[..., None]) / torch.sqrt(2 * variance[..., None])).diff(dim=-1) / 2


def quantiles(histogram: Tensor, levels: Tensor) -> Tensor:
    """Return the quantiles `levels` of a histogram, with its mass evenly distributed within each bin.

    A thousandth of the mass is spread evenly over all bins, so that no time is impossible. If the mass is 0, the
    distribution is uniform.

    Args:
        histogram: (B, n_bins), not negative, of equal parts of [0, 1].
        levels: (B, T), strictly between 0 and 1.

    Returns:
        (B, T), rising where `levels` is.
    """
    n_bins = histogram.size(1)
    total = histogram.sum(1, keepdim=True)
    share = histogram / torch.where(total > 0, total, 1)
    share = torch.where(total > 0, (1 - _FLOOR) * share + _FLOOR / n_bins, 1 / n_bins)  # (B, n_bins)
    end = share.cumsum(1)
    # The last end is 1 except for rounding: levels beyond it are in the last bin.
    number = torch.searchsorted(end.detach(), levels, right=True).clamp(max=n_bins - 1)  # (B, T)
    end, share = end.gather(1, number), share.gather(1, number)
    return (number + 1 + (levels - end) / share).clamp(0, n_bins) / n_bins


def left_edges(histogram: Tensor, levels: Tensor) -> Tensor:
    """Return the left edges of the bins in which the quantiles `levels` of a histogram lie. It has no gradient.

    With random levels, even on [0, 1], the bins are drawn with repetition, each by its mass. No mass is spread evenly;
    if there is none, all bins are as likely.

    Args:
        histogram: (B, n_bins), not negative, of equal parts of [0, 1].
        levels: (B, T), strictly between 0 and 1.

    Returns:
        (B, T), rising where `levels` is.
    """
    n_bins, total = histogram.size(1), histogram.detach().sum(1, keepdim=True)
    end = torch.where(total > 0, histogram.detach(), 1).cumsum(1)  # (B, n_bins)
    # Where rounding leaves a level at the total, it is in the last bin that has a mass.
    number = torch.searchsorted(end, levels * end[:, -1:], right=True)
    last = (end < end[:, -1:]).sum(1, keepdim=True)
    return torch.minimum(number, last).to(histogram.dtype) / n_bins


def pseudorandom(counter: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return n numbers in (0, 1) that differ with `counter` (B,), as if drawn independently: (B, n).

    A pure function, as `jitter`, whose numbers are more even than independent ones. Products stay below 2⁶³.
    """
    x = counter[:, None] * 2_592_223 + torch.arange(n, device=counter.device)
    for shift in (16, 15, 16):
        x = x % 2**31
        x = (x ^ (x >> shift)) * 1_812_433_253
    x = x % 2**31
    return (((x ^ (x >> 16)) % 2**22).to(dtype) + 0.5) / 2**22


def jitter(counter: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return n numbers in (0, 1) that differ with `counter` (B,), evenly spread over time: (B, n).

    They are multiples of two irrational numbers modulo 1, computed in integers. A pure function: recomputation gives
    the same numbers.
    """
    # 1/φ and 1/ρ, the golden and the plastic ratio, in units of 2⁻²²: the middles of those are exact in float32.
    steps = counter[:, None] * 2_592_223 + torch.arange(n, device=counter.device) * 3_166_187
    return ((steps % 2**22).to(dtype) + 0.5) / 2**22


def width_divergence(variance: Tensor, width: float) -> Tensor:
    """Return KL(N(μ, σ²) ‖ N(μ, σ₀²)) = ½ (σ²/σ₀² − ln(σ²/σ₀²) − 1), of σ² = `variance` and σ₀ = `width`."""
    ratio = variance / width**2
    return (ratio - torch.log(ratio) - 1) / 2
