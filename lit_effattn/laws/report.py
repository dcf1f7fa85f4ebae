"""The results of checking a module, as text."""

import importlib.util
import sys
from dataclasses import dataclass, field
from typing import TextIO

from lit_effattn.laws.comparison import Tolerance


class BrokenLawError(AssertionError):
    """A module breaks a law."""


@dataclass(frozen=True)
class Result:
    """The result of one law.

    Attributes:
        law: Its name.
        title: The law, as a sentence.
        status: `ok`, `broken`, `error` (the module raised an exception) or `not checked`.
        tolerance: How far apart results may be, and why.
        seconds: The time it took.
        reason: Why it was not checked.
        detail: What a violation changes.
        case: The smallest case that fails.
        inputs: The types, shapes and seeds of its inputs, which `Adapter.inputs` makes.
        difference: What was compared, by how much it differs, and where first.
        module: The module, with fewer layers if these are enough.
    """

    law: str
    title: str
    status: str
    tolerance: Tolerance | None = None
    seconds: float = 0.0
    reason: str = ""
    detail: str = ""
    case: str = ""
    inputs: str = ""
    difference: str = ""
    module: str = ""

    @property
    def failed(self) -> bool:
        """Whether the law is broken, or could not be tested because the module raised an exception."""
        return self.status in ("broken", "error")


@dataclass(frozen=True)
class Report:
    """The results of all laws for one module.

    Attributes:
        name: The module.
        results: One for each law.
        device: Where it computed.
        dtype: The type of its parameters.
    """

    name: str
    results: list[Result] = field(default_factory=list)
    device: str = "cpu"
    dtype: str = "torch.float64"

    @property
    def ok(self) -> bool:
        """Whether no law is broken, and at least one was checked."""
        return not self.broken and any(result.status == "ok" for result in self.results)

    @property
    def broken(self) -> list[Result]:
        """The laws that are broken, and those during which the module raised an exception."""
        return [result for result in self.results if result.failed]

    def raise_if_broken(self) -> None:
        """Raise an exception of one line if a law is broken.

        Raises:
            BrokenLawError: If a law is broken. The message names the laws.
        """
        if not self.ok:
            raise BrokenLawError(self.summary())

    def summary(self) -> str:
        """Return one line: the number of laws, and those that are broken."""
        checked = [result for result in self.results if result.status != "not checked"]
        seconds = sum(result.seconds for result in self.results)
        if not checked:
            return f"{self.name}: no law could be checked; see what the adapter offers"
        names = (
            f", {len(self.broken)} broken: {', '.join(r.law for r in self.broken)}" if self.broken else ", none broken"
        )
        return f"{self.name}: {len(checked)} laws checked in {seconds:.1f} s ({self.dtype}, {self.device}){names}"

    def __str__(self) -> str:
        lines = [self.summary(), ""]
        for result in self.results:
            line = f"  {result.status:<11}  {result.law:<17}  {result.title}"
            lines.append(f"{line} ({result.reason})" if result.reason else line)
        for result in self.broken:
            lines += ["", *described(result)]
        return "\n".join(lines)

    def print(self, file: TextIO | None = None) -> None:
        """Print the report, in colours on a terminal if the package rich is installed."""
        file = sys.stdout if file is None else file
        if not file.isatty() or importlib.util.find_spec("rich") is None:
            print(self, file=file)
            return
        from rich.console import Console
        from rich.text import Text

        colours = {"ok": "green", "broken": "bold red", "error": "bold yellow", "not checked": "dim"}
        text = Text(str(self))
        for status, colour in colours.items():
            text.highlight_regex(rf"(?m)^  {status} .*$", colour)
        Console(file=file, highlight=False, soft_wrap=True).print(text)


def described(result: Result) -> list[str]:
    """Return the lines that describe a failure."""
    lines = [f"{result.law}: {result.title}, but:"]
    lines.append(f"  {result.difference}")
    if result.case:
        lines.append(f"  smallest case: {result.case}")
    if result.inputs:
        lines.append(f"  inputs: {result.inputs}")
    if result.module:
        lines.append(f"  module: {result.module}")
    if result.tolerance is not None:
        rtol, atol, reason, _ = result.tolerance
        allowed = f"rtol {rtol:g}, atol {atol:g}: {reason}" if rtol or atol else reason
        lines.append(f"  allowed: {allowed}")
    if result.detail:
        lines.append(f"  effect: {result.detail}")
    return lines
