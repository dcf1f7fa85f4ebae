"""One training step, linear attention against softmax attention: time and memory at equal tokens a step.

Unlike `training` and `fit` it needs no data set and no run: it times new models on random levels, at any length.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import cast

import torch
from torch import Tensor

from benchmarks.measuring import MIB, Spread, interleaved, peak_bytes, seconds_of
from benchmarks.models import IMAGES, KINDS, add_model_arguments, at_least, build, random_levels, size_for
from benchmarks.report import Report, Row
from lit_effattn import PixelModel

NOTES = [
    "A step is forward, backward and RAdam in float32, after one to warm up. Figures are median (min–max) over the "
    "rounds, in which the attentions take turns; ratios are taken round by round.",
    "Peak memory: tensors alive at once in forward and backward, gradients included, above parameters and the "
    "optimiser's state. On CUDA the allocator's; on a CPU the storages that operators return, without scratch memory "
    "inside an operator. Measured once, outside the timed steps.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, lengths=[784, 3072], repeats=7)
    parser.add_argument(
        "--tokens", type=at_least(1), default=3072, help="about as many a step, in whole images; default: %(default)s"
    )


def run(args: argparse.Namespace) -> Report:
    rows = [row for length in args.lengths for row in _compare(length, args)]
    return Report("steps", rows, NOTES)


class _Training:
    """A model, its optimiser and the batch that it sees at every step."""

    def __init__(self, model: PixelModel, batch: Tensor) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = cast(torch.optim.Optimizer, model.configure_optimizers())

    def gradients(self) -> None:
        # What `training_step` does, but for its logging, which needs a Trainer.
        self.model.nll(self.batch).mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.gradients()
        self.optimizer.step()

    def peak(self) -> int:
        self.optimizer.zero_grad()
        return peak_bytes(self.gradients, self.batch.device)


def _compare(length: int, args: argparse.Namespace) -> list[Row]:
    size = size_for(length, args.small)
    batch = random_levels(max(1, round(args.tokens / length)), length, args.device)
    trainings = {kind: _Training(build(kind, length, size, args.device), batch) for kind in KINDS}
    for training in trainings.values():
        training.step()
    peaks = {kind: training.peak() for kind, training in trainings.items()}
    measures = {kind: partial(seconds_of, training.step, args.device) for kind, training in trainings.items()}
    results = interleaved(f"steps, length {length}", measures, args.repeats)
    seconds = {kind: Spread(tuple(samples)) for kind, samples in results.items()}
    return [
        {
            "length": IMAGES.get(length, str(length)),
            "model": str(size),
            "batch": len(batch),
            "attention": kind,
            "ms/step": seconds[kind].map(lambda s: 1000 * s),
            "tokens/s": seconds[kind].map(lambda s: batch.numel() / s),
            "tokens/s ÷ softmax's": seconds["softmax"] / seconds[kind],
            "peak memory, MiB": peaks[kind] / MIB,
            "peak memory ÷ softmax's": peaks[kind] / peaks["softmax"],
        }
        for kind in KINDS
    ]
