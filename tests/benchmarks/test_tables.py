"""Every benchmark makes a table at tiny sizes. Nothing is said about how fast anything is."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import __main__ as command

TINY = (
    "steps --small --lengths 8 12 --repeats 2 --tokens 24",
    "generation --small --lengths 24 --repeats 1 --batch_sizes 2 --prefixes 3 --windows 2",
)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        yield from (value["median"], value["min"], value["max"], *value["samples"])
    elif not isinstance(value, str):
        yield value


@pytest.mark.parametrize("words", TINY)
def test_table(words, tmp_path, capsys):
    command.main([*words.split(), "--device", "cpu", "--output", str(tmp_path)])
    name = words.split()[0]
    text = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    for fact in ("machine", "versions", "date", "settings", "command"):
        assert f"- {fact}: " in text
    assert f"`python -m benchmarks {words}" in text or f" python -m benchmarks {words}" in text

    report = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert text.count("\n| ") == len(report["rows"]) + 2  # two lines of head
    for row in report["rows"]:
        assert row.keys() == report["rows"][0].keys()
        for column, value in row.items():
            for number in numbers(value):
                assert math.isfinite(number), (column, row)
                assert number > 0, (column, row)
