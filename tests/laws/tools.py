"""What the laws do to a module."""

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_effattn import sequence
from tests.laws.cases import Case

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
"""Two ways to compute the same float64 numbers: some thousand roundings of 10⁻¹⁶."""


def each(cases: Sequence[Case], quick: Container[str] | None = None) -> Callable[[Callable[..., None]], Any]:
    """Run a test for each of `cases`, those of one kind in a loop; those whose names are not in `quick` are exhaustive.

    A failure names the cases of the kind that fail.
    """
    kinds: dict[tuple[str, bool], list[Case]] = {}
    for case in cases:
        slow = quick is not None and case.name not in quick
        kinds.setdefault((case.name.partition("-")[0], slow), []).append(case)
    given = [
        pytest.param(of_kind, id=f"{kind}-others" if slow else kind, marks=[pytest.mark.exhaustive] if slow else ())
        for (kind, slow), of_kind in kinds.items()
    ]

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def looped(case: list[Case], **others: Any) -> None:
            failed: dict[str, BaseException] = {}
            for one in case:
                try:
                    test(one, **others)
                except (Exception, pytest.fail.Exception) as error:
                    failed[one.name] = error
            if failed:
                told = "\n".join(f"{name}: {type(error).__name__}: {error}" for name, error in failed.items())
                raise AssertionError(told) from next(iter(failed.values()))

        return pytest.mark.parametrize("case", given)(looped)

    return decorate


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
