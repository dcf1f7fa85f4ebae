"""Estimates of softmax attention by random features: the error of the output by kind and number of features."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measuring import Spread, add_options, at_least
from benchmarks.report import Report, Row, plot_spreads
from lit_effattn.ops.favor.pytorch import (
    draw_omega,
    favor,
    log_hyperbolic_features,
    log_positive_features,
    trigonometric_features,
)
from lit_effattn.ops.linear.pytorch import linear_attention

NOTES = [
    "output (figure 4 of Choromanski et al. 2020): squared error of non-causal attention's output against softmax "
    "attention's, ÷ the latter's mean square, so that an output of 0 has the error 1; float32, values from N(0, 1), "
    "queries and keys from N(0, scale²). Median (min–max) over the draws, each of new inputs and features, the same "
    "inputs for all kinds and F.",
    "F: number of features, the cost of an estimate. Hyperbolic and trigonometric ones come in pairs, from F/2 random "
    "vectors.",
    "÷ iid: divided by the error of the same features with independent vectors, draw by draw.",
]


class Kind(NamedTuple):
    """A feature map."""

    features: Callable[[Tensor, Tensor], Tensor]
    in_log_space: bool
    per_omega: int  # features from one random vector


KINDS = {
    "positive": Kind(log_positive_features, True, 1),
    "hyperbolic": Kind(log_hyperbolic_features, True, 2),
    "trigonometric": Kind(trigonometric_features, False, 2),
}
DIRECTIONS = {"orthogonal": True, "iid": False}

Errors = dict[tuple[float, str, str, int], Spread]  # by scale, features, directions, F


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, 2, length=(4096, "the paper's"), draws=(15, "the paper's"), head_dim=(16, "D, the paper's"))
    about = "F, even numbers; default: %(default)s"
    parser.add_argument("--n_features", type=_even, nargs="+", default=[16, 32, 64, 128, 256, 512], help=about)
    about = "of queries and keys; default: %(default)s"
    parser.add_argument("--scales", type=float, nargs="+", default=[0.5, 1.0], help=about)


def _even(text: str) -> int:
    number = at_least(2)(text)
    if number % 2:
        raise argparse.ArgumentTypeError(f"{text} is odd; hyperbolic and trigonometric features come in pairs")
    return number


def run(args: argparse.Namespace) -> Report:
    errors: Errors = {}
    for scale in args.scales:
        errors |= output_errors(scale, args.length, args.head_dim, sorted(args.n_features), args.draws, args.device)
    rows: list[Row] = [
        {
            "what": f"output, scale {scale:g}",
            "features": name,
            "ω": directions,
            "F": n,
            "squared error": error,
            "÷ iid": error / errors[scale, name, "iid", n],
        }
        for (scale, name, directions, n), error in errors.items()
    ]
    return Report("features", rows, NOTES, partial(_plot, errors, args))


def output_errors(
    scale: float, length: int, dim: int, n_features: list[int], draws: int, device: torch.device
) -> Errors:
    """Measure every kind of features on the same inputs in each draw."""
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


def _plot(errors: Errors, args: argparse.Namespace, figure: Any) -> None:
    panels = {f"queries and keys from N(0, {scale:g}²)": {} for scale in args.scales}
    for (scale, name, directions, n), error in errors.items():
        panels[f"queries and keys from N(0, {scale:g}²)"].setdefault((name, directions), {})[n] = error
    for axes in plot_spreads(figure, panels, "squared error of the output ÷ its mean square"):
        axes.set_yscale("log")
    figure.suptitle(f"Estimates of softmax attention: L = {args.length}, D = {args.head_dim}, {args.draws} draws")
