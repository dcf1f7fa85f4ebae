"""How fast text is tokenized and read, and in how much memory, beside the training that it is for."""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.measuring import (
    MIB,
    Spread,
    in_fresh_process,
    interleaved,
    now,
    reset_peak,
    resident_peak,
)
from benchmarks.models import SMALL, at_least
from benchmarks.report import Report, Row
from datamodules import IGNORE, TextStream, TokenBatch
from lit_effattn import Transformer, sequence
from lit_effattn.attention import LinearAttention
from lit_effattn.positions import RotaryPositions
from lit_effattn.tasks import LanguageModel

NOTES = [
    "tokenize: from the files to the mapped tokens of all splits, with nothing cached. read: a whole epoch of training "
    "batches. train: forward, backward and optimiser on one of these batches, by the model of "
    "configs/stdlib_linear.yaml, which carries its memory.",
    "Each is measured in a fresh process; median (min–max) over the rounds, in which they take turns; ratios are taken "
    "round by round. The model's own are above 1 where the loader is not the bottleneck.",
    "peak: of the process's resident memory, libraries included; grown: above what it held before. Pages of the mapped "
    "tokens count as soon as they are read, though the system takes them back whenever it wants.",
]

CPU = torch.device("cpu")


class Probe(NamedTuple):
    """What a part took; memory in bytes, None where the system does not tell."""

    tokens: int
    seconds: float
    before: int | None
    peak: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = ("stdlib", "enwik8", "text8", "wikitext103", "files")
    parser.add_argument("--source", choices=sources, default="stdlib", help="of TextStream; default: %(default)s")
    parser.add_argument("--root", help="where it is, if it is files")
    parser.add_argument("--tokens", choices=("bytes", "characters", "words", "bpe"), help="default: the source's")
    parser.add_argument("--vocab_size", type=at_least(1), help="of words and bpe")
    parser.add_argument("--max_bytes", type=at_least(1), help="of the text; default: all")
    parser.add_argument("--segment_len", type=at_least(1), default=64, help="default: %(default)s")
    parser.add_argument("--batch_size", type=at_least(1), default=24, help="streams; default: %(default)s")
    parser.add_argument("--steps", type=at_least(1), default=10, help="of training; default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="rounds; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    names = ("source", "root", "tokens", "vocab_size", "max_bytes", "segment_len", "batch_size")
    options = {name: getattr(args, name) for name in names}
    TextStream(**options).prepare_data()  # wrong options are refused here, and reading finds the tokens
    parts: dict[str, Callable[[], Probe]] = {
        "tokenize": partial(tokenize, options),
        "read": partial(read, options),
        "train": partial(train, options, args.steps, args.device),
    }
    probes = interleaved(
        "loader", {name: partial(in_fresh_process, part, __name__) for name, part in parts.items()}, args.repeats
    )
    speeds = {name: Spread(tuple(p.tokens / p.seconds for p in of)) for name, of in probes.items()}
    rows: list[Row] = [
        {
            "part": name,
            "tokens": of[0].tokens,
            "seconds": Spread(tuple(p.seconds for p in of)),
            "tokens/s": speeds[name],
            "÷ training's": speeds[name] / speeds["train"],
            "grown, MiB": _spread([p.peak - p.before for p in of if p.peak and p.before]),
            "peak, MiB": _spread([p.peak for p in of if p.peak]),
        }
        for name, of in probes.items()
    ]
    return Report("loader", rows, NOTES)


def tokenize(options: dict[str, Any]) -> Probe:
    """Make the tokens of all splits, with nothing cached."""
    with tempfile.TemporaryDirectory() as cache:
        data = TextStream(**options, cache=cache)
        before, start = reset_peak(CPU), time.perf_counter()
        data.prepare_data()
        seconds, peak = time.perf_counter() - start, _peak(before)
        n_tokens = len(data.train_dataloader().dataset.tokens) + sum(data.n_scored.values())
    return Probe(n_tokens, seconds, before, peak)


def read(options: dict[str, Any]) -> Probe:
    """Read one epoch of training batches."""
    loader = TextStream(**options).train_dataloader()
    before, start, n_tokens = reset_peak(CPU), time.perf_counter(), 0
    for batch in loader:
        n_tokens += _scored(batch)
    return Probe(n_tokens, time.perf_counter() - start, before, _peak(before))


def train(options: dict[str, Any], steps: int, device: torch.device) -> Probe:
    """Train by `steps` steps, always on the same batch."""
    data = TextStream(**options)
    batch = next(iter(data.train_dataloader()))
    step = _Step(data.vocab_size, TokenBatch(*sequence.to(tuple(batch), device)), device)
    step()  # what is allocated once
    before, start = reset_peak(CPU), now(device)
    for _ in range(steps):
        step()
    seconds = now(device) - start
    return Probe(steps * _scored(batch), seconds, before, _peak(before))


class _Step:
    """Trains the model of configs/stdlib_linear.yaml by one step at every call."""

    def __init__(self, vocab_size: int, batch: TokenBatch, device: torch.device) -> None:
        size = SMALL
        attention = partial(LinearAttention, chunk_size=64)
        backbone = Transformer(
            size.d_model, size.n_heads, size.n_layers, attention=attention, positions=RotaryPositions
        )
        optimizer = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.05)
        self.model = LanguageModel(backbone, vocab_size, tie=True, optimizer=optimizer).to(device).train()
        self.model.carries_memory = True
        self.optimizer: Any = self.model.configure_optimizers()
        self.batch = batch

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*You are trying to `self.log\\(\\)`.*")
            self.model.training_step(self.batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def _scored(batch: TokenBatch) -> int:
    return int((batch.targets != IGNORE).sum())


def _peak(before: int | None) -> int | None:
    return None if before is None else resident_peak(CPU)


def _spread(sizes: list[int]) -> Spread | None:
    return Spread(tuple(size / MIB for size in sizes)) if sizes else None
