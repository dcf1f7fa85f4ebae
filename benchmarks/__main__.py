"""The entry point: `python -m benchmarks [NAME] [options]`; `--help` lists the names."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import generation, gpu, kernels, layers, reproduce, scaling, steps
from benchmarks.report import Report, publish

BENCHMARKS = {
    module.__name__.rpartition(".")[2]: module for module in (kernels, layers, steps, generation, scaling, reproduce)
}

PICTURED = ("scaling",)
"""Benchmarks that also draw a picture."""

SHORT = (
    "steps --small --repeats 5",
    "steps configs/digits_linear.yaml --only fit --steps 5 --repeats 2",
    "generation --small --repeats 2 --windows 4",
    "scaling --repeats 2 --lengths 512 1024 2048 --most 1024",
    "kernels --lengths 2048 --repeats 3",
    "layers --lengths 512 --repeats 3",
)
"""The short version, which runs if no benchmark is named: less than 5 minutes on 2 cores."""

FIGURES_DEPEND_ON = ("GLIBC_TUNABLES", "OMP_NUM_THREADS")
"""Environment variables that change figures. They are part of the command that is reported."""


def main(argv: list[str]) -> None:
    """Run the benchmark that `argv` names, or the short version with `argv` as options of each run."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        _one_by_one(argv)
    elif argv[0] == "gpu":
        gpu.main(_parse(argv))
    else:
        _run(_parse(argv), argv)


def _one_by_one(options: list[str]) -> None:
    """Run the short version, each part in its own process. If one fails, the others still run."""
    runs = [[*shlex.split(words), *options] for words in SHORT]
    for words in runs:
        _parse(words)  # invalid options are rejected before the first run
    _log("To run:", *(f"    {_command(words)}" for words in runs))
    failures = []
    for words in runs:
        status = subprocess.run([sys.executable, "-m", "benchmarks", *words]).returncode
        if status:
            failures.append(f"{_command(words)}: exit status {status}")
            _log(failures[-1])
    if failures:
        _log(f"{len(failures)} of {len(runs)} failed:", *failures)
        raise SystemExit(1)


def _log(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.benchmark == "gpu" and args.device.type != "cuda" and not args.dry_run:
        parser.error(f"gpu needs a CUDA device, not {args.device}; --dry_run tries every line on a CPU")
    return args


def _run(args: argparse.Namespace, argv: list[str]) -> None:
    report: Report = BENCHMARKS[args.benchmark].run(args)
    settings = {k: v for k, v in vars(args).items() if k not in ("benchmark", "output")}
    publish(report, settings, _command(argv), args.output)


def _command(argv: list[str]) -> str:
    settings = [f"{name}={os.environ[name]}" for name in FIGURES_DEPEND_ON if name in os.environ]
    return " ".join([*settings, shlex.join(["python", "-m", "benchmarks", *argv])])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure time and memory of attention kinds, and of other libraries. Without a name: a short "
        f"version of {', '.join(dict.fromkeys(words.split()[0] for words in SHORT))}; options are passed on to each.",
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in {**BENCHMARKS, "gpu": gpu}.items():
        summary = (benchmark.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        about = f"also write {name}.md and {name}.json" + (f", and draw {name}.png" if name in PICTURED else "")
        command.add_argument("--output", type=Path, metavar="FOLDER", help=about)
        default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        about = "cpu, cuda or cuda:1; default: %(default)s"
        command.add_argument("--device", type=_device, default=default, help=about)
        benchmark.add_arguments(command)
    return parser


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a device; choose cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text} can't be measured; choose cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text} does not exist: torch finds {torch.cuda.device_count()} GPUs")
    return device


if __name__ == "__main__":
    main(sys.argv[1:])
