"""How well random features estimate softmax attention, and their kernel's errors beside the closed forms."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measuring import Spread, at_least
from benchmarks.report import Report, Row
from lit_effattn.ops.favor.pytorch import (
    draw_omega,
    favor,
    log_hyperbolic_features,
    log_positive_features,
    trigonometric_features,
)
from lit_effattn.ops.linear.pytorch import linear_attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORM = 0.6  # of the kernel's x and y; errors of larger ones have tails too heavy to be measured by their mean

NOTES = [
    "output (figure 4 of Choromanski et al. 2020): squared error of non-causal attention's output against softmax "
    "attention's, ÷ the latter's mean square, so that 1 is what an output of 0 would cost; float32, values from "
    "N(0, 1), queries and keys from N(0, scale²). Median (min–max) over the draws, each of new inputs and features, "
    "the same inputs for all kinds and F.",
    f"kernel: mean squared error of φ(x)·φ(y) as an estimate of exp(x·y), ‖x‖ = ‖y‖ = {NORM}, for three angles, "
    "float64, F = D random vectors; its standard error is behind ±.",
    "F: features, what an estimate costs. Hyperbolic and trigonometric ones come in pairs, from F/2 random vectors, "
    "which is what the closed forms count.",
    "closed form: lemma 2 for independent vectors; ≤: theorem 2's upper bound for positive orthogonal ones, F ≤ D. "
    "Hyperbolic and trigonometric orthogonal features have none in the paper.",
    "÷ iid: by the same features' error with independent vectors; output: draw by draw.",
]


class Kind(NamedTuple):
    """A feature map."""

    features: Callable[[Tensor, Tensor], Tensor]
    in_log_space: bool
    per_omega: int  # features from one random vector

    def __call__(self, x: Tensor, omega: Tensor) -> Tensor:
        """Return φ(x), not its logarithm."""
        phi = self.features(x, omega)
        return phi.exp() if self.in_log_space else phi


KINDS = {
    "positive": Kind(log_positive_features, True, 1),
    "hyperbolic": Kind(log_hyperbolic_features, True, 2),
    "trigonometric": Kind(trigonometric_features, False, 2),
}
DIRECTIONS = {"orthogonal": True, "iid": False}
COLORS = {"positive": "C0", "hyperbolic": "C2", "trigonometric": "C3"}

Errors = dict[tuple[float, str, str, int], Spread]  # by scale, features, directions, F


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=at_least(1), default=4096, help="default: %(default)s, the paper's")
    parser.add_argument("--head_dim", type=at_least(2), default=16, help="D; default: %(default)s, the paper's")
    parser.add_argument(
        "--n_features",
        type=_even,
        nargs="+",
        default=[16, 32, 64, 128, 256, 512],
        help="F, even numbers; default: %(default)s",
    )
    parser.add_argument(
        "--scales", type=float, nargs="+", default=[0.5, 1.0], help="of queries and keys; default: %(default)s"
    )
    parser.add_argument("--draws", type=at_least(1), default=15, help="default: %(default)s, the paper's")
    parser.add_argument(
        "--kernel_draws", type=at_least(2), default=200_000, help="of the kernel's table; default: %(default)s"
    )


def _even(text: str) -> int:
    number = at_least(2)(text)
    if number % 2:
        raise argparse.ArgumentTypeError(f"{text} is odd; hyperbolic and trigonometric features come in pairs")
    return number


def run(args: argparse.Namespace) -> Report:
    errors: Errors = {}
    for scale in args.scales:
        errors |= output_errors(scale, args.length, args.head_dim, sorted(args.n_features), args.draws, args.device)
    rows = [_output_row(errors, *key) for key in errors]
    for cosine in (0.9, 0.0, -0.9):
        rows += _kernel_rows(cosine, args.head_dim, args.kernel_draws, args.device)
    return Report("features", rows, NOTES, lambda figure: _plot(figure, errors, args))


# ----------------------------------------------------------------------------------------------- the attention's output


def output_errors(
    scale: float, length: int, dim: int, n_features: list[int], draws: int, device: torch.device
) -> Errors:
    """Measure every kind of features on the same inputs, draw after draw."""
    samples: dict[tuple[float, str, str, int], list[float]] = {}
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 1, length, dim, generator=generator).to(device) for _ in range(3))
        q, k = scale * q, scale * k
        exact = scaled_dot_product_attention(q, k, v)
        q, k = q * dim**-0.25, k * dim**-0.25
        for n in n_features:
            for name, kind in KINDS.items():
                for directions, orthogonal in DIRECTIONS.items():
                    omega = draw_omega(1, n // kind.per_omega, dim, orthogonal=orthogonal, generator=generator)
                    error = (_attention(kind, q, k, v, omega.to(q)) - exact).square().mean() / exact.square().mean()
                    samples.setdefault((scale, name, directions, n), []).append(error.item())
    return {key: Spread(tuple(values)) for key, values in samples.items()}


def _attention(kind: Kind, q: Tensor, k: Tensor, v: Tensor, omega: Tensor) -> Tensor:
    phi_q, phi_k = kind.features(q, omega), kind.features(k, omega)
    return favor(phi_q, phi_k, v) if kind.in_log_space else linear_attention(phi_q, phi_k, v, eps=0)


def _output_row(errors: Errors, scale: float, name: str, directions: str, n: int) -> Row:
    error = errors[scale, name, directions, n]
    return _row(f"output, scale {scale:g}", name, directions, n, error, error / errors[scale, name, "iid", n])


# ----------------------------------------------------------------------------------------------------------- the kernel


def squared_errors(kind: Kind, x: Tensor, y: Tensor, n: int, draws: int, orthogonal: bool) -> Tensor:
    """Return (φ(x)·φ(y) − exp(x·y))² of every draw of n random vectors, (draws,)."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for part in torch.arange(draws).split(10_000):  # in memory at once
        omega = draw_omega(len(part), n, x.numel(), orthogonal=orthogonal, generator=generator).to(x.device)
        a, b = (kind(t.expand(1, len(part), 1, -1), omega) for t in (x, y))
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


