"""The results of checking a module, as text, JSON and JUnit."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import dataclass, field
from typing import Any, TextIO
from xml.etree import ElementTree

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
        variant: The first variant that fails.
        case: The smallest case that fails.
        difference: What was compared, by how much it differs, and where first.
        relative: The difference relative to the largest expected value, if numbers were compared.
        module: The module, with fewer layers if these are enough.
        script: A script that shows it without this package.
    """

    law: str
    title: str
    status: str
    tolerance: Tolerance | None = None
    seconds: float = 0.0
    reason: str = ""
    detail: str = ""
    variant: str = ""
    case: str = ""
    difference: str = ""
    relative: float | None = None
    module: str = ""
    script: str | None = None

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
        return self.text()

    def text(self, scripts: bool = True) -> str:
        """Return a table of the laws, and each failure with its script."""
        lines = [self.summary(), ""]
        for result in self.results:
            line = f"  {result.status:<11}  {result.law:<17}  {result.title}"
            lines.append(f"{line} ({result.reason})" if result.reason else line)
        for result in self.broken:
            lines += ["", *described(result, scripts)]
        return "\n".join(lines)

    def print(self, file: TextIO | None = None) -> None:
        """Print the report, in colours on a terminal if the package rich is installed."""
        file = sys.stdout if file is None else file
        if not file.isatty() or importlib.util.find_spec("rich") is None:
            print(self.text(), file=file)
            return
        from rich.console import Console
        from rich.text import Text

        colours = {"ok": "green", "broken": "bold red", "error": "bold yellow", "not checked": "dim"}
        text = Text(self.text())
        for status, colour in colours.items():
            text.highlight_regex(rf"(?m)^  {status} .*$", colour)
        Console(file=file, highlight=False, soft_wrap=True).print(text)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data; a relative difference that is not finite is None."""
        results = []
        for result in self.results:
            values = dict(vars(result))
            values["tolerance"] = (
                None if result.tolerance is None else {"rtol": result.tolerance.rtol, "atol": result.tolerance.atol}
            )
            if result.relative is not None and not math.isfinite(result.relative):
                values["relative"] = None  # JSON has no NaN
            results.append(values)
        return {"name": self.name, "device": self.device, "dtype": self.dtype, "ok": self.ok, "results": results}

    def json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.as_dict(), indent=2, default=str) + "\n"

    def junit(self) -> str:
        """Return the report as JUnit XML: one test case for each law."""
        suite = ElementTree.Element("testsuite", name=self.name)
        counts = {"tests": len(self.results)}
        for kind, status in (("failures", "broken"), ("errors", "error"), ("skipped", "not checked")):
            counts[kind] = sum(result.status == status for result in self.results)
        suite.attrib.update({key: str(value) for key, value in counts.items()})
        for result in self.results:
            case = ElementTree.SubElement(
                suite, "testcase", classname=self.name, name=result.law, time=f"{result.seconds:.3f}"
            )
            if result.status == "not checked":
                ElementTree.SubElement(case, "skipped", message=result.reason)
            elif result.failed:
                kind = "failure" if result.status == "broken" else "error"
                ElementTree.SubElement(case, kind, message=result.difference).text = "\n".join(described(result))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def described(result: Result, scripts: bool = True) -> list[str]:
    """Return the lines that describe a failure."""
    lines = [f"{result.law}: {result.title}, but:"]
    lines.append(f"  {result.difference}")
    if result.case:
        lines.append(f"  smallest case: {result.case}")
    if result.module:
        lines.append(f"  module: {result.module}")
    if result.tolerance is not None:
        rtol, atol, reason, _ = result.tolerance
        allowed = f"rtol {rtol:g}, atol {atol:g}: {reason}" if rtol or atol else reason
        lines.append(f"  allowed: {allowed}")
    if result.detail:
        lines.append(f"  effect: {result.detail}")
    if scripts and result.script:
        lines += ["  script:", *(f"    {line}".rstrip() for line in result.script.splitlines())]
    return lines
