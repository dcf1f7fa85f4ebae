"""Growth of time, memory and state of one attention layer with the length: the measured exponents of O(·)."""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring import MIB, Spread, add_options, peak_bytes, timed
from benchmarks.report import Report, Row
from lit_effattn import LSTM, sequence
from lit_effattn import attention as attentions
from lit_effattn.sequence import SequenceModule, State

NOTES = [
    "Forward and backward of one causal layer, its projections included, float32, one sequence.",
    "slope: d log(time, memory or state) / d log(N), fitted by least squares to the medians of all lengths; 0 is "
    "constant, 1 linear, 2 quadratic. The projections are linear, and dominate at small N.",
    "Peak memory: tensors alive at once in forward and backward (CUDA: the allocator's), gradients included, in "
    "addition to the parameters and the input. state: bytes of the layer's state after the longest N measured.",
]


class Kind(NamedTuple):
    """A kind of layer.

    Attributes:
        make: Makes the layer from width, heads and length.
        segments: Whether it reads the sequence in segments and carries its state, or else as a whole.
        quadratic: Whether its time is O(N²).
    """

    make: Callable[[int, int, int], SequenceModule]
    segments: bool = False
    quadratic: bool = False


WINDOW = 128


def _infinite(d_model: int, n_heads: int, n: int, *, sticky: bool) -> SequenceModule:
    sizes = {"mem_len": WINDOW, "segment_len": WINDOW, "n_basis": WINDOW // 2, "n_samples": WINDOW}
    return attentions.InfiniteAttention(d_model, n_heads, widths=(0.01, 0.05), sticky=sticky, **sizes)


KINDS: dict[str, Kind] = {
    "softmax": Kind(lambda e, h, n: attentions.SoftmaxAttention(e, h), quadratic=True),
    f"softmax, window {WINDOW}": Kind(lambda e, h, n: attentions.SoftmaxAttention(e, h, window=WINDOW)),
    "shaw": Kind(lambda e, h, n: attentions.ShawAttention(e, h), quadratic=True),
    "transformer_xl": Kind(
        lambda e, h, n: attentions.TransformerXLAttention(e, h, mem_len=WINDOW, same_length=True), segments=True
    ),
    "compressive": Kind(
        lambda e, h, n: attentions.CompressiveAttention(e, h, mem_len=WINDOW, compressed_len=WINDOW // 2), segments=True
    ),
    "infinite": Kind(partial(_infinite, sticky=False), segments=True),
    "infinite, sticky": Kind(partial(_infinite, sticky=True), segments=True),
    "sparse": Kind(
        lambda e, h, n: attentions.SparseAttention(e, h, pattern="strided", stride=2 ** round(math.log2(n) / 2))
    ),
    "lsh": Kind(lambda e, h, n: attentions.LSHAttention(e, h, n_hashes=1, n_buckets=max(2, n // 64), chunk_size=64)),
    "linear": Kind(lambda e, h, n: attentions.LinearAttention(e, h)),
    "performer": Kind(lambda e, h, n: attentions.PerformerAttention(e, h)),
    "lstm": Kind(lambda e, h, n: LSTM(e, 1)),
}


class Growth(NamedTuple):
    """The figures of one kind by length."""

    seconds: dict[int, Spread]
    peak: dict[int, int]
    state: dict[int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, 2, lengths=([2**i for i in range(9, 17)], "N"))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    add_options(parser, d_model=128, n_heads=4, segment_len=(512, "of kinds that get segments"), repeats=(3, "rounds"))
    about = "seconds; longer lengths are left out if a pass takes more"
    add_options(parser, most=(8192, "longest for O(N²) kinds"), limit=(4, about))


def run(args: argparse.Namespace) -> Report:
    lengths = sorted(args.lengths)
    growths = {name: Growth({}, {}, {}) for name in args.kinds}
    for n in lengths:
        layers = {
            name: _Layer(KINDS[name], n, (args.d_model, args.n_heads), args.segment_len, args.device)
            for name in args.kinds
            if _is_measured(KINDS[name], growths[name], n, args)
        }
        for name, layer in layers.items():
            growths[name].peak[n], growths[name].state[n] = layer.peak_and_state()
        for name, seconds in timed(f"length {n}", layers, args).items():
            growths[name].seconds[n] = seconds
    rows = [_row(name, lengths, growths) for name in args.kinds]
    return Report("scaling", rows, [*NOTES, *_notes(args)], partial(_plot, growths))


def _is_measured(kind: Kind, growth: Growth, n: int, args: argparse.Namespace) -> bool:
    """Return whether length `n` is measured, given the times of shorter lengths."""
    slowest = max((s.median for s in growth.seconds.values()), default=0.0)
    return slowest <= args.limit and not (kind.quadratic and n > args.most)


class _Layer:
    """A layer and its input. A call is a training pass without an optimiser: one step, or one for each segment."""

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
        """Return the peak bytes of a call, and the bytes of the state after it."""
        self()  # one-time allocations
        state_bytes, self.state = sequence.nbytes(self.state), None
        self.module.zero_grad()
        return peak_bytes(self, self.x.device), state_bytes


def _row(name: str, lengths: Sequence[int], growths: dict[str, Growth]) -> Row:
    seconds, peak, state = growths[name]
    softmax = growths["softmax"].seconds if "softmax" in growths else {}
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
    """Return the notes that depend on the settings."""
    segmented = [name for name in args.kinds if KINDS[name].segments]
    quadratic = [name for name in args.kinds if KINDS[name].quadratic]
    notes = [
        "sparse: strided, merged, stride √N. lsh: 1 round, chunks of 64, a bucket for every chunk. transformer_xl, "
        f"compressive, infinite: memories of {WINDOW}. lstm: one layer.",
        f"Not measured: {' and '.join(quadratic) or 'O(N²) kinds'} beyond N {args.most}, and lengths beyond one whose "
        f"pass took more than {args.limit} s.",
    ]
    if segmented:
        notes.append(
            f"{'; '.join(segmented)}: in segments of {args.segment_len}, forward and backward for each, with the state "
            "carried without gradients: truncated back-propagation, as in training. Others: the whole sequence at once."
        )
    return notes


def _plot(growths: dict[str, Growth], figure: Any) -> None:
    time, memory, states = figure.subplots(1, 3)
    figure.set_size_inches(15, 4)
    for i, (name, (seconds, peak, state)) in enumerate(growths.items()):
        line = "o-" if i < 10 else "s--"  # there are ten colours
        time.loglog(list(seconds), [1e6 * s.median / n for n, s in seconds.items()], line, label=name)
        memory.loglog(list(peak), [b / n for n, b in peak.items()], line, label=name)
        states.loglog(list(state), list(state.values()), line, label=name)
    time.set(xlabel="N", ylabel="µs a token, forward and backward")
    memory.set(xlabel="N", ylabel="bytes a token at the peak")
    states.set(xlabel="N", ylabel="bytes of the state")
    states.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
