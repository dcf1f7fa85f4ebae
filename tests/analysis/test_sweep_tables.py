"""Runs that diverged are neither the best nor hidden in a mean."""

import math
from pathlib import Path

import pytest

from lit_effattn.analysis.records import RunRecord
from lit_effattn.analysis.sweep_tables import Cell, Outcome, best_rate, by_kind, by_rate
from lit_effattn.analysis.tables import comma_separated, markdown

BAD = [math.nan, math.inf, -math.inf]


def outcome(*validated: float, test: float = 1.0) -> Outcome:
    curves = {"val/loss": dict(enumerate(validated)), "test/loss": {9: test}}
    return Outcome(RunRecord(Path("run"), {}, curves, state_bytes=8, monitor="val/loss"), None)


@pytest.mark.parametrize(("bad", "first"), [*zip(BAD, (True, False, True), strict=True)])
def test_a_rate_that_diverged_is_not_the_best(bad, first):
    rates = [(0.1, outcome(bad)), (0.2, outcome(3.0)), (0.3, outcome(2.0, bad))]
    outcomes = {Cell("a", rate, 0): made for rate, made in (rates if first else reversed(rates))}
    outcomes[Cell("a", 0.2, 1)] = outcome(1.0)  # rates are compared with seed 0
    assert best_rate("a", outcomes) == 0.3
    assert best_rate("a", {Cell("a", 0.1, 0): outcome(bad)}) is None
    assert best_rate("a", {Cell("a", 0.1, 0): outcome()}) is None
    never = "its validation metric was never finite"
    assert f"| a | {never} | 3 | 2 |" in markdown(by_rate(["a"], [0.1, 0.2, 0.3], outcomes))
    assert never not in markdown(by_kind(["a"], {"a": 0.3}, outcomes))  # of another rate
    assert f"| b | {never} |" in markdown(by_kind(["b"], {}, {Cell("b", 0.1, 0): outcome(bad)}))


def test_a_run_without_a_score_says_why():
    assert outcome(math.nan, 2.0).failure is None
    assert outcome(math.nan).failure == "its validation metric was never finite"
    assert "it ended before its first validation; train longer, or give a smaller" in outcome().failure
    assert Outcome(None, "killed").failure == "killed"


@pytest.mark.parametrize(("bad", "seed"), [*zip(BAD, (0, 2, 0), strict=True)])
def test_the_mean_over_seeds_of_which_one_diverged_is_no_number(bad, seed):
    outcomes = {Cell("a", 0.1, i): outcome(2.0, test=bad if i == seed else 1.0) for i in range(3)}
    outcomes |= {Cell("b", 0.1, i): outcome(3.0, test=1.0 + i) for i in range(3)}
    chosen = {"a": 0.1, "b": 0.1}
    table = by_kind(["a", "b"], chosen, outcomes)
    of_a, of_b = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert math.isnan(of_a["test/loss"].mean)
    assert of_b["test/loss"] == (2.0, 1.0)
    assert "| nan |" in markdown(table)
    assert ",nan,\n" in comma_separated(table)
