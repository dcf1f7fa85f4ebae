"""Laws about a stream that is cut into segments, the state handed along."""

import math
from collections.abc import Iterator, Sequence

import torch

from lit_effattn.laws import tree
from lit_effattn.laws.comparison import Check, Claim, Pair
from lit_effattn.laws.law import Law, Trial, full
from lit_effattn.laws.subject import Subject, splits


def long(subject: Subject) -> int:
    """Return a length of many units, and not a multiple of one."""
    return 4 * subject.adapter.unit + 3


class Segments(Law):
    """Outputs over any split of a stream, the state handed along, are those of one call on the whole."""

    name = "segments"
    title = "any split of a stream gives the outputs of one call"
    needs = frozenset({"state"})
    segments = (2, math.inf)
    detail = "Truncated back-propagation, prefill in chunks and streaming compute something else than one call."

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the first states, kept or donated."""
        return subject.streams()

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield splits of a long stream; four positions in one call follow."""
        for way in splits(long(subject), subject.adapter.unit)[1:]:  # the first has single steps alone: see `Steps`
            yield full(2, *way, 4, variant=variant)

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare the stream with the whole."""
        x = subject.inputs(trial.batch, trial.n)
        with subject.donating(trial.variant):
            first = subject.begin(trial.variant.rpartition("-")[2], trial.batch, trial.n)
            y, _ = subject.stream(x, trial.way, first)
        return [Pair("outputs of the segments and of one call", y, subject.whole(trial.batch, trial.n))]


class Steps(Segments):
    """Single steps after a prompt, or from the start, give the outputs of one call on the whole."""

    name = "steps"
    title = "single steps give the outputs of one call"
    detail = "Generation, one position at a time, computes something else than training."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield single steps, at once or after a prompt."""
        n = long(subject)
        for prompt in (1, subject.adapter.unit + 1):
            yield full(2, prompt, *[1] * (n - prompt), variant=variant)

    def applies(self, trial: Trial) -> bool:
        """Return whether the segments after the prompt are single steps."""
        return len(trial.way) > 1 and set(trial.way[1:]) == {1}


class CarriedGradients(Law):
    """Gradients of a split stream are those of the whole: no call detaches its state."""

    name = "carried-gradients"
    title = "gradients flow through the state"
    needs = frozenset({"state", "parameters"})
    segments = (2, math.inf)
    detail = "Back-propagation through several calls misses what the state carries, or uses overwritten values."

    def missing(self, subject: Subject) -> str:
        """Return why the law can't be checked."""
        return "calls overwrite their state" if subject.adapter.donates else super().missing(subject)

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return kept or donated, from the last of the first states."""
        start = subject.starts()[-1]
        kept = "kept-initial" if "initial" in subject.starts() else "kept-none"
        return [kept, f"donated-{start}"] if "donated" in subject.capabilities else [kept]

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield splits of a long stream."""
        n = long(subject)
        ways = [[1] * n] if variant.startswith("donated") else splits(n, subject.adapter.unit)[1:4]
        for way in ways:
            yield full(2, *way, variant=variant)

    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare gradients."""
        x = subject.differentiable(subject.inputs(trial.batch, trial.n))

        def whole() -> dict[str, torch.Tensor]:
            return subject.gradients(subject.call(x)[0], x)

        expected = subject.remember(("gradients", trial.batch, trial.n), whole)
        with subject.donating(trial.variant):
            first = subject.begin(trial.variant.rpartition("-")[2], trial.batch, trial.n)
            y, _ = subject.stream(x, trial.way, first)
            computed = subject.gradients(y, x)
        return [Pair("gradients of the segments and of one call", computed, expected)]


class Unchanged(Law):
    """A call does not change the state that it is given, so that a second call from it gives the same."""

    name = "unchanged"
    title = "a call does not change the state that it is given"
    needs = frozenset({"kept states"})
    detail = "Several samples of one prompt, and beams, disturb each other."

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the first states."""
        return subject.starts()

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield a first state or a later one, without gradients or with them: each takes a path of its own."""
        u = subject.adapter.unit
        for way in ((1,), (u + 1,), (long(subject), 1), (long(subject), u + 1)):
            for graph in ("", "+graph"):
                yield full(2, *way, variant=variant + graph)

    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Call twice from one state."""
        start, _, graph = trial.variant.partition("+")
        if start == "none" and len(trial.way) == 1:
            return []
        x = subject.inputs(trial.batch, trial.n)
        with torch.set_grad_enabled(bool(graph)):
            state = subject.begin(start, trial.batch, 2 * trial.n)
            if len(trial.way) > 1:
                _, state = subject.call(x[:, : trial.way[0]], state)
            x = x[:, trial.n - trial.way[-1] :]
            before = tree.clone(state)
            first, after = subject.call(x, state)
            kept = tree.clone(after)
            second, again = subject.call(x, state)
        return [
            Pair("outputs of a second and of a first call from one state", second, first, exact=True),
            Claim(tree.same(state, before), "a call changed the state that it was given"),
            Claim(tree.same(after, kept), "a call changed a state that an earlier call had returned"),
            Claim(tree.same(again, after), "two calls from one state returned different states"),
        ]


