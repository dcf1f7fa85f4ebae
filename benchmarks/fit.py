"""What `fit` costs a step beside a bare loop, and what bfloat16, compilation and checkpointing change.

Unlike `steps` and `training`, which call the model themselves, it times steps inside a running Trainer: only its
figures contain the loader, callbacks and loggers, and show the effect of the Trainer's precision and of compilation.
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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from benchmarks.measuring import MIB, Spread, interleaved, now, reset_peak, resident_peak
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.cli import command

DEFAULTS = {
    "configs/digits_linear.yaml": "--data.batch_size 96",
    "configs/stdlib_xl.yaml": "--data.batch_size 48",
}
"""A model without a state and one that carries it, and batches that take 200 ms or more on 2 cores."""

VARIANTS = {
    "fit": "",
    "bfloat16": "--trainer.precision bf16-mixed",
    "compiled": "--trainer.callbacks+=Compile",
    "compiled, bfloat16": "--trainer.callbacks+=Compile --trainer.precision bf16-mixed",
    "checkpointing": "--model.backbone.gradient_checkpointing true",
}
"""What `fit` is told; the first is float32 and plain."""

BARE = "bare loop"
WARM = 4
"""Steps before the timed ones."""

NOTES = [
    "bare loop: forward, backward, clipping and optimiser of the same model in float32 on the same batch, which lies "
    "ready; nothing else. It and `fit` take turns step by step, in one process, so that a machine whose speed changes "
    "changes it for both. All others: `lit-effattn fit --config …` with the configuration's flags and the row's, in "
    "this process, progress bar as on a terminal, both loggers, checkpoints and the data's own loader included, "
    "validation left out.",
    "Figures are median (min–max) over the rounds, in which all take turns; ratios and differences are taken round by "
    f"round. ms/step: the mean of a round's steps, after {WARM} to warm up. first step: of a fit before the rounds, "
    "which starts the loader, and compiles; torch keeps on the disk what an earlier run has compiled.",
    "around: what is left of a step of `fit` without the model's forward pass, backward pass, clipping and optimiser, "
    "all timed in that step: what a bare loop would save, free of how the machine's speed changes from step to step. "
    "On the CPU alone; a GPU works on meanwhile.",
    "Peak memory: above what the process held when the step began, over one step after the timed ones. On CUDA the "
    "allocator's, else resident memory, for compiled code asks no operator for what it needs.",
]


class Probe(NamedTuple):
    """What some steps took."""

    first: float  # seconds of the first step
    step: float  # seconds of each of the timed ones, the mean
    tokens: int  # in each
    grown: int | None  # bytes
    around: float | None = None  # seconds of each of the timed ones in none of what a bare loop does, the mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", nargs="*", help=f"files of configs/; default: {', '.join(DEFAULTS)}")
    parser.add_argument(
        "--flags", default=None, help="for `fit`, say '--data.batch_size 96'; default: a configuration's"
    )
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--steps", type=at_least(1), default=8, help="timed in a round; default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="rounds; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    return Report("fit", [row for config in args.configs or DEFAULTS for row in _compare(config, args)], NOTES)


def _compare(config: str, args: argparse.Namespace) -> list[Row]:
    flags = DEFAULTS.get(config, "") if args.flags is None else args.flags
    with tempfile.TemporaryDirectory() as root:
        fits = {
            name: partial(fit, config, shlex.split(f"{flags} {VARIANTS[name]}"), args.steps, args.device, root)
            for name in dict.fromkeys(["fit", *args.only])
        }
        firsts: dict[str, float] = {}
        for name, one in fits.items():
            print(f"fit, {config}: before the rounds, {name}", file=sys.stderr, flush=True)
            clock = one()
            firsts[name] = clock.probe().first
            if name == "fit":
                bare = Bare(clock)
        measures = {name: partial(_probes, name, one, bare if name == "fit" else None) for name, one in fits.items()}
        rounds = interleaved(f"fit, {config}", measures, args.repeats)
    probes = {name: [p[name] for p in of] for of in rounds.values() for name in of[0]}
    seconds = {name: Spread(tuple(p.step for p in of)) for name, of in probes.items()}
    grown = {name: _spread([p.grown for p in of]) for name, of in probes.items()}
    around = {name: _spread([p.around for p in of]) for name, of in probes.items()}
    plain = grown["fit"]
    rows: list[Row] = []
    for name, of in probes.items():
        peak, rest = grown[name], around[name]
        rows.append(
            {
                "configuration": config,
                "flags": flags,
                "what": name,
                "first step, s": firsts.get(name),
                "ms/step": seconds[name].map(lambda s: 1000 * s),
                "tokens/s": Spread(tuple(p.tokens / p.step for p in of)),
                "tokens/s ÷ bare loop's": seconds[BARE] / seconds[name],
                "the mean ± its standard error": _mean(seconds[BARE] / seconds[name]),
                "ms/step − bare loop's": _over(seconds[name], seconds[BARE]),
                "around, ms/step": None if rest is None else rest.map(lambda s: 1000 * s),
                "around ÷ step": None if rest is None else rest / seconds[name],
                "tokens/s ÷ fit's": seconds["fit"] / seconds[name],
                "peak memory, MiB": None if peak is None else peak.map(lambda b: b / MIB),
                "peak memory ÷ fit's": None if peak is None or plain is None else peak / plain,
            }
        )
    return rows


def _mean(spread: Spread) -> str | None:
    if len(spread.samples) == 1:
        return None
    error = statistics.stdev(spread.samples) / math.sqrt(len(spread.samples))
    return f"{statistics.fmean(spread.samples):.3f} ± {error:.3f}"


def _over(one: Spread, other: Spread) -> Spread:
    return Spread(tuple(1000 * (a - b) for a, b in zip(one.samples, other.samples, strict=True)))


def _probes(name: str, one: Callable[..., Clock], bare: Bare | None) -> dict[str, Probe]:
    clock = one(beside=bare)
    return ({} if bare is None else {BARE: bare.probe()}) | {name: clock.probe()}


def _spread(figures: Sequence[float | None]) -> Spread | None:
    known = [float(x) for x in figures if x is not None]
    return Spread(tuple(known)) if len(known) == len(figures) else None


# -------------------------------------------------------------------------------------------------------- the command


class Clock(pl.Callback):
    """Takes the time of a run's steps, and the memory of its last.

    Args:
        steps: How many are timed.
    """

    last: Clock
    """The one made last: the command makes it, and hands none out."""

    beside: Bare | None = None
    """What takes a step after every one of the run's; see `fit`."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []  # of each step
        self.unwatch: list[Callable[[], None]] = []
        self.tokens = 0
        self.grown: int | None = None
        self.inside: list[float] = []  # seconds of a step in what a bare loop does too
        self._before: int | None = None
        self._began = self._started = 0.0
        Clock.last = self

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin.

        Raises:
            ValueError: The run would go on to a second epoch, and to what ends the first.
        """
        if trainer.num_training_batches <= WARM + self.steps:
            raise ValueError(
                f"an epoch has {trainer.num_training_batches} batches, and a round takes {WARM} + {self.steps} + 1; "
                "fewer --steps, or smaller batches by --flags '--data.batch_size …'"
            )
        self.trainer, self.model = trainer, pl_module
        self.device = pl_module.device
        if self.device.type == "cpu":
            self._watch(pl_module)
        if self.beside is not None:
            self.beside.start(pl_module)
        self._started = now(self.device)

    def _watch(self, model: Any) -> None:
        """Time what a bare loop does too: see the hooks below for the backward pass and where clipping begins."""
        objective = model._objective

        def timed(*args: Any) -> Any:
            self._begin()
            found = objective(*args)
            self._end()
            return found

        model._objective = timed
        self.unwatch = [
            optimizer.register_step_post_hook(lambda *_: self._end()).remove for optimizer in self.trainer.optimizers
        ]
        self.unwatch.append(lambda: setattr(model, "_objective", objective))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the model as it was."""
        for undo in self.unwatch:
            undo()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """Begin with the backward pass."""
        self._begin()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End it."""
        self._end()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Begin with clipping and the optimiser's update."""
        self._begin()

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _end(self) -> None:
        if self.inside:
            self.inside[-1] += time.perf_counter() - self._began

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Watch the memory of the step after the timed ones."""
        self.inside.append(0.0)
        if len(self.seconds) == WARM + self.steps:
            self._before = _held(self.device)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the time: from one of these to the next all that a step needs has happened once."""
        self.seconds.append(now(self.device) - self._started)
        self.tokens = _tokens(batch)
        self.grown = None if self._before is None else resident_peak(self.device) - self._before
        if self.beside is not None:
            self.beside.step(batch, watched=self._before is not None)
        self._started = now(self.device)

    def probe(self) -> Probe:
        """Return what was measured."""
        probe = _probe(self.seconds, self.tokens, self.grown)
        if self.device.type != "cpu":
            return probe
        return probe._replace(around=probe.step - statistics.fmean(self.inside[WARM : WARM + self.steps]))


