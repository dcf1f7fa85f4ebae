"""Causal linear attention and Performer on a GPU: Triton's kernels, plain forms, flash-linear-attention, softmax."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring import MIB, Spread, interleaved, peak_bytes, seconds_of
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn.differences import largest_relative_difference
from lit_effattn.ops.favor.dispatch import positive_favor
from lit_effattn.ops.favor.pytorch import draw_omega, log_positive_features, plain_causal_favor
from lit_effattn.ops.linear.dispatch import elu_linear_attention
from lit_effattn.ops.linear.pytorch import plain_causal_linear_attention

NOTES = [
    "One causal attention of queries, keys and values, heads before positions as projections leave them, without "
    "projections. kernels, plain and flash-linear-attention: feature map elu + 1 and normaliser included, "
    "flash-linear-attention's by its own functions (chunk_linear_attn of elu + 1, normalize=True, scale=1). softmax: "
    "scaled_dot_product_attention. performer: softmax's estimate by 256 positive features, these included; its kernels "
    "are measured at the first precision alone. highest, high, medium: torch.set_float32_matmul_precision, which says "
    "how the kernels round the factors of their products; plain's is highest.",
    "Figures are median (min–max) over the rounds, in which the forms take turns; a round's figure is the mean of "
    "several calls. Ratios are taken round by round. peak: memory above the inputs.",
    "difference: the largest of outputs and gradients from its own plain form's in float32 of the same numbers, each "
    "relative to its norm; for a reader to see that the same is computed.",
]

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PRECISIONS = ("highest", "high", "medium")
PEER = "flash-linear-attention"
PERFORMER = "performer, "
N_FEATURES = 256  # as in the experiments of Choromanski et al. 2020

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys and values (B, H, N, D) and returns (B, H, N, D)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=at_least(1), nargs="+", default=[2048, 8192, 32768], help="N; default: %(default)s"
    )
    parser.add_argument(
        "--tokens",
        type=at_least(1),
        default=65536,
        help="positions of a batch, which is as large; default: %(default)s",
    )
    for name, default in (("n_heads", 8), ("head_dim", 64)):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help="default: %(default)s")
    parser.add_argument("--dtype", choices=list(TYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--precisions",
        choices=PRECISIONS,
        nargs="+",
        default=["highest", "medium"],
        help="torch.set_float32_matmul_precision, one row of kernels for each; default: %(default)s",
    )
    parser.add_argument("--calls", type=at_least(1), default=10, help="calls of a round; default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=10, help="rounds; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    lengths = sorted(set(args.lengths))
    forms, notes = _forms(args.precisions)
    if args.device.type != "cuda":
        why = f"Not measured: the device is {args.device}, and these kernels are for CUDA."
        return Report("linear", [row for n in lengths for row in _rows(n, forms, {}, {}, {})], [*NOTES, *notes, why])
    rows = []
    for n in lengths:
        rows += _measured(n, forms, args)
    return Report("linear", rows, [*NOTES, *notes])


# ------------------------------------------------------------------------------------------------------------ the forms


def _forms(precisions: list[str]) -> tuple[dict[str, Form | None], list[str]]:
    """Return the forms, None for one that is not installed, and what is to be said about it."""
    forms: dict[str, Form | None] = {f"kernels, {p}": partial(_rounded, p, kernels) for p in dict.fromkeys(precisions)}
    forms["plain"] = _exact
    forms[f"{PERFORMER}kernels, {precisions[0]}"] = partial(_rounded, precisions[0], performer_kernels)
    forms[f"{PERFORMER}plain"] = _exact_performer
    forms |= {"softmax": softmax, PEER: None}
    try:
        library = import_module("fla.ops.linear_attn")
    except ImportError:
        return forms, [f"Absent, and so not measured: {PEER}; pip install 'flash-linear-attention>=0.5.1'."]
    return {**forms, PEER: partial(peer, library)}, []


def kernels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return elu_linear_attention(q, k, v, *_nothing(k, v))[0]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain_causal_linear_attention(_phi(q.float()), _phi(k.float()), v.float(), *_nothing(k, v))[0].to(v.dtype)


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _rounded("highest", plain, q, k, v)


def performer_kernels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return positive_favor(q, k, v, _omega(k), *_no_features(v), scale=q.size(3) ** -0.25)[0]


def performer_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    log_q, log_k = (log_positive_features(t.float() * t.size(3) ** -0.25, _omega(k)) for t in (q, k))
    return plain_causal_favor(log_q, log_k, v.float(), *_no_features(v))[0].to(v.dtype)


def _exact_performer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _rounded("highest", performer_plain, q, k, v)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def peer(library: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    by_position = (t.transpose(1, 2) for t in (_phi(q), _phi(k), v))  # (B, H, N, D) -> (B, N, H, D)
    return library.chunk_linear_attn(*by_position, scale=1.0, normalize=True)[0].transpose(1, 2)


def _phi(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _nothing(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, h, _, d = k.shape
    return k.new_zeros(b, h, d, v.size(3), dtype=torch.float32), k.new_zeros(b, h, d, dtype=torch.float32)


def _omega(k: Tensor) -> Tensor:
    """Return the directions, (H, F, D): for all calls the same."""
    return _drawn(k.size(1), k.size(3), k.device)


@cache
def _drawn(n_heads: int, head_dim: int, device: torch.device) -> Tensor:
    omega = draw_omega(n_heads, N_FEATURES, head_dim, generator=torch.Generator().manual_seed(0))
    return omega.to(device, torch.float32)


def _no_features(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b, h, _, d = v.shape
    s = v.new_zeros(b, h, N_FEATURES, d, dtype=torch.float32)
    return s, s[..., 0].clone(), torch.full_like(s[..., 0], -torch.inf)


def _rounded(precision: str, form: Form, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call `form`, and let its backward pass be of this precision too: it stays set until another sets it."""
    torch.set_float32_matmul_precision(precision)
    return form(q, k, v)


