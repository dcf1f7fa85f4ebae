"""Laws about padding: it is nothing."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_effattn.laws import tree
from lit_effattn.laws.comparison import Check, Pair
from lit_effattn.laws.law import Law, Trial
from lit_effattn.laws.rows import row
from lit_effattn.laws.segments import long
from lit_effattn.laws.subject import Subject

GARBAGE = {"large": 100.0, "nan": float("nan"), "infinite": float("inf")}
"""What padding holds, besides other tokens."""


class Padding(Law):
    """Outputs, gradients and the state of a padded row are those of the row without padding."""

    name = "padding"
    title = "padding changes neither outputs nor gradients nor the state"
    needs = frozenset({"lengths"})
    detail = "The result for a sequence depends on the longest one in its batch."

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the contents of the padding, without a state before and after one."""
        contents = ["large", "nan", "infinite"] if "features" in subject.capabilities else ["tokens"]
        after = contents[:2] if "state" in subject.capabilities and subject.adapter.padding == "right" else []
        return [*contents, *(f"{content}-after-a-state" for content in after)]

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield rows of lengths around multiples of the unit."""
        u, least = subject.adapter.unit, subject.adapter.least
        lengths = [n for n in (0, 1, u, u + 1, 3 * u, 3 * u + 1) if n >= least]
        yield Trial((3 * u + 1,), tuple(lengths), variant)

    def applies(self, trial: Trial) -> bool:
        """Return whether there is one call, and a row that is not empty."""
        return len(trial.way) == 1 and max(trial.lengths) > 0

    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare with each row alone, without padding."""
        n, lengths, adapter = trial.way[0], trial.lengths, subject.adapter
        plain, valid = subject.inputs(trial.batch, n), subject.valid(trial.lengths, n)
        before = None
        if trial.variant.endswith("after-a-state"):
            earlier = subject.inputs(trial.batch, trial.batch, 1)
            counts = [max(i, adapter.least) for i in range(trial.batch)]
            with torch.no_grad():
                _, before = subject.call(subject.padded(earlier, counts), None, counts)
        x = subject.differentiable(subject.padded(plain, lengths, _garbage(subject, trial)))
        y, state = subject.call(x, subject.kept(before), lengths)
        computed = subject.gradients(y if adapter.zeroes_padding else y.masked_fill(~valid[..., None], 0), x)
        checks: list[Check] = []
        total: dict[str, Tensor] = {}

        def alone() -> dict[int, tuple[Tensor, Any, dict[str, Tensor]]]:
            results = {}
            for i, length in enumerate(lengths):
                if length > 0:
                    part = subject.differentiable(plain[i : i + 1, :length])
                    z, after = subject.call(part, subject.kept(row(before, subject, i)))
                    results[i] = z[0].detach(), tree.detach(after), subject.gradients(_shifted(subject, z, n), part)
            return results

        for i, (z, after, computed_alone) in subject.remember(
            ("padding", trial.way, lengths, before is None), alone
        ).items():
            checks.append(Pair(f"outputs of row {i}, padded and alone", y[i][valid[i]], z))
            for name, gradient in computed_alone.items():
                if name == "input 0":
                    got = computed[name][i][valid[i]]
                    checks.append(Pair(f"gradients of row {i}, padded and alone", got, gradient[0]))
                else:
                    total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
            if "state" in subject.capabilities:
                checks.append(_next(subject, row(state, subject, i), after))
        if 0 in lengths and "state" in subject.capabilities:  # a row of length 0 is where it was
            i = lengths.index(0)
            checks.append(_next(subject, row(state, subject, i), row(before, subject, i)))
        if adapter.zeroes_padding:
            checks.append(Pair("outputs at padding and 0", y[~valid], torch.zeros_like(y[~valid]), exact=True))
        if "input 0" in computed:
            at_padding = computed["input 0"][~valid]
            checks.append(Pair("gradients at padding and 0", at_padding, torch.zeros_like(at_padding), exact=True))
        shared = {name: computed[name] for name in total}
        return [*checks, Pair("gradients of the parameters, padded and alone", shared, total)]


def _garbage(subject: Subject, trial: Trial) -> Tensor:
    """Return the contents of the padding, (B, N, …)."""
    x = subject.inputs(trial.batch, trial.way[0])
    if not x.is_floating_point():
        return subject.inputs(trial.batch, trial.way[0], 3)
    generator = torch.Generator().manual_seed(1)
    random = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)
    return GARBAGE[trial.variant.split("-")[0]] * random


def _shifted(subject: Subject, y: Tensor, n: int) -> Tensor:
    """Return outputs (1, L, E), behind zeros if padding is on the left, so that positions have the batch's weights."""
    if subject.adapter.padding != "left":
        return y
    return torch.cat([y.new_zeros(1, n - y.size(1), y.size(2)), y], 1)


def _next(subject: Subject, state: Any, expected: Any) -> Pair:
    """Compare the outputs that follow two states."""
    more = subject.inputs(1, 1 if subject.adapter.donates else 3, 2)
    with torch.no_grad():
        got, wanted = (subject.call(more, subject.kept(s))[0] for s in (state, expected))
    return Pair("outputs of the next call, after the padded row and after the row alone", got, wanted)


class EmptyRows(Law):
    """Rows without a valid position have outputs and gradients 0."""

    name = "empty-rows"
    title = "rows without a valid position give 0, in outputs and gradients"
    needs = frozenset({"empty rows", "features"})
    detail = "An empty sequence in a batch makes losses or gradients NaN."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield two empty rows of NaN."""
        yield Trial((subject.adapter.unit + 1,), (0, 0))

    def applies(self, trial: Trial) -> bool:
        """Return whether rows are empty."""
        return len(trial.way) == 1 and set(trial.lengths) == {0}

    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare with 0."""
        x = subject.differentiable(torch.full_like(subject.inputs(trial.batch, trial.n), torch.nan))
        y, _ = subject.call(x, None, trial.lengths)
        computed = subject.gradients(y, x)
        return [
            Pair("outputs of empty rows and 0", y, torch.zeros_like(y), exact=True),
            Pair(
                "gradients of empty rows and 0", computed, {k: torch.zeros_like(g) for k, g in computed.items()}, True
            ),
        ]


class FullLengths(Law):
    """Lengths that leave no padding change nothing."""

    name = "full-lengths"
    title = "lengths that leave no padding change nothing"
    needs = frozenset({"lengths"})

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield two full rows."""
        yield Trial((long(subject),), (long(subject),) * 2)

    def applies(self, trial: Trial) -> bool:
        """Return whether no row is padded."""
        return len(trial.way) == 1 and set(trial.lengths) == {trial.way[0]}

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare calls with lengths and without."""
        x = subject.inputs(trial.batch, trial.n)
        y, state = subject.call(x, None, trial.lengths)
        z, other = subject.call(x)
        checks: list[Check] = [Pair("outputs with full lengths and without lengths", y, z)]
        if "state" in subject.capabilities and subject.adapter.padding == "right":
            checks.append(_next(subject, row(state, subject, 0), row(other, subject, 0)))
        return checks
