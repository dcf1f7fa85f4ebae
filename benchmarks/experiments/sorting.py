"""The use of a long-term memory: accuracy on the sorting task, compared with counting within a short memory."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import yaml

from benchmarks.experiments.reproduce import command, scores
from benchmarks.measuring import Spread, at_least
from benchmarks.report import Report, Row
from lit_effattn import LanguageModel, sequence
from lit_effattn.checkpoints.runs import find_checkpoint
from lit_effattn.datamodules import SortingTask, counting_accuracy
from lit_effattn.sequence import SequenceModule

NOTES = [
    "accuracy: of the last checkpoint on the test sequences, given the previous answers; median (min–max) over seeds.",
    "short-term reach: tokens before the separator that the output there depends on through the short-term memories of "
    "all layers, by its gradients, without long-term memories.",
    "counting: upper bound without a long-term memory, on the same test sequences: counting the types within that "
    "reach. gain: accuracy minus counting.",
    "state: bytes of one stream's state in all layers. Minutes: the whole `lit-effattn fit`.",
]


class Trained(NamedTuple):
    """One run of a configuration, with one seed."""

    checkpoint: Path
    accuracy: float
    minutes: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", type=Path, nargs="+", help="configurations with data of SortingTask")
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    about = "options of the first configuration's attention to vary, a row each: n_basis=16, or tau=0.5,sticky=true"
    parser.add_argument("--vary", nargs="+", default=[], metavar="NAME=VALUE", help=about)
    parser.add_argument("--flags", nargs="+", default=[], metavar="NAME=VALUE", help="for every fit: data.length=8192")
    parser.add_argument("--trained", action="store_true", help="evaluate the newest run of each, and train none")


def run(args: argparse.Namespace) -> Report:
    variants = [(path, []) for path in args.configs] + [(args.configs[0], options.split(",")) for options in args.vary]
    return Report("sorting", [_row(config, options, args) for config, options in variants], NOTES)


def _row(config: Path, options: list[str], args: argparse.Namespace) -> Row:
    folder = Path(yaml.safe_load(config.read_text())["trainer"]["default_root_dir"])
    root = folder.with_name("_".join([folder.name, *options]))
    flags = [f"--model.init_args.backbone.init_args.attention.init_args.{option}" for option in options]
    words = ["--config", str(config), *flags, *(f"--{flag}" for flag in args.flags)]
    runs = [_trained(words, root / f"seed_{seed}", seed, train=not args.trained) for seed in args.seeds]
    model = LanguageModel.load_from_checkpoint(runs[0].checkpoint, map_location="cpu")
    trained_on = yaml.safe_load((runs[0].checkpoint.parent.parent / "config.yaml").read_text())["data"]
    data = SortingTask(**trained_on["init_args"])
    streams = np.stack([data.sequences("test").types(i) for i in range(data.sizes["test"])])
    state = model.backbone.initial_state(1)
    # Up to the separator, which does not belong to the stream.
    reach = short_term_reach(model.backbone, data.length + 1, data.segment_len) - 1
    counted = counting_accuracy(streams, data.n_types, reach)
    accuracy = Spread(tuple(r.accuracy for r in runs))
    gain = accuracy.map(lambda x: x - counted)
    minutes = [r.minutes for r in runs if r.minutes is not None]
    return {
        "configuration": ", ".join([config.stem, *options]),
        "accuracy": accuracy,
        "short-term reach, tokens": f"{reach} of {data.length}",
        "counting": counted,
        "gain": f"{gain.median:+.3f} ({min(gain.samples):+.3f} … {max(gain.samples):+.3f})",
        "state, bytes": sequence.nbytes(state),
        "minutes": Spread(tuple(minutes)) if minutes else None,
    }


def _trained(words: list[str], root: Path, seed: int, *, train: bool) -> Trained:
    minutes = None
    if train:
        start = time.monotonic()
        command("fit", *words, "--seed_everything", str(seed), "--trainer.default_root_dir", str(root))
        minutes = (time.monotonic() - start) / 60
    checkpoint = find_checkpoint("last", root)
    return Trained(checkpoint, float(scores(command("test", "--ckpt_path", str(checkpoint)))["accuracy"]), minutes)


def short_term_reach(backbone: SequenceModule, length: int, segment_len: int) -> int:
    """Return the number of inputs that the last output depends on, its own included, without long-term memories.

    This is measured, not derived from options: the first input with a gradient of the last output. The inputs come in
    segments, the first one shorter, like those of the task.

    Args:
        backbone: The model. Its long-term memories are disabled.
        length: Number of inputs.
        segment_len: Inputs in a segment.
    """
    backbone = backbone.double().eval()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        x = torch.randn(1, length, backbone.d_input, dtype=torch.float64, requires_grad=True)
    for name, parameter in backbone.named_parameters():
        if ".ltm_out_proj." in name:
            parameter.data.zero_()
    state, first = None, length % segment_len
    for segment in x.split([*([first] if first else []), *[segment_len] * (length // segment_len)], 1):
        y, state = backbone(segment, state)
    y[0, -1].square().sum().backward()
    assert x.grad is not None
    reached = x.grad[0].abs().amax(-1).nonzero()  # (reached, 1)
    return length - int(reached[0])
