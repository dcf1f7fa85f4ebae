"""Laws about the rows of a batch, which do not know each other."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_effattn.laws import tree
from lit_effattn.laws.comparison import Check, Claim, Pair
from lit_effattn.laws.law import Law, Trial, full
from lit_effattn.laws.segments import long
from lit_effattn.laws.subject import Subject


class Alone(Law):
    """A row's outputs do not depend on its batch-mates, nor on its place among them."""

    name = "alone"
    title = "a row's outputs do not depend on the other rows"
    detail = "The answer to one request depends on those that are computed with it."

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the kinds of mates: none, others, NaN."""
        return ["alone", "others", "nan"] if "features" in subject.capabilities else ["alone", "others"]

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield three rows, the second under test, full or padded, and what follows from their state."""
        n = long(subject)
        yield full(3, n, n, variant=variant, at=1)
        if "lengths" in subject.capabilities:
            yield Trial((n, n), (n, n - 2, 3), variant, 1)

    def applies(self, trial: Trial) -> bool:
        """Return whether the row has mates, and calls are as long as the first."""
        return trial.at < trial.batch and trial.batch > 1 and len(trial.way) == 2

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare the row with itself among other mates."""
        x, row, batch = subject.inputs(trial.batch, trial.way[0]), trial.at, trial.batch
        lengths = None if set(trial.lengths) == {trial.way[0]} else list(trial.lengths)
        after = subject.inputs(batch, trial.way[1], 2)
        if trial.variant == "alone":
            mates, rows = x[[row]], [row]
        else:
            nan = torch.full_like(x, torch.nan) if x.is_floating_point() else x
            mates = subject.inputs(batch, trial.way[0], 1) if trial.variant == "others" else nan
            mates[[row, batch - 1]] = x[row]
            rows = [row] if row == batch - 1 else [row, batch - 1]
        at = [0] if trial.variant == "alone" else rows
        valid = None
        if lengths is not None:
            valid = [lengths[row] if i in at else max(1, subject.adapter.least) for i in range(len(mates))]
            x, mates = subject.padded(x, lengths), subject.padded(mates, valid)
        y, state = subject.call(x, None, lengths)
        z, other = subject.call(mates, None, valid)
        what = "outputs of a row among its mates and " + (
            "alone" if trial.variant == "alone" else f"among {'NaN' if trial.variant == 'nan' else 'others'}"
        )
        n = trial.way[0]
        shown = slice(n) if lengths is None or subject.adapter.zeroes_padding else subject.valid([lengths[row]], n)[0]
        checks: list[Check] = [Pair(what, z[at][:, shown], y[[row]].expand_as(z[at])[:, shown])]
        if "state" in subject.capabilities and (lengths is None or subject.adapter.padding == "right"):
            follow = after[[row] * len(mates)]
            y, _ = subject.call(after, state)
            z, _ = subject.call(follow, other)
            checks.append(Pair(f"{what}, in the next call", z[at], y[[row]].expand_as(z[at]).contiguous()))
        return checks


class Ragged(Law):
    """Prompts of different lengths, padded; then all rows go on, each from where it is."""

    name = "ragged"
    title = "rows go on from prompts of different lengths as each would alone"
    needs = frozenset({"state", "lengths"})
    segments = (2, math.inf)
    detail = "Batched generation after padded prompts differs from that of each prompt alone."

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the first states, kept or donated."""
        return subject.streams()

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield one step and several at a time after the prompts."""
        u = subject.adapter.unit
        lengths = (1, 2 * u + 1, subject.adapter.least, 3 * u)
        for way in ((1, 1, 1, u + 1, u - 1), (2 * u + 3,)):
            yield Trial((3 * u, *(n for n in way if n)), lengths, variant)

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare with each row alone."""
        prompt = subject.inputs(trial.batch, trial.way[0])
        rest = subject.inputs(trial.batch, trial.n - trial.way[0], 1)

        def alone() -> Tensor:
            rows = zip(prompt, rest, trial.lengths, strict=True)
            return torch.stack([subject.call(torch.cat([p[:n], r])[None])[0][0, n:] for p, r, n in rows])

        expected = subject.remember(("ragged", trial.lengths, trial.way[0], trial.n), alone)
        with subject.donating(trial.variant):
            state = subject.begin(trial.variant.rpartition("-")[2], trial.batch, trial.n + subject.adapter.unit)
            _, state = subject.call(subject.padded(prompt, trial.lengths), state, trial.lengths)
            y, _ = subject.stream(rest, trial.way[1:], state)
        return [Pair("outputs after padded prompts and after each prompt alone", y, expected)]


