"""Parameters of tests of which `make test` runs some, and `make test-all` all."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
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


def pairwise(dimensions: Mapping[str, Sequence[Any]], expensive: str = "") -> list[dict[str, Any]]:
    """Return cells that contain every pair of values of every two dimensions; greedy, and always the same.

    Of equally good cells, that with the first value of the dimension `expensive` is taken, and then a random one.
    """
    candidates = [dict(zip(dimensions, cell, strict=True)) for cell in product(*dimensions.values())]
    random.Random(0).shuffle(candidates)
    if expensive:
        candidates.sort(key=lambda cell: dimensions[expensive].index(cell[expensive]))

    def pairs(cell: dict[str, Any]) -> set[Any]:
        return set(combinations(cell.items(), 2))

    missing, cells = set().union(*map(pairs, candidates)), []
    while missing:
        best = max(candidates, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        cells.append(best)
    return cells
