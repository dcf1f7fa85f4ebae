"""Transformer-XL's and sparse attention on a GPU: through FlexAttention, the plain form, and dense attention."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring import MIB, Spread, interleaved, peak_bytes, seconds_of
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn.ops.flex import FLEX, relative_flex_attention
from lit_effattn.ops.relative import relative_attention
from lit_effattn.ops.sparse import fixed_attention, strided_attention

NOTES = [
    "Forward and backward of one causal attention, without projections. transformer_xl: a segment of N queries after a "
    "memory of N keys; flex and plain have relative positions (the same numbers). strided, fixed: of N positions, both "
    "sets of keys merged. dense: scaled_dot_product_attention, to every key: with a mask and without positions beside "
    "transformer_xl, causal beside the sparse patterns.",
    "Figures are median (min–max) over the rounds, in which the forms take turns; ratios are taken round by round. "
    "peak: memory above the inputs.",
]

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=at_least(1), nargs="+", default=[512, 1024, 2048, 4096], help="N; default: %(default)s"
    )
    parser.add_argument(
        "--sparse_lengths",
        type=at_least(1),
        nargs="+",
        default=[4096, 12288],
        help="N of the sparse patterns; default: %(default)s",
    )
    parser.add_argument(
        "--strides",
        type=at_least(1),
        nargs="+",
        default=[128, 1024],
        help="of the sparse patterns; default: %(default)s",
    )
    parser.add_argument(
        "--summary", type=at_least(1), default=32, help="columns of a stride, of fixed; default: %(default)s"
    )
    for name, default in (("batch_size", 4), ("n_heads", 8), ("head_dim", 64)):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help="default: %(default)s")
    parser.add_argument("--dtype", choices=list(TYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=10, help="rounds; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    if args.summary > min(args.strides):
        raise SystemExit(f"flex: --summary {args.summary} columns of --strides {min(args.strides)}; choose fewer")
    if args.device.type != "cuda":
        why = f"Not measured: the device is {args.device}, and FlexAttention has a backward pass on CUDA alone."
        return Report("flex", [row for case in _cases(args) for row in _rows(case, {}, {})], [*NOTES, why])
    rows = []
    for case in _cases(args):
        inputs = _inputs(case, args)
        passes = {form: partial(_both_ways, function, inputs) for form, function in case.forms.items()}
        for both_ways in passes.values():
            both_ways()  # compiled, and what is allocated once
        peaks = {form: peak_bytes(both_ways, args.device) for form, both_ways in passes.items()}
        measures = {form: partial(seconds_of, both_ways, args.device) for form, both_ways in passes.items()}
        title = f"N {case.n}, {case.title}"
        timed = {form: Spread(tuple(s)) for form, s in interleaved(title, measures, args.repeats).items()}
        rows += _rows(case, timed, peaks)
    return Report("flex", rows, NOTES)


# ------------------------------------------------------------------------------------------------------------ the forms


class Case(NamedTuple):
    """An attention at one length."""

    title: str
    n: int
    forms: dict[str, Callable[..., Tensor]]


def _cases(args: argparse.Namespace) -> list[Case]:
    cases = [Case("transformer_xl", n, RELATIVE) for n in sorted(set(args.lengths))]
    for n in sorted(set(args.sparse_lengths)):
        for stride in sorted(set(args.strides)):
            columns = torch.arange(stride - args.summary, stride, device=args.device)[None]  # (1, summary)
            patterns = {
                "strided": partial(strided_attention, stride=stride),
                "fixed": partial(fixed_attention, stride=stride, columns=columns),
            }
            cases += [Case(f"{name}, stride {stride}", n, _sparse(pattern)) for name, pattern in patterns.items()]
    return cases


def dense(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    n, m = q.size(2), k.size(2) - q.size(2)
    seen = torch.ones(n, m + n, dtype=torch.bool, device=q.device).tril(m)
    return F.scaled_dot_product_attention(q, k, v, seen)


def plain(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    with asked(False):
        return relative_attention(q, k, v, r, u, w)


RELATIVE: dict[str, Callable[..., Tensor]] = {"flex": relative_flex_attention, "plain": plain, "dense": dense}


def _sparse(pattern: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    def form(flex: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with asked(flex):
            return pattern(q, k, v)

    dense = partial(F.scaled_dot_product_attention, is_causal=True)
    return {"flex": partial(form, True), "plain": partial(form, False), "dense": dense}


@contextmanager
def asked(flex: bool) -> Iterator[None]:
    """Ask for FlexAttention inside, or for the plain form, whatever the environment says."""
    before = os.environ.get(FLEX)
    os.environ[FLEX] = "1" if flex else "0"
    try:
        yield
    finally:
        del os.environ[FLEX]
        if before is not None:
            os.environ[FLEX] = before


# ------------------------------------------------------------------------------------------------------ the measurement


def _inputs(case: Case, args: argparse.Namespace) -> list[Tensor]:
    b, h, d, n = args.batch_size, args.n_heads, args.head_dim, case.n
    shapes: list[tuple[int, ...]] = [(b, h, n, d)] * 3
    if case.forms is RELATIVE:
        shapes = [(b, h, n, d), (b, h, 2 * n, d), (b, h, 2 * n, d), (h, 2 * n, d), (h, d), (h, d)]
    torch.manual_seed(0)
    return [torch.randn(s, device=args.device, dtype=TYPES[args.dtype]).requires_grad_() for s in shapes]


def _both_ways(function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)  # dense has no positions


def _rows(case: Case, seconds: dict[str, Spread], peaks: dict[str, int]) -> list[Row]:
    """Return a row for each form; empty ones of what was not measured."""
    return [
        {
            "N": case.n,
            "attention": case.title,
            "form": form,
            "ms": seconds[form].map(lambda s: 1000 * s) if seconds else None,
            "time ÷ plain's": seconds[form] / seconds["plain"] if seconds else None,
            "time ÷ dense's": seconds[form] / seconds["dense"] if seconds else None,
            "peak, MiB": peaks[form] / MIB if peaks else None,
            "peak ÷ plain's": peaks[form] / peaks["plain"] if peaks else None,
        }
        for form in case.forms
    ]
