"""What a segment costs after 4k, 64k and 1M tokens of a stream, and how large the state is by then."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.measuring import Spread, interleaved, seconds_of
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn.attention import (
    Attention,
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    SoftmaxAttention,
    TransformerXLAttention,
)
from lit_effattn.sequence import State, nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = [
    "One causal layer, its projections included, reads a stream of random inputs, float32, without gradients, segment "
    "by segment, the state handed along. The states that it has after each number of tokens are kept; then, in every "
    "round, it reads the same segment from each in turn: nothing but the state differs.",
    "ms: of one segment, the fastest of --segments in a row, since other work on the machine only adds; median "
    "(min–max) over the rounds. Ratios are taken round by round.",
    "xl, compressive, infinite and softmax with a window see --mem_len positions, compressive half as many summaries "
    "of 4 inputs too. infinite: a signal of half as many basis functions, to which as many positions are written at "
    "once; where segments are that long, each is timed with one update. softmax: all keys and values, which grow.",
]

GROWING = "softmax"

KINDS: dict[str, Callable[[int, int, int], Attention]] = {
    "xl": lambda e, h, m: TransformerXLAttention(e, h, mem_len=m, same_length=True),
    "compressive": lambda e, h, m: CompressiveAttention(e, h, mem_len=m, compressed_len=m // 2),
    "infinite": lambda e, h, m: _infinite(e, h, m, sticky=False),
    "infinite_sticky": lambda e, h, m: _infinite(e, h, m, sticky=True),
    "linear": lambda e, h, m: LinearAttention(e, h),
    "softmax_window": lambda e, h, m: SoftmaxAttention(e, h, window=m),
    GROWING: lambda e, h, m: SoftmaxAttention(e, h),
}
"""Each kind, made from width, heads and the positions that a memory holds."""


def _infinite(d_model: int, n_heads: int, mem_len: int, *, sticky: bool) -> Attention:
    return InfiniteAttention(
        d_model,
        n_heads,
        mem_len=mem_len,
        segment_len=mem_len,
        n_basis=mem_len // 4 * 2,
        widths=(0.01, 0.05),
        n_samples=mem_len,
        sticky=sticky,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=at_least(1),
        nargs="+",
        default=[2**12, 2**16, 2**20],
        help="tokens read before; the shortest is what the others are compared with; default: %(default)s",
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    parser.add_argument("--d_model", type=at_least(2), default=64, help="default: %(default)s")
    parser.add_argument("--n_heads", type=at_least(1), default=4, help="default: %(default)s")
    parser.add_argument("--mem_len", type=at_least(4), default=128, help="default: %(default)s")
    parser.add_argument(
        "--segment_len", type=at_least(1), default=128, help="tokens that are read at once; default: %(default)s"
    )
    parser.add_argument(
        "--segments", type=at_least(1), default=10, help="segments of each measurement; default: %(default)s"
    )
    parser.add_argument("--repeats", type=at_least(1), default=20, help="rounds; default: %(default)s")
    parser.add_argument(
        "--most", type=at_least(1), default=2**16, help="longest for softmax, which is O(N²); default: %(default)s"
    )


@torch.no_grad()
def run(args: argparse.Namespace) -> Report:
    lengths = sorted(set(args.lengths))
    if any(length % args.segment_len for length in lengths):
        raise ValueError(
            f"lengths={lengths} are not all multiples of segment_len={args.segment_len}; choose some that are"
        )
    streams = {}
    for kind in args.kinds:
        within = [n for n in lengths if kind != GROWING or n <= args.most]
        if within:
            print(f"stream: {kind} reads {within[-1]:,} tokens", file=sys.stderr, flush=True)
            attention = KINDS[kind](args.d_model, args.n_heads, args.mem_len).to(args.device).eval()
            streams[kind] = Stream(attention, args.segment_len)
            streams[kind].read(within)
    measures = {
        f"{kind}, {n}": partial(_fastest, partial(stream.segment, n), args.segments, args.device)
        for kind, stream in streams.items()
        for n in stream.states
    }
    for stream in streams.values():
        stream.segment(min(stream.states))  # what is allocated once
    timed = {name: Spread(tuple(s)) for name, s in interleaved("stream", measures, args.repeats).items()}
    seconds = {kind: {n: timed[f"{kind}, {n}"] for n in stream.states} for kind, stream in streams.items()}
    rows = [_row(kind, lengths, seconds[kind], stream) for kind, stream in streams.items()]
    return Report("stream", rows, NOTES, partial(_plot, seconds, streams))


def _fastest(function: Callable[[], None], times: int, device: torch.device) -> float:
    return min(seconds_of(function, device) for _ in range(times))


class Stream:
    """An attention that reads random inputs segment by segment.

    Args:
        attention: What reads.
        segment_len: Positions of a segment.
    """

    def __init__(self, attention: Attention, segment_len: int) -> None:
        self.attention = attention
        self.segment_len = segment_len
        self.states: dict[int, State] = {}
        """The state after so many tokens."""
        parameter = next(attention.parameters())
        self._generator = torch.Generator(parameter.device).manual_seed(0)
        self._next = self._draw()  # what is read from all of the states

    @torch.no_grad()
    def read(self, lengths: Sequence[int]) -> None:
        """Read as many tokens as the last of `lengths`, ascending, and keep the state after each."""
        parameter = next(self.attention.parameters())
        state = self.attention.initial_state(1, device=parameter.device)
        seen = 0
        for length in lengths:
            while seen < length:
                _, state = self.attention(self._draw(), state)
                seen += self.segment_len
            self.states[length] = state

    @torch.no_grad()
    def segment(self, length: int) -> None:
        """Read one segment more after `length` tokens; that state stays as it was."""
        self.attention(self._next, self.states[length])

    def _draw(self) -> Tensor:
        shape = (1, self.segment_len, self.attention.d_input)
        return torch.randn(shape, generator=self._generator, device=self._generator.device)


def _row(kind: str, lengths: Sequence[int], seconds: dict[int, Spread], stream: Stream) -> Row:
    shortest = lengths[0]
    return {
        "attention": kind,
        **{f"ms after {n:,}": seconds[n].map(lambda s: 1000 * s) if n in seconds else None for n in lengths},
        **{
            f"after {n:,} ÷ after {shortest:,}": seconds[n] / seconds[shortest] if n in seconds else None
            for n in lengths[1:]
        },
        **{f"state after {n:,}, bytes": nbytes(stream.states[n]) if n in stream.states else None for n in lengths},
    }


def _plot(seconds: dict[str, dict[int, Spread]], streams: dict[str, Stream], figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    figure.set_size_inches(10, 4)
    for kind, stream in streams.items():
        spreads = seconds[kind]
        left.loglog(list(spreads), [1000 * s.median for s in spreads.values()], "o-", label=kind)
        right.loglog(list(spreads), [nbytes(stream.states[n]) for n in spreads], "o-", label=kind)
    left.set(xlabel="tokens read before", ylabel="ms a segment")
    right.set(xlabel="tokens read before", ylabel="bytes of the state")
    left.legend(fontsize="small")
