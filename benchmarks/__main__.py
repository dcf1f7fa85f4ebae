"""The entry point: `python -m benchmarks [NAME] [options]`; `--help` lists the names."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import (
    compression,
    evaluation,
    features,
    flex,
    generation,
    kernels,
    linear,
    loader,
    longterm,
    memory,
    peers,
    recl,
    scaling,
    sorting,
    steps,
    stream,
    swap,
    training,
)
from benchmarks.report import Report, publish

BENCHMARKS = {
    "steps": steps,
    "generation": generation,
    "memory": memory,
    "compression": compression,
    "features": features,
    "scaling": scaling,
    "swap": swap,
    "training": training,
    "sorting": sorting,
    "evaluation": evaluation,
    "recl": recl,
    "stream": stream,
    "longterm": longterm,
    "flex": flex,
    "kernels": kernels,
    "peers": peers,
    "linear": linear,
    "loader": loader,
}

PICTURED = ("features", "generation", "longterm", "memory", "scaling", "stream", "training")
"""Those whose folder gets a picture as well."""

SHORT = (
    "steps --small --repeats 5",
    "generation --small --repeats 3 --windows 4",
    "memory --small --repeats 2 --lengths 256 512 1024 2048",
    "scaling --repeats 2 --lengths 512 1024 2048 4096 --most 2048",
)
"""What runs when no benchmark is named: under 5 minutes on 2 cores."""


def main(argv: list[str]) -> list[Report]:
    """Run what `argv` names, or the short version, to whose parts the options are passed on; print the tables."""
    named = bool(argv) and (argv[0] in ("-h", "--help") or not argv[0].startswith("-"))
    runs = [argv] if named else [[*shlex.split(short), *argv] for short in SHORT]
    for words in runs:
        _parse(words)  # what the last would refuse is refused before the first has run
    return [_run(words) for words in runs]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.output is not None and args.benchmark in PICTURED and find_spec("matplotlib") is None:
        parser.error("--output draws a picture, which needs matplotlib: pip install 'lit-effattn[bench]'")
    return args


def _run(argv: list[str]) -> Report:
    args = _parse(argv)
    report: Report = BENCHMARKS[args.benchmark].run(args)
    settings = {k: v for k, v in vars(args).items() if k not in ("benchmark", "output")}
    publish(report, settings, _command(argv), args.output)
    return report


def _command(argv: list[str]) -> str:
    threads = os.environ.get("OMP_NUM_THREADS")  # the environment's one variable that changes figures
    words = shlex.join(["python", "-m", "benchmarks", *argv])
    return words if threads is None else f"OMP_NUM_THREADS={threads} {words}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure linear attention against softmax attention. Without a name: a short version of steps, "
        "generation, memory and scaling; options given are passed on to each.",
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        summary = (benchmark.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_argument("--output", type=Path, metavar="FOLDER", help=_files(name))
        command.add_argument(
            "--device",
            type=_device,
            default=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            help="cpu, cuda or cuda:1; default: %(default)s",
        )
        benchmark.add_arguments(command)
    return parser


def _files(name: str) -> str:
    return f"also write {name}.md and {name}.json" + (f", and draw {name}.png" if name in PICTURED else "")


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text} is no device: cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text} can't be measured: cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text} is not there: torch finds {torch.cuda.device_count()} GPUs")
    return device


if __name__ == "__main__":
    main(sys.argv[1:])
