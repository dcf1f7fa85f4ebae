"""The comparison of kernels with the plain form before their first use."""

import pytest
import torch

from lit_effattn.ops.runtime.selection import failed_self_check

CPU, FULL = torch.device("cpu"), torch.float32
ONES = [torch.ones(4) for _ in range(3)]


@pytest.mark.parametrize(("which", "bad"), [(0, torch.nan), (1, torch.inf), (2, torch.nan)])
def test_kernels_whose_numbers_are_not_finite_fail(which, bad):
    """Whichever result it is: Python's `max` keeps the number that it sees first before a NaN."""
    results = [t.clone() for t in ONES]
    results[which][2] = bad
    assert "they fail: ValueError: the relative difference is" in failed_self_check(CPU, FULL, lambda: (results, ONES))


def test_kernels_without_results_fail_and_equal_ones_pass():
    assert "nothing was compared" in failed_self_check(CPU, FULL, lambda: ([], []))
    assert failed_self_check(CPU, FULL, lambda: (ONES, [1.01 * t for t in ONES])) is None
    assert "off by 5" in failed_self_check(CPU, FULL, lambda: (ONES, [2 * t for t in ONES]))
