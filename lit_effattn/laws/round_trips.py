"""Laws about what is saved and loaded, compiled, and generated."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lit_effattn.laws import tree
from lit_effattn.laws.comparison import Check, Claim, Pair
from lit_effattn.laws.law import Law, Trial, full
from lit_effattn.laws.segments import long
from lit_effattn.laws.subject import Subject


def saved(thing: Any) -> Any:
    """Save and load without pickled code."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Parameters(Law):
    """A module that is built again and loads the state_dict has the same outputs, to the bit."""

    name = "state-dict"
    title = "state_dict survives saving and loading"
    needs = frozenset({"parameters"})
    segments = (1, 1)
    detail = "A checkpoint lacks something that outputs depend on."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield one call."""
        yield full(2, long(subject))

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Change the parameters, save, build, load."""
        module, built = subject.build(), subject.build()
        generator = torch.Generator().manual_seed(2)
        for p in module.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device, p.dtype))
        x = subject.inputs(trial.batch, trial.n)
        expected = subject.call(x, module=module)[0]
        before = subject.call(x, module=built)[0]
        built.load_state_dict(saved(module.state_dict()))
        return [
            Claim(not torch.equal(before, expected), "outputs do not depend on the parameters"),
            Pair(
                "outputs of a module that has loaded the state_dict", subject.call(x, module=built)[0], expected, True
            ),
        ]


class SavedState(Law):
    """A state that is saved and loaded goes on as before, to the bit."""

    name = "saved-state"
    title = "the state survives saving and loading"
    needs = frozenset({"state", "pack"})
    segments = (2, 2)
    detail = "A run that is resumed in mid-stream goes on from something else."

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the first states."""
        return subject.starts()

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield a call, padded where that is possible, and another one."""
        n = long(subject)
        yield Trial((n, n), (n, n - 2) if "lengths" in subject.capabilities else (n, n), variant)

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Save with `weights_only=True`, and load."""
        adapter, n = subject.adapter, trial.way[0]
        x = subject.inputs(trial.batch, n)
        lengths = trial.lengths if set(trial.lengths) != {n} else None
        _, state = subject.call(x, subject.begin(trial.variant, trial.batch, 2 * trial.n), lengths)
        if "initial_state" in subject.capabilities:
            example = subject.begin("max_len" if trial.variant == "max_len" else "initial", 1, 5)
        else:
            example = subject.call(x[:1])[1]
        loaded = adapter.unpack(saved(adapter.pack(state)), example)
        x = subject.inputs(trial.batch, trial.way[1])
        y, z = subject.call(x, subject.kept(loaded))[0], subject.call(x, state)[0]
        return [
            Claim(tree.same(loaded, state), "the state that was loaded is another one"),
            Pair("outputs after the state that was loaded and after the state", y, z, exact=True),
        ]


class Compiled(Law):
    """`torch.compile` gives the same outputs, gradients and states."""

    name = "compiled"
    title = "compiled equals eager"
    needs = frozenset({"module", "compiles"})
    detail = "A compiled model computes something else than the one that was tested."
    backend = "aot_eager"

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield two rows, one of them padded where that is possible. A graph repeats the segments, so two units do."""
        n = min(long(subject), 2 * subject.adapter.unit + 1)
        padded = "lengths" in subject.capabilities
        yield Trial((n, n), (n, subject.adapter.unit) if padded else (n, n))

    def applies(self, trial: Trial) -> bool:
        """Return whether a call of the same length follows."""
        return len(trial.way) == 2 and trial.way[0] == trial.way[1]

    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compile, and call twice."""
        torch._dynamo.reset()
        compiled = torch.compile(subject.module, backend=self.backend, fullgraph=subject.adapter.fullgraph)
        x = subject.differentiable(subject.inputs(trial.batch, trial.way[0]))
        lengths = None if "lengths" not in subject.capabilities else trial.lengths
        y, state = subject.call(x, None, lengths, compiled)
        expected, after = subject.call(x, None, lengths)
        checks: list[Check] = [
            Pair("outputs, compiled and eager", y, expected),
            Pair("gradients, compiled and eager", subject.gradients(y, x), subject.gradients(expected, x)),
        ]
        if "state" in subject.capabilities:
            y, _ = subject.call(x, tree.detach(state), None, compiled)
            checks.append(Pair("outputs after a state, compiled and eager", y, subject.call(x, tree.detach(after))[0]))
        return checks


class CompiledSteps(Law):
    """Compiled single steps give the outputs of one eager call; states that are kept are not overwritten."""

    name = "compiled-steps"
    title = "compiled single steps equal one eager call"
    needs = frozenset({"module", "state", "kept states", "compiles"})
    detail = "Compiled generation computes something else, or overwrites a state that is needed again."

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield a unit of steps."""
        yield full(2, *[1] * (subject.adapter.unit + 2))

    def applies(self, trial: Trial) -> bool:
        """Return whether there are three steps."""
        return len(trial.way) > 2 and set(trial.way) == {1}

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compile a step, and call it for donated states and for one that is kept."""
        torch._dynamo.reset()
        module, n, batch = subject.module, trial.n, trial.batch
        compiled = torch.compile(module, backend="aot_eager", fullgraph=subject.adapter.fullgraph, dynamic=False)
        x, expected = subject.inputs(batch, n), subject.whole(batch, n)
        start = subject.starts()[-1]
        with subject.donating("donated" if "donated" in subject.capabilities else "kept"):
            y, _ = subject.stream(x, trial.way, subject.begin(start, batch, n), compiled)
        _, state = subject.call(x[:, :2], subject.begin(start, batch, n))
        before = tree.clone(state)
        z, _ = subject.call(x[:, 2:3], state, None, compiled)
        return [
            Pair("outputs of compiled steps and of one eager call", y, expected),
            Pair("outputs of a compiled step from a state that is kept", z, expected[:, 2:3]),
            Claim(tree.same(state, before), "a compiled step changed the state that it was given"),
        ]


class Generation(Law):
    """The module's own generation gives the tokens that one call after the other on the whole text gives."""

    name = "generation"
    title = "generated tokens are those of calls on the whole text"
    needs = frozenset({"generate"})
    detail = "Samples differ from what the model predicts."

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return prompts of one length, and padded ones."""
        return ["equal", "padded"] if "lengths" in subject.capabilities else ["equal"]

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield prompts, and the number of tokens to generate."""
        u = subject.adapter.unit
        yield Trial((2 * u, 8), (2 * u,) * 3 if variant == "equal" else (2 * u, 2, u), variant)

    def applies(self, trial: Trial) -> bool:
        """Return whether there are a prompt and a number of tokens."""
        return len(trial.way) == 2 and min(trial.lengths) > 0

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare with the most probable tokens of single calls, each row alone."""
        n, more = trial.way
        prompts = subject.inputs(trial.batch, n)
        lengths = None if set(trial.lengths) == {n} else subject.lengths(trial.lengths)
        x = prompts if lengths is None else subject.padded(prompts, trial.lengths)
        tokens = subject.adapter.generate(subject.module, x, more, lengths)
        wrong = 0
        for prompt, length, generated in zip(prompts, trial.lengths, tokens, strict=True):
            text = prompt[None, :length]
            for _ in range(more):
                text = torch.cat([text, subject.call(text)[0][:, -1:].argmax(-1)], 1)
            wrong += int((generated != text[0, length:]).sum())
        share = 100 * wrong / (trial.batch * more)
        return [Claim(wrong == 0, f"{share:.0f} % of {trial.batch * more} generated tokens are others", share / 100)]
