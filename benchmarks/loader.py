"""How fast text is tokenized and read, and in how much memory, beside the training that it is for."""

from __future__ import annotations

import argparse
import tempfile
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
    mapped_bytes,
    now,
    reset_peak,
    resident_peak,
)
from benchmarks.models import SMALL, at_least
from benchmarks.report import Report, Row
from lit_effattn import Transformer, sequence
from lit_effattn.attention import LinearAttention
from lit_effattn.datamodules import IGNORE, TextStream, TokenBatch
from lit_effattn.positions import RotaryPositions
from lit_effattn.tasks import LanguageModel

NOTES = [
    "tokenize: from the files to the mapped tokens of all splits, with nothing cached. read: a whole epoch of training "
    "batches. train: forward, backward and optimiser on one of these batches, by the model of "
    "configs/stdlib_linear.yaml, which carries its memory.",
    "Each is measured in a fresh process; median (min–max) over the rounds, in which they take turns; ratios are taken "
    "round by round. The model's own are above 1 where the loader is not the bottleneck.",
    "peak: of the process's resident memory, libraries included; grown: above what it held before. mapped: pages of "
    "files, at the end above the beginning: tokens that were read, which the system takes back whenever it wants to.",
]

CPU = torch.device("cpu")


class Probe(NamedTuple):
    """What a part took; memory in bytes, None where the system does not tell."""

    tokens: int
    seconds: float
    before: int | None  # resident
    peak: int | None
    mapped: int | None  # more of files than before


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
            "grown, MiB": _spread([p.peak - p.before if p.peak and p.before else None for p in of]),
            "of that mapped, MiB": _spread([p.mapped for p in of]),
            "peak, MiB": _spread([p.peak for p in of]),
        }
        for name, of in probes.items()
    ]
    return Report("loader", rows, NOTES)


def tokenize(options: dict[str, Any]) -> Probe:
    """Make the tokens of all splits, with nothing cached."""
    with tempfile.TemporaryDirectory() as cache:
        data = TextStream(**options, cache=cache)
        watch = _Watch(CPU)
        data.prepare_data()
        probe = watch.stop()
        return probe._replace(tokens=len(data.train_dataloader().dataset.tokens) + sum(data.n_scored.values()))


def read(options: dict[str, Any]) -> Probe:
    """Read one epoch of training batches."""
    loader = TextStream(**options).train_dataloader()
    watch, n_tokens = _Watch(CPU), 0
    for batch in loader:
        n_tokens += _scored(batch)
    return watch.stop()._replace(tokens=n_tokens)


def train(options: dict[str, Any], steps: int, device: torch.device) -> Probe:
    """Train by `steps` steps, always on the same batch."""
    data = TextStream(**options)
    batch = next(iter(data.train_dataloader()))
    step = _Step(data.vocab_size, TokenBatch(*sequence.to(tuple(batch), device)), device)
    step()  # what is allocated once
    watch = _Watch(device)
    for _ in range(steps):
        step()
    return watch.stop()._replace(tokens=steps * _scored(batch))


class _Watch:
    """Begins to measure as soon as it is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before, self.mapped = reset_peak(CPU), mapped_bytes()
        self.start = now(device)

    def stop(self) -> Probe:
        """Return what it took, the tokens aside."""
        seconds = now(self.device) - self.start
        peak, mapped = None if self.before is None else resident_peak(CPU), mapped_bytes()
        more = None if mapped is None or self.mapped is None else max(0, mapped - self.mapped)
        return Probe(0, seconds, self.before, peak, more)


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
        self.optimizer: Any = self.model.configure_optimizers()
        self.batch = batch
        self.model.memory = backbone.initial_state(len(batch.inputs), device=device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*You are trying to `self.log\\(\\)`.*")
            self.model.training_step(self.batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def _scored(batch: TokenBatch) -> int:
    return int((batch.targets != IGNORE).sum())


def _spread(sizes: list[int | None]) -> Spread | None:
    known = [size / MIB for size in sizes if size is not None]
    return Spread(tuple(known)) if len(known) == len(sizes) else None
