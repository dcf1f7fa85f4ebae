"""How time and memory of one attention layer grow with the length: the slopes behind every O(·)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.measuring import MIB, Spread, interleaved, peak_bytes, seconds_of
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn.attention import (
    Attention,
    LinearAttention,
    LSHAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = [
    "Forward and backward of one causal layer, its projections included, float32, one sequence. Figures are median "
    "(min–max) over the rounds, in which the kinds take turns; ratios are taken round by round.",
    "slope: d log(time or memory) / d log(N), fitted by least squares to the medians of all lengths; 1 is linear, 2 "
    "quadratic. The projections are linear, and weigh in at small N.",
    "Peak memory: tensors alive at once in forward and backward, gradients included, above the parameters.",
    "sparse: strided, merged, stride √N. lsh: 1 round, chunks of 64, a bucket for every chunk.",
]


def _power_of_two(x: float) -> int:
    return 2 ** round(math.log2(x))


KINDS: dict[str, Callable[[int, int, int], Attention]] = {
    "softmax": lambda e, h, n: SoftmaxAttention(e, h),
    "softmax, window 128": lambda e, h, n: SoftmaxAttention(e, h, window=128),
    "shaw": lambda e, h, n: ShawAttention(e, h),
    "sparse": lambda e, h, n: SparseAttention(e, h, pattern="strided", stride=_power_of_two(math.sqrt(n))),
    "lsh": lambda e, h, n: LSHAttention(e, h, n_hashes=1, n_buckets=max(2, n // 64), chunk_size=64),
    "linear": lambda e, h, n: LinearAttention(e, h),
    "performer": lambda e, h, n: PerformerAttention(e, h),
}
"""Each kind, made from width, heads and the length that it will see."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=at_least(2), nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="default: %(default)s"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    parser.add_argument("--d_model", type=at_least(1), default=128, help="default: %(default)s")
    parser.add_argument("--n_heads", type=at_least(1), default=4, help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="rounds; default: %(default)s")
    parser.add_argument("--most", type=at_least(1), default=8192, help="longest for O(N²) kinds; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    lengths = sorted(args.lengths)
    seconds: dict[str, dict[int, Spread]] = {kind: {} for kind in args.kinds}
    peaks: dict[str, dict[int, float]] = {kind: {} for kind in args.kinds}
    for n in lengths:
        kinds = [kind for kind in args.kinds if n <= args.most or kind not in ("softmax", "shaw")]
        layers = {kind: _Layer(KINDS[kind](args.d_model, args.n_heads, n), n, args.device) for kind in kinds}
        for kind, layer in layers.items():
            peaks[kind][n] = layer.peak()
        timed = interleaved(
            f"length {n}", {k: partial(seconds_of, v, args.device) for k, v in layers.items()}, args.repeats
        )
        for kind, samples in timed.items():
            seconds[kind][n] = Spread(tuple(samples))
    rows = [_row(kind, lengths, seconds, peaks) for kind in args.kinds if seconds[kind]]  # not if all were too long
    return Report("scaling", rows, NOTES, partial(_plot, seconds, peaks))


class _Layer:
    """A layer and its input; a call is a forward and a backward pass."""

    def __init__(self, attention: Attention, n: int, device: torch.device) -> None:
        self.attention = attention.to(device).train()
        generator = torch.Generator().manual_seed(0)
        self.x: Tensor = torch.randn(1, n, attention.d_input, generator=generator).to(device).requires_grad_()

    def __call__(self) -> None:
        self.attention.zero_grad()
        y, _ = self.attention(self.x)
        y.sum().backward()

    def peak(self) -> float:
        self()  # what is allocated once
        return peak_bytes(self, self.x.device)


def _row(
    kind: str, lengths: Sequence[int], seconds: dict[str, dict[int, Spread]], peaks: dict[str, dict[int, float]]
) -> Row:
    time, memory = seconds[kind], peaks[kind]
    longest = max(time)
    reference = seconds.get("softmax", {})
    return {
        "attention": kind,
        **{f"ms, N {n}": time[n].map(lambda s: 1000 * s) if n in time else None for n in lengths},
        **{f"MiB, N {n}": memory[n] / MIB if n in memory else None for n in lengths},
        "slope of time": _slope({n: s.median for n, s in time.items()}),
        "slope of memory": _slope(memory),
        "µs a token, longest": 1e6 * time[longest].median / longest,
        "time ÷ softmax's, longest common": time[max(reference)] / reference[max(reference)] if reference else None,
    }


def _slope(values: dict[int, float]) -> float | None:
    """Fit log(value) = slope · log(n) + constant by least squares."""
    if len(values) < 2:
        return None
    x = torch.tensor([math.log(n) for n in values], dtype=torch.float64)
    y = torch.tensor([math.log(v) for v in values.values()], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def _plot(seconds: dict[str, dict[int, Spread]], peaks: dict[str, dict[int, float]], figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    figure.set_size_inches(10, 4)
    for kind in seconds:
        left.loglog(list(seconds[kind]), [1e6 * s.median / n for n, s in seconds[kind].items()], "o-", label=kind)
        right.loglog(list(peaks[kind]), [b / n for n, b in peaks[kind].items()], "o-", label=kind)
    left.set(xlabel="N", ylabel="µs a token, forward and backward")
    right.set(xlabel="N", ylabel="bytes a token at the peak")
    left.legend(fontsize="small")
