"""The parsers import nothing slow, and offer what the commands take."""

import argparse
import subprocess
import sys
from typing import Any

import pytest

from lit_effattn.cli import CONVERT, TOOLS
from lit_effattn.datamodules.text.tokenizers import KINDS
from lit_effattn.interchange import export
from lit_effattn.interchange.onnx_operators import OPERATORS
from lit_effattn.settings import parsers

SLOW = {"torch", "lightning", "numpy"}


def option(parser: argparse.ArgumentParser, name: str) -> argparse.Action:
    (found,) = (action for action in parser._actions if f"--{name}" in action.option_strings)
    return found


@pytest.mark.parametrize(
    ("parser", "name", "values"),
    [
        (parsers.export, "format", export.SUFFIXES),
        (parsers.export, "dtype", export.DTYPES),
        (parsers.export, "operators", OPERATORS),
        (parsers.prepare, "tokens", KINDS),
    ],
)
def test_the_values_of_an_option_are_those_that_the_command_takes(parser: Any, name: str, values: Any):
    assert [*(option(parser(), name).choices or ())] == [*values]


def test_the_number_of_checked_steps_is_that_of_the_function():
    assert option(parsers.export(), "check").default == export.CHECKED


@pytest.mark.parametrize("arguments", [["--help"], ["--no_option"]], ids=["help", "an unknown option"])
def test_help_and_mistakes_import_nothing_slow(arguments: list[str]):
    code = f"""
import sys
from lit_effattn.cli import main
for command in {[[name] for name in (*TOOLS, CONVERT)] + [["data", "prepare"], ["predict", "--stream", "-"]]!r}:
    try:
        main([*command, *{arguments!r}])
    except SystemExit as error:
        print(error.code, file=sys.stderr)
loaded = {SLOW!r} & sys.modules.keys()
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ends = [line for line in done.stderr.splitlines() if line in ("0", "1", "2")]
    assert ends == ["0" if arguments == ["--help"] else "2"] * (len(TOOLS) + 3)
