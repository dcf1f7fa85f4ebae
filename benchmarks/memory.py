"""What a memory costs: a segment after 4k, 64k and 1M tokens of a stream, or evaluation against a sliding window.

Without windows, one layer of each kind reads a long stream. With windows, a Transformer-XL that carries its memory
scores tokens, and a Transformer that reads its window again for each of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Spread, add_options, at_least, interleaved, seconds_of, timed
from benchmarks.models import SMALL, Size
from benchmarks.report import Report, Row
from lit_effattn import Transformer
from lit_effattn import attention as attentions
from lit_effattn.datamodules import TokenBatch
from lit_effattn.nn.sliding import SlidingState
from lit_effattn.sequence import State, nbytes
from lit_effattn.tasks import LanguageModel

GROWING = "softmax"
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Dai et al. 2019, table 9: how many times faster than sliding, by attention length; 24 layers on a GPU."""

N_TOKENS = 256  # bytes

STREAM_NOTES = [
    "One causal layer, its projections included, reads a stream of random inputs, float32, without gradients, segment "
    "by segment, the state handed along. The states that it has after each number of tokens are kept; then, in every "
    "round, it reads the same segment from each in turn: nothing but the state differs.",
    "ms: of one segment, the fastest of --segments in a row, since other work on the machine only adds.",
    "xl, compressive, infinite and softmax with a window see --mem_len positions, compressive half as many summaries "
    "of 4 inputs too. infinite: a signal of half as many basis functions, to which as many positions are written at "
    "once; where segments are that long, each is timed with one update. softmax: all keys and values, which grow.",
]
WINDOW_NOTES = [
    "Every token is scored with a window of positions in sight, its own included: by a Transformer-XL (same_length) "
    "that reads segments and carries the layers' inputs between them; or, as Al-Rfou et al. 2018, by a Transformer "
    "with softmax attention and absolute positions that reads all those positions again for each token.",
    "Both have the same size, random weights, and read one stream, whose memory is full before the clock starts; "
    "embedding and head are included. Time is all that is compared: how well either predicts is not measured.",
    "paper: table 9 of Dai et al. 2019, whose models are larger and ran on a GPU.",
]


def _infinite(d_model: int, n_heads: int, mem_len: int, *, sticky: bool) -> attentions.Attention:
    return attentions.InfiniteAttention(
        d_model,
        n_heads,
        mem_len=mem_len,
        segment_len=mem_len,
        n_basis=mem_len // 4 * 2,
        widths=(0.01, 0.05),
        n_samples=mem_len,
        sticky=sticky,
    )


