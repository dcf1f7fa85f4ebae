"""The laws as tests of pytest."""

from collections.abc import Sequence
from typing import Any, ClassVar

from lit_effattn.laws.adapter import Adapter
from lit_effattn.laws.checking import adapter_for, failed
from lit_effattn.laws.law import Failure, Law, run
from lit_effattn.laws.registry import chosen
from lit_effattn.laws.report import described
from lit_effattn.laws.shrink import SECONDS
from lit_effattn.laws.subject import Subject

Tried = tuple[Law, str]
"""A law, and one of its variants."""


class LawSuite:
    """A mixin for a test class of pytest: one test for each adapter, which tries all laws.

    Attributes:
        adapter: An adapter, or what `check` takes in its place.
        adapters: Several of them, in place of `adapter`.
        laws: Names of laws. Default: all that the adapter can be checked for.

    Examples:
        class TestMine(LawSuite):
            adapter = functools.partial(MyAttention, 64, 4)
    """

    adapter: ClassVar[Any] = None
    adapters: ClassVar[Sequence[Any] | None] = None
    laws: ClassVar[Sequence[str] | None] = None

    @classmethod
    def marks(cls, adapter: Adapter, law: Law, variant: str) -> Sequence[Any] | None:
        """Return pytest's marks for a variant of a law, or None to leave it out. The default returns none.

        Variants with the same marks are one test.
        """
        return ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make the tests: pytest calls this for each test of a class."""
        import pytest

        if "law_case" not in metafunc.fixturenames:
            return
        given = self.adapters if self.adapters is not None else [type(self).__dict__.get("adapter", self.adapter)]
        cases = []
        for adapter in map(adapter_for, map(_plain, given)):
            subject = Subject(adapter)
            tests: dict[str, tuple[list[Tried], Sequence[Any]]] = {}
            for law in chosen(self.laws):
                for variant in () if law.missing(subject) else law.variants(subject):
                    if (marks := self.marks(adapter, law, variant)) is not None:
                        tests.setdefault(repr([*marks]), ([], marks))[0].append((law, variant))
            for tried, marks in tests.values():
                name = "-".join([adapter.name, *(mark.name for mark in marks)])
                cases.append(pytest.param((adapter, tried), id=name, marks=marks))
        metafunc.parametrize("law_case", cases)

    def test_laws(self, law_case: tuple[Adapter, list[Tried]]) -> None:
        """Try all laws on one module; the message names each one that fails, with its smallest case."""
        adapter, tried = law_case
        subject = Subject(adapter)
        if failures := [f for law, variant in tried if (f := run(law, subject, variant)) is not None]:
            raise AssertionError(_message(subject, failures, len(tried)))


def _message(subject: Subject, failures: list[Failure], n: int) -> str:
    names = ", ".join("-".join(filter(None, (f.law.name, f.variant))) for f in failures)
    lines = [f"{subject.adapter.name} breaks {len(failures)} of {n} variants of laws: {names}"]
    for failure in failures:
        lines += described(failed(failure, subject, SECONDS / len(failures)))
    return "\n".join(lines)


def _plain(adapter: Any) -> Any:
    """Return the function of a static method."""
    return adapter.__func__ if isinstance(adapter, staticmethod) else adapter
