"""Laws about gradients and half precision."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lit_effattn.laws.comparison import Check, Claim, Pair, Tolerance, percent
from lit_effattn.laws.law import Law, Trial, full
from lit_effattn.laws.subject import Subject, stream

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_JUMPED, _MAGNIFIED = 0.5, 0.1
"""The shares of outputs that may be further off, where rounding makes outputs jump or magnifies it."""
_WINDOW = 15  # positions; of these most are near, where rounding is magnified


class Gradients(Law):
    """Gradients with respect to inputs and parameters are those of finite differences, through a state too.

        ⟨∇_p f, u⟩ = (f(p + h u) − f(p − h u)) / 2h, u at random, f a random combination of the outputs

    This is the fast mode of `torch.autograd.gradcheck`, for every tensor.
    """

    name = "gradients"
    title = "gradients equal finite differences, through a state too"
    needs = frozenset({"module", "features"})
    detail = "Training follows another direction than the steepest one."

    def missing(self, subject: Subject) -> str:
        """Return why the law can't be checked."""
        if subject.dtype != torch.float64:
            return "finite differences need float64"
        return super().missing(subject)

    def tolerance(self, subject: Subject) -> Tolerance:
        """Return the tolerance of a difference quotient."""
        return Tolerance(1e-4, 1e-6, "a difference quotient of step 1e-6 in float64")

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield two segments, or one call."""
        u, state = subject.adapter.unit, "state" in subject.capabilities
        yield full(1, 3, u - 1) if state and u > 1 else full(1, u + 2)

    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare with difference quotients."""
        module = subject.build(torch.float64, 4)
        called, generator, step = _Called(subject, module), torch.Generator().manual_seed(1), 1e-6
        given = {name: p.detach() for name, p in called.named_parameters() if p.requires_grad}
        given["input"] = subject.inputs(trial.batch, trial.n, module=module)

        def random(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)

        def outputs(values: Mapping[str, Tensor]) -> Tensor:
            parameters = {name: value for name, value in values.items() if name != "input"}
            return stream(
                lambda *args: torch.func.functional_call(called, parameters, args), values["input"], trial.way
            )[0]

        leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
        y = outputs(leaves)
        w = random(y)
        computed = torch.autograd.grad((y * w).sum(), [*leaves.values()], allow_unused=True)
        analytic, quotients = {}, {}
        for (name, value), gradient in zip(given.items(), computed, strict=True):
            u = random(value)
            with torch.no_grad():
                above, below = (outputs({**given, name: value + h * u}) for h in (step, -step))
            quotients[name] = ((above - below) * w).sum() / (2 * step)
            analytic[name] = torch.zeros_like(quotients[name]) if gradient is None else (gradient * u).sum()
        return [Pair("gradients and difference quotients", analytic, quotients)]


