"""Training steps: linear and softmax attention, or `fit` with given configurations compared with a bare loop.

Without configurations it times new models on random levels, at any length. With configurations it times the steps of a
running Trainer, including the loader, callbacks and loggers, with several precisions and with compilation.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks.measuring import (
    MIB,
    Spread,
    add_options,
    interleaved,
    now,
    peak_bytes,
    reset_peak,
    resident_peak,
    timed,
)
from benchmarks.models import IMAGES, KINDS, SMALL, build, random_levels, size_for
from benchmarks.report import Report, Row
from lit_effattn import PixelModel
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.cli import command

FLAGS = {"configs/digits_linear.yaml": "--data.batch_size 96", "configs/stdlib_xl.yaml": "--data.batch_size 48"}
"""Flags of these configurations, for steps of 200 ms or more on 2 cores."""

SAVE = "--checkpoint.every_n_train_steps 1"
VARIANTS = {
    "fit": "",
    "bfloat16": "--trainer.precision bf16-mixed",
    "compiled": "--trainer.callbacks+=Compile",
    "compiled, bfloat16": "--trainer.callbacks+=Compile --trainer.precision bf16-mixed",
    "checkpointing": "--model.backbone.gradient_checkpointing true",
    "saving": SAVE,
    "saving, asynchronous": f"{SAVE} --checkpoint.asynchronous true",
}
"""The flags of each run of `fit`; the first run is plain, in float32."""

BARE = "bare loop"
WARM = 4
"""Steps before the timed ones."""

MODEL_NOTES = [
    "A step is forward, backward and RAdam in float32, after one warm-up step.",
    "Peak memory: tensors alive at once in forward and backward, gradients included, in addition to parameters and the "
    "optimiser's state. On CUDA the allocator's; on a CPU the storages that operators return, without scratch memory "
    "inside operators. Measured once, outside the timed steps.",
]
FIT_NOTES = [
    "bare loop: only forward, backward, clipping and optimiser of the same model in float32 on the same batch, which "
    "is in memory. It and `fit` take turns step by step, in one process, so that a change of the machine's speed "
    "affects both. All others: `lit-effattn fit --config …` with the flags and those of the row, in this process, with "
    "the progress bar of a terminal, both loggers, checkpoints and the data's own loader, without validation. saving: "
    "a checkpoint after each step.",
    f"ms/step: the mean of a round's steps, after {WARM} warm-up steps. first step: of a fit before the rounds, which "
    "starts the loader, and compiles; torch caches compiled code on disk.",
    "Peak memory: in addition to that of the process when the step began, over one step after the timed ones. On CUDA "
    "the allocator's, else resident memory, since compiled code calls no operators.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", nargs="*", help="files of configs/ that `fit` runs; default: none, new models")
    add_options(parser, repeats=(7, "rounds"), steps=(8, "of `fit`, timed in a round"))
    add_options(parser, 3, lengths=([784, 3072], "tokens of a sequence of the new models"))
    add_options(parser, tokens=(3072, "about as many a step of the new models, in whole images"))
    parser.add_argument("--small", action="store_true", help=f"new models of {SMALL} instead of the paper's sizes")
    parser.add_argument("--flags", help=f"of every `fit`; default: {FLAGS}")
    about = "runs of `fit`; default: all"
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help=about)


def run(args: argparse.Namespace) -> Report:
    if args.configs:
        return Report("steps", _fits(args), FIT_NOTES)
    return Report("steps", [row for length in args.lengths for row in _models(length, args)], MODEL_NOTES)


def _step(model: PixelModel, optimizer: torch.optim.Optimizer, batch: Tensor, *, update: bool = True) -> None:
    """Perform a training step without logging, which needs a Trainer."""
    model.nll(batch).mean().backward()
    if update:
        optimizer.step()
    optimizer.zero_grad()


def _models(length: int, args: argparse.Namespace) -> list[Row]:
    size = size_for(length, args.small)
    batch = random_levels(max(1, round(args.tokens / length)), length, args.device)
    models = {kind: build(kind, length, size, args.device) for kind in KINDS}
    steps = {
        kind: partial(_step, model, cast(torch.optim.Optimizer, model.configure_optimizers()), batch)
        for kind, model in models.items()
    }
    for step in steps.values():
        step()
    peaks = {kind: peak_bytes(partial(step, update=False), args.device) for kind, step in steps.items()}
    seconds = timed(f"steps, length {length}", steps, args)
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


class Probe(NamedTuple):
    """Measurements of some steps."""

    first: float  # seconds of the first step
    step: float  # mean seconds of the timed steps
    tokens: int  # in a step
    peak: int | None  # bytes of a step, in addition to those before it


class _Steps:
    """Seconds of each step, tokens in one, and bytes of the last."""

    def begin(self, device: torch.device) -> None:
        """Begin a run."""
        self.device, self.seconds, self.peak = device, list[float](), cast("int | None", None)

    def add(self, seconds: float, batch: Any, before: int | None) -> None:
        """Add a step on `batch`; `before`: the bytes before it, if its memory is measured."""
        self.seconds.append(seconds)
        self.tokens = _tokens(batch)
        self.peak = None if before is None else resident_peak(self.device) - before

    def probe(self) -> Probe:
        """Return the measurements."""
        return Probe(self.seconds[0], statistics.fmean(self.seconds[WARM:-1]), self.tokens, self.peak)


def _fits(args: argparse.Namespace) -> list[Row]:
    """Return the rows of all configurations, whose runs take turns."""
    with tempfile.TemporaryDirectory() as root:
        fits, firsts, bares = {}, {}, {}
        for config in args.configs:
            flags = FLAGS.get(config, "") if args.flags is None else args.flags
            for name in dict.fromkeys(["fit", *args.only]):
                print(f"steps, {config}: before the rounds, {name}", file=sys.stderr, flush=True)
                words = shlex.split(f"{flags} {VARIANTS[name]}")
                fits[config, name] = partial(fit, config, words, args.steps, args.device, root)
                clock = fits[config, name]()
                firsts[config, name] = clock.probe().first
                if name == "fit":
                    bares[config] = Bare(clock)

        def probes(key: tuple[str, str]) -> dict[tuple[str, str], Probe]:
            bare = bares[key[0]] if key[1] == "fit" else None
            clock = fits[key](beside=bare)
            return ({} if bare is None else {(key[0], BARE): bare.probe()}) | {key: clock.probe()}

        measures = {", ".join(key): partial(probes, key) for key in fits}
        rounds = interleaved("steps", measures, args.repeats)
    probes_of = {key: [p[key] for p in samples] for samples in rounds.values() for key in samples[0]}
    seconds = {key: Spread(tuple(p.step for p in samples)) for key, samples in probes_of.items()}
    memory = {key: _spread([p.peak for p in samples]) for key, samples in probes_of.items()}
    rows: list[Row] = []
    for (config, name), samples in probes_of.items():
        own, peak, plain = seconds[config, name], memory[config, name], memory[config, "fit"]
        # On the CPU, a step that only reuses resident memory takes 0 bytes, and has no ratio.
        comparable = peak is not None and plain is not None and all(plain.samples)
        rows.append(
            {
                "configuration": config,
                "what": name,
                "first step, s": firsts.get((config, name)),
                "ms/step": own.map(lambda s: 1000 * s),
                "tokens/s": Spread(tuple(p.tokens / p.step for p in samples)),
                "tokens/s ÷ bare loop's": seconds[config, BARE] / own,
                "the mean ± its standard error": _mean(seconds[config, BARE] / own),
                "tokens/s ÷ fit's": seconds[config, "fit"] / own,
                "ms/step ÷ fit's of the first": own / seconds[args.configs[0], "fit"],
                "peak memory, MiB": None if peak is None else peak.map(lambda b: b / MIB),
                "peak memory ÷ fit's": peak / plain if comparable else None,
            }
        )
    return rows


def _mean(spread: Spread) -> str | None:
    if len(spread.samples) == 1:
        return None
    error = statistics.stdev(spread.samples) / math.sqrt(len(spread.samples))
    return f"{statistics.fmean(spread.samples):.3f} ± {error:.3f}"


def _spread(figures: Sequence[float | None]) -> Spread | None:
    known = [float(x) for x in figures if x is not None]
    return Spread(tuple(known)) if len(known) == len(figures) else None


class Clock(_Steps, pl.Callback):
    """Measures the time of a run's steps, and the memory of the last one.

    Args:
        steps: Number of steps that are timed.
    """

    last: Clock
    """The newest clock, since the command makes it and does not return it."""

    beside: Bare | None = None
    """Takes a step after each step of the run; see `fit`."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        Clock.last = self

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin.

        Raises:
            ValueError: If an epoch has too few batches.
        """
        if trainer.num_training_batches <= WARM + self.steps:
            raise ValueError(
                f"an epoch has {trainer.num_training_batches} batches, but a round needs {WARM} + {self.steps} + 1; "
                "use fewer --steps, or smaller batches by --flags '--data.batch_size …'"
            )
        self.trainer, self.model = trainer, pl_module
        self.begin(pl_module.device)
        if self.beside is not None:
            self.beside.start(pl_module)
        self._started = now(self.device)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start to measure the memory of the step after the timed ones."""
        self._before = _memory_before(self.device) if len(self.seconds) == WARM + self.steps else None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the time since the previous call, in which everything that a step needs has run once."""
        self.add(now(self.device) - self._started, batch, self._before)
        if self.beside is not None:
            self.beside.step(batch, measure_memory=self._before is not None)
        self._started = now(self.device)


def fit(
    config: str, flags: list[str], steps: int, device: torch.device, root: str, beside: Bare | None = None
) -> Clock:
    """Run `lit-effattn fit` as a user does, and return its clock. `beside` takes turns with it, step by step."""
    accelerator = ["gpu", f"[{device.index or 0}]"] if device.type == "cuda" else ["cpu", "1"]
    Clock.beside, environ = beside, mock.patch.dict(os.environ, {"FORCE_COLOR": "1"})
    try:
        # The progress bar is drawn as on a terminal, but not shown.
        with environ, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            command.run(
                [
                    *("fit", "--config", config, "--trainer.precision", "32-true", *flags),
                    *("--trainer.max_steps", str(WARM + steps + 1), "--trainer.limit_val_batches", "0"),
                    *("--trainer.accelerator", accelerator[0], "--trainer.devices", accelerator[1]),
                    *("--trainer.default_root_dir", root),
                    *("--trainer.callbacks+=benchmarks.steps.Clock", "--trainer.callbacks.steps", str(steps)),
                ]
            )
    finally:
        Clock.beside = None
    return Clock.last


class Bare(_Steps):
    """Trains the model of an earlier run in a bare loop, in turn with another run of it.

    Args:
        clock: The clock of the earlier run.
    """

    def __init__(self, clock: Clock) -> None:
        self.model: Any = clock.model.to(clock.device)
        self.device = clock.device
        self.clip = clock.trainer.gradient_clip_val
        self.carries = any(isinstance(callback, MemoryCarry) for callback in clock.trainer.callbacks)  # type: ignore[attr-defined]

    def start(self, model: pl.LightningModule) -> None:
        """Begin with the weights of `model`."""
        self.model.load_state_dict(model.state_dict())
        self.model.train()
        configured: Any = self.model.configure_optimizers()
        self.optimizer: Any = configured["optimizer"] if isinstance(configured, dict) else configured
        self.optimizer.zero_grad()
        self.memory: Any = None
        self.begin(self.device)

    def step(self, batch: Any, measure_memory: bool) -> None:
        """Train on `batch`."""
        before = _memory_before(self.device) if measure_memory else None
        start = now(self.device)
        if self.carries and self.memory is None:
            self.memory = self.model.backbone.initial_state(len(batch[0]), device=self.device)
        loss, _, state, _ = self.model.objective(batch, self.memory)
        self.memory = state if self.carries else None
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.add(now(self.device) - start, batch, before)


def _tokens(batch: Any) -> int:
    """Return the number of tokens in a batch: levels of pixels, or the inputs or features of a tuple."""
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    return int(batch.lengths.sum()) if batch.lengths is not None else batch[0].numel()


def _memory_before(device: torch.device) -> int | None:
    """Return free memory to the system, reset the peak, and return the bytes in use."""
    with suppress(OSError, AttributeError):  # other systems' libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
    return reset_peak(device)
