"""Whole runs beside each other: what each configuration scores, what a step costs, and how its loss falls.

Unlike `steps` and `fit` it trains to the end: only it reports test scores and loss curves, and steps of trained models.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import shlex
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentParser

from benchmarks.measuring import MIB, Spread, interleaved, peak_bytes, seconds_of
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn import tasks
from lit_effattn.checkpoints import read_checkpoint
from lit_effattn.runs import find_checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = [
    "The score is that of `lit-effattn test --ckpt_path best` after `lit-effattn fit --config …`, one run at the seed "
    "of the configuration; lower is better, but for accuracy.",
    "A step is forward, backward and optimiser on a training batch, after one to warm up, measured after all runs: "
    "median (min–max) over the rounds, in which the configurations take turns; ratios are taken round by round.",
    "Peak memory: tensors alive at once in forward and backward, gradients included, above parameters and the "
    "optimiser's state. Measured once, outside the timed steps.",
]

_LOSSES = ("train/loss", "train/bits_per_dim")


class Run(NamedTuple):
    """A configuration that has been trained and tested."""

    name: str
    folder: Path
    scores: dict[str, str]
    steps: int
    curve: list[tuple[int, float]]  # step, loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", type=Path, nargs="+", help="files of configs/")
    parser.add_argument("--repeats", type=at_least(1), default=7, help="rounds of timed steps; default: %(default)s")
    parser.add_argument("--flags", default="", help="for every `fit`, say '--trainer.max_steps 900'")
    parser.add_argument("--trained", action="store_true", help="look at the newest run of each, and train none")


def run(args: argparse.Namespace) -> Report:
    configs = {path: yaml.safe_load(path.read_text()) for path in args.configs}  # a missing file is named at once
    runs = []
    for path, config in configs.items():
        if not args.trained:
            command("fit", "--config", str(path), *shlex.split(args.flags))
        root = Path(config["trainer"]["default_root_dir"])
        best = find_checkpoint("best", root)
        reported = scores(command("test", "--ckpt_path", str(best)))
        folder = best.parent.parent
        steps = read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"]
        runs.append(Run(path.stem, folder, reported, steps, _curve(folder)))
    single = {r.name: _Step(r, args.device) for r in runs}
    peaks = {name: step.peak() for name, step in single.items()}
    for step in single.values():
        step()
    timed = interleaved("steps", {n: partial(seconds_of, s, args.device) for n, s in single.items()}, args.repeats)
    seconds = {name: Spread(tuple(samples)) for name, samples in timed.items()}
    first = runs[0].name
    names = list(dict.fromkeys(name for r in runs for name in r.scores))
    rows: list[Row] = [
        {
            "configuration": r.name,
            **{f"test {name}": r.scores.get(name) for name in names},
            "steps": r.steps,
            "s/step": seconds[r.name],
            f"÷ {first}'s": seconds[r.name] / seconds[first],
            "peak memory, MiB": peaks[r.name] / MIB,
        }
        for r in runs
    ]
    return Report("training", rows, NOTES, partial(_plot, runs))


def command(*args: str) -> str:
    """Run the command as a user would, its progress shown, and return what it prints."""
    print(f"$ lit-effattn {shlex.join(args)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "lit_effattn.cli", *args], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"lit-effattn {args[0]} failed, see above")
    return done.stdout


def scores(said: str) -> dict[str, str]:
    """Find `test bits/dim: 1.8022`, `test PER: 9.38 %` and the like; counts are no scores."""
    return dict(re.findall(r"^test (\S+): (\d+\.\d+(?: %)?)$", said, re.M))


def _curve(folder: Path) -> list[tuple[int, float]]:
    """Read the training loss that a run has logged."""
    points = []
    for path in sorted(folder.glob("csv/version_*/metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                value = next((row[name] for name in _LOSSES if row.get(name)), None)
                if value is not None:
                    points.append((int(row["step"]) + 1, float(value)))
    return points


class _Step:
    """Trains a run's model by one step at every call, always on the same batch."""

    def __init__(self, run: Run, device: torch.device) -> None:
        checkpoint = run.folder / "checkpoints" / "best.ckpt"
        name = read_checkpoint(checkpoint)["hyper_parameters"]["_class_path"].rpartition(".")[2]
        self.model: Any = getattr(tasks, name).load_from_checkpoint(checkpoint, map_location=device).train()
        config = yaml.safe_load((run.folder / "config.yaml").read_text())
        made = _made(config["data"])
        made.prepare_data()
        made.setup("fit")
        batch = next(iter(made.train_dataloader()))
        self.batch = self.model.transfer_batch_to_device(batch, device, 0)
        if "MemoryCarry" in str(config["trainer"]["callbacks"]):
            self.model.memory = self.model.backbone.initial_state(len(batch[0]), device=device)
        configured = self.model.configure_optimizers()
        self.optimizer = configured["optimizer"] if isinstance(configured, dict) else configured

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self._gradients()
        self.optimizer.step()

    def peak(self) -> int:
        self.optimizer.zero_grad()
        return peak_bytes(self._gradients, next(self.model.parameters()).device)

    def _gradients(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*You are trying to `self.log\\(\\)`.*")
            self.model.training_step(self.batch).backward()


def _made(data: dict[str, Any]) -> pl.LightningDataModule:
    """Make what the configuration of a run calls its data."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    made: pl.LightningDataModule = parser.instantiate_classes(parser.parse_object({"data": data})).data
    return made


def _plot(runs: list[Run], figure: Figure) -> None:
    axes = figure.subplots()
    for r in runs:
        steps, losses = zip(*_smooth(r.curve), strict=True)
        axes.plot(steps, losses, label=r.name)
    axes.set(xlabel="steps", ylabel="training loss, as logged", yscale="log")
    axes.legend()


def _smooth(curve: list[tuple[int, float]], most: int = 150) -> list[tuple[int, float]]:
    """Average neighbouring points, lest a plot of several runs be a thicket."""
    size = math.ceil(len(curve) / most)
    groups = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
