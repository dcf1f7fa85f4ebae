"""YAML of others is read within bounds."""

from itertools import pairwise

import pytest
import yaml

from lit_effattn.checkpoints.plain_yaml import MAX_BYTES, MAX_DEPTH, MAX_NODES, parse_yaml

NAMES = "abcdefghi"
LAUGHS = "a: &a [ha]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise(NAMES)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in pairwise(NAMES)
)


def test_out_of_bounds():
    for text, words in [
        (LAUGHS, "more than 100,000 nodes"),
        (MERGES, "more than 100,000 nodes"),
        ("a: &a [*a]", "an alias is inside the node that it names"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "nested more than 100 deep"),
        ("[" * 100_000, "nested too deeply|nesting depth"),
        ("a" * (MAX_BYTES + 1), "more than 1,048,576 characters"),
        ("a: 9" + "9" * 5000, "digits"),
        ("a: [", "while parsing a flow node"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ]:
        with pytest.raises(ValueError, match=words):
            parse_yaml(text)


def test_within_bounds():
    for text in ["", "a: {b: [1, 2.5, null, x], c: &c {d: true}, e: *c}", "a: &a {x: 1}\nb: {<<: *a}"]:
        assert parse_yaml(text) == yaml.safe_load(text)


def test_at_the_bounds():
    rows = 369  # of 271 nodes each, in a node
    assert 1 + rows * 271 == MAX_NODES
    parse_yaml(f"[&row [{'1, ' * 270}]" + ", *row" * (rows - 1) + "]")
    parse_yaml("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    assert parse_yaml("a" * MAX_BYTES) == "a" * MAX_BYTES
