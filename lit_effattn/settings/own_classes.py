"""The option `--trust`, and subclasses."""

from __future__ import annotations

import argparse
from typing import Any

from lit_effattn.hparams import subclasses

__all__ = ["TRUST", "add_trust", "subclasses"]

TRUST = (
    "A module of your own, or the full name of a class, that a checkpoint from somebody else, or one outside of your "
    "runs, may name although it is not on lit-effattn's list. May be given several times."
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
