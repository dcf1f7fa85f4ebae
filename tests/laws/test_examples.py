"""The examples in docstrings are run: what a reader copies works."""

import doctest
import importlib
import pkgutil

import pytest

import lit_effattn

MODULES = ["lit_effattn", *(m.name for m in pkgutil.walk_packages(lit_effattn.__path__, "lit_effattn."))]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples_in_docstrings(name: str):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