KINDS: dict[str, Callable[[int, int, int], attentions.Attention]] = {
    "xl": lambda e, h, m: attentions.TransformerXLAttention(e, h, mem_len=m, same_length=True),
    "compressive": lambda e, h, m: attentions.CompressiveAttention(e, h, mem_len=m, compressed_len=m // 2),
    "infinite": partial(_infinite, sticky=False),
    "infinite_sticky": partial(_infinite, sticky=True),
    "linear": lambda e, h, m: attentions.LinearAttention(e, h),
    "softmax_window": lambda e, h, m: attentions.SoftmaxAttention(e, h, window=m),
    GROWING: lambda e, h, m: attentions.SoftmaxAttention(e, h),
}
"""Each kind, made from width, heads and the positions that a memory holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "tokens read before; the shortest is what the others are compared with"
    add_options(parser, lengths=([2**12, 2**16, 2**20], about), segment_len=(128, "tokens that are read at once"))
    add_options(parser, segments=(10, "segments of each measurement"), repeats=(20, "rounds"))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    add_options(parser, 2, d_model=64, n_heads=4)
    add_options(parser, 4, mem_len=128)
    add_options(parser, most=(2**16, "longest for softmax, which is O(N²)"))
    about = f"attention lengths of evaluation by models of {SMALL}; Dai et al. 2019 have {list(PAPER)}"
    parser.add_argument("--windows", type=at_least(2), nargs="+", default=[], help=about)


@torch.no_grad()
def run(args: argparse.Namespace) -> Report:
    if args.windows:
        return Report("memory", [_evaluated(window, SMALL, args) for window in sorted(args.windows)], WINDOW_NOTES)
    return Report("memory", _streamed(args), STREAM_NOTES)


class Stream:
    """An attention that reads random inputs segment by segment.

    Args:
        attention: What reads.
        segment_len: Positions of a segment.
    """

    def __init__(self, attention: attentions.Attention, segment_len: int) -> None:
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
        state = self.attention.initial_state(1, device=self._next.device)
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


def _streamed(args: argparse.Namespace) -> list[Row]:
    lengths = sorted(set(args.lengths))
    if any(length % args.segment_len for length in lengths):
        raise ValueError(
            f"lengths={lengths} are not all multiples of segment_len={args.segment_len}; choose some that are"
        )
    streams = {}
    for kind in args.kinds:
        within = [n for n in lengths if kind != GROWING or n <= args.most]
        if within:
            print(f"memory: {kind} reads {within[-1]:,} tokens", file=sys.stderr, flush=True)
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
    found = {name: Spread(tuple(s)) for name, s in interleaved("memory", measures, args.repeats).items()}
    rows: list[Row] = []
    for kind, stream in streams.items():
        seconds = {n: found[f"{kind}, {n}"] for n in stream.states}
        shortest = lengths[0]
        rows.append(
            {
                "attention": kind,
                **{f"ms after {n:,}": seconds[n].map(lambda s: 1000 * s) if n in seconds else None for n in lengths},
                **{
                    f"after {n:,} ÷ after {shortest:,}": seconds[n] / seconds[shortest] if n in seconds else None
                    for n in lengths[1:]
                },
                **{f"state after {n:,}, bytes": nbytes(stream.states[n]) if n in seconds else None for n in lengths},
            }
        )
    return rows


def _fastest(function: Callable[[], None], times: int, device: torch.device) -> float:
    return min(seconds_of(function, device) for _ in range(times))


class Reader:
    """Reads on in a stream, whose memory it carries: each call scores `n_scored` tokens more.

    Args:
        model: The model.
        memory: The memory that it begins with.
        segment_len: Tokens that go through the model at once.
        segments: How many of these are read in a call.
    """

    def __init__(self, model: LanguageModel, memory: State, segment_len: int, segments: int) -> None:
        self.model = model
        self.memory = memory
        self.n_scored = segments * segment_len
        self.batches = [_batch(segment_len, model.device) for _ in range(segments)]

    @torch.no_grad()
    def __call__(self) -> None:
        """Score the next tokens."""
        for batch in self.batches:
            hidden, self.memory = self.model.hidden(batch, self.memory)
            self.model.head.nll(hidden, batch.targets)


def _evaluated(window: int, size: Size, args: argparse.Namespace) -> Row:
    readers = {
        "with memory": with_memory(window, size, args.segment_len, args.segments, args.device),
        "sliding": sliding(window, size, 2, args.device),
    }
    for reader in readers.values():
        reader()  # what is allocated once
    seconds = timed(f"attention length {window}", readers, args)
    each = {name: seconds[name].map(lambda s, n=reader.n_scored: 1000 * s / n) for name, reader in readers.items()}
    return {
        "attention length": window,
        "with memory, ms a token": each["with memory"],
        "sliding, ms a token": each["sliding"],
        "sliding ÷ with memory": each["sliding"] / each["with memory"],
        "paper": PAPER.get(window, "—"),
    }


@torch.no_grad()
def with_memory(length: int, size: Size, segment_len: int, segments: int, device: torch.device) -> Reader:
    """Return a Transformer-XL whose memory holds `length` positions, and is full."""
    attention = partial(attentions.TransformerXLAttention, mem_len=length, same_length=True)
    model = _model(size, device, attention=attention, positions=None)
    _, memory = model.hidden(_batch(length, device), model.backbone.initial_state(1, device=device))
    return Reader(model, memory, segment_len, segments)


def sliding(length: int, size: Size, windows: int, device: torch.device) -> Reader:
    """Return a Transformer that reads the `length` newest positions for each token, and has as many before it."""
    model = _model(size, device, attention=attentions.SoftmaxAttention, eval_window=length)
    inputs = model.embedding(_batch(length - 1, device).inputs)  # (1, length − 1, E)
    # Reading them in one by one would take as many windows.
    memory = SlidingState(inputs.detach(), torch.full((1,), length - 1, device=device))
    return Reader(model, memory, windows, 1)


def _model(size: Size, device: torch.device, eval_window: int | None = None, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    backbone = Transformer(size.d_model, size.n_heads, size.n_layers, **options)
    return LanguageModel(backbone, N_TOKENS, unit="byte", eval_window=eval_window).to(device).eval()


def _batch(length: int, device: torch.device) -> TokenBatch:
    """Make tokens at random; what they are does not change what they cost."""
    tokens = torch.randint(N_TOKENS, (1, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
    return TokenBatch(tokens[:, :-1], tokens[:, 1:])
