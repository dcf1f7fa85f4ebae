"""Laws about what outputs depend on: not on the future, but on everything else; else the other laws say nothing."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_effattn.laws.comparison import Check, Claim, Pair
from lit_effattn.laws.law import Law, Trial, full
from lit_effattn.laws.segments import long
from lit_effattn.laws.subject import Subject


class Alive(Law):
    """Outputs are finite, repeatable, and depend on the position itself and on earlier ones.

    A module whose outputs are constant or NaN would keep many other laws.
    """

    name = "alive"
    title = "outputs are finite, repeatable, and depend on the inputs"
    detail = "The other laws say nothing about a module whose outputs are constant, NaN or random."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield one call."""
        yield full(2, long(subject))

    def applies(self, trial: Trial) -> bool:
        """Return whether there is one call, of two rows and positions."""
        return len(trial.way) == 1 and trial.batch > 1 and trial.n > 2

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Call twice, and with other inputs."""
        x, adapter = subject.inputs(trial.batch, trial.n), subject.adapter
        y, again = subject.call(x)[0], subject.call(x)[0]
        checks: list[Check] = [
            _finite(y),
            Pair("outputs of two calls on the same inputs", again, y, exact=True),
            Claim(not torch.equal(y[0], y[1]), "outputs do not depend on the inputs: two rows have the same"),
            Claim(not torch.equal(y[:, 1:], y[:, :-1]), "outputs are the same at all positions"),
        ]
        changed = adapter.changed(x, trial.n - 1, 0.5)  # larger inputs may overflow
        last = subject.call(changed)[0]
        checks.append(_finite(last))
        if not adapter.jumps:
            checks.append(Claim(not torch.equal(last[:, -1], y[:, -1]), "the last output does not depend on its input"))
        if adapter.remembers:
            for t in range(trial.n - 1):
                x = adapter.changed(x, t, 0.5)
            other = subject.call(x)[0]
            depends = not torch.equal(other[:, -1], y[:, -1])
            checks += [_finite(other), Claim(depends, "the last output does not depend on earlier positions")]
        return checks


def _finite(y: Tensor) -> Claim:
    return Claim(bool(y.isfinite().all()), f"{int((~y.isfinite()).sum())} of {y.numel()} outputs are not finite")


class NoFuture(Law):
    """Changing position t, a little or by a factor of 12, changes no output before t, but the output at t."""

    name = "no-future"
    title = "no output depends on a later position"
    needs = frozenset({"causal"})
    detail = "The model sees what it is to predict: its training loss is too low and its samples are bad."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield positions around multiples of the unit, each changed in two ways."""
        n, u = long(subject), subject.adapter.unit
        for t in sorted({0, 1, u - 1, u, u + 1, 2 * u - 1, 2 * u, 3 * u, n - 1}):
            for factor in (1, 12) if "features" in subject.capabilities else (12,):
                yield full(1, n, at=t, factor=factor)

    def applies(self, trial: Trial) -> bool:
        """Return whether the position exists."""
        return len(trial.way) == 1 and trial.batch == 1 and 0 <= trial.at < trial.n

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare the outputs before the changed position."""
        t, n = trial.at, trial.n
        y = subject.whole(1, n)
        z, _ = subject.call(subject.adapter.changed(subject.inputs(1, n), t, trial.factor))
        # A hash may let a position see a single other one, and then all of it, whatever it asks for.
        jumps = subject.adapter.jumps
        end = n if jumps else t + 1
        changes = not torch.equal(z[:, t:end], y[:, t:end]) or (jumps and t == n - 1)
        return [
            Pair(f"outputs before position {t}, with position {t} changed and not", z[:, :t], y[:, :t]),
            Claim(changes, f"position {t} does not change its own output"),
        ]