def fit(
    config: str, flags: list[str], steps: int, device: torch.device, root: str, beside: Bare | None = None
) -> Clock:
    """Run `lit-effattn fit` as a user would, and return its clock; `beside` takes turns with it, step by step."""
    accelerator = ["gpu", f"[{device.index or 0}]"] if device.type == "cuda" else ["cpu", "1"]
    with _terminal(), _beside(beside):
        command.run(
            [
                *("fit", "--config", config, *flags),
                *("--trainer.max_steps", str(WARM + steps + 1), "--trainer.limit_val_batches", "0"),
                *("--trainer.accelerator", accelerator[0], "--trainer.devices", accelerator[1]),
                *("--trainer.default_root_dir", root),
                *("--trainer.callbacks+=benchmarks.fit.Clock", "--trainer.callbacks.steps", str(steps)),
            ]
        )
    return Clock.last


@contextmanager
def _beside(bare: Bare | None) -> Iterator[None]:
    """Give it to the clocks that the command makes meanwhile."""
    Clock.beside = bare
    try:
        yield
    finally:
        Clock.beside = None


@contextmanager
def _terminal() -> Iterator[None]:
    """Have the progress bar drawn as on a terminal, wherever the output goes; and drop it, for tables are printed."""
    before = os.environ.get("FORCE_COLOR")
    os.environ["FORCE_COLOR"] = "1"
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        os.environ.pop("FORCE_COLOR")
        if before is not None:
            os.environ["FORCE_COLOR"] = before


