"""The parser of a command: jsonargparse with text that stays text, and messages of our own."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Union, get_args

from lightning.pytorch.cli import LightningArgumentParser

from lit_effattn.cli.errors import fault
from lit_effattn.cli.help import arranged
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.texts import TextParser, keep_texts


class UsageError(Exception):
    """The arguments are invalid. The message is that of jsonargparse."""


class Parser(TextParser):
    """A parser that raises `UsageError` instead of exiting, without abbreviations of options.

    The help of a `command` is `arranged`, with `all_options` or without those of Lightning's trainer.
    """

    def __init__(self, *args: Any, command: str | None = None, all_options: bool = False, **kwargs: Any) -> None:
        self._shown: tuple[str, bool] | None = None if command is None else (command, all_options)
        self._ignored: set[str] = set()
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def ignore(self, names: Iterable[str]) -> None:
        """Accept sections of files that this command does not use. As flags they are errors."""
        for name in names:
            self._ignored.add(name)
            self.add_argument(f"--{name}", type=Any, help=argparse.SUPPRESS)

    def parse(self, args: list[str], arguments: Arguments, run: Mapping[str, Any] | None = None) -> Any:
        """Parse `args`, which jsonargparse gets for the user's `arguments` and the settings of a `run`.

        Raises:
            UsageError: If a setting is invalid. The message names it.
        """
        try:
            if self._ignored & arguments.flags.options.keys():
                raise UsageError
            return self.parse_args(args)
        except UsageError as error:
            known = {*self.get_defaults(skip_validation=True).keys()} - self._ignored
            raise UsageError(fault(arguments, known, run) or str(error)) from error

    def format_help(self, *args: Any) -> str:
        """Return the help. That of a command begins with its own options."""
        if (self.description or "").startswith("Help for "):  # of one class: its usage would name all options twice
            self.usage = argparse.SUPPRESS
        text = str(super().format_help(*args))
        return text if self._shown is None else arranged(text, self._shown[0], all_options=self._shown[1])

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `UsageError`."""
        if not self.exit_on_error:  # a nested parser: its parent reports the error
            super().error(message, ex)
        raise UsageError(message) from ex

    def parse_args(self, *args: Any, **options: Any) -> Any:
        """Parse arguments; text stays text."""
        keep_texts(self)
        return super().parse_args(*args, **options)

    def _parse_common(self, *args: Any, **options: Any) -> Any:
        """Let the outermost parser add the defaults of nested classes: each level that does so too triples the work.

        There is no public way: jsonargparse creates the parsers of nested classes, and calls them itself.
        """
        if not self.exit_on_error and "defaults" in options:
            options["defaults"] = False
        return super()._parse_common(*args, **options)


def integers_first(parser: LightningArgumentParser) -> None:
    """Make each option that takes integers and floats try integers first: 1 batch is not 1.0, all batches.

    Until Python 3.10, typing may return a cached `float | int` for `int | float`, since they are equal. There is no
    public way to the type of an option that Lightning has added.
    """
    for action in parser._actions:
        types = get_args(getattr(action, "_typehint", None))
        if int in types and float in types[: types.index(int)]:
            vars(action)["_typehint"] = Union[tuple(sorted(types, key=lambda kind: kind is not int))]  # noqa: UP007
