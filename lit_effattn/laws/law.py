"""The form of a law: its cases, what it compares in each, and the failures."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from lit_effattn.laws.comparison import Check, Difference, Tolerance, difference
from lit_effattn.laws.subject import Subject

REASONS = {
    "module": "it is a function",
    "causal": "it is not causal",
    "state": "it has no state",
    "lengths": "its `padding` is None",
    "empty rows": "its rows have at least one position",
    "features": "its inputs are tokens",
    "kept states": "its calls overwrite the state, as `donates` says",
    "parameters": "it has no parameters",
    "compiles": "its `compiles` is False",
}
"""Why a law can't be checked, for what it needs, in the order in which they are reported."""


@dataclass(frozen=True)
class Trial:
    """One case of a law. The fields are what shrinking makes smaller.

    Attributes:
        way: Lengths of the segments of a stream, in order.
        lengths: For each row its valid positions in the first segment.
        variant: The variant of the law, such as `kept-none`.
        at: The position or row that the law changes.
        factor: What features are multiplied by in a change; 1: a small number is added.
    """

    way: tuple[int, ...]
    lengths: tuple[int, ...]
    variant: str = ""
    at: int = 0
    factor: float = 1

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def n(self) -> int:
        """Number of positions of the stream."""
        return sum(self.way)

    def is_valid(self) -> bool:
        """Return whether sizes are possible."""
        first = self.way[0] if self.way else 0
        return first > 0 and min(self.way) > 0 and self.batch > 0 and all(0 <= n <= first for n in self.lengths)

    def __str__(self) -> str:
        parts = [f"batch {self.batch}", f"length {self.n}"]
        if len(self.way) > 1:
            runs = [(n, len([*same])) for n, same in groupby(self.way)]
            parts.append("split " + " + ".join(f"{k} × {n}" if k > 4 else " + ".join([str(n)] * k) for n, k in runs))
        if any(n != self.way[0] for n in self.lengths):
            parts.append(f"valid positions {list(self.lengths)}")
        return ", ".join(parts + ([self.variant] if self.variant else []))


def full(batch: int, *way: int, variant: str = "", at: int = 0, factor: float = 1) -> Trial:
    """Return a trial without padding."""
    return Trial(way, (way[0],) * batch, variant, at, factor)


class Law(ABC):
    """A property that every module keeps.

    Attributes:
        name: Its name, as in reports and in `check(laws=…)`.
        title: The property, as a sentence.
        needs: What an adapter must offer: see `Adapter.capabilities`.
        segments: The least and the largest number of segments of a case about which the law says something.
        detail: What changes when the law is broken, for readers of a report.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    segments: ClassVar[tuple[float, float]] = (1, math.inf)
    detail: ClassVar[str] = ""

    def tolerance(self, subject: Subject) -> Tolerance:
        """Return how far apart two results may be, and why."""
        return subject.tolerance(self.name)

    def missing(self, subject: Subject) -> str:
        """Return why the law can't be checked, "" if it can."""
        missing = [reason for need, reason in REASONS.items() if need in self.needs - subject.capabilities]
        missing += [f"the adapter has no `{need}`" for need in sorted(self.needs - subject.capabilities - {*REASONS})]
        return missing[0] if missing else ""

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the variants, each of which is one test."""
        return ("",)

    @abstractmethod
    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield the cases to test."""

    @abstractmethod
    def checks(self, subject: Subject, trial: Trial) -> Sequence[Check]:
        """Return what must be equal, and what must hold, in a case."""

    def applies(self, trial: Trial) -> bool:
        """Return whether the law says anything about a case that shrinking has made."""
        fewest, largest = self.segments
        return fewest <= len(trial.way) <= largest


@dataclass(frozen=True)
class Failure:
    """A violated law, the case that shows it, and the inputs of that case."""

    law: Law
    variant: str
    trial: Trial
    difference: Difference
    inputs: tuple[str, ...] = ()


def attempt(law: Law, subject: Subject, trial: Trial) -> Failure | None:
    """Test one case. An exception of the module is a failure, too."""
    subject.drawn.clear()
    try:
        checks = law.checks(subject, trial)
    except Exception as error:  # the module's own code may raise any exception
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raised = Difference("the module raised", error=message[:300])
        return Failure(law, trial.variant, trial, raised, tuple(subject.drawn))
    tolerance = law.tolerance(subject)
    for check in checks:
        if (violation := difference(check, tolerance)) is not None:
            return Failure(law, trial.variant, trial, violation, tuple(subject.drawn))
    return None


def run(law: Law, subject: Subject, variant: str) -> Failure | None:
    """Test the cases of a variant, and return the first failure."""
    for trial in law.trials(subject, variant):
        if (failure := attempt(law, subject, trial)) is not None:
            return failure
    return None
