"""What `torch.compile` makes of each kind's training step, its state included: graphs, breaks, compilations."""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn import LSTM, Transformer
from lit_effattn.attention import (
    AttentionFactory,
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    LSHAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
)
from lit_effattn.datamodules import TokenBatch
from lit_effattn.nn.adaptive import AdaptiveHead
from lit_effattn.sequence import SequenceModule
from lit_effattn.tasks import LanguageModel

N_TOKENS = 64
WIDTH, N_HEADS, N_LAYERS = 32, 2, 1

NOTES = [
    f"The training step of a LanguageModel: embedding, a Transformer of {N_LAYERS} layer, width {WIDTH} and {N_HEADS} "
    "heads, loss, and the state that the next batch goes on from, where it has a bound, else none. Three batches of "
    "equally many rows, then two of other numbers.",
    "graphs: programs of the first step; 1 with 0 breaks is the whole step at once. compiled again: in later steps of "
    "the same size, where the state is carried; and after batches of other sizes.",
    "The backend `eager` runs the graphs as they are: what is found here is so for every backend.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=list(kinds(1)), default=list(kinds(1)), help="default: all")
    about = "positions, and what memories and windows hold; default: %(default)s"
    parser.add_argument("--segment_len", type=at_least(8), default=32, help=about)


def kinds(n: int) -> dict[str, Callable[[], LanguageModel]]:
    """Return what makes a model of each kind, for segments of `n` positions."""
    attentions: dict[str, AttentionFactory] = {
        "softmax, window": partial(SoftmaxAttention, window=n),
        "softmax": SoftmaxAttention,
        "shaw, window": partial(ShawAttention, max_distance=8, window=n),
        "sparse, strided": partial(SparseAttention, stride=8),
        "sparse, fixed": partial(SparseAttention, stride=8, pattern="fixed"),
        "lsh": partial(LSHAttention, n_hashes=2, n_buckets=4, chunk_size=8),
        "linear": partial(LinearAttention, chunk_size=8),
        "performer": partial(PerformerAttention, chunk_size=8),
        "xl": partial(TransformerXLAttention, mem_len=n),
        "compressive": partial(CompressiveAttention, mem_len=n, compressed_len=8, compression_rate=4),
        "infinite": partial(InfiniteAttention, mem_len=n, segment_len=n, n_basis=8),
        "infinite, sticky": partial(InfiniteAttention, mem_len=n, segment_len=n, n_basis=8, sticky=True),
    }
    makers = {name: partial(_model, attention) for name, attention in attentions.items()}
    adaptive = partial(AdaptiveHead, cutoffs=[N_TOKENS // 2])
    return {
        **makers,
        "linear, checkpointing": partial(_model, attentions["linear"], gradient_checkpointing=True),
        "linear, adaptive head": partial(_model, attentions["linear"], head=adaptive),
        "lstm, 1 layer": lambda: LanguageModel(LSTM(WIDTH, 1), N_TOKENS),
    }


def _model(attention: AttentionFactory, gradient_checkpointing: bool = False, head: Any = None) -> LanguageModel:
    backbone: SequenceModule = Transformer(
        WIDTH, N_HEADS, N_LAYERS, attention=attention, positions=None, gradient_checkpointing=gradient_checkpointing
    )
    return LanguageModel(backbone, N_TOKENS, head=head)


def run(args: argparse.Namespace) -> Report:
    made = kinds(args.segment_len)
    return Report("graphs", [{"kind": name, **count(made[name](), args)} for name in args.kinds], NOTES)


def count(model: LanguageModel, args: argparse.Namespace) -> Row:
    """Train by a few steps, and count what is compiled."""
    torch._dynamo.reset()
    counters.clear()
    model.to(args.device).train().compile_objective("eager")
    start = time.perf_counter()
    first = _graphs(model, 4, args, steps=1)
    seconds, breaks = time.perf_counter() - start, dict(counters["graph_break"])
    same = _graphs(model, 4, args, steps=2)
    _graphs(model, 3, args, steps=1)
    other = _graphs(model, 6, args, steps=1)
    return {
        "state": "carried" if model.backbone.bounded_by is None else "none",
        "graphs": first,
        "breaks": sum(breaks.values()),
        "why": "; ".join(map(_explained, breaks)) or "–",
        "compiled again, same size": same - first,
        "compiled again, other sizes": other - same,
        "first step, s": seconds,
    }


def _explained(reason: str) -> str:
    """Return what Dynamo says of a break, in a line and without addresses in memory."""
    head, _, rest = reason.partition("\n")
    found = re.search(r"Explanation: (.+)", rest)
    return re.sub(r" at 0x[0-9a-f]+", "", found[1] if found else head)


def _graphs(model: LanguageModel, rows: int, args: argparse.Namespace, steps: int) -> int:
    """Train by `steps` steps of `rows` rows, the first without a past; return how many graphs there are by now."""
    memory = model.memory
    if model.backbone.bounded_by is None and (memory is None or len(memory.length) != rows):
        model.memory = model.backbone.initial_state(rows, device=args.device)
    for _ in range(steps):
        tokens = torch.randint(N_TOKENS, (rows, args.segment_len), device=args.device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*You are trying to `self.log\\(\\)`.*")
            model.training_step(TokenBatch(tokens, tokens)).backward()
    return counters["stats"]["unique_graphs"]
