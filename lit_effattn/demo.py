"""Train, test and draw, as `make demo` does: the commands that a person would type, one after the other."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from pathlib import Path

import yaml

from lit_effattn.cli import main as lit_effattn


def main() -> None:
    """Run the demonstration and end with its result and pictures."""
    parser = argparse.ArgumentParser(prog="python -m lit_effattn.demo", description=__doc__)
    parser.add_argument("--config", default="configs/digits_linear.yaml", help="what to train (default: %(default)s)")
    config = parser.parse_args().config
    root = yaml.safe_load(Path(config).read_text())["trainer"]["default_root_dir"]
    best = ["--ckpt_path", "best", "--trainer.default_root_dir", root]

    _run("fit", "--config", config)
    result = _run("test", *best)
    samples = _run("generate", *best, "--n", "64")
    completed = _run("generate", *best, "--n", "12", "--complete", "0.5")

    print()
    for line in (*_lines(result, "test "), *_lines(samples, "picture:"), *_lines(completed, "picture:")):
        print(line)


def _run(*args: str) -> str:
    """Show the command, run it, show and return what it printed."""
    print(f"\n$ lit-effattn {' '.join(args)}", flush=True)
    said = _Tee()
    with contextlib.redirect_stdout(said):
        lit_effattn(list(args))
    return said.getvalue()


class _Tee(io.StringIO):
    """Keeps what is written, and lets it through."""

    def __init__(self) -> None:
        super().__init__()
        self._through = sys.stdout

    def write(self, text: str) -> int:
        self._through.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._through.flush()

    def isatty(self) -> bool:
        return self._through.isatty()


def _lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


if __name__ == "__main__":
    main()
