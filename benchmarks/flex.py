"""Transformer-XL's attention on a GPU: through FlexAttention, the plain form, and dense attention without positions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring import MIB, Spread, interleaved, peak_bytes, seconds_of
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn.ops.flex import relative_flex_attention
from lit_effattn.ops.relative import relative_attention

NOTES = [
    "Forward and backward of one causal attention, without projections: a segment of N queries after a memory of N "
    "keys. flex and plain have relative positions (the same numbers); dense is scaled_dot_product_attention, with a "
    "mask and without positions: what the positions cost.",
    "Figures are median (min–max) over the rounds, in which the forms take turns; ratios are taken round by round. "
    "peak: memory above the inputs.",
]

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=at_least(1), nargs="+", default=[512, 1024, 2048, 4096], help="N; default: %(default)s"
    )
    for name, default in (("batch_size", 4), ("n_heads", 8), ("head_dim", 64)):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help="default: %(default)s")
    parser.add_argument("--dtype", choices=list(TYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=10, help="rounds; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    lengths = sorted(set(args.lengths))
    if args.device.type != "cuda":
        why = f"Not measured: the device is {args.device}, and FlexAttention has a backward pass on CUDA alone."
        return Report("flex", [row for n in lengths for row in _rows(n, {}, {})], [*NOTES, why])
    rows = []
    for n in lengths:
        inputs = _inputs(n, args)
        passes = {form: partial(_both_ways, function, inputs) for form, function in FORMS.items()}
        for both_ways in passes.values():
            both_ways()  # compiled, and what is allocated once
        peaks = {form: peak_bytes(both_ways, args.device) for form, both_ways in passes.items()}
        measures = {form: partial(seconds_of, both_ways, args.device) for form, both_ways in passes.items()}
        timed = {form: Spread(tuple(s)) for form, s in interleaved(f"N {n}", measures, args.repeats).items()}
        rows += _rows(n, timed, peaks)
    return Report("flex", rows, NOTES)


def dense(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    n, m = q.size(2), k.size(2) - q.size(2)
    seen = torch.ones(n, m + n, dtype=torch.bool, device=q.device).tril(m)
    return F.scaled_dot_product_attention(q, k, v, seen)


FORMS: dict[str, Callable[..., Tensor]] = {
    "flex": relative_flex_attention,
    "plain": relative_attention,
    "dense": dense,
}


def _inputs(n: int, args: argparse.Namespace) -> list[Tensor]:
    b, h, d = args.batch_size, args.n_heads, args.head_dim
    shapes = [(b, h, n, d), (b, h, 2 * n, d), (b, h, 2 * n, d), (h, 2 * n, d), (h, d), (h, d)]
    torch.manual_seed(0)
    return [torch.randn(s, device=args.device, dtype=TYPES[args.dtype]).requires_grad_() for s in shapes]


def _both_ways(function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)  # dense has no positions


def _rows(n: int, seconds: dict[str, Spread], peaks: dict[str, int]) -> list[Row]:
    """Return a row for each form; empty ones of what was not measured."""
    return [
        {
            "N": n,
            "form": form,
            "ms": seconds[form].map(lambda s: 1000 * s) if seconds else None,
            "time ÷ plain's": seconds[form] / seconds["plain"] if seconds else None,
            "peak, MiB": peaks[form] / MIB if peaks else None,
            "peak ÷ plain's": peaks[form] / peaks["plain"] if peaks else None,
        }
        for form in FORMS
    ]
