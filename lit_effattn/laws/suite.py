"""The laws as tests of pytest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lit_effattn.laws import code
from lit_effattn.laws.adapter import Adapter
from lit_effattn.laws.checking import adapter_for
from lit_effattn.laws.law import Law, run
from lit_effattn.laws.registry import chosen
from lit_effattn.laws.report import Result, described
from lit_effattn.laws.shrink import shrink
from lit_effattn.laws.subject import Subject


class LawSuite:
    """A mixin for a test class of pytest: one test for each law and variant.

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
        """Return pytest's marks for a test, or None to leave the test out. The default returns none."""
        return ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make the tests: pytest calls this for each test of a class."""
        import pytest

        if "law_case" not in metafunc.fixturenames:
            return
        given = self.adapters if self.adapters is not None else [type(self).__dict__.get("adapter", self.adapter)]
        subjects = [Subject(adapter_for(adapter)) for adapter in map(_plain, given)]
        cases = []
        for law in chosen(self.laws):
            for subject in subjects:
                for variant in () if law.missing(subject) else law.variants(subject):
                    if (marks := self.marks(subject.adapter, law, variant)) is not None:
                        name = "-".join(filter(None, (law.name, variant, subject.adapter.name)))
                        cases.append(pytest.param((law, subject, variant), id=name, marks=marks))
        metafunc.parametrize("law_case", cases)

    def test_law(self, law_case: tuple[Law, Subject, str]) -> None:
        """Test one variant of one law; a failure has the smallest case and a script."""
        law, subject, variant = law_case
        if (failure := run(law, subject, variant)) is None:
            return
        smallest, failure = shrink(subject, failure)
        case, told = str(failure.trial), str(failure.difference)
        script = code.script(smallest, failure)
        result = Result(
            law.name, law.title, "broken", law.tolerance(subject), case=case, difference=told, detail=law.detail,
            module=smallest.adapter.name, script=script,
        )  # fmt: skip
        raise AssertionError("\n".join(described(result)))


def _plain(adapter: Any) -> Any:
    """Return the function of a static method."""
    return adapter.__func__ if isinstance(adapter, staticmethod) else adapter
