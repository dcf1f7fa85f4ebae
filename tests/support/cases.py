"""Parameters of tests of which `make test` runs some, and `make test-all` all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def one_of_each(values: Iterable[Any], group: Callable[[Any], str], name: Callable[[Any], str]) -> list[Any]:
    """Return parameters; all but the first of each group are exhaustive."""
    seen: set[str] = set()
    result = []
    for value in values:
        marks = pytest.mark.exhaustive if group(value) in seen else ()
        seen.add(group(value))
        result.append(pytest.param(value, id=name(value), marks=marks))
    return result


def some(values: Iterable[tuple], chosen: Iterable[tuple]) -> list[Any]:
    """Return parameters; all that are not among `chosen` are exhaustive."""
    chosen = list(chosen)
    values = list(values)
    assert all(value in values for value in chosen)
    return [pytest.param(*value, marks=() if value in chosen else pytest.mark.exhaustive) for value in values]


def of_kinds(cases: Iterable[Any]) -> list[Any]:
    """Return cases of the laws; all but the first of each class are exhaustive."""
    return one_of_each(cases, lambda case: case.name.partition("-")[0], lambda case: case.name)


def of_data_sets(configs: Iterable[Any]) -> list[Any]:
    """Return files of configurations; all but the first of each data set are exhaustive."""
    return one_of_each(configs, lambda config: config.stem.partition("_")[0], lambda config: config.stem)
