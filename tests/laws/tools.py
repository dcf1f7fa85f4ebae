"""What the laws do to a module."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_effattn import sequence
from tests.laws.cases import Case

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
"""Two ways to compute the same float64 numbers: some thousand roundings of 10⁻¹⁶."""


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Run a test once for each of `cases`."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def inputs(module: sequence.SequenceModule, batch: int, n: int, seed: int = 0) -> Tensor:
    """(batch, n, d_input), wide enough that the attention weights are far from equal."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(batch, n, module.d_input, generator=generator, dtype=torch.float64)


def splits(n: int, unit: int) -> list[list[int]]:
    """Ways to cut a stream of n positions: single steps, across borders, several units at a time, and by chance."""
    generator = torch.Generator().manual_seed(n)
    ways = [[1] * n, [unit + 1, 1, 1, n - unit - 3], [1, n - 2, 1], [2 * unit, n - 2 * unit]]
    for most in (3, unit + 2, 3 * unit):
        way: list[int] = []
        while sum(way) < n:
            way.append(min(int(torch.randint(1, most + 1, (), generator=generator)), n - sum(way)))
        ways.append(way)
    assert all(sum(way) == n and min(way) > 0 for way in ways)
    return ways


def stream(module: sequence.SequenceModule, x: Tensor, way: Sequence[int], state: Any = None) -> tuple[Tensor, Any]:
    """Feed `x` in segments of the lengths `way`, the state handed along."""
    outputs = []
    for segment in x.split(list(way), 1):
        y, state = module(segment, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def copied(state: Any) -> Any:
    """Copy `state`, to see later whether it was changed."""
    return sequence.map_tensors(Tensor.clone, state)


def assert_same(a: Any, b: Any) -> None:
    """Assert that two states are equal to the bit, NaN included: nothing was changed in place."""
    assert type(a) is type(b)
    for s, t in zip(sequence.tensors(a), sequence.tensors(b), strict=True):
        torch.testing.assert_close(s, t, rtol=0, atol=0, equal_nan=True)


def gradients(module: sequence.SequenceModule, y: Tensor, *wanted: Tensor) -> dict[str, Tensor]:
    """Return the gradients, with respect to the parameters and to `wanted`, of a sum of `y` with fixed uneven weights.

    The weight of a position does not depend on how many follow.
    """
    named = {**dict(module.named_parameters()), **{f"wanted[{i}]": t for i, t in enumerate(wanted)}}
    n, e = y.shape[1:]
    weights = torch.arange(n * e, dtype=y.dtype).view(n, e).sin()
    found = torch.autograd.grad((y * weights).sum(), list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(t) if gradient is None else gradient
        for (name, t), gradient in zip(named.items(), found, strict=True)
    }


def assert_close(a: Any, b: Any, **tolerance: float) -> None:
    """Assert that tensors, or dictionaries of tensors, are equal but for rounding."""
    torch.testing.assert_close(a, b, **(tolerance or CLOSE))
