"""What a scored token costs: segments with a memory, against a window that slides on by one."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks.measuring import Spread, interleaved, seconds_of
from benchmarks.models import SMALL, Size, at_least
from benchmarks.report import Report, Row
from lit_effattn import Transformer
from lit_effattn.attention import SoftmaxAttention, TransformerXLAttention
from lit_effattn.datamodules import TokenBatch
from lit_effattn.nn.sliding import SlidingState
from lit_effattn.sequence import State
from lit_effattn.tasks import LanguageModel

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Dai et al. 2019, table 9: how many times faster than sliding, by attention length; 24 layers on a GPU."""

N_TOKENS = 256  # bytes

NOTES = [
    "Every token is scored with `attention length` positions in sight, its own included: by a Transformer-XL "
    "(same_length) that reads segments and carries the layers' inputs between them; or, as Al-Rfou et al. 2018, by a "
    "Transformer with softmax attention and absolute positions that reads all those positions anew for each token.",
    "Both have the same size, random weights, and read one stream, whose memory is full before the clock starts; "
    "embedding and head are included. Time is all that is compared: how well either predicts is not measured.",
    "Figures are median (min–max) over the rounds, in which the two take turns; ratios are taken round by round.",
    "paper: table 9 of Dai et al. 2019, whose models are larger and ran on a GPU.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=at_least(2), nargs="+", default=list(PAPER), help="attention lengths; default: %(default)s"
    )
    for name, default in SMALL._asdict().items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help="default: %(default)s")
    parser.add_argument(
        "--segment_len", type=at_least(1), default=128, help="tokens that are read at once; default: %(default)s"
    )
    parser.add_argument(
        "--segments", type=at_least(1), default=3, help="segments of each measurement; default: %(default)s"
    )
    parser.add_argument(
        "--windows", type=at_least(1), default=2, help="windows of each measurement; default: %(default)s"
    )
    parser.add_argument("--repeats", type=at_least(1), default=3, help="rounds; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    size = Size(args.n_layers, args.n_heads, args.d_model)
    rows: list[Row] = []
    for length in sorted(args.lengths):
        readers = {
            "with memory": with_memory(length, size, args.segment_len, args.segments, args.device),
            "sliding": sliding(length, size, args.windows, args.device),
        }
        for reader in readers.values():
            reader()  # what is allocated once
        timed = interleaved(
            f"attention length {length}",
            {name: partial(seconds_of, reader, args.device) for name, reader in readers.items()},
            args.repeats,
        )
        each = {
            name: Spread(tuple(1000 * s / readers[name].n_scored for s in samples)) for name, samples in timed.items()
        }
        rows.append(
            {
                "attention length": length,
                "with memory, ms a token": each["with memory"],
                "sliding, ms a token": each["sliding"],
                "sliding ÷ with memory": each["sliding"] / each["with memory"],
                "paper": PAPER.get(length, "—"),
            }
        )
    return Report("evaluation", rows, NOTES)


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


@torch.no_grad()
def with_memory(length: int, size: Size, segment_len: int, segments: int, device: torch.device) -> Reader:
    """Return a Transformer-XL whose memory holds `length` positions, and is full."""
    attention = partial(TransformerXLAttention, mem_len=length, same_length=True)
    model = _model(size, device, attention=attention, positions=None)
    _, memory = model.hidden(_batch(length, device), model.backbone.initial_state(1, device=device))
    return Reader(model, memory, segment_len, segments)


def sliding(length: int, size: Size, windows: int, device: torch.device) -> Reader:
    """Return a Transformer that reads the `length` newest positions for each token, and has as many behind it."""
    model = _model(size, device, attention=SoftmaxAttention, eval_window=length)
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