class Reset(Law):
    """Rows that are reset are as new, whatever they held; the others go on."""

    name = "reset"
    title = "rows that are reset are as new, and the others go on"
    needs = frozenset({"state", "reset"})
    detail = "A new request, or the next document, sees what was in the row before."

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the first states."""
        return subject.starts()

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield three rows, of which the first goes on and the last is NaN, if it can be."""
        n = long(subject)
        yield full(3, n, 1, n - 1, variant=variant)

    def applies(self, trial: Trial) -> bool:
        """Return whether calls follow, and a row is reset."""
        return trial.batch > 1 and len(trial.way) > 1

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Reset all rows but the first."""
        adapter, module, batch, n = subject.adapter, subject.module, trial.batch, trial.way[0]
        x, after = subject.inputs(batch, n), subject.inputs(batch, trial.n - n, 1)
        if x.is_floating_point() and batch > 2:
            x[-1] = torch.nan  # what diverged is forgotten too
        rows = torch.arange(batch, device=subject.device) > 0
        _, state = subject.call(x, subject.begin(trial.variant, batch, trial.n))
        before = tree.clone(state)
        reset = adapter.reset(module, subject.kept(state), rows)
        unchanged = adapter.donates or tree.same(state, before)
        one, other = (subject.select(s, [0]) for s in (reset, before))
        checks: list[Check] = [
            Claim(unchanged, "resetting changed the state that it was given"),
            Claim(type(reset) is type(state), f"resetting made a {type(reset).__name__} of a {type(state).__name__}"),
            Claim(tree.same(one, other), "resetting changed a row that was to go on"),
        ]
        y, _ = subject.stream(after, trial.way[1:], reset)
        checks.append(Pair("outputs of rows that were reset and of new ones", y[1:], subject.call(after)[0][1:]))
        going = subject.call(torch.cat([x, after], 1)[:1])[0][0, n:]
        checks.append(Pair("outputs of a row that was not reset and of one call", y[0], going))
        return checks


class Select(Law):
    """Rows of a state that are dropped, repeated and reordered go on as they would have."""

    name = "select"
    title = "selected rows of a state go on as they would have"
    needs = frozenset({"state"})
    segments = (2, math.inf)
    detail = "Beam search, several samples of one prompt and batches that shrink continue other rows."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield three rows, padded where that is possible, of which one is repeated."""
        n, u = long(subject), subject.adapter.unit
        way = (n, 1, 1, 1) if subject.adapter.donates else (n, 1, n - 1)  # a cache goes on as in beam search
        yield Trial(way, (n, 2, u) if subject.adapter.padding == "right" else (n, n, n))

    @staticmethod
    def _rows(trial: Trial) -> list[int]:
        last = trial.batch - 1
        return [last, 0, 0, *range(1, last)]

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare with each row alone."""
        n, rows = trial.way[0], self._rows(trial)
        x, after = subject.inputs(trial.batch, n), subject.inputs(len(rows), trial.n - n, 1)
        padded = any(length != n for length in trial.lengths)
        _, state = subject.call(subject.padded(x, trial.lengths), None, trial.lengths if padded else None)
        y, _ = subject.stream(after, trial.way[1:], subject.select(state, rows))
        alone = [
            subject.call(torch.cat([x[row, : trial.lengths[row]], after[i]])[None])[0][0, trial.lengths[row] :]
            for i, row in enumerate(rows)
        ]
        return [Pair("outputs of selected rows and of each row alone", y, torch.stack(alone))]


class Packed(Law):
    """Sequences that are packed in one row have the outputs of each alone."""

    name = "packed"
    title = "packed sequences have the outputs of each alone"
    needs = frozenset({"packed"})
    detail = "A document sees the one before it in the same row."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield sequences shorter and longer than a unit."""
        u = subject.adapter.unit
        yield full(1, 2 * u + 1, 1, u, u + 1)
        yield full(1, 1, u)

    def applies(self, trial: Trial) -> bool:
        """Return whether there are two sequences."""
        return len(trial.way) > 1 and trial.batch == 1

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare with each sequence alone."""
        x = subject.inputs(1, trial.n)
        y = subject.adapter.packed(subject.module, x, list(trial.way))
        alone = [subject.call(part)[0] for part in x.split(list(trial.way), 1)]
        return [Pair("outputs of packed sequences and of each alone", y, torch.cat(alone, 1))]


def row(state: Any, subject: Subject, i: int) -> Any:
    """Return one row of a state, None for None."""
    return None if state is None else subject.select(state, [i])
