"""How time, memory and state of one attention layer grow with the length: the slopes behind every O(·)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from benchmarks import stream
from benchmarks.measuring import MIB, Spread, interleaved, peak_bytes, seconds_of
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn import LSTM, sequence
from lit_effattn.attention import (
    LinearAttention,
    LSHAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
)
from lit_effattn.sequence import SequenceModule, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = [
    "Forward and backward of one causal layer, its projections included, float32, one sequence. Figures are median "
    "(min–max) over the rounds, in which the kinds take turns; ratios are taken round by round.",
    "slope: d log(time, memory or state) / d log(N), fitted by least squares to the medians of all lengths; 0 is "
    "constant, 1 linear, 2 quadratic. The projections are linear, and weigh in at small N.",
    "Peak memory: tensors alive at once in forward and backward (CUDA: of the allocator), gradients included, above "
    "the parameters and the input. state: bytes of what the layer hands on after the longest N measured.",
]


class Kind(NamedTuple):
    """What is measured.

    Attributes:
        make: Makes it from width, heads and the length that it will see.
        segments: Whether it is fed the sequence in segments, as it is made for, its state handed on; else whole.
        quadratic: Whether time is O(N²).
    """

    make: Callable[[int, int, int], SequenceModule]
    segments: bool = False
    quadratic: bool = False


WINDOW = 128


def _power_of_two(x: float) -> int:
    return 2 ** round(math.log2(x))


def _streaming(name: str) -> Kind:
    return Kind(lambda e, h, n: stream.KINDS[name](e, h, WINDOW), segments=True)


KINDS: dict[str, Kind] = {
    "softmax": Kind(lambda e, h, n: SoftmaxAttention(e, h), quadratic=True),
    f"softmax, window {WINDOW}": Kind(lambda e, h, n: SoftmaxAttention(e, h, window=WINDOW)),
    "shaw": Kind(lambda e, h, n: ShawAttention(e, h), quadratic=True),
    "transformer_xl": _streaming("xl"),
    "compressive": _streaming("compressive"),
    "infinite": _streaming("infinite"),
    "infinite, sticky": _streaming("infinite_sticky"),
    "sparse": Kind(
        lambda e, h, n: SparseAttention(e, h, pattern="strided", stride=_power_of_two(math.sqrt(n))),
    ),
    "lsh": Kind(lambda e, h, n: LSHAttention(e, h, n_hashes=1, n_buckets=max(2, n // 64), chunk_size=64)),
    "linear": Kind(lambda e, h, n: LinearAttention(e, h)),
    "performer": Kind(lambda e, h, n: PerformerAttention(e, h)),
    "lstm": Kind(lambda e, h, n: LSTM(e, 1)),
}


class Growth(NamedTuple):
    """One kind's figures by length."""

    seconds: dict[int, Spread]
    peak: dict[int, int]
    state: dict[int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = [2**i for i in range(9, 17)]
    parser.add_argument("--lengths", type=at_least(2), nargs="+", default=lengths, help="default: %(default)s")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    parser.add_argument("--d_model", type=at_least(1), default=128, help="default: %(default)s")
    parser.add_argument("--n_heads", type=at_least(1), default=4, help="default: %(default)s")
    parser.add_argument(
        "--segment_len", type=at_least(1), default=512, help="of kinds that are fed segments; default: %(default)s"
    )
    parser.add_argument("--repeats", type=at_least(1), default=3, help="rounds; default: %(default)s")
    parser.add_argument("--most", type=at_least(1), default=8192, help="longest for O(N²) kinds; default: %(default)s")
    parser.add_argument(
        "--limit",
        type=at_least(1),
        default=4,
        help="seconds; where a pass took more, longer lengths are left out; default: %(default)s",
    )


def run(args: argparse.Namespace) -> Report:
    lengths = sorted(args.lengths)
    found = {name: Growth({}, {}, {}) for name in args.kinds}
    for n in lengths:
        names = [name for name in args.kinds if _fits(KINDS[name], found[name], n, args)]
        layers = {
            name: _Layer(KINDS[name], n, (args.d_model, args.n_heads), args.segment_len, args.device) for name in names
        }
        for name, layer in layers.items():
            found[name].peak[n], found[name].state[n] = layer.peak_and_state()
        timed = interleaved(
            f"length {n}", {k: partial(seconds_of, v, args.device) for k, v in layers.items()}, args.repeats
        )
        for name, samples in timed.items():
            found[name].seconds[n] = Spread(tuple(samples))
    rows = [_row(name, lengths, found) for name in args.kinds]
    return Report("scaling", rows, [*NOTES, *_notes(args)], partial(_plot, found))


def _fits(kind: Kind, growth: Growth, n: int, args: argparse.Namespace) -> bool:
    """Whether `n` is to be measured, after what was at shorter lengths."""
    slowest = max((s.median for s in growth.seconds.values()), default=0.0)
    return slowest <= args.limit and not (kind.quadratic and n > args.most)


class _Layer:
    """A layer and its input; a call is a training pass over it: one step, or one a segment, without an optimizer."""

    def __init__(self, kind: Kind, n: int, size: tuple[int, int], segment_len: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.module = kind.make(*size, n).to(device).train()
        generator = torch.Generator().manual_seed(0)
        self.x: Tensor = torch.randn(1, n, self.module.d_input, generator=generator).to(device)
        self.segment_len = segment_len if kind.segments else n
        self.state: State = None

    def __call__(self) -> None:
        state = None
        for segment in self.x.split(self.segment_len, 1):
            self.module.zero_grad()
            y, state = self.module(segment.detach().requires_grad_(), sequence.detach(state))
            auxiliary = sequence.losses(state)
            (y.sum() if auxiliary is None else y.sum() + auxiliary.sum()).backward()
        self.state = sequence.detach(state)

    def peak_and_state(self) -> tuple[int, int]:
        """Return the bytes alive at the peak of a call, and those of the state after it."""
        self()  # what is allocated once
        held, self.state = sequence.nbytes(self.state), None
        self.module.zero_grad()
        return peak_bytes(self, self.x.device), held


def _row(name: str, lengths: Sequence[int], found: dict[str, Growth]) -> Row:
    seconds, peak, state = found[name]
    softmax = found["softmax"].seconds if "softmax" in found else {}
    common = max(seconds.keys() & softmax.keys(), default=None)
    longest = max(seconds, default=None)
    return {
        "attention": name,
        **{f"ms, N {n}": seconds[n].map(lambda s: 1000 * s) if n in seconds else None for n in lengths},
        **{f"MiB, N {n}": peak[n] / MIB if n in peak else None for n in lengths},
        "slope of time": _slope({n: s.median for n, s in seconds.items()}),
        "slope of memory": _slope(peak),
        "slope of state": _slope(state),
        "longest N": longest,
        "µs a token": None if longest is None else 1e6 * seconds[longest].median / longest,
        "bytes a token": None if longest is None else peak[longest] / longest,
        "state, bytes": None if longest is None else state[longest],
        "time ÷ softmax's, longest common": None if common is None else seconds[common] / softmax[common],
    }


def _slope(values: dict[int, float] | dict[int, int]) -> float | None:
    """Fit log(value) = slope · log(n) + constant by least squares."""
    if len(values) < 2:
        return None
    x = torch.tensor([math.log(n) for n in values], dtype=torch.float64)
    y = torch.tensor([math.log(v) for v in values.values()], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def _notes(args: argparse.Namespace) -> list[str]:
    """Return what depends on the settings."""
    fed = [name for name in args.kinds if KINDS[name].segments]
    quadratic = [name for name in args.kinds if KINDS[name].quadratic]
    notes = [
        "sparse: strided, merged, stride √N. lsh: 1 round, chunks of 64, a bucket for every chunk. transformer_xl, "
        f"compressive, infinite: memories of {WINDOW}, as in the benchmark `stream`. lstm: one layer.",
        f"Not measured: {' and '.join(quadratic) or 'O(N²) kinds'} beyond N {args.most}, and what is longer than a "
        f"length at which a pass took more than {args.limit} s.",
    ]
    if fed:
        notes.append(
            f"{'; '.join(fed)}: in segments of {args.segment_len}, forward and backward for each, the state handed on "
            "without gradients: truncated back-propagation, as they are trained. Others: the whole sequence at once."
        )
    return notes


def _plot(found: dict[str, Growth], figure: Figure) -> None:
    time, memory, held = figure.subplots(1, 3)
    figure.set_size_inches(15, 4)
    for i, (name, (seconds, peak, state)) in enumerate(found.items()):
        line = "o-" if i < 10 else "s--"  # there are ten colours
        time.loglog(list(seconds), [1e6 * s.median / n for n, s in seconds.items()], line, label=name)
        memory.loglog(list(peak), [b / n for n, b in peak.items()], line, label=name)
        held.loglog(list(state), list(state.values()), line, label=name)
    time.set(xlabel="N", ylabel="µs a token, forward and backward")
    memory.set(xlabel="N", ylabel="bytes a token at the peak")
    held.set(xlabel="N", ylabel="bytes of the state")
    held.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
