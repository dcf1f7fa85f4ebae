"""The examples in docstrings are run: what a reader copies works."""

import doctest
import importlib
import pkgutil

import lit_effattn


def test_examples_in_docstrings():
    names = ["lit_effattn", *(m.name for m in pkgutil.walk_packages(lit_effattn.__path__, "lit_effattn."))]
    attempted, failed = 0, []
    for name in names:
        if not name.endswith("__main__"):
            result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
            attempted += result.attempted
            failed += [name] if result.failed else []
    assert failed == []
    assert attempted > 100