class DonationEnds(Law):
    """A state that was donated in a context is kept by calls after it."""

    name = "donation-ends"
    title = "states are kept again after the context that donates them"
    needs = frozenset({"donated", "initial_state"})
    segments = (2, 2)
    detail = "A cache is overwritten although the caller did not give it away."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield a prompt inside the context and one step after it."""
        yield full(2, 3, 1)

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Call after the context."""
        x = subject.inputs(trial.batch, trial.n)
        with subject.adapter.donated():
            _, state = subject.call(x[:, : trial.way[0]], subject.begin("max_len", trial.batch, 3 * trial.n))
        before = tree.clone(state)
        subject.call(x[:, trial.way[0] :], state)
        return [Claim(tree.same(state, before), "a call outside the context changed the state that it was given")]


class Bounded(Law):
    """The state's size is constant if it is declared bounded, and grows if it is declared to grow."""

    name = "bounded"
    title = "the state is as large as declared"
    needs = frozenset({"state", "bounded"})
    detail = "Memory grows in a stream that was to run for ever, or the declaration is wrong."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield six units."""
        yield full(2, *[subject.adapter.unit] * 6)

    def applies(self, trial: Trial) -> bool:
        """Return whether there are as many equal segments."""
        return len(trial.way) == 6 and len(set(trial.way)) == 1

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare sizes after each segment."""
        offers = "initial_state" in subject.capabilities
        state, sizes = subject.begin("initial" if offers else "none", trial.batch, trial.n), []
        for x in subject.inputs(trial.batch, trial.n).split(list(trial.way), 1):
            _, state = subject.call(x, state)
            sizes.append(tree.nbytes(state))
        if not subject.adapter.bounded(subject.module):
            return [Claim(sizes[0] < sizes[2] < sizes[-1], f"the state is declared to grow, but takes {sizes} bytes")]
        if offers:
            _, from_none = subject.call(subject.inputs(trial.batch, trial.way[0]))
            sizes += [tree.nbytes(from_none), tree.nbytes(subject.begin("initial", trial.batch, trial.n))]
        else:
            sizes = sizes[2:]
        return [Claim(len(set(sizes)) == 1, f"the state is declared bounded, but takes {sizes} bytes")]


class Combine(Law):
    """Two states, of a stream's parts, combine to the state after both."""

    name = "combine"
    title = "combined states go on as the state after both parts"
    needs = frozenset({"state", "combine", "initial_state"})
    segments = (4, 4)
    detail = "Sequence parallelism and parallel scans compute something else than one process."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield three parts, shorter and longer than a unit, and what follows."""
        u = subject.adapter.unit
        for way in ((u + 1, 2 * u, 1, 3), (1, 1, 2 * u + 1, u)):
            yield full(2, *way)

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Combine in both orders, and with the empty state."""
        x = subject.inputs(trial.batch, trial.n)
        *parts, last = x.split(list(trial.way), 1)
        a, b, c = (subject.call(part)[1] for part in parts)
        empty = subject.begin("initial", trial.batch, trial.n)

        def joined(before: object, after: object) -> object:
            return subject.adapter.combine(subject.module, before, after)

        states = {
            "(a + b) + c": joined(joined(a, b), c),
            "a + (b + c)": joined(a, joined(b, c)),
            "the empty state + a + b + c": joined(joined(joined(empty, a), b), c),
            "a + b + c + the empty state": joined(joined(joined(a, b), c), empty),
        }
        expected = subject.whole(trial.batch, trial.n)[:, -trial.way[-1] :]
        return [
            Pair(f"outputs after {name} and after the whole", subject.call(last, state)[0], expected)
            for name, state in states.items()
        ]