# ------------------------------------------------------------------------------------------------------ the measurement


def _measured(n: int, forms: dict[str, Form | None], args: argparse.Namespace) -> list[Row]:
    """Return a row for each pass and form at length `n`."""
    inputs = _inputs(n, args)
    there = {name: form for name, form in forms.items() if form is not None}
    before = torch.get_float32_matmul_precision()
    try:
        differences = _differences({name: form for name, form in there.items() if name != "softmax"}, inputs)
        timed, peaks = {}, {}
        for title, one_pass in PASSES.items():
            calls = {name: partial(one_pass, form, inputs) for name, form in there.items()}
            for call in calls.values():
                call()  # compiled, and what is allocated once
            peaks[title] = {name: peak_bytes(call, args.device) for name, call in calls.items()}
            again = {name: partial(_again, call, args.calls) for name, call in calls.items()}
            measures = {name: partial(seconds_of, function, args.device) for name, function in again.items()}
            rounds = interleaved(f"N {n}, {title}", measures, args.repeats)
            timed[title] = {name: Spread(tuple(s / args.calls for s in samples)) for name, samples in rounds.items()}
    finally:
        torch.set_float32_matmul_precision(before)
    return _rows(n, forms, timed, peaks, differences)


def _inputs(n: int, args: argparse.Namespace) -> list[Tensor]:
    """Return queries, keys and values, (B, H, N, D), views of (B, N, H, D)."""
    b, h, d = max(1, args.tokens // n), args.n_heads, args.head_dim
    generator = torch.Generator(args.device).manual_seed(0)
    numbers = [torch.randn(b, n, h, d, device=args.device, generator=generator) for _ in range(3)]
    return [t.to(TYPES[args.dtype]).transpose(1, 2).requires_grad_() for t in numbers]


def _forward(form: Form, inputs: list[Tensor]) -> None:
    with torch.no_grad():
        form(*inputs)


def _both_ways(form: Form, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of its product with the values."""
    out = form(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, inputs[2].detach())]


PASSES: dict[str, Callable[[Form, list[Tensor]], Any]] = {"forward": _forward, "forward + backward": _both_ways}


def _again(function: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        function()


def _differences(forms: dict[str, Form], inputs: list[Tensor]) -> dict[str, float]:
    """Return how far each form is from its own plain one in float32."""
    differences: dict[str, float] = {}
    for reference, performer in ((_exact, False), (_exact_performer, True)):
        exact = _both_ways(reference, [t.detach().float().requires_grad_() for t in inputs])
        of_kind = {name: form for name, form in forms.items() if name.startswith(PERFORMER) == performer}
        differences |= {
            name: largest_relative_difference(_both_ways(form, inputs), exact, f"{name}: the difference")
            for name, form in of_kind.items()
        }
    return differences


def _rows(
    n: int,
    forms: dict[str, Form | None],
    timed: dict[str, dict[str, Spread]],
    peaks: dict[str, dict[str, int]],
    differences: dict[str, float],
) -> list[Row]:
    """Return a row for each pass and form; empty ones of what was not measured."""
    rows: list[Row] = []
    first = next(iter(forms))
    for title in PASSES:
        seconds, peak = timed.get(title, {}), peaks.get(title, {})
        rows += [
            {
                "N": n,
                "pass": title,
                "form": name,
                "ms": seconds[name].map(lambda s: 1000 * s) if name in seconds else None,
                f"time ÷ {first}'s": seconds[name] / seconds[first] if name in seconds else None,
                "peak, MiB": peak[name] / MIB if name in peak else None,
                f"peak ÷ {first}'s": peak[name] / peak[first] if name in peak else None,
                "difference": "—" if name == "softmax" and seconds else differences.get(name),
            }
            for name in forms
        ]
    return rows
