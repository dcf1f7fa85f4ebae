"""The entry point: `python -m benchmarks [steps | generation | memory | compression] [options]`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch

from benchmarks import compression, generation, memory, steps
from benchmarks.report import Report, publish

BENCHMARKS = {"steps": steps, "generation": generation, "memory": memory, "compression": compression}

SHORT = (
    "steps --small --repeats 5",
    "generation --small --repeats 3 --windows 4",
    "memory --small --repeats 2 --lengths 256 512 1024 2048",
)
"""What runs when no benchmark is named: under 5 minutes on 2 cores."""


def main(argv: list[str]) -> list[Report]:
    """Run what `argv` names and print it; without a name, the short version, to whose parts the options are passed on."""
    named = bool(argv) and (argv[0] in ("-h", "--help") or not argv[0].startswith("-"))
    runs = [argv] if named else [[*shlex.split(short), *argv] for short in SHORT]
    return [_run(words) for words in runs]


def _run(argv: list[str]) -> Report:
    args = _parser().parse_args(argv)
    report: Report = BENCHMARKS[args.benchmark].run(args)
    settings = {k: v for k, v in vars(args).items() if k not in ("benchmark", "output")}
    publish(report, settings, shlex.join(["python", "-m", "benchmarks", *argv]), args.output)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure linear attention against softmax attention. Without a name: a short version of steps, "
        "generation and memory; options given are passed on to all three.",
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        summary = (benchmark.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_argument("--output", type=Path, metavar="FOLDER", help="also write NAME.md, NAME.json, NAME.png")
        command.add_argument(
            "--device",
            type=torch.device,
            default=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            help="cpu, cuda or cuda:1; default: %(default)s",
        )
        benchmark.add_arguments(command)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
