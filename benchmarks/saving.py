"""How long training waits for a checkpoint, written while it waits or while it goes on."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch

from benchmarks.measuring import Spread, interleaved, now
from benchmarks.models import Size, at_least, build, random_levels
from benchmarks.report import Report, Row
from lit_effattn.checkpoints import AtomicCheckpointIO

NOTES = [
    "A checkpoint holds the weights and RAdam's states. It is saved before the first of so many steps. *Save*: seconds "
    "of this call. *All*: seconds of the call, the steps and, if the writing lasts longer, the wait for it, less the "
    "time of as many steps without a save.",
    "Files are flushed to the disk. Ways take turns, round by round; figures are median (min–max).",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024], help="E; default: %(default)s")
    parser.add_argument("--layers", type=at_least(1), default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=at_least(1), default=10, help="from a save to the next; default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="rounds; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="of the files; default: a temporary folder")


def run(args: argparse.Namespace) -> Report:
    with TemporaryDirectory(dir=args.folder) as folder:
        return Report("saving", [row for width in args.widths for row in _compare(width, Path(folder), args)], NOTES)


def _compare(width: int, folder: Path, args: argparse.Namespace) -> list[Row]:
    model = build("linear", 256, Size(args.layers, 8, width), args.device)
    optimizer = cast(torch.optim.Optimizer, model.configure_optimizers())
    batch = random_levels(2, 256, args.device)
    path = folder / "last.ckpt"

    def train(way: AtomicCheckpointIO | None) -> tuple[float, float]:
        """Return the seconds of the save, and of all."""
        begun = now(args.device)
        if way is not None:
            way.save_checkpoint({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        saved = now(args.device)
        for _ in range(args.steps):
            optimizer.zero_grad()
            model.nll(batch).mean().backward()
            optimizer.step()
        if way is not None:
            way.finish()
        return saved - begun, now(args.device) - begun

    train(None)
    waiting, asynchronous = AtomicCheckpointIO(), AtomicCheckpointIO(asynchronous=True)
    ways = {"training waits": waiting, "asynchronous": asynchronous}
    measures = {"no save": lambda: train(None), **{name: (lambda io=io: train(io)) for name, io in ways.items()}}
    found = interleaved(f"saving, E = {width}", measures, args.repeats)
    asynchronous.teardown()
    steps = [whole for _, whole in found["no save"]]
    size = path.stat().st_size / 1e6
    return [
        {
            "MB": round(size),
            "written": name,
            "ms a step": Spread(tuple(1000 * s / args.steps for s in steps)),
            "save, ms": Spread(tuple(1000 * saved for saved, _ in found[name])),
            "all, ms": Spread(tuple(1000 * (whole - s) for (_, whole), s in zip(found[name], steps, strict=True))),
        }
        for name in ways
    ]
