"""Make a failing case smaller: fewer rows, shorter segments, fewer of them, fewer layers."""

import time
from collections.abc import Iterator
from dataclasses import replace

from lit_effattn.laws.law import Failure, Trial, attempt, run
from lit_effattn.laws.subject import Subject

SECONDS = 5.0
"""The time that shrinking one failure takes at most."""


def shrink(subject: Subject, failure: Failure, seconds: float = SECONDS) -> tuple[Subject, Failure]:
    """Return the smallest failing case, and the subject with the fewest layers, that were reached.

    Each step tries smaller cases, the smallest first, and goes on from the first that fails in the same way: with an
    exception, or with other numbers.

    Args:
        subject: The module.
        failure: A failing case.
        seconds: The time to take at most.
    """
    end = time.monotonic() + seconds
    for adapter in subject.adapter.smaller():
        smaller = Subject(adapter, subject.device, subject.dtype, subject.bitwise)
        if failure.law.missing(smaller) or failure.variant not in failure.law.variants(smaller):
            continue
        other = run(failure.law, smaller, failure.variant)
        if other is not None and _alike(other, failure):
            subject, failure = smaller, other
            break
        if time.monotonic() > end:
            break
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for trial in _smaller(failure.trial):
            if not (trial.is_valid() and failure.law.applies(trial)) or min(trial.lengths) < subject.adapter.least:
                continue
            other = attempt(failure.law, subject, trial)
            if other is not None and _alike(other, failure):
                failure, progress = replace(other, variant=failure.variant), True
                break
            if time.monotonic() > end:
                break
    return subject, failure


def _alike(a: Failure, b: Failure) -> bool:
    return (a.difference.error is None) == (b.difference.error is None)


def _smaller(trial: Trial) -> Iterator[Trial]:
    """Yield smaller cases, those that save most first."""
    way, lengths = trial.way, trial.lengths
    if len(way) > 3:  # half of the segments
        half = len(way) // 2
        yield replace(trial, way=way[: half + 1])
        yield replace(trial, way=(way[0], *way[half + 1 :]))
    for i in range(min(len(way), 12) - 1, 0, -1):  # without one
        yield replace(trial, way=way[:i] + way[i + 1 :])
    for i in reversed(range(len(lengths))):  # without a row
        if len(lengths) > 1:
            at = trial.at - (i < trial.at) if trial.at < len(lengths) else trial.at
            yield replace(trial, lengths=lengths[:i] + lengths[i + 1 :], at=at)
    for by in (lambda n: n // 2, lambda n: n - 1):
        for i in range(min(len(way), 12)):
            n = by(way[i])
            if 0 < n < way[i]:
                yield _with_segment(trial, i, n)
        if len(set(way)) == 1 and 0 < by(way[0]) < way[0]:  # all segments alike
            n = by(way[0])
            yield replace(trial, way=(n,) * len(way), lengths=tuple(min(k, n) if k < way[0] else n for k in lengths))
        for i, length in enumerate(lengths):
            if 0 <= by(length) < length and len(set(lengths)) > 1:
                yield replace(trial, lengths=(*lengths[:i], by(length), *lengths[i + 1 :]))
    if trial.at > 0:
        yield replace(trial, at=trial.at // 2)
        yield replace(trial, at=trial.at - 1)
    if trial.variant.startswith(("kept-", "donated-")) and trial.variant != "kept-none":
        yield replace(trial, variant="kept-none")


def _with_segment(trial: Trial, i: int, n: int) -> Trial:
    """Return the trial with another length of a segment. Rows that filled the first still do; `at` stays inside."""
    way = (*trial.way[:i], n, *trial.way[i + 1 :])
    if i > 0:
        return replace(trial, way=way)
    lengths = tuple(n if k == trial.way[0] else min(k, n) for k in trial.lengths)
    inside = trial.at if len(trial.lengths) > 1 or trial.at < n else n - 1
    return replace(trial, way=way, lengths=lengths, at=inside)