# ------------------------------------------------------------------------------------------------------- the bare loop


class Bare:
    """Trains the model of a run by a bare loop, beside another run of it.

    Args:
        clock: Of the run whose model it takes over.
    """

    def __init__(self, clock: Clock) -> None:
        self.model: Any = clock.model.to(clock.device)
        self.device = clock.device
        self.clip = clock.trainer.gradient_clip_val
        self.carries = any(isinstance(callback, MemoryCarry) for callback in clock.trainer.callbacks)  # type: ignore[attr-defined]

    def start(self, model: pl.LightningModule) -> None:
        """Begin where `model` does."""
        self.model.load_state_dict(model.state_dict())
        self.model.train()
        configured: Any = self.model.configure_optimizers()
        self.optimizer: Any = configured["optimizer"] if isinstance(configured, dict) else configured
        self.optimizer.zero_grad()
        self.memory: Any = None
        self.seconds: list[float] = []

    def step(self, batch: Any, watched: bool) -> None:
        """Train on `batch`; if `watched`, see how much memory that takes."""
        before = _held(self.device) if watched else None
        start = now(self.device)
        if self.carries and self.memory is None:
            self.memory = self.model.backbone.initial_state(len(batch[0]), device=self.device)
        loss, _, self.memory = self.model.objective(batch, self.memory)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.seconds.append(now(self.device) - start)
        self.tokens = _tokens(batch)
        self.grown = None if before is None else resident_peak(self.device) - before

    def probe(self) -> Probe:
        """Return what was measured."""
        return _probe(self.seconds, self.tokens, self.grown)


def _probe(seconds: list[float], tokens: int, grown: int | None) -> Probe:
    return Probe(seconds[0], statistics.fmean(seconds[WARM:-1]), tokens, grown)


def _tokens(batch: Any) -> int:
    """Return how many tokens a batch has: pixels' levels, or the inputs or features of a tuple."""
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    return int(batch.lengths.sum()) if batch.lengths is not None else batch[0].numel()


def _held(device: torch.device) -> int | None:
    """Return the bytes held, free ones of the C library's given back, and let their peak start there."""
    with suppress(OSError, AttributeError):  # other systems' libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
    return reset_peak(device)