class _Called(nn.Module):
    """The module as the adapter calls it."""

    def __init__(self, subject: Subject, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call = subject.adapter.call

    def forward(self, *args: Any) -> Any:
        return self.call(self.module, *args)


class Precision(Law):
    """Half precision stays finite and near float32, over long sequences and over many single steps."""

    name = "half-precision"
    title = "half precision stays finite, and near float32"
    needs = frozenset({"module"})
    detail = "Sums that are kept in half precision drift, or overflow, after some hundred positions."

    def tolerance(self, subject: Subject) -> Tolerance:
        """Return the tolerance in spacings."""
        spacings = subject.adapter.spacings
        return Tolerance(spacings * 2.0**-7, 0, f"{spacings:g} spacings of the numbers near 1, of each output's length")

    def variants(self, subject: Subject) -> Sequence[str]:
        """Return the types, for one call on a long sequence, and for steps."""
        forms = ["long", "steps"] if "state" in subject.capabilities else ["long"]
        return [f"{form}-{dtype}" for form in forms for dtype in DTYPES]

    def trials(self, subject: Subject, variant: str) -> Iterator[Trial]:
        """Yield a long sequence, or a prompt and twice as many steps."""
        adapter = subject.adapter
        if variant.startswith("long"):
            # Where outputs jump, the share of those that differ needs more.
            yield full(1, (2 if adapter.jumps else 1) * adapter.longest, variant=variant)
        else:
            yield full(1, adapter.steps, *[1] * (2 * adapter.steps), variant=variant)

    def applies(self, trial: Trial) -> bool:
        """Return whether the form is that of the variant."""
        return trial.batch == 1 and (len(trial.way) == 1) == trial.variant.startswith("long")

    @torch.no_grad()
    def checks(self, subject: Subject, trial: Trial) -> list[Check]:
        """Compare each position with that in float32, or all but a share of them."""
        adapter, name, capabilities = subject.adapter, trial.variant.partition("-")[2], subject.capabilities
        dtype = DTYPES[name]
        exact, narrow, context = self._narrow(subject, dtype)
        x = self._inputs(subject, exact, trial.n)
        y_exact, _ = adapter.call(exact, x)
        x = x.to(dtype) if x.is_floating_point() and dtype == torch.float16 else x

        def call(part: Tensor, state: Any) -> Any:
            return adapter.call(narrow, part, state)

        with context:
            if len(trial.way) == 1:
                y, _ = call(x, None)
            else:
                half = len(trial.way) // 2 + 1
                n, donated = sum(trial.way[:half]), "donated" in capabilities
                first = adapter.initial_state(narrow, 1, trial.n, x) if "initial_state" in capabilities else None
                y, state = stream(call, x[:, :n], trial.way[:half], first)
                with adapter.donated() if donated else nullcontext():
                    if trial.way[half:]:
                        y = torch.cat([y, stream(call, x[:, n:], trial.way[half:], state)[0]], 1)
        for of, outputs in ((name, y), ("float32", y_exact)):
            if not outputs.isfinite().all():
                at = int((~outputs.isfinite()).any(-1).flatten().nonzero()[0])
                return [Claim(False, f"outputs in {of} are not finite, first at position {at}")]
        gap, size = (y.float() - y_exact).norm(dim=-1)[0], y_exact.norm(dim=-1)[0]
        errors = torch.where(gap == 0, 0, gap / size)
        share = _JUMPED if adapter.jumps else _MAGNIFIED if adapter.magnifies else 0.0
        ordered, order = errors.sort(descending=True)
        of = f"more than {percent(share)} of the outputs" if share else f"position {order[0]}'s output"
        compared = {of: ordered[int(share * len(errors))].item()}
        if adapter.magnifies and not adapter.jumps:  # a sum that drifts stays wrong
            medians = errors.unfold(0, min(len(errors), _WINDOW), 1).median(-1).values
            compared[f"most of {_WINDOW} outputs from position {medians.argmax()}"] = medians.max().item()
        # An output is rounded to half of the spacing of numbers near 1, and so are x, the weights, q, k and v before,
        # whose errors add at random: four spacings. A drifting sum is off by far more.
        bound = adapter.spacings * torch.finfo(dtype).eps
        text = f"{{}} in {name}: off by {{}} of its length; at most {percent(bound, 2)} is rounding"
        return [Claim(error < bound, text.format(of, percent(error)), error) for of, error in compared.items()]

    @staticmethod
    def _narrow(subject: Subject, dtype: torch.dtype) -> tuple[Any, Any, AbstractContextManager[Any]]:
        """Return the module in float32, the module that computes in `dtype`, and the context to call it in."""
        torch.manual_seed(1)
        exact, narrow = subject.build(torch.float32, 32), subject.build(torch.float32, 32)
        if dtype == torch.float16:
            narrow.half()
            exact.load_state_dict(
                {k: v.float() if v.is_floating_point() else v for k, v in narrow.state_dict().items()}
            )
            return exact, narrow, nullcontext()
        return exact, narrow, torch.autocast(subject.device.type, dtype)

    @staticmethod
    def _inputs(subject: Subject, module: Any, n: int) -> Tensor:
        """Return inputs, of a mean that is not 0, so that sums grow. They continue the random numbers of the build."""
        if "features" not in subject.capabilities:
            return subject.inputs(1, n, module=module)
        width = subject.adapter.input_width(module)
        subject.drawn[f"torch.float32 of shape {(1, n, width)}, drawn after the module with seed 1"] = None
        return (torch.randn(1, n, width) + torch.randn(width)).half().float().to(subject.device)
