"""Parsers of the commands without options for a model and data."""

import argparse
from typing import Any

ROOT = "runs"  # the default of `trainer.default_root_dir`: the folder that holds all runs

TRUST = (
    "A module of your own, or the full name of a class, that a checkpoint from somebody else, or one outside of your "
    "runs, may name although it is not on lit-effattn's list. May be given several times."
)


def tool_parser(command: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser for `lit-effattn COMMAND`, without abbreviations of options."""
    return argparse.ArgumentParser(f"lit-effattn {command}", description=description, allow_abbrev=False, **options)


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trainer.default_root_dir`, the folder in which `last` and `best` look for runs."""
    parser.add_argument(
        "--trainer.default_root_dir",
        dest="root",
        default=ROOT,
        metavar="FOLDER",
        help=f"Folder of the runs. Default: {ROOT}.",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trust`, whose value is a list of names."""
    parser.add_argument("--trust", action=_Append, default=[], metavar="NAME", help=TRUST)


class _Append(argparse.Action):
    """Adds a name to a list, if the name exists."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        from lit_effattn.checkpoints.trust import Trust

        Trust([value])
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), value])
