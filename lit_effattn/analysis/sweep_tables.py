"""The results of a sweep: the best rate of each kind, and means and deviations over seeds."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from lit_effattn.analysis.records import RunRecord
from lit_effattn.analysis.tables import Spread, Table, from_columns


class Cell(NamedTuple):
    """One run of a sweep: an attention with its options, a learning rate, and a seed of the weights and the data."""

    kind: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.kind.replace(':', '_')}_lr{self.rate:g}_seed{self.seed}"


class Outcome(NamedTuple):
    """The result of a cell: a run, or the reason for its failure."""

    record: RunRecord | None
    reason: str | None

    @property
    def score(self) -> float:
        """The lowest value of the task's validation metric, or infinity."""
        return min((value for value in self._validated if math.isfinite(value)), default=math.inf)

    @property
    def failure(self) -> str | None:
        """The reason why there is no score; None with a score."""
        if self.reason is not None or math.isfinite(self.score):
            return self.reason
        if self._validated:
            return "its validation metric was never finite"
        return (
            "it ended before its first validation; train longer, or give a smaller --trainer.val_check_interval or "
            "--trainer.check_val_every_n_epoch"
        )

    @property
    def _validated(self) -> Sequence[float]:
        """The values of the task's validation metric."""
        monitor = None if self.record is None else self.record.monitor
        return [] if self.record is None or monitor is None else [*self.record.curves.get(monitor, {}).values()]


Outcomes = Mapping[Cell, Outcome]
_SIZES = ("parameters", "state_bytes", "state_length")


def best_rate(kind: str, outcomes: Outcomes) -> float | None:
    """Return the rate with the lowest validation metric with seed 0, or None if no rate has a finite one."""
    scores = {cell.rate: outcome.score for cell, outcome in outcomes.items() if cell.kind == kind and cell.seed == 0}
    finite = {rate: score for rate, score in scores.items() if math.isfinite(score)}
    return min(finite, key=finite.__getitem__) if finite else None


def by_rate(kinds: Sequence[str], rates: Sequence[float], outcomes: Outcomes) -> Table:
    """Return the validation metric of each kind at each rate, or the reason for its failure."""

    def tried(outcome: Outcome) -> Any:
        return outcome.score if math.isfinite(outcome.score) else outcome.failure

    monitors = {outcome.record.monitor: None for outcome in outcomes.values() if outcome.record is not None}
    rows = [[kind, *(tried(outcomes[Cell(kind, rate, 0)]) for rate in rates)] for kind in kinds]
    title = f"Rates: the lowest {', '.join(map(str, monitors)) or 'validation metric'} with seed 0"
    return Table(title, ["kind", *(f"{rate:g}" for rate in rates)], rows)


def by_kind(kinds: Sequence[str], chosen: Mapping[str, float], outcomes: Outcomes) -> Table:
    """Return a row for each kind: means over seeds at its best rate ± standard deviations."""
    runs = []
    for kind in kinds:
        at_best = sorted(cell for cell in outcomes if cell.kind == kind and cell.rate == chosen.get(kind))
        runs.append([record for cell in at_best if (record := outcomes[cell].record) is not None])
    reasons = {
        cell.kind: outcome.failure
        for cell, outcome in reversed([*outcomes.items()])
        if outcome.failure and chosen.get(cell.kind, cell.rate) == cell.rate
    }
    metrics = dict.fromkeys(name for of_kind in runs for run in of_kind for name in _scores(run))
    columns: dict[str, list[Any]] = {
        "kind": list(kinds),
        **{
            title: [getattr(of_kind[0], name) if of_kind else None for of_kind in runs]
            for title, name in zip(("parameters", "state bytes", "at length"), _SIZES, strict=True)
        },
        "rate": [chosen.get(kind) for kind in kinds],
        "seeds": [len(of_kind) or None for of_kind in runs],
        "s/step": [_spread([run.seconds_per_step for run in of_kind]) for of_kind in runs],
        **{metric: [_spread([_scores(run).get(metric) for run in of_kind]) for of_kind in runs] for metric in metrics},
        "refused": [reasons.get(kind) for kind in kinds],
    }
    return from_columns("Kinds at their best rate: mean ± standard deviation over seeds", columns)


def _scores(run: RunRecord) -> dict[str, float]:
    """Return the lowest value of the validation metric, and all test metrics."""
    validated = {run.monitor: Outcome(run, None).score} if run.monitor is not None else {}
    return validated | {name: value for name, value in run.final.items() if name.startswith("test/")}


def _spread(values: Sequence[float | None]) -> Spread | None:
    """Return the mean and deviation of the known values: NaN if one is not finite, None without any."""
    known = [value for value in values if value is not None]
    if not all(map(math.isfinite, known)):  # a seed diverged; `stdev` accepts finite numbers only
        return Spread(math.nan, None)
    return Spread(mean(known), stdev(known) if len(known) > 1 else None) if known else None
