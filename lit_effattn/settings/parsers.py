"""Parsers of the commands without options for a model and data."""

from __future__ import annotations

import argparse
from typing import Any


def tool_parser(command: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser for `lit-effattn COMMAND`, without abbreviations of options."""
    return argparse.ArgumentParser(f"lit-effattn {command}", description=description, allow_abbrev=False, **options)