def _kernel_rows(cosine: float, dim: int, draws: int, device: torch.device) -> list[Row]:
    x, y = torch.zeros(2, dim, dtype=torch.float64, device=device)
    x[0], y[0], y[1] = NORM, NORM * cosine, NORM * math.sqrt(1 - cosine**2)
    rows = []
    for name, kind in KINDS.items():
        found = {key: squared_errors(kind, x, y, dim, draws, o) for key, o in DIRECTIONS.items()}
        expected = {"iid": closed_form(name, x, y, dim)}
        if name == "positive":
            expected["orthogonal"] = orthogonal_bound(x, y, dim)
        for directions, errors in found.items():
            value = expected.get(directions)
            bound = "≤ " if directions == "orthogonal" else ""
            rows.append(
                _row(
                    f"kernel, x·y = {x @ y:.2g}",
                    name,
                    directions,
                    dim * kind.per_omega,
                    _measured(errors),
                    _ratio(errors, found["iid"]),
                    "—" if value is None else f"{bound}{value:.4g}",
                    "—" if value is None else _measured(errors / value),
                )
            )
    return rows


def _measured(x: Tensor) -> str:
    return f"{x.mean():.4g} ± {x.std() / math.sqrt(len(x)):.2g}"


def _ratio(a: Tensor, b: Tensor) -> str:
    """Return the ratio of two independent means, with its standard error (to first order)."""
    ratio = a.mean() / b.mean()
    relative = torch.stack([t.var() / len(t) / t.mean() ** 2 for t in (a, b)]).sum().sqrt()
    return "1" if a is b else f"{ratio:.4g} ± {ratio * relative:.2g}"


def _row(
    what: str,
    name: str,
    directions: str,
    n: int,
    error: Spread | str,
    to_iid: Spread | str,
    expected: str = "—",
    to_expected: str = "—",
) -> Row:
    return {
        "what": what,
        "features": name,
        "ω": directions,
        "F": n,
        "squared error": error,
        "÷ iid": to_iid,
        "closed form": expected,
        "÷ closed form": to_expected,
    }


# ---------------------------------------------------------------------------------------------------------- the picture


def _plot(figure: Figure, errors: Errors, args: argparse.Namespace) -> None:
    figure.set_size_inches(5 * len(args.scales), 4.5)
    panels = figure.subplots(1, len(args.scales), squeeze=False)[0]
    for axes, scale in zip(panels, args.scales, strict=True):
        for name in KINDS:
            for directions in DIRECTIONS:
                style = "o-" if directions == "orthogonal" else "o--"
                spreads = {n: errors[scale, name, directions, n] for n in sorted(args.n_features)}
                medians = [spread.median for spread in spreads.values()]
                low, high = ([end(spread.samples) for spread in spreads.values()] for end in (min, max))
                axes.plot(list(spreads), medians, style, color=COLORS[name], label=f"{name}, {directions}")
                axes.fill_between(list(spreads), low, high, color=COLORS[name], alpha=0.12, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("features F")
        axes.set_title(f"queries and keys from N(0, {scale:g}²)", fontsize="medium")
    panels[0].set_ylabel("squared error of the output ÷ its mean square")
    panels[0].legend(title="median; band: min to max", fontsize="small")
    figure.suptitle(f"Estimates of softmax attention: L = {args.length}, D = {args.head_dim}, {args.draws} draws")
