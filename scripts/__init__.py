"""Builders of data and models, and checks of this repository: `python -m scripts.NAME --help`."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def documented_parser(doc: str | None) -> ArgumentParser:
    """Make a parser whose help is the docstring of a module."""
    summary, _, details = (doc or "").partition("\n")
    return ArgumentParser(description=summary, epilog=details, formatter_class=RawDescriptionHelpFormatter)
