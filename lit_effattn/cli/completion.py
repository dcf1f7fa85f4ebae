"""`lit-effattn completion`: a script that completes commands, options, classes and configurations in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lit_effattn.checkpoints.shipped import PREFIX, models
from lit_effattn.cli.command import CLI
from lit_effattn.cli.data import add_options
from lit_effattn.cli.errors import class_names, option_paths
from lit_effattn.laws import command as laws
from lit_effattn.settings import parsers
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.kinds import attention_kinds
from lit_effattn.settings.shipped import shipped

CHECK = "check"
SHELLS = ("bash", "zsh")
_FUNCTION = "lit_effattn"


def script(shell: str, commands: Sequence[str], tools: Sequence[str], lists: Sequence[str]) -> str:
    """Return the script for a shell, with the nested options in `cli.errors.option_paths`.

    Args:
        shell: One of `SHELLS`.
        commands: The commands that take options of the model, the data or the trainer.
        tools: The commands whose parsers `settings.parsers` has.
        lists: The commands that take names only.

    Raises:
        ValueError: If the shell is not known, or the package shtab is not installed.
    """
    if shell not in SHELLS:
        raise ValueError(f"there is no completion for {shell!r}; there is for {' and '.join(SHELLS)}")
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ValueError("completion needs the package shtab: pip install 'lit-effattn[completion]'") from error
    parser = argparse.ArgumentParser("lit-effattn")
    subparsers = parser.add_subparsers()
    added = {name: subparsers.add_parser(name, help=name) for name in (*commands, *tools, CHECK, *lists, "completion")}
    flags = {command: {flag: _values(flag[2:]) for flag in sorted(_options(command))} for command in commands}
    flags["data"] |= _options_of(parsers.prepare())
    flags |= {name: _options_of(getattr(parsers, name)()) for name in tools}
    flags[CHECK] = _options_of(laws.parser())
    flags["sweep"] = flags["fit"] | flags["sweep"]
    for command, values in flags.items():
        for flag, choices in values.items():
            option = added[command].add_argument(flag, choices=choices or None)
            if not choices:
                option.complete = shtab.FILE  # type: ignore[attr-defined]
    added["data"].add_argument("action", nargs="?", choices=["prepare"])
    for name, choices in zip(lists, (list(shipped()), list(attention_kinds()), list(models())), strict=True):
        added[name].add_argument("names", nargs="*", choices=choices)
    added["completion"].add_argument("shell", choices=SHELLS)
    text: str = shtab.complete(parser, shell, root_prefix=_FUNCTION)
    # Where no name fits, files are offered: a configuration or a checkpoint of the user's own.
    return f"{text}\ncomplete -o default -F _shtab_{_FUNCTION} lit-effattn" if shell == "bash" else text


def _options(command: str) -> set[str]:
    """Return the options of a command, and those of classes that it may name."""
    if command == "data":
        parser = LightningArgumentParser()
        add_options(parser)
        own = {"--config", *parser._option_string_actions}
    else:
        own = {*_Parsers.of(command)._option_string_actions}
    nested = {f"--{path}" for path in option_paths() if f"--{path.partition('.')[0]}" in own}
    return {flag for flag in own | nested if flag.startswith("--") and not flag.endswith("+")} - {"--help"}


def _options_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return the options of a parser, each with its values if they are names."""
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    flags = {action.option_strings[0]: action.choices for action in actions}
    return {flag: [*(choices or _values(flag[2:]))] for flag, choices in flags.items()}


def _values(path: str) -> list[str]:
    """Return the values of an option, if they are names."""
    if path == "config":
        return list(shipped())
    if path in ("ckpt_path", "init_weights", "transfer_from"):
        return ["last", "best", *(f"{PREFIX}{name}" for name in models())]
    return class_names(path.removesuffix(".help"))


class _Parsers(CLI):
    """A command line that stops when its parsers are built."""

    def parse_arguments(self, parser: Any, args: Any) -> NoReturn:
        """Raise the parsers."""
        raise _BuiltError(self._subcommand_parsers)

    @classmethod
    def of(cls, command: str) -> Any:
        """Return the parser of a command."""
        try:
            cls(Arguments([command, "--help"]))
        except _BuiltError as built:
            return built.args[0][command]


class _BuiltError(Exception):
    """Carries the parsers of the commands."""
