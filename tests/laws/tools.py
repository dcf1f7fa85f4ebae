"""What the laws do to a module."""

from collections.abc import Container, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_effattn import sequence
from tests.laws.cases import Case

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
"""Two ways to compute the same float64 numbers: some thousand roundings of 10⁻¹⁶."""


def each(cases: Sequence[Case], quick: Container[str] | None = None) -> pytest.MarkDecorator:
    """Run a test once for each of `cases`; those whose names are not in `quick` are exhaustive."""
    slow = [() if quick is None or case.name in quick else pytest.mark.exhaustive for case in cases]
    given = [pytest.param(case, id=case.name, marks=marks) for case, marks in zip(cases, slow, strict=True)]
    return pytest.mark.parametrize("case", given)


def inputs(module: sequence.SequenceModule, batch: int, n: int, seed: int = 0) -> Tensor:
    """(batch, n, d_input), wide enough that the attention weights are far from equal."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(batch, n, module.d_input, generator=generator, dtype=torch.float64)


def copied(state: Any) -> Any:
    """Copy `state`, to see later whether it was changed."""
    return sequence.map_tensors(Tensor.clone, state)


def assert_same(a: Any, b: Any) -> None:
    """Assert that two states are equal to the bit, NaN included: nothing was changed in place."""
    assert type(a) is type(b)
    for s, t in zip(sequence.tensors(a), sequence.tensors(b), strict=True):
        torch.testing.assert_close(s, t, rtol=0, atol=0, equal_nan=True)


def assert_close(a: Any, b: Any, **tolerance: float) -> None:
    """Assert that tensors, or dictionaries of tensors, are equal but for rounding."""
    torch.testing.assert_close(a, b, **(tolerance or CLOSE))
