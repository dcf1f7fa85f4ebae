"""Time and memory per scored token: a carried memory compared with a window that slides by one token."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks.measuring import add_options, timed
from benchmarks.models import SMALL, Size, random_levels
from benchmarks.report import Report, Row
from lit_effattn import Transformer
from lit_effattn import attention as attentions
from lit_effattn.datamodules import TokenBatch
from lit_effattn.nn.sliding import SlidingState
from lit_effattn.sequence import State, nbytes
from lit_effattn.tasks import LanguageModel

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Dai et al. 2019, table 9: speed-up over a sliding window, by attention length; 24 layers on a GPU."""

DEEP = Size(24, 8, 1024)
"""The model of table 9, with feed-forward layers of width 3,072."""

N_TOKENS = 256  # bytes

NOTES = [
    "Every token is scored with a window of visible positions, its own included: by a Transformer-XL (same_length) "
    "that reads segments and carries the layers' inputs between them; or, as in Al-Rfou et al. 2018, by a Transformer "
    "with softmax attention and absolute positions that reads all those positions again for each token.",
    "Both have the same size and random weights, and read one stream, with a full memory before the clock starts; "
    "embedding and head are included. Only time is compared, not the quality of the predictions.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, 2, lengths=(list(PAPER), "visible positions, those of the paper"))
    add_options(parser, segment_len=(128, "tokens that are read at once"), repeats=(3, "rounds"))
    add_options(parser, segments=(3, "segments of each measurement"))
    parser.add_argument("--paper", action="store_true", help=f"the paper's size, {DEEP}, instead of {SMALL}")


def run(args: argparse.Namespace) -> Report:
    return Report(
        "memory", [_row(length, DEEP if args.paper else SMALL, args) for length in sorted(args.lengths)], NOTES
    )


class Reader:
    """Reads a stream and carries its memory. Each call scores the next `n_scored` tokens.

    Args:
        model: The model.
        memory: The initial memory.
        segment_len: Tokens that the model reads at once.
        segments: Number of segments that a call reads.
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


def _row(length: int, size: Size, args: argparse.Namespace) -> Row:
    readers = {
        "with memory": with_memory(length, size, args.segment_len, args.segments, args.device),
        "sliding": sliding(length, size, 2, args.device),
    }
    for reader in readers.values():
        reader()  # one-time allocations
    seconds = timed(f"attention length {length}", readers, args)
    each = {name: seconds[name].map(lambda s, n=reader.n_scored: 1000 * s / n) for name, reader in readers.items()}
    return {
        "attention length": length,
        "model": str(size),
        "with memory, ms a token": each["with memory"],
        "sliding, ms a token": each["sliding"],
        "sliding ÷ with memory": each["sliding"] / each["with memory"],
        "memory, bytes": nbytes(readers["with memory"].memory),
        "paper": PAPER.get(length, "—"),
    }


@torch.no_grad()
def with_memory(length: int, size: Size, segment_len: int, segments: int, device: torch.device) -> Reader:
    """Return a Transformer-XL with a full memory of `length` positions."""
    attention = partial(attentions.TransformerXLAttention, mem_len=length, same_length=True)
    model = _model(size, device, attention=attention, positions=None)
    _, memory = model.hidden(_batch(length, device), model.backbone.initial_state(1, device=device))
    return Reader(model, memory, segment_len, segments)


def sliding(length: int, size: Size, windows: int, device: torch.device) -> Reader:
    """Return a Transformer that reads the `length` newest positions for each token, after `length` − 1 positions."""
    model = _model(size, device, attention=attentions.SoftmaxAttention, eval_window=length)
    inputs = model.embedding(_batch(length - 1, device).inputs)  # (1, length − 1, E)
    # The state directly, since reading these positions would take a window for each.
    memory = SlidingState(inputs.detach(), torch.full((1,), length - 1, device=device))
    return Reader(model, memory, windows, 1)


def _model(size: Size, device: torch.device, eval_window: int | None = None, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    width = 3072 if size == DEEP else None
    backbone = Transformer(size.d_model, size.n_heads, size.n_layers, d_ff=width, **options)
    return LanguageModel(backbone, N_TOKENS, unit="byte", eval_window=eval_window).to(device).eval()


def _batch(length: int, device: torch.device) -> TokenBatch:
    """Make random tokens. The cost does not depend on them."""
    tokens = random_levels(1, length + 1, device)
    return TokenBatch(tokens[:, :-1], tokens[:, 1:])
